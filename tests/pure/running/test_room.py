from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from outcore.errors import BudgetTooSmall
from outcore.planning.tidy import Tidied
from outcore.running.room import FIRST_SHARE, LARGEST_SHARE, LEAST_SHARE, NUM_ATTEMPTS, NUM_LOOKS, Room
from outcore.values import Budget, Plan

GIB = 1 << 30
MEMORY_BYTES = 16 * GIB
Behaviour = Callable[[float], tuple[float, int, float]]  # room's share -> step seconds, restarts, reserved share


def plan_in(room_bytes: int, predicted_s: float = 0.0) -> Plan:
    return Plan("print", "mine", Budget(room_bytes, 0, 0), {}, 0, predicted_step_s=predicted_s)


def settle(
    behave: Behaviour,
    predicted_s: Callable[[float], float] = lambda share: 0.0,
    restarts_s: Callable[[float], float] = lambda share: 0.0,
) -> Room:
    """Plays the owner's part, as limit.py does: plan, follow, judge."""
    room = Room(MEMORY_BYTES)
    while not room.settled:
        if room.crowded:

            def look(room_bytes: int) -> Tidied:
                share = room_bytes / MEMORY_BYTES
                plan = plan_in(room_bytes, predicted_s(share))
                return Tidied(plan, plan.predicted_step_s + restarts_s(share), plan.predicted_step_s)

            if room.another(look) is None:
                room.settle()
                break
        share = room.room_bytes / MEMORY_BYTES
        room.begin()
        step_s, num_restarts, reserved = behave(share)
        while not room.note(step_s, num_restarts, int(reserved * MEMORY_BYTES)):
            pass
        room.judge(share)
    return room


def test_a_plan_that_never_restarts_and_fills_the_memory_stays() -> None:
    room = settle(lambda share: (1.0, 0, 0.99))
    assert [attempt.made for attempt in room.attempts] == [room.room_bytes / MEMORY_BYTES]
    assert abs(room.room_bytes / MEMORY_BYTES - FIRST_SHARE) < 1e-6


def test_after_a_restart_the_largest_room_without_one_in_the_model_is_tried() -> None:
    room = settle(
        lambda share: (1.2, 1, 1.0) if share > 0.9 else (1.05, 0, 0.95),
        restarts_s=lambda share: 0.0 if share < 0.895 else 0.1,
    )
    assert len(room.attempts) == 2
    assert abs(room.room_bytes / MEMORY_BYTES - 0.88) < 1e-3
    assert room.best.num_restarts == 0


def test_where_every_room_restarts_in_the_model_the_one_that_loses_least_is_tried() -> None:
    room = settle(
        lambda share: (1.2, 1, 1.0) if share > 0.9 else (1.05, 0, 0.95),
        restarts_s=lambda share: 0.1 + abs(share - 0.88),
    )
    assert len(room.attempts) == 2
    assert abs(room.room_bytes / MEMORY_BYTES - 0.88) < 1e-3


def test_a_smaller_plan_that_is_slower_than_the_restarts_is_not_kept() -> None:
    room = settle(lambda share: (1.2, 1, 1.0) if share < 0.93 else (1.3, 0, 0.95))
    assert abs(room.room_bytes / MEMORY_BYTES - FIRST_SHARE) < 1e-6
    assert room.best.step_s == 1.2


def test_a_plan_that_cannot_be_faster_is_not_even_tried() -> None:
    room = settle(lambda share: (1.2, 1, 1.0), predicted_s=lambda share: 1.25)
    assert len(room.attempts) == 1
    assert abs(room.room_bytes / MEMORY_BYTES - FIRST_SHARE) < 1e-6


def test_restarts_everywhere_end_at_the_fastest() -> None:
    room = settle(lambda share: (1.0 + abs(share - 0.9), 1, 1.0))
    assert len(room.attempts) == NUM_ATTEMPTS
    assert abs(room.room_bytes / MEMORY_BYTES - 0.9) < 0.001


def crowded(room_bytes: int) -> Tidied:
    return Tidied(plan_in(room_bytes), 0.1, 0.0)


def roomy(room_bytes: int) -> Tidied:
    return Tidied(plan_in(room_bytes), 0.0, 0.0)


def test_no_more_rooms_are_planned_for_than_one_can_wait_for() -> None:
    looked: list[int] = []

    def look(room_bytes: int) -> Tidied:
        looked.append(room_bytes)
        return crowded(room_bytes)

    room = Room(MEMORY_BYTES, crowded=True)
    assert room.another(look) is not None
    assert len(looked) == NUM_LOOKS
    assert max(looked) == int(LARGEST_SHARE * MEMORY_BYTES)
    assert room.another(look) is not None
    assert len(looked) == NUM_LOOKS  # nothing was tried in between: what was seen still holds


def test_a_room_in_which_the_model_runs_out_is_never_chosen() -> None:
    def look(room_bytes: int) -> Tidied:
        return Tidied(plan_in(room_bytes), math.inf if room_bytes > 0.85 * MEMORY_BYTES else 0.1, 0.0)

    room = Room(MEMORY_BYTES, crowded=True)
    room.another(look)
    follow(room, 1.0, 1)
    room.judge("first")
    assert room.another(look) is not None
    assert room.room_bytes <= 0.85 * MEMORY_BYTES


