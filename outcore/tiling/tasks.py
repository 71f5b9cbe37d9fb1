"""Distributes tasks over lanes of unequal speed.

A lane (a device) takes whole C tiles while there are many, so faster lanes take more, as in BLASX (arXiv 1510.05041).
In BLASX the last round waits for the slowest device's last tile. Here the last tiles are divided into row strips: a
lane takes half of what it could do before the projected end at its measured speed, and a lane that is too slow to help
takes nothing more. Unfinished pieces of a failed lane return to the front of the queue.

Time is a parameter: the executor passes the clock; tests and the benchmark with simulated devices pass their own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from outcore.tiling.tiles import Task

NUM_STRIPS = 16
NUM_LOOKED_AT = 16  # tasks among which a lane's second one is chosen


@dataclass(frozen=True)
class Piece:
    """Rows [first, stop) of a task's tile."""

    task: Task
    first: int
    stop: int

    @property
    def num_rows(self) -> int:
        return self.stop - self.first

    @property
    def area(self) -> int:
        return self.num_rows * self.task.num_cols


class Answer(Enum):
    LATER = "nothing to take now; finish what is in flight, then ask again"
    FINISHED = "every piece is done"


@dataclass
class LaneState:
    """The state of a lane. Its speed, in area per second, is measured once `done_area` is above zero."""

    hint: float
    trusted: bool = False  # the hint was measured with such products
    started_s: float | None = None
    done_area: int = 0
    num_pieces: int = 0
    last_done_s: float = 0.0
    held: list[Piece] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def held_area(self) -> int:
        return sum(piece.area for piece in self.held)


