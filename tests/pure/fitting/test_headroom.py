"""How much of a CUDA budget plans may use, found by trying: played without a device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from outcore.errors import BudgetTooSmall
from outcore.fitting.headroom import Attempt, Headroom, Trouble
from outcore.fitting.settings import FITTING
from outcore.planning.allocator.fragmentation import Placement
from outcore.values import Budget, Plan

GIB = 1 << 30
MEMORY_BYTES = 16 * GIB
Behaviour = Callable[[float], tuple[float, int, float]]  # share of the budget -> step seconds, restarts, reserved share


def ready(name: Any) -> Any:
    """What a headroom keeps for its owner, and never looks at."""
    return name


def plan_in(size_bytes: int, predicted_s: float = 0.0) -> Plan:
    return Plan("print", "mine", Budget(size_bytes, 0, 0), {}, 0, predicted_step_s=predicted_s)


def settle(
    behave: Behaviour,
    predicted_s: Callable[[float], float] = lambda share: 0.0,
    restarts_s: Callable[[float], float] = lambda share: 0.0,
) -> Headroom:
    """Plays the owner's part, as the phases do: plan, follow, judge."""
    headroom, goes_on = Headroom(MEMORY_BYTES), True
    while goes_on:
        if headroom.is_fragmented:

            def look(size_bytes: int) -> Placement:
                share = size_bytes / MEMORY_BYTES
                plan = plan_in(size_bytes, predicted_s(share))
                return Placement(plan, plan.predicted_step_s + restarts_s(share), plan.predicted_step_s)

            if headroom.another(look) is None:
                headroom.settle()
                break
        share = headroom.usable_bytes / MEMORY_BYTES
        headroom.begin()
        step_s, num_restarts, reserved = behave(share)
        while not headroom.note(step_s, num_restarts, int(reserved * MEMORY_BYTES)):
            pass
        goes_on = headroom.judge(ready(share))
    return headroom


def test_a_plan_that_never_restarts_and_fills_the_memory_stays() -> None:
    headroom = settle(lambda share: (1.0, 0, 0.99))
    assert [attempt.ready for attempt in headroom.attempts] == [ready(headroom.usable_bytes / MEMORY_BYTES)]
    assert abs(headroom.usable_bytes / MEMORY_BYTES - FITTING.first_share) < 1e-6


def test_after_a_restart_the_largest_size_without_one_in_the_model_is_tried() -> None:
    headroom = settle(
        lambda share: (1.2, 1, 1.0) if share > 0.9 else (1.05, 0, 0.95),
        restarts_s=lambda share: 0.0 if share < 0.895 else 0.1,
    )
    assert len(headroom.attempts) == 2
    assert abs(headroom.usable_bytes / MEMORY_BYTES - 0.88) < 1e-3
    assert headroom.best.num_restarts == 0


def test_where_every_size_restarts_in_the_model_the_one_that_loses_least_is_tried() -> None:
    headroom = settle(
        lambda share: (1.2, 1, 1.0) if share > 0.9 else (1.05, 0, 0.95),
        restarts_s=lambda share: 0.1 + abs(share - 0.88),
    )
    assert len(headroom.attempts) == 2
    assert abs(headroom.usable_bytes / MEMORY_BYTES - 0.88) < 1e-3


def test_a_smaller_plan_that_is_slower_than_the_restarts_is_not_kept() -> None:
    headroom = settle(lambda share: (1.2, 1, 1.0) if share < 0.93 else (1.3, 0, 0.95))
    assert abs(headroom.usable_bytes / MEMORY_BYTES - FITTING.first_share) < 1e-6
    assert headroom.best.step_s == 1.2


def test_a_plan_that_cannot_be_faster_is_not_even_tried() -> None:
    headroom = settle(lambda share: (1.2, 1, 1.0), predicted_s=lambda share: 1.25)
    assert len(headroom.attempts) == 1
    assert abs(headroom.usable_bytes / MEMORY_BYTES - FITTING.first_share) < 1e-6


def test_restarts_everywhere_end_at_the_fastest() -> None:
    headroom = settle(lambda share: (1.0 + abs(share - 0.9), 1, 1.0))
    assert len(headroom.attempts) == FITTING.num_attempts
    assert abs(headroom.usable_bytes / MEMORY_BYTES - 0.9) < 0.001


def fragmented(size_bytes: int) -> Placement:
    return Placement(plan_in(size_bytes), 0.1, 0.0)


def roomy(size_bytes: int) -> Placement:
    return Placement(plan_in(size_bytes), 0.0, 0.0)


