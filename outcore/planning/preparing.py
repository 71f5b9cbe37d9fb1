"""Trace + Machine + Budget -> Plan -> PreparedStep: the entry to planning, and the planners by name.

`plan` runs one planner, lowers and simulates its decisions, and raises BudgetTooSmall, with a budget that is enough, if
they do not fit. `prepare` lowers, verifies and simulates a plan, and keeps the trace that it was made for.

A plan may be made for a rewritten step, in which ops that compute the same value are merged. The rewritten trace is
derived here, once; `outcore.planning.program`, the allocator model, the runtime and the reports take the trace of the
`PreparedStep`. `lower`, `verify` and `simulate` are the public functions of the same names: they accept the trace as it
was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.planning.planners.exact import exact
from outcore.planning.planners.hybrid import hybrid, priced, several, smallest_fit
from outcore.planning.planners.pooch import pooch
from outcore.planning.planners.scoring import (
    Decisions,
    Planner,
    Progress,
    Scored,
    bound_step_s,
    keep_all,
    lean_bytes,
    leanest,
    recompute_all,
    score,
    swap_all,
)
from outcore.planning.planners.swap import swap
from outcore.planning.program import lower as lowering
from outcore.planning.program import simulate as simulating
from outcore.planning.program import verify as verifying
from outcore.planning.rewrites.common_ops import merged
from outcore.planning.trace_index import TraceIndex, index_of
from outcore.values import MADE_AGAIN, Budget, Machine, Plan, PreparedStep, Residency, Schedule, Timeline, Trace

PLANNERS: dict[str, Planner] = {
    "keep-all": keep_all,
    "swap-all": swap_all,
    "recompute-all": recompute_all,
    "swap": swap,
    "pooch": pooch,
    "priced": priced,
    "hybrid": hybrid,
    "exact": exact,
}


def check_planner(name: str) -> None:
    """Raises an error unless there is a planner of that name."""
    if name not in PLANNERS:
        raise OutcoreError(f"there is no planner {name!r}; choose one of {', '.join(PLANNERS)}")


AS_IT_IS = ("keep-all", "swap-all", "swap")  # planners that run nothing again and merge no ops
PURE = ("keep-all", "swap-all", "recompute-all")  # planners whose decisions do not depend on the device budget


def plan(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    planner: str = "hybrid",
    progress: Progress | None = None,
    *,
    brief: bool = False,
) -> Plan:
    """Decides for each saved value whether to keep, swap or recompute it, so that the step fits into `budget`.

    Raises BudgetTooSmall if there is no such plan. With `brief`, the default planner searches only until the step time
    is roughly known, for example to draw a curve over many budgets.

    ```python
    import outcore

    trace = outcore.Trace.load("step.trace.json")
    machine = outcore.Machine.load("here.machine.json")
    in_core = outcore.plan(trace, machine, outcore.Budget(10**15)).in_core_peak_bytes
    plan = outcore.plan(trace, machine, outcore.Budget(int(0.9 * in_core), disk_bytes=10**12))
    print(plan.predicted_step_s / plan.in_core_step_s, "times as long as in-core")
    plan.save("smaller.plan.json")
    ```
    """
    return plans(trace, machine, budget, planner, progress, most=1, brief=brief)[0]


def plans(
    trace: Trace,
    machine: Machine,
    budget: Budget,
    planner: str = "hybrid",
    progress: Progress | None = None,
    *,
    most: int,
    starts: Sequence[Plan] = (),
    brief: bool = False,
) -> list[Plan]:
    """Returns what `plan` returns, followed by other plans that are nearly as fast, if the planner found any; `most` in
    all. `starts` are plans for a similar budget, from which the default planner's search may start."""
    check_planner(planner)
    tell = progress or _say_nothing
    in_core = index_of(replace(trace, asked_late=()) if trace.asked_late else trace)
    kept = score(in_core, machine, budget, keep_all(in_core, machine, budget, tell))
    step = trace if kept.fits or planner in AS_IT_IS else merged(trace)
    trace_index = index_of(step)
    if planner == "hybrid":
        known = [other.decisions for other in starts if other.fingerprint == trace.fingerprint]
        several_decisions = several(trace_index, machine, budget, tell, most=most, starts=known, brief=brief)
    else:
        several_decisions = [PLANNERS[planner](trace_index, machine, budget, tell)]
    decided = [score(trace_index, machine, budget, decisions) for decisions in several_decisions]
    if not decided[0].fits:
        if planner not in PURE:  # a last resort that every planner which mixes has
            decided = [score(trace_index, machine, budget, leanest(trace_index, machine, budget, tell))]
        if not decided[0].fits:
            raise _too_small(trace_index, machine, budget, dict(decided[0].decisions), planner)
    bound_s = bound_step_s(trace_index, machine, budget)
    return [
        Plan(
            fingerprint=trace.fingerprint,
            planner=planner,
            budget=budget,
            decisions=dict(scored.decisions),
            before_bytes=trace.before_bytes,
            predicted_step_s=scored.step_s,
            predicted_peak_bytes=scored.peak_bytes,
            in_core_step_s=kept.step_s,
            in_core_peak_bytes=kept.peak_bytes,
            bound_step_s=bound_s,
            merges_ops=step.has_merged_ops,
            reasons=_reasons(trace_index, scored),
        )
        for scored in decided
        if scored.fits
    ]


def _say_nothing(what: str, part: float) -> None:
    pass


def _too_small(
    trace_index: TraceIndex, machine: Machine, budget: Budget, decisions: Decisions, planner: str
) -> BudgetTooSmall:
    """Returns the error, with the least memory that these decisions need, or less if a search finds a better plan."""
    searches = planner in ("priced", "hybrid", "exact")
    slot_bytes = lean_bytes(trace_index, budget, decisions)
    needed_bytes = int(slot_bytes.max(initial=trace_index.trace.before_bytes))
    smaller = smallest_fit(trace_index, machine, budget, needed_bytes) if searches else None
    if smaller is not None:
        needed_bytes, decisions = smaller
        slot_bytes = lean_bytes(trace_index, budget, decisions)
    at_op = trace_index.op_at(int(slot_bytes.argmax()))
    before_bytes = trace_index.trace.before_bytes
    alone = "" if searches else planner
    return BudgetTooSmall(needed_bytes, budget.device_bytes, at_op, before_bytes=before_bytes, planner=alone)


def _reasons(trace_index: TraceIndex, scored: Scored) -> dict[int, str]:
    reasons = {value: f"kept: {why}" for value, why in trace_index.kept_for.items()}
    for value, decision in scored.decisions.items():
        stall_s = scored.clocked.out_stall_s.get(value, 0.0) + scored.clocked.in_stall_s.get(value, 0.0)
        if decision in MADE_AGAIN:
            seconds = trace_index.trace.ops[trace_index.producer[value]].rerun_s
            each = ", and it is let go in between" if decision == "remake" else ""
            reasons[value] = f"its op takes {seconds * 1e6:.0f} µs to run again{each}"
        elif decision == "swap":
            reasons[value] = f"compute waits {stall_s * 1e6:.0f} µs for it" if stall_s > 0 else "its copies are hidden"
        else:
            reasons[value] = "there is room for it"
    return reasons


# -- from a plan to a program ------------------------------------------------------------------------------------------


def as_planned(trace: Trace, made: Plan | Schedule) -> Trace:
    """The step that a plan or a schedule was made for, of a recorded one."""
    return merged(trace) if made.merges_ops else trace


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