def test_where_the_model_runs_out_everywhere_rooms_shrink_as_they_always_did() -> None:
    room, rooms = Room(MEMORY_BYTES), []
    while True:
        follow(room, 1.0, 1)
        rooms.append(room.room_bytes / MEMORY_BYTES)
        if not room.judge("made") or room.another(lambda size: Tidied(plan_in(size), math.inf, 0.0)) is None:
            break
    assert len(rooms) == NUM_ATTEMPTS
    assert all(abs(before - after - 0.04) < 0.001 for before, after in itertools.pairwise(rooms))


def test_looking_ends_at_the_first_room_that_cannot_be_faster() -> None:
    looked: list[int] = []

    def look(room_bytes: int) -> Tidied:
        looked.append(room_bytes)
        return Tidied(plan_in(room_bytes, predicted_s=2.0), 2.0, 2.0)

    room = Room(MEMORY_BYTES)
    follow(room, 1.0, 1)
    assert room.judge("first")
    assert room.another(look) is None
    assert len(looked) == 1


def test_where_a_large_room_costs_its_plan_dear_smaller_ones_are_looked_at() -> None:
    """Pages in order may cost a plan some percent: then a smaller room's, planned slower, can end up faster."""
    tidied_s = {0.94: 1.024, 0.92: 1.010, 0.90: 1.008, 0.88: 1.030}
    looked: list[float] = []

    def look(room_bytes: int) -> Tidied:
        share = round(room_bytes / MEMORY_BYTES, 2)
        looked.append(share)
        return Tidied(plan_in(room_bytes, tidied_s[share]), tidied_s[share], 1.0 + (0.94 - share) / 10)

    room = Room(MEMORY_BYTES, crowded=True)
    assert room.another(look) is not None
    assert looked == [0.94, 0.92, 0.90]  # there the smaller ones' plans are no faster than what was found
    assert round(room.room_bytes / MEMORY_BYTES, 2) == 0.90


def test_what_was_seen_is_forgotten_when_copies_turn_out_slower() -> None:
    looked: list[int] = []

    def look(room_bytes: int) -> Tidied:
        looked.append(room_bytes)
        return crowded(room_bytes)

    room = Room(MEMORY_BYTES, crowded=True)
    room.another(look)
    num_looked = len(looked)
    follow(room, 1.0, 0)
    assert room.judge("first", again=True)
    assert room.again
    room.again = False
    room.another(look)
    assert len(looked) > num_looked


def test_rooms_too_small_to_plan_in_end_the_looking() -> None:
    def look(room_bytes: int) -> Tidied:
        if room_bytes < 0.93 * MEMORY_BYTES:
            raise BudgetTooSmall(MEMORY_BYTES, room_bytes, "op 1", where="cuda:0")
        return crowded(room_bytes)

    room = Room(MEMORY_BYTES, crowded=True)
    assert room.another(look) is not None
    assert room.room_bytes >= 0.93 * MEMORY_BYTES


def test_a_room_that_ran_out_is_followed_by_smaller_ones_only() -> None:
    room = Room(MEMORY_BYTES)
    follow(room, 1.2, 1)
    assert room.judge("first")
    room.another(roomy)
    assert room.room_bytes > FIRST_SHARE * MEMORY_BYTES
    assert room.ran_out()
    room.another(roomy)
    assert room.room_bytes < FIRST_SHARE * MEMORY_BYTES


def test_a_room_without_restarts_never_changes() -> None:
    room = settle(lambda share: (2.0 - share, 0, share + 0.005))
    assert abs(room.room_bytes / MEMORY_BYTES - FIRST_SHARE) < 1e-6


def follow(room: Room, step_s: float, num_restarts: int) -> None:
    room.begin()
    while not room.note(step_s, num_restarts, MEMORY_BYTES):
        pass


def test_a_plan_that_ran_out_is_followed_by_smaller_ones_to_the_end() -> None:
    room, rooms = Room(MEMORY_BYTES), []
    while room.ran_out():
        rooms.append(room.room_bytes)
    assert rooms == sorted(rooms, reverse=True)
    assert room.settled
    assert room.room_bytes >= LEAST_SHARE * MEMORY_BYTES


def test_a_smaller_plan_that_runs_out_settles_on_the_next_one_that_did_not() -> None:
    room = Room(MEMORY_BYTES)
    follow(room, 1.2, 1)
    assert room.judge("large")
    room.room_bytes = int(0.8 * MEMORY_BYTES)
    follow(room, 1.1, 0)
    assert not room.judge("small")
    assert room.best.made == "small"
    room.room_bytes = room.attempts[0].room_bytes  # the large one is followed after all, and runs out
    assert not room.ran_out()
    assert room.settled
    assert room.best.made == "small"


def test_the_first_step_of_a_plan_maps_memory_and_does_not_count() -> None:
    room = Room(MEMORY_BYTES)
    room.begin()
    assert not room.note(9.0, 3, MEMORY_BYTES)
    assert not room.note(1.0, 0, MEMORY_BYTES)
    assert room.note(1.0, 0, MEMORY_BYTES)
    assert not room.judge("made")
    assert room.best.step_s == 1.0
    assert room.best.num_restarts == 0
