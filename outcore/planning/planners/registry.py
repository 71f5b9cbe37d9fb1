"""Trace + Machine + Budget -> Plan: the entry to planning.

`plan` runs one planner, lowers and simulates its decisions, and raises BudgetTooSmall, with a budget that is enough, if
they do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.planning.planners.bound import bound_step_s
from outcore.planning.planners.exact import exact
from outcore.planning.planners.hybrid import hybrid, priced, several, smallest_fit
from outcore.planning.planners.pooch import pooch
from outcore.planning.planners.scoring import Decisions, Planner, Progress, Scored, lean_bytes, score
from outcore.planning.planners.simple import keep_all, leanest, recompute_all, swap_all
from outcore.planning.planners.swap import swap
from outcore.planning.rewrites.common_ops import merged
from outcore.planning.trace_index import TraceIndex, index_of
from outcore.values import MADE_AGAIN, Budget, Machine, Plan, Trace

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
    if planner not in PLANNERS:
        raise OutcoreError(f"there is no planner {planner!r}; choose one of {', '.join(PLANNERS)}")
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
