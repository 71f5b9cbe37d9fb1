"""Lowered schedules verify and keep their promise about memory; the simulator counts as the reference does."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.planning import lower, simulate, verify
from outcore.planning.planners.scoring import lean_bytes
from outcore.planning.program.simulate import memory_of, steps_of
from outcore.planning.trace_index import index_of
from outcore.values import MADE_AGAIN, Budget, Decision, Machine, Plan, Schedule, Trace
from tests.pure.planning.random_steps import MACHINES, steps
from tests.pure.planning.reference import Interpreter

QUICK = settings(max_examples=100, deadline=None)


@st.composite
def decided(draw: st.DrawFn, max_ops: int = 7) -> tuple[Trace, Plan]:
    """A random step with random decisions that its rules allow."""
    trace = draw(steps(max_ops=max_ops))
    trace_index = index_of(trace)
    decisions: dict[int, Decision] = {}
    for value in trace_index.evictable:
        choices: list[Decision] = ["keep", "swap", *(MADE_AGAIN if trace_index.recomputable[value] else ())]
        decisions[value] = draw(st.sampled_from(choices))
    budget = Budget(draw(st.integers(0, 150)), draw(st.sampled_from([0, 20, 1000])), 1000)
    return trace, Plan(trace.fingerprint, "random", budget, decisions, trace.before_bytes)


@QUICK
@given(decided(), MACHINES)
def test_every_lowered_schedule_verifies(made: tuple[Trace, Plan], machine: Machine) -> None:
    trace, plan = made
    verify(trace, lower(trace, plan, machine))


@QUICK
@given(decided(), MACHINES)
def test_memory_agrees_with_the_reference_in_every_slot(made: tuple[Trace, Plan], machine: Machine) -> None:
    trace, plan = made
    schedule = lower(trace, plan, machine)
    expected = Interpreter(trace, schedule).run()
    assert memory_of(index_of(trace), steps_of(schedule), schedule.decisions).tolist() == expected
    assert simulate(trace, schedule, machine).peak_bytes == max(expected)


@st.composite
def tight(draw: st.DrawFn) -> tuple[Trace, Plan]:
    """A longer step, and little more than the least memory of its decisions."""
    trace, plan = draw(decided(max_ops=30))
    floor_bytes = int(lean_bytes(index_of(trace), Budget(0, 10**6), plan.decisions).max())
    return trace, replace(plan, budget=Budget(floor_bytes + draw(st.integers(0, 40)), 10**6))


@settings(max_examples=40, deadline=None)
@given(tight(), MACHINES)
def test_copies_that_come_in_early_stay_in_the_budget(made: tuple[Trace, Plan], machine: Machine) -> None:
    """Also in the tick that needs them, before the rerun that reads them."""
    trace, plan = made
    assert simulate(trace, lower(trace, plan, machine), machine).peak_bytes <= plan.budget.device_bytes


@QUICK
@given(decided(), MACHINES)
def test_lowering_stays_in_the_budget_or_at_the_floor(made: tuple[Trace, Plan], machine: Machine) -> None:
    trace, plan = made
    floor_bytes = int(lean_bytes(index_of(trace), plan.budget, plan.decisions).max())
    peak_bytes = simulate(trace, lower(trace, plan, machine), machine).peak_bytes
    assert peak_bytes <= max(plan.budget.device_bytes, floor_bytes)


@QUICK
@given(decided(), MACHINES)
def test_seconds_add_up(made: tuple[Trace, Plan], machine: Machine) -> None:
    trace, plan = made
    schedule = lower(trace, plan, machine)
    found = simulate(trace, schedule, machine, detail=True)
    op_s = sum(op.seconds for op in trace.ops) / machine.speed
    assert abs(found.step_s - op_s - found.stall_s - found.recompute_s) < 1e-9
    assert found.stall_s >= 0
    ends = {(span.stream, span.what): span.end_s for span in found.spans}
    assert all(end_s <= found.step_s + 1e-9 for (stream, _), end_s in ends.items() if stream != "swap_out")
    lanes = sorted((span.start_s, span.end_s) for span in found.spans if span.stream == "swap_out")
    assert all(one[1] <= two[0] + 1e-9 for one, two in pairwise(lanes))  # one copy at a time


@QUICK
@given(decided(), MACHINES)
def test_a_schedule_survives_its_file(made: tuple[Trace, Plan], machine: Machine) -> None:
    trace, plan = made
    schedule = lower(trace, plan, machine)
    read = Schedule.from_json(schedule.to_json())
    assert simulate(Trace.from_json(trace.to_json()), read, machine) == simulate(trace, schedule, machine)
