"""Plan + cap -> a plan nearly as fast whose blocks find places between the holes.

How many pages a step wants (`outcore.planning.holes`) changes with any small change of the plan, and there are
thousands of plans within a percent of the fastest. So neighbours are drawn, as the hybrid planner draws them, downhill
in pages, and the fastest that wants safely less than the cap stays. Not the one that starts over least under the cap:
of hundreds of plans that the model lets through by a hair the device refuses most (ResNet-50: 2 to 5 times a step in
five of five).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from outcore.planning.holes import Places, mapped, wanted_bytes
from outcore.planning.hybrid import Flips
from outcore.planning.lower import lower
from outcore.planning.scoring import lean_bytes, score
from outcore.planning.terrain import terrain_of
from outcore.values import Machine, Plan, Trace

RESTART_S = 0.02  # what one start over costs, about, on an H200
SAFE_SHARE = 0.97  # of a cap: the rest is for small blocks, and for requests that no trace knows
HOPELESS_SHARE = 0.1  # of a cap, beyond what is safe: a giant block is in the way, and no neighbour changes that
OVER_SHARE = 0.02  # of a cap: wanting this much more costs another start over
DRAW_WORK = 1_200_000  # neighbours drawn x (ops + ticks): a few seconds
MOST_DRAWS = 800
MOST_S = 4.0  # on a slow or busy host fewer are drawn
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
    terrain, budget = terrain_of(trace), plan.budget
    here, flips = score(terrain, machine, budget, plan.decisions), Flips(terrain, budget)
    here_bytes = wanted_bytes(trace, lower(trace, plan, machine), memory_bytes, there)
    best, best_s = here, here.step_s + _lost_s(here_bytes, memory_bytes)
    most_s, enough_s, until_s = here.step_s * (1 + FAR), here.step_s * (1 + NEAR), time.monotonic() + MOST_S
    hopeless = here_bytes > (SAFE_SHARE + HOPELESS_SHARE) * memory_bytes
    can_draw = plan.planner == "hybrid" and terrain.evictable and not hopeless
    for _ in range(min(MOST_DRAWS, DRAW_WORK // trace.num_slots) if can_draw else 0):
        if best_s <= enough_s or time.monotonic() > until_s:
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
        tried_s = tried.step_s + _lost_s(tried_bytes, memory_bytes)
        if tried_s < best_s:
            best, best_s = tried, tried_s
    made = replace(
        plan, decisions=dict(best.decisions), predicted_step_s=best.step_s, predicted_peak_bytes=best.peak_bytes
    )
    runs_out = best_s > best.step_s and mapped(trace, lower(trace, made, machine), memory_bytes, None, there) is None
    return Tidied(made, float("inf") if runs_out else best_s)


def _lost_s(page_bytes: int, memory_bytes: int) -> float:
    """What starting over should cost a step that wants more pages than are safely there: the more, the oftener."""
    over_bytes = page_bytes - SAFE_SHARE * memory_bytes
    return RESTART_S * (1 + over_bytes / (OVER_SHARE * memory_bytes)) if over_bytes > 0 else 0.0
