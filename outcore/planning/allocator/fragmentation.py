"""Plan + memory cap -> Placement: a plan nearly as fast whose blocks fit the cap in spite of fragmentation.

The number of pages that a step maps (`planning.allocator.model`) changes with any small change of its plan, and
thousands of plans are within a percent of the fastest. The search is a set of local searches over the neighbours that
the hybrid planner draws. Each minimizes time plus a price for the pages beyond a safe amount; the price differs from
walk to walk, and a walk that does not improve ends. Other plans that are nearly as fast are also starting points: where
a few values have most of the bytes, a plan with few pages may be many flips away. The result is the plan with the
lowest expected time, allocator restarts included. A plan that maps safely less than the cap has no restarts. A plan
that maps more may fit by luck, because a trace does not know every request, so it is charged half a restart on top.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.planning.allocator.hints import AllocatorHints
from outcore.planning.allocator.model import Event, Places, allocations, mapped, safe_bytes, wanted_bytes
from outcore.planning.allocator.placeholders import arranged, best_share
from outcore.planning.planners.hybrid import Flips
from outcore.planning.planners.scoring import Scored, score, score_if_it_can_fit
from outcore.planning.preparing import as_planned
from outcore.planning.program.lower import as_schedule, lower
from outcore.planning.settings import FRAGMENTATION
from outcore.planning.trace_index import index_of
from outcore.values import Machine, Plan, Trace


@dataclass(frozen=True)
class Placement:
    """A plan and the expected time of its steps, allocator restarts included; infinite where memory runs out.
    `planned_s` is the expected time of the plan for the same budget that ignores fragmentation."""

    plan: Plan
    step_s: float
    planned_s: float

    @property
    def restarts(self) -> bool:
        return self.step_s > self.plan.predicted_step_s


def search_placement(
    trace: Trace,
    machine: Machine,
    plan: Plan,
    memory_bytes: int,
    there: Places = (),
    *,
    others: Sequence[Plan] = (),
    keeps_places: bool = True,
) -> Placement:
    """Returns the plan, one of the `others` for the same step and budget, or a neighbour of these. `memory_bytes` is
    what may be mapped; plans allocate their own budget of it. `there` holds the addresses of the weights; without it
    they count as one block. Only plans of the hybrid planner have neighbours: the other planners are there for
    comparison."""
    search = _Search(trace, machine, plan, memory_bytes, there, keeps_places)
    search.begin_with(others)
    if plan.planner == "hybrid" and search.has_hope:
        search.run()
    best = search.best
    made = replace(
        plan, decisions=dict(best.decisions), predicted_step_s=best.step_s, predicted_peak_bytes=best.peak_bytes
    )
    return Placement(made, search.best_s, search.first.step_s)


def has_room(trace: Trace, machine: Machine, plan: Plan, memory_bytes: int, there: Places = ()) -> bool:
    """Whether the steps of a plan run in the cap at all, without hints and if need be with restarts."""
    step = as_planned(trace, plan)
    return mapped(step, list(allocations(step, lower(step, plan, machine))), memory_bytes, there=there) is not None


class _Search:
    """Local searches from one plan and others. `best_s` is the expected time of the best plan, restarts included."""

    def __init__(
        self, trace: Trace, machine: Machine, plan: Plan, memory_bytes: int, there: Places, keeps_places: bool
    ) -> None:
        trace = as_planned(trace, plan)
        self.machine, self.budget = machine, plan.budget
        self.memory_bytes, self.there = memory_bytes, there
        self.trace_index = index_of(trace)
        self.flips = Flips(self.trace_index, plan.budget)
        self.first = self.best = score(self.trace_index, machine, plan.budget, plan.decisions)
        events, peak_bytes = self._events(self.first), self.first.peak_bytes
        self.giant_share = best_share(trace, events, memory_bytes, peak_bytes, there) if keeps_places else None
        self.safe_bytes = safe_bytes(trace, self._hints(events, peak_bytes), memory_bytes)
        self.least_bytes = first_bytes = self.wanted_bytes(self.first)
        self.best_s = self.first.step_s + self._lost_s(self.first, first_bytes)
        self.starts = [(self.first, first_bytes)]
        self.num_draws, self.most_draws = (
            0,
            min(FRAGMENTATION.most_draws, FRAGMENTATION.draw_work // max(1, trace.num_slots)),
        )

    def begin_with(self, others: Sequence[Plan]) -> None:
        """Adds starting points."""
        for other in others:
            scored = score(self.trace_index, self.machine, self.budget, other.decisions)
            page_bytes = self.wanted_bytes(scored)
            self._note(scored, page_bytes)
            self.starts.append((scored, page_bytes))

    @property
    def has_hope(self) -> bool:
        least_bytes = min(page_bytes for _, page_bytes in self.starts)
        return least_bytes <= self.safe_bytes + FRAGMENTATION.give_up_share * self.memory_bytes and bool(
            self.trace_index.evictable
        )

    def run(self) -> None:
        end_s, start_bytes = time.monotonic() + FRAGMENTATION.most_s, min(page_bytes for _, page_bytes in self.starts)

        def is_over() -> bool:
            most_draws = self.most_draws * (1 if self.least_bytes < start_bytes else FRAGMENTATION.stuck_share)
            near = self.best_s <= self.first.step_s * (1 + FRAGMENTATION.near_share)
            return near or self.num_draws >= most_draws or time.monotonic() > end_s

        starts = sorted(self.starts, key=lambda start: start[1])
        for price, (here, page_bytes) in itertools.cycle(itertools.product(FRAGMENTATION.prices, starts)):
            height, num_idle = self._height(here, page_bytes, price), 0
            while num_idle < FRAGMENTATION.patience and not is_over():
                num_idle += 1
                tried = self._draw(here, height)
                if tried is None:
                    continue
                page_bytes = self.wanted_bytes(tried)
                self._note(tried, page_bytes)
                if (tried_height := self._height(tried, page_bytes, price)) < height:
                    here, height, num_idle = tried, tried_height, 0
            if is_over():
                return

    def _height(self, scored: Scored, page_bytes: int, price: float) -> float:
        """Returns the objective: step time plus the price of excess pages."""
        over = max(0, page_bytes - self.safe_bytes) / self.memory_bytes
        return scored.step_s + price * over * self.first.step_s

    def _draw(self, here: Scored, height: float) -> Scored | None:
        """Returns a neighbour that fits and may improve the objective or the best time, or None."""
        self.num_draws += 1
        changed = self.flips.draw(here)
        if changed is None:
            return None
        most_s = min(self.first.step_s * (1 + FRAGMENTATION.far_share), self.best_s, height)
        tried = score_if_it_can_fit(self.trace_index, self.machine, self.budget, {**here.decisions, **changed}, most_s)
        return tried if tried is not None and tried.fits and tried.step_s < most_s else None

    def _note(self, tried: Scored, page_bytes: int) -> None:
        self.least_bytes = min(self.least_bytes, page_bytes)
        if page_bytes > self.safe_bytes and tried.step_s + FRAGMENTATION.doubt * FRAGMENTATION.restart_s >= self.best_s:
            return  # even with the fewest restarts it would be slower than the best
        tried_s = tried.step_s + self._lost_s(tried, page_bytes)
        if tried_s < self.best_s:
            self.best, self.best_s = tried, tried_s

    def wanted_bytes(self, scored: Scored) -> int:
        events = self._events(scored)
        return wanted_bytes(self.trace_index.trace, events, self._hints(events, scored.peak_bytes), self.there)

    def _lost_s(self, scored: Scored, page_bytes: int) -> float:
        """Returns the expected seconds of allocator restarts in a step, infinite if memory runs out."""
        if page_bytes <= self.safe_bytes:
            return 0.0
        events = self._events(scored)
        hints = self._hints(events, scored.peak_bytes)
        found = mapped(self.trace_index.trace, events, self.memory_bytes, hints, self.there)
        return (
            FRAGMENTATION.restart_s * (FRAGMENTATION.doubt + found.num_restarts) if found is not None else float("inf")
        )

    def _events(self, scored: Scored) -> list[Event]:
        return list(
            allocations(self.trace_index.trace, as_schedule(self.trace_index.trace, scored.decisions, scored.steps))
        )

    def _hints(self, events: list[Event], peak_bytes: int) -> AllocatorHints:
        return arranged(self.trace_index.trace, events, self.memory_bytes, peak_bytes, self.giant_share)