class TaskQueue:
    """The tasks, a counter over them, and which lane holds which piece. Thread-safe."""

    def __init__(self, tasks: Sequence[Task], hints: Sequence[float], *, trusted: bool = False) -> None:
        self._tasks = list(tasks)
        self._next_task = 0
        self._next_row = 0
        self._returned: list[Piece] = []
        self._changed = threading.Condition()
        self.lanes = [LaneState(hint, trusted) for hint in hints]
        self.total_area = sum(task.num_rows * task.num_cols for task in tasks)
        self._unclaimed_area = self.total_area
        self.done_area = 0
        self._cancelled = False

    def pull(self, lane: int, now_s: float) -> Piece | Answer:
        with self._changed:
            state = self.lanes[lane]
            if self._cancelled or self.done_area == self.total_area:
                return Answer.FINISHED
            if not self._unclaimed_area or not self._may_take(lane, now_s):
                return Answer.LATER
            if state.started_s is None:
                state.started_s = now_s
            piece = self._returned.pop() if self._returned else self._advance(lane, now_s)
            self._unclaimed_area -= piece.area
            state.held.append(piece)
            return piece

    def done(self, lane: int, piece: Piece, now_s: float) -> None:
        with self._changed:
            state = self.lanes[lane]
            state.held.remove(piece)
            state.done_area += piece.area
            state.num_pieces += 1
            state.last_done_s = now_s
            self.done_area += piece.area
            self._changed.notify_all()

    def fail(self, lane: int, error: BaseException) -> list[Piece]:
        """Marks the lane as failed and returns the pieces it held to the queue."""
        with self._changed:
            state = self.lanes[lane]
            state.error = error
            lost, state.held = state.held, []
            self._returned.extend(reversed(lost))
            self._unclaimed_area += sum(piece.area for piece in lost)
            self._changed.notify_all()
            return lost

    def cancel(self) -> None:
        """Stops handing out pieces; has no effect after the end."""
        with self._changed:
            self._cancelled = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Waits until another lane finishes or fails."""
        with self._changed:
            if self.done_area < self.total_area and not self._cancelled:
                self._changed.wait(timeout_s)

    def missing(self) -> list[Piece]:
        """Returns the unfinished pieces: returned ones, held ones, and everything after the counter."""
        with self._changed:
            held = [piece for state in self.lanes for piece in state.held]
            rest = [Piece(task, 0, task.num_rows) for task in self._tasks[self._next_task :]]
            if rest and self._next_row:
                rest[0] = Piece(rest[0].task, self._next_row, rest[0].task.num_rows)
            return [*self._returned, *held, *rest]

    def _alive(self) -> list[int]:
        return [index for index, state in enumerate(self.lanes) if state.error is None]

    def _speed(self, state: LaneState, now_s: float) -> float:
        """Returns the speed up to the lane's last finished piece, or less if it is late; before that the scaled
        hint."""
        if state.done_area and state.started_s is not None and state.last_done_s > state.started_s:
            at_most = (state.done_area + state.held_area) / (now_s - state.started_s)
            return min(state.done_area / (state.last_done_s - state.started_s), at_most)
        return state.hint * self._area_per_hint(now_s)

    def _area_per_hint(self, now_s: float) -> float:
        known = [state for state in self.lanes if state.error is None and state.done_area]
        hints = sum(state.hint for state in known)
        return sum(self._speed(state, now_s) for state in known) / hints if hints else 1.0

    def _spare(self, lane: int, now_s: float) -> float:
        """Returns the area that the lane could still take and finish when the others do."""
        alive = self._alive()
        open_area = self._unclaimed_area + sum(self.lanes[index].held_area for index in alive)
        speed = self._speed(self.lanes[lane], now_s)
        total_speed = sum(self._speed(self.lanes[index], now_s) for index in alive)
        return speed / total_speed * open_area - self.lanes[lane].held_area

    def _may_take(self, lane: int, now_s: float) -> bool:
        """Whether the lane would help. The lane with the most to spare may always take a piece."""
        alive = self._alive()
        if len(alive) == 1:
            return True
        task = self._tasks[min(self._next_task, len(self._tasks) - 1)]
        spare = self._spare(lane, now_s)
        if spare >= task.num_rows * task.num_cols / NUM_STRIPS / 2:
            return True
        return spare >= max(self._spare(index, now_s) for index in alive)

    def _advance(self, lane: int, now_s: float) -> Piece:
        self._bring_nearest(self.lanes[lane])
        task = self._tasks[self._next_task]
        first = self._next_row
        stop = min(task.num_rows, first + self._rows_to_take(task, lane, now_s))
        self._next_row = stop
        if stop == task.num_rows:
            self._next_task, self._next_row = self._next_task + 1, 0
        return Piece(task, first, stop)

    def _bring_nearest(self, state: LaneState) -> None:
        """Moves the task that shares most with the lane's first one to the front, for the lane's second task.

        Both are claimed while all lanes wait for their first blocks, possibly over one link. In the order of the tasks
        four pieces of two lanes need three slabs of A and two of B; this way they need two and two. Later on the order
        of the tasks is better: it suits every lane's cache, and there is a whole piece's time to load the next.
        """
        if self._next_row or state.num_pieces or len(state.held) != 1 or len(self._alive()) == 1:
            return
        first = state.held[-1].task
        ahead = range(self._next_task, min(len(self._tasks), self._next_task + NUM_LOOKED_AT))
        nearest = min(ahead, key=lambda index: _num_new_lines(first, self._tasks[index]))
        self._tasks.insert(self._next_task, self._tasks.pop(nearest))

    def _rows_to_take(self, task: Task, lane: int, now_s: float) -> int:
        if len(self._alive()) == 1:
            return (task.cut if self._next_row < task.cut else task.num_rows) - self._next_row
        strip_rows = -(-task.num_rows // NUM_STRIPS)
        rows = int(self._spare(lane, now_s) / 2 / task.num_cols)
        if not self.lanes[lane].done_area and not self.lanes[lane].trusted:  # hints may be far off
            rows = min(rows, 2 * strip_rows)
        return max(strip_rows, rows // strip_rows * strip_rows)


def _num_new_lines(held: Task, task: Task) -> int:
    """Returns how many rows of A and columns of B `task` needs and `held` does not."""

    return (task.num_rows if task.row != held.row else 0) + (task.num_cols if task.col != held.col else 0)
