"""Every transition in the life of a kind of step, by what its steps show: no step is run here."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from outcore.errors import BudgetTooSmall, PlanMismatch
from outcore.fitting import phases, preparing
from outcore.fitting.headroom import Headroom
from outcore.fitting.kinds import Kinds
from outcore.fitting.phases import (
    GivenUp,
    LeftPlan,
    New,
    Phase,
    RanOut,
    Recorded,
    Restored,
    Searching,
    Settled,
    Timed,
    Timing,
    Took,
    Trying,
    WasRecorded,
)
from outcore.memory.device import CpuMemory
from outcore.planning import plans
from outcore.planning.allocator.fragmentation import Placement
from outcore.units import GIB, MIB
from outcore.values import Budget, Plan
from tests.cpu.fitting.played import BUDGET_BYTES, MACHINE, Held, Life, recorded
from tests.cpu.fitting.pretended import PretendedGpu

Scenario = Callable[[], Life]
SCENARIOS: list[Scenario] = []


def scenario(play: Scenario) -> Scenario:
    SCENARIOS.append(play)
    return play


@pytest.fixture(autouse=True)
def _searches_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    """The search for a plan that lies well: the first one does."""
    monkeypatch.setattr(
        preparing,
        "search_placement",
        lambda trace, machine, plan, *_, **__: Placement(plan, plan.predicted_step_s, plan.predicted_step_s),
    )


@scenario
def recorded_timed_tried_settled() -> Life:
    life = Life().to_trying()
    assert life.phase.trace is not None
    assert sum(op.seconds for op in life.phase.trace.ops) == pytest.approx(0.5e-3 * len(recorded().ops))
    life.measure(1.02, num=2)
    assert life.is_in(Trying)
    assert life.phase.ready is not None
    predicted_s = life.phase.ready.prepared.predicted.step_s
    life.measure(1.02)
    assert isinstance(life.phase, Settled)
    assert life.phase.fits
    ready = life.phase.ready
    assert ready.prepared.predicted.step_s == pytest.approx(1.02 * predicted_s, rel=1e-3)  # at the pace of its steps
    life.measure(1.5, restarts=1, num=4)  # what is settled is not judged
    life.begin()
    assert life.phase.ready is ready
    return life


@scenario
def on_the_cpu_nothing_is_timed_or_tried() -> Life:
    life = Life(CpuMemory)
    life.record()
    assert life.is_in(Timed)
    life.begin()
    assert life.is_in(Settled)
    assert life.phase.headroom is None
    life.show(RanOut())
    life.measure(2.0, num=4)
    assert life.is_in(Settled)
    return life


@scenario
def on_the_cpu_a_searched_plan_is_timed_first() -> Life:
    life = Life(CpuMemory, planner="hybrid", budget_bytes=peak_bytes() - MIB).to_timing()
    life.time()
    assert life.is_in(Timed)
    life.begin()
    assert life.is_in(Settled)
    return life


@scenario
def on_the_cpu_a_plan_that_keeps_everything_stays_when_it_is_timed() -> Life:
    life = Life(CpuMemory, planner="hybrid", budget_bytes=GIB).to_timing()
    assert life.phase.ready is not None
    before = life.phase.ready
    life.time(0.5)
    assert life.is_in(Settled)
    ready = life.phase.ready
    assert ready.program is before.program
    assert ready.prepared.predicted.step_s == pytest.approx(0.5 * before.prepared.predicted.step_s)
    assert ready.prepared.plan.in_core_step_s == ready.prepared.predicted.step_s
    return life


@scenario
def on_the_cpu_the_first_steps_correct_the_prediction() -> Life:
    life = Life(CpuMemory)
    life.record()
    life.begin()
    assert life.phase.ready is not None
    predicted = life.phase.ready.prepared.predicted
    for factor in (9.0, 2.0, 1.9, 0.1):  # the fourth is no matter
        life.show(Took(factor * predicted.step_s))
    after = life.phase.ready.prepared.predicted
    assert after.step_s == pytest.approx(2.0 * predicted.step_s, rel=0.05)  # copies are as fast as they were
    assert life.is_in(Settled)
    return life


@functools.cache
def peak_bytes() -> int:
    plan = plans(recorded(), MACHINE, Budget(GIB), "keep-all", most=1)[0]
    return plan.predicted_peak_bytes


@scenario
def a_failed_step_changes_nothing() -> Life:
    life = Life()
    life.show(RanOut())
    assert life.is_in(New)
    life.record()
    phase = life.phase
    life.show(RanOut())  # while it was planned
    assert life.phase is phase
    return life


@scenario
def an_expected_trace_is_planned_at_once() -> Life:
    life = Life()
    kinds = Kinds(life.preparer)
    kinds.expect(recorded())
    life.kind = kinds.find("batch of 4", ())
    assert life.is_in(Timed)
    life.begin()
    assert life.is_in(Trying)
    assert type(kinds.find("batch of 8", ()).phase) is New
    return life


@scenario
def a_plan_of_an_earlier_run_is_followed_at_once() -> Life:
    own = Life().to_settled()
    assert own.phase.trace is not None
    assert own.kind.plan is not None
    for memory, follows in ((PretendedGpu, Trying), (CpuMemory, Settled)):
        life = Life(memory)
        life.kind.phase = Restored(own.phase.trace, plan=own.kind.plan)
        life.begin()
        assert life.is_in(follows)
        assert life.kind.plan is own.kind.plan
    return life


@scenario
def a_plan_of_an_earlier_run_beside_which_more_lies_now_is_made_anew() -> Life:
    own = Life().to_settled()
    assert own.phase.trace is not None
    assert own.kind.plan is not None
    life = Life()
    life.kind.phase = Restored(own.phase.trace, plan=own.kind.plan)
    life.begin(4 * MIB)
    assert life.is_in(Trying)
    assert life.kind.plan is not own.kind.plan
    return life


@scenario
def a_given_plan_is_followed_without_timing_and_stays() -> Life:
    own = Life(CpuMemory)
    own.record()
    own.begin()
    assert own.kind.plan is not None
    given = replace(own.kind.plan, planner="by hand", before_bytes=own.kind.plan.before_bytes - 2 * MIB)
    life = Life(given=given)
    life.record()
    assert life.is_in(Timed)
    life.begin()
    assert life.is_in(Trying)
    assert life.kind.plan is given
    life.measure(restarts=1)
    assert life.is_in(Settled)
    ready = life.phase.ready
    life.begin()  # as much is there as when it was taken up, more than it says
    assert life.phase.ready is ready
    life.begin(4 * MIB)  # grown: it is taken up anew
    assert life.phase.ready is not ready
    assert life.kind.plan is given
    return life


@scenario
def a_given_plan_for_another_step_is_refused_every_time() -> Life:
    life = Life(given=Plan("another", "by hand", Budget(1), {}, 0))
    life.record()
    phase = life.phase
    assert type(phase) is Recorded
    for _ in range(2):
        with pytest.raises(PlanMismatch):
            life.begin()
        assert life.phase is phase
    return life


@scenario
def everything_is_kept_so_nothing_is_tried() -> Life:
    life = Life(planner="keep-all").to_trying()
    life.measure(1.5, restarts=1)
    assert life.is_in(Settled)
    return life


@scenario
def a_budget_too_small_for_a_brief_plan_is_planned_in_earnest() -> Life:
    def stubborn(*args: Any, **options: Any) -> list[Plan]:
        if options["planner"] == "priced":
            raise BudgetTooSmall(2, 1, "op 1")
        return plans(*args, **options)

    life = Life(planner="hybrid")
    life.record()
    assert life.is_in(Recorded)
    with mock.patch.object(preparing, "plans", stubborn):
        life.begin()
    assert life.is_in(Trying)
    assert life.kind.plan is not None
    assert life.kind.plan.planner == "hybrid"
    return life


@scenario
def starts_over_lead_to_other_plans_and_the_fastest_stays() -> Life:
    life = Life().to_trying()
    first = life.phase.ready
    life.measure(1.1, restarts=1, num=3)
    assert life.is_in(Timed)
    life.begin()
    assert life.is_in(Trying)
    assert life.phase.headroom is not None
    assert life.phase.headroom.is_fragmented
    life.measure(1.3, num=3)  # without starts over, but slower
    assert life.is_in(Settled)
    assert first is not None
    assert life.phase.ready is not None
    assert life.phase.ready.program is first.program
    assert life.kind.num_steps == 0
    return life


@scenario
def memory_that_is_left_unmapped_is_planned_for() -> Life:
    life = Life().to_trying()
    life.measure(1.02, num=3, reserved=0.92)
    assert life.is_in(Timed)
    life.begin()
    assert life.is_in(Trying)
    assert life.kind.plan is not None
    assert life.kind.plan.budget.device_bytes == pytest.approx((0.92 + 0.985 - 0.92) * BUDGET_BYTES, rel=1e-3)
    life.measure(1.01, num=3, reserved=0.97)
    assert life.is_in(Settled)
    assert life.kind.plan.budget.device_bytes > 0.98 * BUDGET_BYTES
    return life


@scenario
def a_larger_plan_that_would_run_out_of_memory_is_not_tried() -> Life:
    life = Life().to_trying()
    first = life.phase.ready
    life.measure(1.02, num=3, reserved=0.92)
    with mock.patch.object(preparing, "has_room", return_value=False):
        life.begin()
    assert life.is_in(Settled)
    assert first is not None
    assert life.phase.ready is not None
    assert life.phase.ready.program is first.program
    return life


@scenario
def a_plan_that_cannot_be_faster_is_not_tried() -> Life:
    life = Life().to_trying()
    life.measure(1.0, restarts=1, num=3)
    ready = life.phase.ready
    life.begin()
    assert life.is_in(Settled)
    assert life.phase.ready is ready
    return life


@scenario
def copies_that_are_slower_than_thought_are_planned_for_twice_at_the_same_size() -> Life:
    life = Life().to_trying()
    for num_slowed in (1, 2, 2):
        rate = life.preparer.machine.swap_out_bytes_per_s
        life.measure(1.1, stall=0.1, num=3)
        assert life.kind.num_slowed == num_slowed
        if life.is_in(Settled):
            break
        assert isinstance(life.phase, Timed)
        assert life.phase.same_size
        assert life.preparer.machine.swap_out_bytes_per_s == pytest.approx(0.9 * rate)
        life.begin()
    assert life.is_in(Settled)
    return life


def run_out_to_the_end(life: Life, waiting: type[Phase]) -> list[int]:
    sizes: list[int] = []
    while True:
        assert life.phase.headroom is not None
        life.show(RanOut())
        if not life.is_in(waiting):
            return sizes
        life.begin()
        assert life.kind.plan is not None
        sizes.append(life.kind.plan.budget.device_bytes)


@scenario
def out_of_memory_while_timing_leads_to_smaller_brief_plans() -> Life:
    life = Life().to_timing()
    sizes = run_out_to_the_end(life, Recorded)
    assert len(sizes) > 3
    assert sizes == sorted(sizes, reverse=True)
    assert life.is_in(Timing)  # nothing smaller is left: it stays
    life.time()
    assert life.is_in(Timed)
    return life


@scenario
def out_of_memory_while_trying_leads_to_smaller_plans() -> Life:
    life = Life().to_trying()
    sizes = run_out_to_the_end(life, Timed)
    assert len(sizes) > 3
    assert sizes == sorted(sizes, reverse=True)
    assert life.is_in(Settled)
    return life


@scenario
def out_of_memory_once_settled_leads_to_smaller_plans() -> Life:
    life = Life().to_settled()
    life.show(RanOut())
    assert life.is_in(Timed)
    life.begin()
    assert life.is_in(Trying)
    return life


@scenario
def out_of_memory_in_a_large_plan_goes_back_to_a_small_one_that_fitted() -> Life:
    life = Life().to_settled()
    assert life.phase.headroom is not None
    small = life.phase.ready
    life.phase.headroom.usable_bytes += MIB  # as if a larger plan were followed now
    life.show(RanOut())
    assert life.is_in(Settled)
    assert life.phase.ready is small
    return life


@scenario
def a_grown_model_is_planned_anew_in_every_phase() -> Life:
    life = Life().to_timing()
    headroom = life.phase.headroom
    life.begin(MIB // 2)
    assert life.phase.headroom is headroom  # a little more changes nothing
    life.begin(2 * MIB)
    assert life.is_in(Timing)
    assert life.phase.headroom is not headroom
    life.time()
    for extra_bytes, phase in ((4 * MIB, Trying), (6 * MIB, Trying)):
        headroom = life.phase.headroom
        life.begin(extra_bytes)
        assert life.is_in(phase)
        assert life.phase.headroom is not headroom
    life.measure(num=3)
    assert life.is_in(Settled)
    life.begin(8 * MIB)
    assert life.is_in(Trying)
    assert life.kind.plan is not None
    assert life.kind.plan.before_bytes == recorded().before_bytes + 8 * MIB
    life.measure(num=3)
    life.begin(0)  # less again: the plan for the most stays
    assert life.is_in(Settled)
    return life


@scenario
def without_a_headroom_a_plan_bears_what_fits_beside_it() -> Life:
    life = Life(CpuMemory)
    life.record()
    life.begin()
    assert life.phase.ready is not None
    first = life.phase.ready
    left_bytes = BUDGET_BYTES - first.prepared.predicted.peak_bytes
    for extra_bytes in (1, left_bytes, 5):
        life.begin(extra_bytes)
        ready = life.phase.ready
        assert ready.program is first.program
    assert ready.prepared.predicted.peak_bytes == ready.prepared.plan.predicted_peak_bytes == BUDGET_BYTES
    assert life.is_in(Settled)
    life.begin(left_bytes + 1)
    assert life.phase.ready.program is not first.program
    return life


@scenario
def a_model_grown_too_large_is_refused_every_time_and_its_plan_stays() -> Life:
    life = Life().to_settled()
    phase = life.phase
    for _ in range(2):
        with pytest.raises(BudgetTooSmall):
            life.begin(BUDGET_BYTES)
        assert life.phase is phase
    life.begin()
    assert life.phase is phase
    return life


class Unwatched(PretendedGpu):
    """Its peak is known without counting, as on CUDA: nothing keeps autograd from adding gradients in place."""

    counts_op_by_op = False


@scenario
def a_backward_under_a_mode_of_the_users_is_planned_for_ever_after() -> Life:
    life = Life(Unwatched).to_trying()
    assert life.phase.ready is not None
    assert life.phase.ready.sums_in_place
    headroom = life.phase.headroom
    life.kind.is_watched = True  # an execution found a mode active
    life.begin()
    assert life.is_in(Trying)
    assert not life.phase.ready.sums_in_place
    assert life.phase.headroom is not headroom
    life.measure(num=3)
    ready = life.phase.ready
    life.begin()
    assert life.is_in(Settled)
    assert life.phase.ready is ready
    return life


@scenario
def a_mode_that_is_noticed_before_the_next_plan_forgets_what_was_tried() -> Life:
    life = Life(Unwatched).to_trying()
    life.measure(1.1, restarts=1, num=3)
    assert life.is_in(Timed)
    assert life.phase.headroom is not None
    assert life.phase.headroom.attempts
    life.kind.is_watched = True
    life.begin()
    assert life.is_in(Trying)
    assert not life.phase.headroom.attempts
    return life


@scenario
def what_autograd_asks_for_after_a_step_is_planned_for() -> Life:
    life = Life().to_settled()
    value = next(tick.value for tick in recorded().ticks if tick.kind == "unpack")
    ready = life.phase.ready
    life.kind.asked_late.add(value)
    assert life.kind.is_asked_late_anew
    life.begin()
    assert life.is_in(Trying)
    assert life.phase.trace is not None
    assert life.phase.trace.asked_late == (value,)
    assert life.phase.ready is not ready
    ready = life.phase.ready
    life.begin()
    assert life.phase.ready is ready
    assert not life.kind.is_asked_late_anew
    return life


@scenario
def a_step_that_leaves_its_plan_is_recorded_anew_twice() -> Life:
    life = Life()
    for reach, phase in ((Life.to_timing, Timing), (Life.to_trying, Trying)):
        reach(life)
        assert life.is_in(phase)
        life.leave_once()
        assert life.is_in(New)
    life.to_settled()
    with pytest.warns(UserWarning, match="keep doing different work"):
        life.leave_once()
    assert life.phase == GivenUp("another op")
    for shown in (RanOut(), LeftPlan("x"), WasRecorded(recorded())):
        life.show(shown)
    life.begin()
    assert life.is_in(GivenUp)
    return life


@scenario
def a_settled_step_that_leaves_is_recorded_anew() -> Life:
    life = Life().to_settled()
    life.leave_once()
    assert life.is_in(New)
    return life


@scenario
def a_timed_step_that_leaves_for_the_third_time_is_given_up() -> Life:
    life = Life()
    for _ in range(2):
        life.to_timing().leave_once()
    with pytest.warns(UserWarning, match="keep doing different work"):
        life.to_timing().leave_once()
    return life


@scenario
def a_tried_step_that_leaves_for_the_third_time_is_given_up() -> Life:
    life = Life()
    for _ in range(2):
        life.to_trying().leave_once()
    with pytest.warns(UserWarning, match="keep doing different work"):
        life.to_trying().leave_once()
    return life


TIGHT_BYTES = 4 * MIB  # not all can be kept in them


def searching() -> tuple[Life, Held]:
    held = Held()
    life = Life(planner="hybrid", process=held, budget_bytes=TIGHT_BYTES)
    life.to_timing().time()
    life.begin()
    assert life.is_in(Searching)
    return life, held


@scenario
def steps_follow_the_brief_plan_until_a_better_one_is_found() -> Life:
    life, held = searching()
    brief = life.phase.ready
    for _ in range(3):
        life.begin()
        assert life.phase.ready is brief
    num_answered = 0
    while life.is_in(Searching):
        num_answered += len(held.asked)
        held.answer()
        life.begin()
    assert life.is_in(Trying)
    assert num_answered >= 2  # a plan, and its program
    assert life.kind.plan is not None
    assert life.kind.plan.planner == "hybrid"
    life.measure(1.0, restarts=1, num=3)
    assert life.is_in(Searching)
    assert life.kind.plan.planner == "hybrid"
    held.open()
    while life.is_in(Searching):
        life.begin()
    return life


@scenario
def a_step_that_grew_is_planned_at_once() -> Life:
    life, _ = searching()
    life.begin(extra_bytes=MIB + 1)
    assert life.is_in(Trying)
    assert life.kind.plan is not None
    assert life.kind.plan.before_bytes == recorded().before_bytes + MIB + 1
    return life


@scenario
def a_search_that_breaks_off_is_done_in_the_loop() -> Life:
    life, held = searching()
    held.break_off()
    life.begin()
    assert life.is_in(Trying)
    assert life.kind.plan is not None
    assert life.kind.plan.planner == "hybrid"
    return life


@scenario
def a_brief_plan_stays_where_nothing_else_fits() -> Life:
    life, held = searching()
    for _, future in held.asked:
        future.set_exception(BudgetTooSmall(2 * BUDGET_BYTES, BUDGET_BYTES, "an op"))
    held.asked.clear()
    held.open()
    brief = life.phase.ready
    with mock.patch.object(preparing, "plans", side_effect=BudgetTooSmall(2 * BUDGET_BYTES, BUDGET_BYTES, "an op")):
        life.begin()
    assert life.is_in(Trying)
    assert life.phase.ready is brief
    return life


@scenario
def a_step_that_leaves_while_a_plan_is_searched_for_is_recorded_again() -> Life:
    life, _ = searching()
    life.leave_once()
    assert life.is_in(New)
    return life


@scenario
def out_of_memory_while_a_plan_is_searched_for() -> Life:
    life, _ = searching()
    life.show(RanOut())
    assert life.is_in(Timed)
    return life


@scenario
def a_better_plan_than_the_best_that_was_tried_is_not_found() -> Life:
    life, held = searching()
    held.open()
    while life.is_in(Searching):
        life.begin()
    life.measure(1e-3, restarts=1, num=3)  # nothing can be as fast as this
    assert life.is_in(Searching)
    life.begin()
    assert life.is_in(Settled)
    return life


@scenario
def a_step_that_leaves_for_the_third_time_is_given_up_while_a_plan_is_searched_for() -> Life:
    life, _ = searching()
    life.leave_once()
    for times in range(2):
        life.to_timing().time()
        life.begin()
        assert life.is_in(Searching)
        if times:
            with pytest.warns(UserWarning, match="keep doing different work"):
                life.leave_once()
        else:
            life.leave_once()
    return life


def test_a_plan_is_searched_for_in_a_process_of_its_own() -> None:
    life = Life(planner="hybrid")
    life.to_timing().time()
    for _ in range(600):
        life.begin()
        if not life.is_in(Searching):
            break
        time.sleep(0.1)
    assert life.is_in(Trying)
    assert life.kind.plan is not None
    assert life.kind.plan.planner == "hybrid"
    life.preparer.process.close()


@pytest.mark.parametrize("play", SCENARIOS, ids=lambda play: play.__name__)
def test_life(play: Scenario) -> None:
    play()


def test_every_transition_that_is_drawn_is_walked() -> None:
    every = (New, Recorded, Restored, Timing, Searching, Timed, Trying, Settled, GivenUp)
    names = {phase.__name__ for phase in every}
    walked = {pair for play in SCENARIOS for pair in play().walked}
    assert {name for pair in walked for name in pair} == names
    assert phases.__doc__ is not None
    assert names <= set(re.findall(r"\b[A-Z]\w+", phases.__doc__))
    for before, after in sorted(walked):
        assert (before, after) in ALLOWED, f"{before} -> {after} is not drawn"
    assert set(ALLOWED) == walked


# As in the table, where planning at the beginning of a step goes on to what it leads to.
ALLOWED = {
    ("New", "Recorded"),
    ("New", "Timed"),
    ("Recorded", "Timing"),
    ("Recorded", "Trying"),
    ("Restored", "Trying"),
    ("Restored", "Settled"),
    ("Timing", "Timed"),
    ("Timing", "Timing"),
    ("Timing", "Recorded"),
    ("Timing", "New"),
    ("Timing", "GivenUp"),
    ("Timing", "Searching"),
    ("Timing", "Settled"),
    ("Searching", "Trying"),
    ("Searching", "Settled"),
    ("Searching", "Timed"),
    ("Searching", "New"),
    ("Searching", "GivenUp"),
    ("Timed", "Trying"),
    ("Timed", "Settled"),
    ("Trying", "Searching"),
    ("Trying", "Timed"),
    ("Trying", "Settled"),
    ("Trying", "Trying"),
    ("Trying", "New"),
    ("Trying", "GivenUp"),
    ("Settled", "Timed"),
    ("Settled", "Trying"),
    ("Settled", "Settled"),
    ("Settled", "New"),
    ("Settled", "GivenUp"),
}


def test_a_headroom_is_begun_anew_for_every_plan() -> None:
    """What was measured of one plan is not held against the next."""
    life = Life().to_trying()
    life.measure(1.0, num=2)
    assert isinstance(life.phase.headroom, Headroom)
    life.show(RanOut())
    life.begin()
    life.measure(1.0, num=2)
    assert life.is_in(Trying)
    assert not life.phase.headroom.attempts