def test_no_more_sizes_are_planned_for_than_one_can_wait_for() -> None:
    looked: list[int] = []

    def look(size_bytes: int) -> Placement:
        looked.append(size_bytes)
        return fragmented(size_bytes)

    headroom = Headroom(MEMORY_BYTES, Trouble.STARTED_OVER)
    assert headroom.another(look) is not None
    assert len(looked) == FITTING.num_looks
    assert max(looked) == int(FITTING.largest_share * MEMORY_BYTES)
    assert headroom.another(look) is not None
    assert len(looked) == FITTING.num_looks  # nothing was tried in between: what was seen still holds


def test_a_size_in_which_the_model_runs_out_is_never_chosen() -> None:
    def look(size_bytes: int) -> Placement:
        return Placement(plan_in(size_bytes), math.inf if size_bytes > 0.85 * MEMORY_BYTES else 0.1, 0.0)

    headroom = Headroom(MEMORY_BYTES, Trouble.STARTED_OVER)
    headroom.another(look)
    follow(headroom, 1.0, 1)
    headroom.judge(ready("first"))
    assert headroom.another(look) is not None
    assert headroom.usable_bytes <= 0.85 * MEMORY_BYTES


def test_where_the_model_runs_out_everywhere_sizes_shrink_as_they_always_did() -> None:
    headroom, rooms = Headroom(MEMORY_BYTES), []
    while True:
        follow(headroom, 1.0, 1)
        rooms.append(headroom.usable_bytes / MEMORY_BYTES)
        if (
            not headroom.judge(ready("made"))
            or headroom.another(lambda size: Placement(plan_in(size), math.inf, 0.0)) is None
        ):
            break
    assert len(rooms) == FITTING.num_attempts
    assert all(abs(before - after - 0.04) < 0.001 for before, after in itertools.pairwise(rooms))


def test_looking_ends_at_the_first_size_that_cannot_be_faster() -> None:
    looked: list[int] = []

    def look(size_bytes: int) -> Placement:
        looked.append(size_bytes)
        return Placement(plan_in(size_bytes, predicted_s=2.0), 2.0, 2.0)

    headroom = Headroom(MEMORY_BYTES)
    follow(headroom, 1.0, 1)
    assert headroom.judge(ready("first"))
    assert headroom.another(look) is None
    assert len(looked) == 1


def test_where_a_large_size_costs_its_plan_dear_smaller_ones_are_looked_at() -> None:
    """Pages in order may cost a plan some percent: then a smaller one's, planned slower, can end up faster."""
    placed_s = {0.94: 1.024, 0.92: 1.010, 0.90: 1.008, 0.88: 1.030}
    looked: list[float] = []

    def look(size_bytes: int) -> Placement:
        share = round(size_bytes / MEMORY_BYTES, 2)
        looked.append(share)
        return Placement(plan_in(size_bytes, placed_s[share]), placed_s[share], 1.0 + (0.94 - share) / 10)

    headroom = Headroom(MEMORY_BYTES, Trouble.STARTED_OVER)
    assert headroom.another(look) is not None
    assert looked == [0.94, 0.92, 0.90]  # there the smaller ones' plans are no faster than what was found
    assert round(headroom.usable_bytes / MEMORY_BYTES, 2) == 0.90


def test_what_was_seen_is_forgotten_when_copies_turn_out_slower() -> None:
    looked: list[int] = []

    def look(size_bytes: int) -> Placement:
        looked.append(size_bytes)
        return fragmented(size_bytes)

    headroom = Headroom(MEMORY_BYTES, Trouble.STARTED_OVER)
    headroom.another(look)
    num_looked = len(looked)
    follow(headroom, 1.0, 0)
    assert headroom.judge(ready("first"), again=True)
    headroom.another(look)
    assert len(looked) > num_looked


def test_sizes_too_small_to_plan_in_end_the_looking() -> None:
    def look(size_bytes: int) -> Placement:
        if size_bytes < 0.93 * MEMORY_BYTES:
            raise BudgetTooSmall(MEMORY_BYTES, size_bytes, "op 1", where="cuda:0")
        return fragmented(size_bytes)

    headroom = Headroom(MEMORY_BYTES, Trouble.STARTED_OVER)
    assert headroom.another(look) is not None
    assert headroom.usable_bytes >= 0.93 * MEMORY_BYTES


def test_a_size_that_ran_out_is_followed_by_smaller_ones_only() -> None:
    headroom = Headroom(MEMORY_BYTES)
    follow(headroom, 1.2, 1)
    assert headroom.judge(ready("first"))
    headroom.another(roomy)
    assert headroom.usable_bytes > FITTING.first_share * MEMORY_BYTES
    assert headroom.ran_out()
    headroom.another(roomy)
    assert headroom.usable_bytes < FITTING.first_share * MEMORY_BYTES


