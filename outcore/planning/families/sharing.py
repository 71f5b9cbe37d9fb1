"""A predicted trace -> a plan that steps of many sizes share, as large as the allocator lets it be.

Steps whose sizes change cannot find out by trying how much of a CUDA budget a plan may use, because no two of them lay
their blocks out alike. The model of the allocator (`outcore.planning.allocator.model`) is asked instead: of a few sizes
of the plan, from the largest down to the first one without an allocator restart, the one whose steps should be the
fastest is taken, restarts included.
"""

from __future__ import annotations

import math
from dataclasses import replace

from outcore.errors import BudgetTooSmall
from outcore.planning.allocator.model import NO_HINTS, Places, allocations, mapped, safe_bytes, wanted_bytes
from outcore.planning.preparing import Planned, plan_step
from outcore.planning.settings import FAMILIES, FRAGMENTATION
from outcore.values import Budget, Machine, Trace


def plan_shared(
    trace: Trace, machine: Machine, budget: Budget, planner: str, usable_share: float, there: Places
) -> Planned:
    """Makes a plan for at most `usable_share` of the budget. `there` holds the addresses of the weights. Raises
    BudgetTooSmall."""
    best: Planned | None = None
    best_s = math.inf
    for share in (share for share in FAMILIES.shares if share <= usable_share):
        size = replace(budget, device_bytes=int(share * budget.device_bytes))
        try:
            planned = plan_step(trace, machine, size, planner, brief=True)
        except BudgetTooSmall:
            if best is None:
                raise
            break
        if best is not None and planned.predicted.step_s >= best_s:
            break  # plans for less memory take longer still
        lost_s = restarts_s(planned, trace, budget.device_bytes, there)
        if best is None or planned.predicted.step_s + lost_s < best_s:
            best, best_s = planned, planned.predicted.step_s + lost_s
        if not lost_s:
            break
    if best is None:
        return plan_step(trace, machine, budget, planner, brief=True)
    return best


def restarts_s(planned: Planned, trace: Trace, memory_bytes: int, there: Places) -> float:
    """Returns the expected seconds of allocator restarts in a step, infinite if the model runs out of memory."""
    step = planned.with_trace(trace).trace
    events = list(allocations(step, planned.schedule))
    if wanted_bytes(step, events, NO_HINTS, there) <= safe_bytes(step, NO_HINTS, memory_bytes):
        return 0.0
    pages = mapped(step, events, memory_bytes, NO_HINTS, there)
    return FRAGMENTATION.restart_s * (FRAGMENTATION.doubt + pages.num_restarts) if pages is not None else math.inf
