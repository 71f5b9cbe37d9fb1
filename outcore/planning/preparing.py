"""Trace + Plan + Machine -> PreparedStep: a plan lowered, verified and simulated, with the trace it was made for.

A plan may be made for a rewritten step, in which ops that compute the same value are merged. The rewritten trace is
derived here, once; `outcore.planning.program`, the allocator model, the runtime and the reports take the trace of the
`PreparedStep`. `lower`, `verify` and `simulate` are the public functions of the same names: they accept the trace as it
was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from outcore.planning.planners.bound import bound_step_s
from outcore.planning.planners.registry import plans
from outcore.planning.program import lower as lowering
from outcore.planning.program import simulate as simulating
from outcore.planning.program import verify as verifying
from outcore.planning.rewrites.common_ops import as_planned
from outcore.planning.trace_index import index_of
from outcore.values import Budget, Machine, Plan, PreparedStep, Residency, Schedule, Timeline, Trace


def prepare(
    trace: Trace, plan: Plan, machine: Machine, *, detail: bool = False, residency: Residency | None = None
) -> PreparedStep:
    """Lowers, verifies and simulates a plan for `machine`.

    `trace` is the step that was planned, before ops that compute the same value were merged. `detail` adds the spans
    and the memory curve to the prediction. `residency` says where the training state is, whose copies share the links.
    """
    step = as_planned(trace, plan)
    schedule = lowering.lower(step, plan, machine)
    verifying.verify(step, schedule)
    predicted = simulating.simulate(step, schedule, machine, detail=detail, residency=residency)
    if residency is not None:
        plan = replace(plan, predicted_step_s=predicted.step_s)
    return PreparedStep(step, plan, schedule, predicted, residency)


def lower(trace: Trace, plan: Plan, machine: Machine) -> Schedule:
    """Returns the program for this machine that carries out the plan of a recorded step.

    ```python
    import outcore

    trace, machine = outcore.Trace.load("step.trace.json"), outcore.Machine.load("here.machine.json")
    schedule = outcore.lower(trace, outcore.Plan.load("step.plan.json"), machine)
    print(len(schedule.actions), "actions")
    ```
    """
    return lowering.lower(as_planned(trace, plan), plan, machine)


def verify(trace: Trace, schedule: Schedule) -> None:
    """Raises ScheduleError at the first action that could read or overwrite the wrong bytes.

    ```python
    import outcore

    trace, machine = outcore.Trace.load("step.trace.json"), outcore.Machine.load("here.machine.json")
    schedule = outcore.lower(trace, outcore.Plan.load("step.plan.json"), machine)
    outcore.verify(trace, schedule)
    ```
    """
    verifying.verify(as_planned(trace, schedule), schedule)


def simulate(trace: Trace, schedule: Schedule, machine: Machine, *, detail: bool = False) -> Timeline:
    """Predicts the time and memory that a schedule takes; `detail` adds the spans and the memory curve.

    ```python
    import outcore

    trace, machine = outcore.Trace.load("step.trace.json"), outcore.Machine.load("here.machine.json")
    schedule = outcore.lower(trace, outcore.Plan.load("step.plan.json"), machine)
    timeline = outcore.simulate(trace, schedule, machine, detail=True)
    for span in timeline.spans[:5]:
        print(span.stream, span.start_s, span.what)
    ```
    """
    return simulating.simulate(as_planned(trace, schedule), schedule, machine, detail=detail)


@dataclass(frozen=True)
class Planned:
    """A prepared step without its trace, which the caller has already; it is small enough to send between processes."""

    plan: Plan
    schedule: Schedule
    predicted: Timeline

    def with_trace(self, trace: Trace) -> PreparedStep:
        return PreparedStep(as_planned(trace, self.plan), self.plan, self.schedule, self.predicted)


def plan_step(trace: Trace, machine: Machine, budget: Budget, planner: str, *, brief: bool = False) -> Planned:
    """Plans a step and prepares it. Raises BudgetTooSmall."""
    return prepare_planned(trace, plans(trace, machine, budget, planner, most=1, brief=brief)[0], machine)


def prepare_planned(trace: Trace, plan: Plan, machine: Machine) -> Planned:
    """Returns what `prepare` returns, without the trace."""
    prepared = prepare(trace, plan, machine)
    return Planned(plan, prepared.schedule, prepared.predicted)


def at_pace(prepared: PreparedStep, pace: float, machine: Machine) -> PreparedStep:
    """Returns the same program with a prediction in which every op takes `pace` times as long."""
    return with_times(prepared, prepared.trace.at(pace), machine, pace * prepared.plan.in_core_step_s)


def with_times(
    prepared: PreparedStep, trace: Trace, machine: Machine, in_core_step_s: float | None = None
) -> PreparedStep:
    """Returns the same program with a prediction by the seconds of `trace`. Without `in_core_step_s` the plan is taken
    to keep everything."""
    predicted = simulating.simulate(trace, prepared.schedule, machine, residency=prepared.residency)
    in_core_s = predicted.step_s if in_core_step_s is None else in_core_step_s
    bound_s = bound_step_s(index_of(trace), machine, prepared.plan.budget)
    plan = replace(prepared.plan, predicted_step_s=predicted.step_s, in_core_step_s=in_core_s, bound_step_s=bound_s)
    return PreparedStep(trace, plan, prepared.schedule, predicted, prepared.residency)
