from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.tiling.tasks import Answer, Piece, TaskQueue
from outcore.tiling.tiles import Task

SIDE = 256


def square_tasks(num_tasks: int) -> list[Task]:
    """Two columns, so that a task has a neighbour in its row and many in its column."""
    return [Task(index, index // 2 * SIDE, SIDE, index % 2 * SIDE, SIDE) for index in range(num_tasks)]


def play(
    num_tasks: int, speeds: list[float], hints: list[float], fails: dict[int, float] | None = None, window: int = 2
) -> TaskQueue:
    """The queue against lanes of exact speeds in simulated time, each holding up to `window` pieces.

    A lane of `fails` dies at that second.
    """
    queue = TaskQueue(square_tasks(num_tasks), hints)
    order = itertools.count()
    events: list[tuple[float, int, int, Piece | None]] = [(0.0, next(order), lane, None) for lane in range(len(speeds))]
    held = [0] * len(speeds)
    free_s = [0.0] * len(speeds)
    dead = set[int]()
    heapq.heapify(events)
    while events:
        now_s, _, lane, piece = heapq.heappop(events)
        if lane in dead:
            continue
        if fails and now_s >= fails.get(lane, float("inf")):
            dead.add(lane)
            queue.fail(lane, RuntimeError("lost"))
            continue
        if piece is not None:
            held[lane] -= 1
            queue.done(lane, piece, now_s)
        while held[lane] < window:
            answer = queue.pull(lane, now_s)
            if not isinstance(answer, Piece):
                break
            held[lane] += 1
            free_s[lane] = max(free_s[lane], now_s) + answer.area / speeds[lane]
            heapq.heappush(events, (free_s[lane], next(order), lane, answer))
        if not held[lane] and answer is Answer.LATER:
            heapq.heappush(events, (now_s + 1e-3 * SIDE * SIDE, next(order), lane, None))
    return queue


def balance(queue: TaskQueue, speeds: list[float]) -> float:
    """The time perfect sharing would take, over the time it took."""
    end_s = max(state.last_done_s for state in queue.lanes)
    return queue.total_area / sum(speeds) / end_s


@pytest.mark.parametrize("num_lanes", [2, 3, 4])
@pytest.mark.parametrize("num_tasks", [64, 100, 256])
def test_unequal_lanes_end_together_even_when_nothing_is_known_of_them(num_lanes: int, num_tasks: int) -> None:
    speeds = [1.0, 2.0, 4.0, 8.0][-num_lanes:]
    assert balance(play(num_tasks, speeds, [1.0] * num_lanes), speeds) >= 0.97
    assert balance(play(num_tasks, speeds, speeds), speeds) >= 0.97


def test_even_few_tasks_are_shared_out() -> None:
    speeds = [1.0, 2.0, 4.0, 8.0]
    assert balance(play(16, speeds, [1.0] * 4), speeds) >= 0.9


def test_whole_tiles_alone_would_not_balance() -> None:
    """What the strips are for: 64 whole tiles on 1:2:4:8 end at 5 units of time instead of 64/15."""
    speeds = [1.0, 2.0, 4.0, 8.0]
    ends = [0.0] * 4
    for _ in range(64):
        lane = min(range(4), key=lambda index: ends[index])
        ends[lane] += 1 / speeds[lane]
    assert 64 / 15 / max(ends) < 0.97


def test_faster_lanes_take_more() -> None:
    queue = play(64, [1.0, 3.0], [1.0, 1.0])
    assert queue.lanes[1].done_area / queue.lanes[0].done_area == pytest.approx(3, rel=0.1)


def test_a_lane_a_thousand_times_slower_does_not_hold_up_the_end() -> None:
    speeds = [1.0, 1000.0]
    assert balance(play(64, speeds, speeds), speeds) >= 0.97


@pytest.mark.parametrize("order", [(0, 1, 0, 1), (0, 0, 1, 1), (1, 0, 0, 1)])
@pytest.mark.parametrize("wide", [False, True])
def test_what_a_lane_claims_before_anything_arrives_shares_the_larger_block(order: tuple[int, ...], wide: bool) -> None:
    num_rows, num_cols = (SIDE, 2 * SIDE) if wide else (2 * SIDE, SIDE)
    places = [(i, j) for j in range(4) for i in range(4)]
    tasks = [Task(index, i * num_rows, num_rows, j * num_cols, num_cols) for index, (i, j) in enumerate(places)]
    queue = TaskQueue(tasks, [1.0, 2.0], trusted=True)
    pieces: list[list[Piece]] = [[], []]
    for lane in order:
        piece = queue.pull(lane, 0.0)
        assert isinstance(piece, Piece)
        pieces[lane].append(piece)
    for first, second in pieces:
        assert first.task != second.task
        assert first.task.col == second.task.col if wide else first.task.row == second.task.row
    assert sum(piece.area for piece in queue.missing()) == queue.total_area
    assert {piece.task for piece in queue.missing()} == set(tasks)


def test_a_lane_alone_keeps_the_order_its_plan_was_played_in() -> None:
    queue = TaskQueue(square_tasks(12), [1.0])
    pieces = [queue.pull(0, 0.0) for _ in range(12)]
    assert [piece.task.index for piece in pieces if isinstance(piece, Piece)] == list(range(12))


def test_a_single_lane_takes_whole_tiles() -> None:
    assert play(10, [1.0], [1.0]).lanes[0].num_pieces == 10


@settings(max_examples=50, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.floats(0.1, 50), min_size=1, max_size=5),
    st.dictionaries(st.integers(0, 4), st.floats(0, 1e6), max_size=4),
)
def test_every_element_is_done_once_whoever_fails(num_tasks: int, speeds: list[float], fails: dict[int, float]) -> None:
    queue = play(num_tasks, speeds, [1.0] * len(speeds), fails)
    lost = len([lane for lane in range(len(speeds)) if queue.lanes[lane].error])
    missing_area = sum(piece.area for piece in queue.missing())
    assert queue.done_area + missing_area == queue.total_area
    if lost < len(speeds):
        assert missing_area == 0


def test_a_failed_lanes_piece_goes_first_to_the_others() -> None:
    queue = TaskQueue(square_tasks(8), [1.0, 1.0])
    piece = queue.pull(0, 0.0)
    assert queue.fail(0, RuntimeError("lost")) == [piece]
    assert queue.pull(1, 0.0) == piece
    assert piece not in queue.missing()[1:]


def test_after_cancel_nobody_gets_more() -> None:
    queue = TaskQueue(square_tasks(3), [1.0])
    assert isinstance(queue.pull(0, 0.0), Piece)
    queue.cancel()
    assert queue.pull(0, 1.0) is Answer.FINISHED
    assert sum(piece.area for piece in queue.missing()) == queue.total_area


def test_a_lane_alone_takes_the_last_task_at_its_cut() -> None:
    tasks = square_tasks(2)
    tasks[1] = replace(tasks[1], cut=200)
    queue = TaskQueue(tasks, [1.0])
    pieces = [queue.pull(0, 0.0) for _ in range(3)]
    assert [(p.first, p.stop) for p in pieces if isinstance(p, Piece)] == [(0, SIDE), (0, 200), (200, SIDE)]
    assert queue.missing() == pieces
