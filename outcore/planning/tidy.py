"""Plan + cap -> a plan nearly as fast whose blocks find places between the holes.

How many pages a step wants (`outcore.planning.holes`) changes with any small change of the plan, and there are
thousands of plans within a percent of the fastest. So walks start from the plan, to neighbours as the hybrid planner
draws them, downhill in time and pages together: pages beyond what is safe have a price, another one in each walk, and a
walk that gets nowhere ends. Other plans that are nearly as fast are starts, too: where few values have nearly all
bytes, one that wants few pages may be many flips away. The plan that should be fastest stays, starts over included. One
that wants safely less than the cap has none. One that wants more and starts over little may have found its places by
luck: a request that no trace knows, and they are others. So it counts as half a start more than it has.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.planning.crowd import Crowd
from outcore.planning.echoes import step_of
from outcore.planning.holes import Event, Places, allocations, mapped, safe_bytes, wanted_bytes
from outcore.planning.hybrid import Flips
from outcore.planning.lower import as_schedule
from outcore.planning.placeholders import arranged, best_share
from outcore.planning.scoring import Scored, score, score_if_it_can_fit
from outcore.planning.terrain import terrain_of
from outcore.values import Machine, Plan, Trace

RESTART_S = 0.02  # what one start over costs, about, on an H200
HOPELESS_SHARE = 0.4  # of a cap, beyond what is safe: no neighbour changes that
DOUBT = 0.5  # starts over beyond those of the model, for a step that wants more than is safe
PRICES = (0.3, 0.8, 1.6)  # of the step's time, for as many pages as the whole cap has, beyond what is safe
PATIENCE = 80  # neighbours drawn that lead nowhere: a new walk
DRAW_WORK, MOST_DRAWS = 1_500_000, 1500  # neighbours drawn x (ops + ticks), and drawn: a few seconds
STUCK_SHARE = 0.25  # of them, where by then none wanted less
MOST_S = 4.0  # on a slow or busy host fewer are drawn
NEAR = 2e-3  # as fast as the plan was: good enough
FAR = 0.03  # so much slower is not looked at


@dataclass(frozen=True)
class Tidied:
    """A plan, and what its steps should take, the allocator's own time included; infinite where memory runs out.
    `planned_s` is what the plan for this room would take that cares for no pages."""

    plan: Plan
    step_s: float
    planned_s: float

    @property
    def restarts(self) -> bool:
        return self.step_s > self.plan.predicted_step_s


def tidy(
    trace: Trace,
    machine: Machine,
    plan: Plan,
    memory_bytes: int,
    there: Places = (),
    *,
    others: Sequence[Plan] = (),
    keeps_places: bool = True,
) -> Tidied:
    """The plan, one of the `others` for the same step and budget, or a neighbour of these. `memory_bytes`: what may be
    mapped, of which plans allocate their own budget. `there`: where the weights lie; without it they are taken for one
    block. Planners that are there to be compared with decide for themselves: their plans have no neighbours."""
    search = _Search(trace, machine, plan, memory_bytes, there, keeps_places)
    search.begin_with(others)
    if plan.planner == "hybrid" and search.has_hope:
        search.run()
    best = search.best
    made = replace(
        plan, decisions=dict(best.decisions), predicted_step_s=best.step_s, predicted_peak_bytes=best.peak_bytes
    )
    return Tidied(made, search.best_s, search.first.step_s)


class _Search:
    """Walks from one plan and others. `best_s`: what a step of the best so far should take, starts over included."""

    def __init__(
        self, trace: Trace, machine: Machine, plan: Plan, memory_bytes: int, there: Places, keeps_places: bool
    ) -> None:
        self.trace = trace = step_of(trace, plan)
        self.machine, self.budget = machine, plan.budget
        self.memory_bytes, self.there = memory_bytes, there
        self.terrain = terrain_of(trace)
        self.flips = Flips(self.terrain, plan.budget)
        self.first = self.best = score(self.terrain, machine, plan.budget, plan.decisions)
        events, peak_bytes = self._events(self.first), self.first.peak_bytes
        self.giant_share = best_share(trace, events, memory_bytes, peak_bytes, there) if keeps_places else None
        self.safe_bytes = safe_bytes(trace, self._crowd(events, peak_bytes), memory_bytes)
        self.least_bytes = first_bytes = self._wanted_bytes(self.first)
        self.best_s = self.first.step_s + self._lost_s(self.first, first_bytes)
        self.starts = [(self.first, first_bytes)]
        self.num_draws, self.most_draws = 0, min(MOST_DRAWS, DRAW_WORK // max(1, trace.num_slots))

    def begin_with(self, others: Sequence[Plan]) -> None:
        """Walks begin there, too."""
        for other in others:
            scored = score(self.terrain, self.machine, self.budget, other.decisions)
            page_bytes = self._wanted_bytes(scored)
            self._note(scored, page_bytes)
            self.starts.append((scored, page_bytes))

    @property
    def has_hope(self) -> bool:
        least_bytes = min(page_bytes for _, page_bytes in self.starts)
        return least_bytes <= self.safe_bytes + HOPELESS_SHARE * self.memory_bytes and bool(self.terrain.evictable)

    def run(self) -> None:
        end_s, start_bytes = time.monotonic() + MOST_S, min(page_bytes for _, page_bytes in self.starts)

        def is_over() -> bool:
            most_draws = self.most_draws * (1 if self.least_bytes < start_bytes else STUCK_SHARE)
            near = self.best_s <= self.first.step_s * (1 + NEAR)
            return near or self.num_draws >= most_draws or time.monotonic() > end_s

        starts = sorted(self.starts, key=lambda start: start[1])
        for price, (here, page_bytes) in itertools.cycle(itertools.product(PRICES, starts)):
            height, num_idle = self._height(here, page_bytes, price), 0
            while num_idle < PATIENCE and not is_over():
                num_idle += 1
                tried = self._draw(here, height)
                if tried is None:
                    continue
                page_bytes = self._wanted_bytes(tried)
                self._note(tried, page_bytes)
                if (tried_height := self._height(tried, page_bytes, price)) < height:
                    here, height, num_idle = tried, tried_height, 0
            if is_over():
                return

    def _height(self, scored: Scored, page_bytes: int, price: float) -> float:
        """Time and pages together; as time alone, at least this."""
        over = max(0, page_bytes - self.safe_bytes) / self.memory_bytes
        return scored.step_s + price * over * self.first.step_s

    def _draw(self, here: Scored, height: float) -> Scored | None:
        """A neighbour that fits and may still lead down or be the best."""
        self.num_draws += 1
        changed = self.flips.draw(here)
        if changed is None:
            return None
        most_s = min(self.first.step_s * (1 + FAR), self.best_s, height)
        tried = score_if_it_can_fit(self.terrain, self.machine, self.budget, {**here.decisions, **changed}, most_s)
        return tried if tried is not None and tried.fits and tried.step_s < most_s else None

    def _note(self, tried: Scored, page_bytes: int) -> None:
        self.least_bytes = min(self.least_bytes, page_bytes)
        if page_bytes > self.safe_bytes and tried.step_s + DOUBT * RESTART_S >= self.best_s:
            return  # whatever else it may lose, that is too much
        tried_s = tried.step_s + self._lost_s(tried, page_bytes)
        if tried_s < self.best_s:
            self.best, self.best_s = tried, tried_s

    def _wanted_bytes(self, scored: Scored) -> int:
        events = self._events(scored)
        return wanted_bytes(self.trace, events, self._crowd(events, scored.peak_bytes), self.there)

    def _lost_s(self, scored: Scored, page_bytes: int) -> float:
        """What starting over should cost a step; infinite where memory runs out."""
        if page_bytes <= self.safe_bytes:
            return 0.0
        events = self._events(scored)
        crowd = self._crowd(events, scored.peak_bytes)
        found = mapped(self.trace, events, self.memory_bytes, crowd, self.there)
        return RESTART_S * (DOUBT + found.num_restarts) if found is not None else float("inf")

    def _events(self, scored: Scored) -> list[Event]:
        return list(allocations(self.trace, as_schedule(self.trace, scored.decisions, scored.steps)))

    def _crowd(self, events: list[Event], peak_bytes: int) -> Crowd:
        return arranged(self.trace, events, self.memory_bytes, peak_bytes, self.giant_share)
