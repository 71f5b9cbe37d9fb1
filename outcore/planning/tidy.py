"""Plan + cap -> a plan nearly as fast whose blocks find places between the holes.

How many pages a step wants (`outcore.planning.holes`) changes with any small change of the plan, and there are
thousands of plans within a percent of the fastest. So neighbours are drawn, as the hybrid planner draws them, downhill
in pages, and the one that should be fastest stays, starts over included. One that wants safely less than the cap has
none. One that wants more and starts over little may have found its places by luck: a request that no trace knows, and
they are others. So it counts as half a start more than it has.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from outcore.planning.holes import Places, mapped, wanted_bytes
from outcore.planning.hybrid import Flips
from outcore.planning.lower import lower
from outcore.planning.scoring import lean_bytes, score
from outcore.planning.terrain import terrain_of
from outcore.values import Machine, Plan, Schedule, Trace

RESTART_S = 0.02  # what one start over costs, about, on an H200
SAFE_SHARE = 0.99  # of a cap: the rest is for small blocks, and for requests that no trace knows
HOPELESS_SHARE = 0.2  # of a cap, beyond what is safe: a giant block is in the way, and no neighbour changes that
DOUBT = 0.5  # starts over beyond those of the model, for a step that wants more than is safe
DRAW_WORK = 1_200_000  # neighbours drawn x (ops + ticks): a few seconds
MOST_DRAWS = 800
MOST_S = 4.0  # on a slow or busy host fewer are drawn
STUCK_S = 1.0  # nor more where by then none wanted less
NEAR = 2e-3  # as fast as the plan was: good enough
FAR = 0.03  # so much slower is not looked at


@dataclass(frozen=True)
class Tidied:
    """A plan, and what its steps should take, the allocator's own time included; infinite where memory runs out."""

    plan: Plan
    step_s: float

    @property
    def restarts(self) -> bool:
        return self.step_s > self.plan.predicted_step_s


def tidy(trace: Trace, machine: Machine, plan: Plan, memory_bytes: int, there: Places = ()) -> Tidied:
    """The plan or a neighbour. `memory_bytes`: what may be mapped, of which the plan allocates its own budget. `there`:
    where the weights lie; without it they are taken for one block. Planners that are there to be compared with decide
    for themselves: their plans have no neighbours."""
    terrain, budget, schedule = terrain_of(trace), plan.budget, lower(trace, plan, machine)
    here, flips = score(terrain, machine, budget, plan.decisions), Flips(terrain, budget)
    here_bytes = wanted_bytes(trace, schedule, memory_bytes, there)
    best, best_s = here, here.step_s + _lost_s(trace, schedule, here_bytes, memory_bytes, there)
    most_s, enough_s = here.step_s * (1 + FAR), here.step_s * (1 + NEAR)
    began_s, first_bytes = time.monotonic(), here_bytes
    hopeless = here_bytes > (SAFE_SHARE + HOPELESS_SHARE) * memory_bytes
    can_draw = plan.planner == "hybrid" and terrain.evictable and not hopeless
    for _ in range(min(MOST_DRAWS, DRAW_WORK // trace.num_slots) if can_draw else 0):
        if best_s <= enough_s or time.monotonic() - began_s > (MOST_S if here_bytes < first_bytes else STUCK_S):
            break
        changed = flips.draw(here)
        if changed is None:
            continue
        decisions = {**here.decisions, **changed}
        if int(lean_bytes(terrain, budget, decisions).max(initial=0)) > budget.device_bytes:
            continue
        tried = score(terrain, machine, budget, decisions)
        if not tried.fits or tried.step_s > min(most_s, best_s):
            continue
        schedule = lower(trace, replace(plan, decisions=decisions), machine)
        tried_bytes = wanted_bytes(trace, schedule, memory_bytes, there)
        if tried_bytes <= max(here_bytes, SAFE_SHARE * memory_bytes):  # downhill, or along where it is safe
            here, here_bytes = tried, tried_bytes
        tried_s = tried.step_s + _lost_s(trace, schedule, tried_bytes, memory_bytes, there)
        if tried_s < best_s:
            best, best_s = tried, tried_s
    made = replace(
        plan, decisions=dict(best.decisions), predicted_step_s=best.step_s, predicted_peak_bytes=best.peak_bytes
    )
    return Tidied(made, best_s)


def _lost_s(trace: Trace, schedule: Schedule, page_bytes: int, memory_bytes: int, there: Places) -> float:
    """What starting over should cost a step; infinite where memory runs out."""
    if page_bytes <= SAFE_SHARE * memory_bytes:
        return 0.0
    found = mapped(trace, schedule, memory_bytes, None, there)
    return RESTART_S * (DOUBT + found.num_restarts) if found is not None else float("inf")
