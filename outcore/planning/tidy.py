"""Plan + cap -> a plan nearly as fast whose blocks find places between the holes.

Whether the allocator has to start over in a step (`outcore.planning.holes`) changes with any small change of the plan,
and there are thousands of plans within a percent of the fastest. So neighbours are drawn, as the hybrid planner draws
them, and one stays when its step, with what starting over costs, takes less time.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from outcore.planning.holes import mapped
from outcore.planning.hybrid import Flips
from outcore.planning.lower import lower
from outcore.planning.scoring import lean_bytes, score
from outcore.planning.terrain import terrain_of
from outcore.values import Machine, Plan, Trace

RESTART_S = 0.02  # what one start over costs, about, on an H200
DRAW_WORK = 600_000  # neighbours drawn x (ops + ticks): a few seconds
MOST_DRAWS = 400
MOST_S = 4.0  # on a slow or busy host fewer are drawn
NEAR = 2e-3  # as fast as the plan was: good enough


@dataclass(frozen=True)
class Tidied:
    """A plan, and what its steps should take, the allocator's own time included; infinite where memory runs out."""

    plan: Plan
    step_s: float

    @property
    def restarts(self) -> bool:
        return self.step_s > self.plan.predicted_step_s


def tidy(trace: Trace, machine: Machine, plan: Plan, memory_bytes: int) -> Tidied:
    """The plan or a neighbour. `memory_bytes`: what may be mapped, of which the plan allocates its own budget. Planners
    that are there to be compared with decide for themselves: their plans have no neighbours."""
    terrain, budget = terrain_of(trace), plan.budget
    best, flips = score(terrain, machine, budget, plan.decisions), Flips(terrain, budget)
    best_s, enough_s = best.step_s + _restarts_s(trace, machine, plan, memory_bytes), best.step_s * (1 + NEAR)
    until_s = time.monotonic() + MOST_S
    can_draw = plan.planner == "hybrid" and terrain.evictable
    for _ in range(min(MOST_DRAWS, DRAW_WORK // trace.num_slots) if can_draw else 0):
        if best_s <= enough_s or time.monotonic() > until_s:
            break
        changed = flips.draw(best)
        if changed is None:
            continue
        decisions = {**best.decisions, **changed}
        if int(lean_bytes(terrain, budget, decisions).max(initial=0)) > budget.device_bytes:
            continue
        tried = score(terrain, machine, budget, decisions)
        if tried.fits and tried.step_s < best_s:
            tried_s = tried.step_s + _restarts_s(trace, machine, replace(plan, decisions=decisions), memory_bytes)
            if tried_s < best_s:
                best, best_s = tried, tried_s
    made = replace(
        plan, decisions=dict(best.decisions), predicted_step_s=best.step_s, predicted_peak_bytes=best.peak_bytes
    )
    return Tidied(made, best_s)


def _restarts_s(trace: Trace, machine: Machine, plan: Plan, memory_bytes: int) -> float:
    found = mapped(trace, lower(trace, plan, machine), memory_bytes)
    return found.num_restarts * RESTART_S if found is not None else float("inf")