def test_a_size_without_restarts_that_leaves_little_never_changes() -> None:
    headroom = settle(lambda share: (2.0 - share, 0, share + 0.03))
    assert abs(headroom.usable_bytes / MEMORY_BYTES - FITTING.first_share) < 1e-6


def test_a_size_that_leaves_memory_unmapped_is_followed_by_a_larger_one() -> None:
    """Its pages come to as much more than the plan as those of the first: what is left over is used."""
    headroom = settle(lambda share: (2.0 - share, 0, share + 0.005))
    assert len(headroom.attempts) == 2
    assert abs(headroom.usable_bytes / MEMORY_BYTES - (1 - FITTING.margin_share - 0.005)) < 1e-6
    assert headroom.best is headroom.attempts[1]
    assert headroom.fits


def test_a_larger_size_that_starts_over_gives_way_to_the_one_before() -> None:
    headroom = settle(lambda share: (1.0, 0, share) if share < 0.93 else (1.2, 2, 1.0))
    assert len(headroom.attempts) == 2
    assert headroom.best is headroom.attempts[0]
    assert headroom.fits
    assert not headroom.is_fragmented
    assert abs(headroom.usable_bytes / MEMORY_BYTES - FITTING.first_share) < 1e-6


def test_a_larger_size_that_runs_out_gives_way_to_the_one_before() -> None:
    headroom = Headroom(MEMORY_BYTES)
    follow(headroom, 1.0, 0, reserved=0.925)
    assert headroom.judge(ready("first"))
    assert headroom.is_larger
    assert not headroom.ran_out()
    assert headroom.best.ready == ready("first")
    assert headroom.usable_bytes == headroom.attempts[0].usable_bytes


def test_copies_that_turned_out_slower_are_planned_for_before_a_larger_size() -> None:
    headroom = Headroom(MEMORY_BYTES)
    follow(headroom, 1.0, 0, reserved=0.925)
    assert headroom.judge(ready("first"), again=True)
    assert not headroom.is_larger
    follow(headroom, 1.0, 0, reserved=0.925)
    assert headroom.judge(ready("again"))
    assert headroom.is_larger


def follow(headroom: Headroom, step_s: float, num_restarts: int, *, reserved: float = 1.0) -> None:
    headroom.begin()
    while not headroom.note(step_s, num_restarts, int(reserved * MEMORY_BYTES)):
        pass


def test_a_plan_that_ran_out_is_followed_by_smaller_ones_to_the_end() -> None:
    headroom, rooms = Headroom(MEMORY_BYTES), []
    while headroom.ran_out():
        rooms.append(headroom.usable_bytes)
    assert rooms == sorted(rooms, reverse=True)
    assert headroom.usable_bytes >= FITTING.least_share * MEMORY_BYTES


def test_a_smaller_plan_that_runs_out_settles_on_the_next_one_that_did_not() -> None:
    headroom = Headroom(MEMORY_BYTES)
    follow(headroom, 1.2, 1)
    assert headroom.judge(ready("large"))
    headroom.usable_bytes = int(0.8 * MEMORY_BYTES)
    follow(headroom, 1.1, 0)
    assert not headroom.judge(ready("small"))
    assert headroom.best.ready == ready("small")
    headroom.usable_bytes = headroom.attempts[0].usable_bytes  # the large one is followed after all, and runs out
    assert not headroom.ran_out()
    assert headroom.best.ready == ready("small")


def test_the_first_step_of_a_plan_maps_memory_and_does_not_count() -> None:
    headroom = Headroom(MEMORY_BYTES)
    headroom.begin()
    assert not headroom.note(9.0, 3, MEMORY_BYTES)
    assert not headroom.note(1.0, 0, MEMORY_BYTES)
    assert headroom.note(1.0, 0, MEMORY_BYTES)
    assert not headroom.judge(ready("made"))
    assert headroom.best.step_s == 1.0
    assert headroom.best.num_restarts == 0


def test_a_plan_fits_once_its_steps_were_measured_without_starts_over() -> None:
    headroom = Headroom(1000)
    assert not headroom.fits  # nothing was measured
    headroom.attempts = [Attempt(920, 1.0, 2, 1000, ready("large"))]
    assert not headroom.fits
    headroom.attempts.append(Attempt(900, 0.9, 0, 990, ready("small")))
    assert headroom.fits
