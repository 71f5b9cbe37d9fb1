"""Trace + machine, budget and headroom -> Ready: a plan that the next step can follow.

All plans of `fitting` are made here, in this process or in the planning process.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

from outcore.eager.program import Program
from outcore.errors import BudgetTooSmall, PlanMismatch
from outcore.fitting.headroom import Headroom
from outcore.fitting.planning_process import PlanningProcess
from outcore.fitting.ready import Ready
from outcore.fitting.searches import Search
from outcore.fitting.settings import FittingSettings
from outcore.memory.clock import Looks
from outcore.memory.device import DeviceMemory
from outcore.memory.store import Store
from outcore.planning import AS_IT_IS, plan, plans
from outcore.planning.allocator.fragmentation import Placement, has_room, search_placement
from outcore.planning.allocator.hints import AllocatorHints
from outcore.planning.planners.scoring import lean_bytes, swap_all
from outcore.planning.preparing import as_planned, at_pace, prepare, prepare_planned, with_times
from outcore.planning.residency import beside_state, choose_residency, with_gradients
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.planning.rewrites.workspaces import less_workspace
from outcore.planning.trace_index import index_of
from outcore.reporting.long_work import shown_if_long
from outcore.units import format_bytes
from outcore.values import Budget, Machine, Plan, Residency, Timeline, Trace

Sizes = list[tuple[int, int]]  # to plan for, and what workspaces may take beyond each


class Preparer:
    """Makes plans for all kinds of steps of one loop. Corrections of the machine's rates hold for all of them."""

    def __init__(
        self,
        machine: Machine,
        budget: Budget,
        planner: str,
        memory: DeviceMemory,
        store: Store,
        given: Plan | None,
        settings: FittingSettings,
        process: PlanningProcess,
    ) -> None:
        self.machine, self.budget, self.planner, self.memory = machine, budget, planner, memory
        self.settings = settings
        self.beside: Any = None  # the training state, if it may leave the device (`StateBeside`)
        self.residency: Residency | None = None  # where the training state is kept
        self.looks = Looks()  # what looking at ops adds to the host's seconds between them
        self.uses_given = False  # a step occurred for which the user gave the plan
        self._given, self.store, self.process = given, store, process

    def is_given_for(self, trace: Trace) -> bool:
        return self._given is not None and self._given.fingerprint == trace.fingerprint

    def begin_headroom(self, known: Headroom | None) -> Headroom | None:
        """Called before a plan is made. Returns the headroom to plan in, a new one if `known` is None, or None if the
        device has no caching allocator."""
        if not self.memory.has_caching_allocator:
            return None
        self.memory.give_back()  # what the allocator reserves from now on is due to the new plan
        if known is None:
            known = Headroom(self.budget.device_bytes, settings=self.settings)
            self.memory.new_headroom()  # with another plan the host may not need to wait
        known.begin()
        return known

    # -- the plan -----------------------------------------------------------------------------------------------------

    def brief_plan(self, trace: Trace, headroom: Headroom | None) -> Plan | None:
        """Makes a plan, without a long search, for the one step whose ops are timed."""
        return self._plan(trace, headroom, self.brief_planner, same_size=False)

    @property
    def searches_beside(self) -> bool:
        """Whether steps follow a brief plan while the planning process searches for a better one."""
        return self.memory.has_caching_allocator and self.beside is None and self.brief_planner != self.planner

    @property
    def brief_planner(self) -> str:
        return "priced" if self.planner == "hybrid" else self.planner

    def plan(
        self, trace: Trace, headroom: Headroom | None, *, same_size: bool = False, search: Search | None = None
    ) -> Plan | None:
        """Returns a plan, or None if those that were tried cannot be beaten. The given plan is used if it is for this
        step. With a `search`, the planning process plans, and StillSearching is raised until it is done."""
        return self._plan(trace, headroom, self.planner, same_size=same_size, search=search)

    def _plan(
        self, trace: Trace, headroom: Headroom | None, planner: str, *, same_size: bool, search: Search | None = None
    ) -> Plan | None:
        if self.is_given_for(trace):
            self.uses_given = True
            return self._given
        if self._given is not None and not self.uses_given:
            raise PlanMismatch(
                f"the plan was made for another step (fingerprint {self._given.fingerprint}, this step is "
                f"{trace.fingerprint}); plan this one anew: leave out plan=..."
            )
        if headroom is None:
            return self.plan_of_size(trace, [(self.budget.device_bytes, 0)], planner, [], 0.0)
        known = headroom.plans
        if headroom.is_fragmented and not same_size:
            found = self._search_places(trace, headroom, planner, search)
            if found is not None or headroom.attempts:
                return found
        margin = self.settings.margin_share
        sizes = [(headroom.usable_bytes, 0)]
        if not (headroom.attempts or headroom.is_fragmented):
            most_bytes = int(self.budget.device_bytes * (1 - margin))
            sizes += [(most_bytes, 0), (most_bytes, self.budget.device_bytes - most_bytes)]
        try:
            found = self.plan_of_size(trace, sizes, planner, known, margin, search)
        except BudgetTooSmall:
            if headroom.attempts:
                return None
            raise
        if headroom.is_larger:  # it must not run out of memory, as far as the model of the allocator knows
            asked = (trace, self.machine, found, self.budget.device_bytes, self.memory.places())
            part = ("has room", found.budget.device_bytes)
            if not (search.ask(part, has_room, *asked) if search is not None else has_room(*asked)):
                return None
        headroom.usable_bytes = found.budget.device_bytes
        return found

    def _search_places(self, trace: Trace, headroom: Headroom, planner: str, search: Search | None) -> Plan | None:
        """Returns a plan that fits in spite of fragmentation, of the size that should be fastest."""

        def placed(size_bytes: int) -> Placement:
            most, known = self.settings.num_plans, headroom.plans
            first, *others = self._plans(trace, size_bytes, planner, known, most=most, search=search)
            place = partial(search_placement, others=others, keeps_places=headroom.keeps_places)
            step, memory_bytes = (trace, self.machine, first), self.budget.device_bytes
            if search is not None:
                found = search.answer(
                    ("placed", size_bytes),
                    lambda: self.process.submit(place, *step, memory_bytes, self.memory.places()),
                )
            else:
                with shown_if_long("searching for a plan that leaves few holes"):
                    found = place(*step, memory_bytes, self.memory.places())
            return found

        return headroom.another(placed)

    def plan_of_size(
        self, trace: Trace, sizes: Sizes, planner: str, known: list[Plan], margin: float, search: Search | None = None
    ) -> Plan:
        """Makes a plan for the first size that is large enough. With each comes what workspaces may take beyond it: an
        op of the recorded step may have taken all memory that was left, and would in any budget that an error names."""
        for size_bytes, spare_bytes in sizes:
            try:
                return self._plans(trace, size_bytes, planner, known, most=1, search=search, spare_bytes=spare_bytes)[0]
            except BudgetTooSmall as error:
                too_small = error.with_traceback(None)  # a traceback holds all frames, and with them the user's tensors
        needed_bytes = int(too_small.needed_bytes / (1 - margin)) + 1 + (self.settings.unsplit_bytes if margin else 0)
        where = str(self.memory.device)
        raise too_small.on(where, needed_bytes=needed_bytes, budget_bytes=self.budget.device_bytes) from None

    def _plans(
        self,
        trace: Trace,
        size_bytes: int,
        planner: str,
        known: list[Plan],
        *,
        most: int,
        search: Search | None = None,
        spare_bytes: int = 0,
    ) -> list[Plan]:
        trace = less_workspace(trace, spare_bytes) if spare_bytes else trace
        budget = replace(self.budget, device_bytes=size_bytes)
        machine = self.machine if self.residency is None else beside_state(self.machine, self.residency)
        if search is not None:
            part = ("plans", size_bytes, most, spare_bytes)
            return search.ask(part, plans, trace, machine, budget, planner=planner, most=most, starts=known)
        with shown_if_long("planning a step") as tell:
            return plans(trace, machine, budget, planner=planner, progress=tell, most=most, starts=known)

    def choose_residency(
        self, trace: Trace, least: Residency, budget: Budget, early: Collection[int] = ()
    ) -> Residency:
        """Returns where to keep the training state. Parameters in `early` may be updated in the backward."""
        planner = self.planner if self.planner in AS_IT_IS else "priced"

        return choose_residency(trace, least, self.machine, budget, partial(plan, planner=planner), early=early)

    # -- from a plan to a program -------------------------------------------------------------------------------------

    def as_run(self, trace: Trace, *, in_place: bool) -> Trace:
        """Returns the step to plan for, where autograd adds gradients in place if `in_place`."""
        step = trace if self.residency is None else with_gradients(trace, self.residency)
        return sums_in_place(step) if in_place else step

    def make_ready(
        self,
        trace: Trace,
        plan: Plan,
        headroom: Headroom | None,
        *,
        in_place: bool,
        may_switch: bool = False,
        search: Search | None = None,
    ) -> Ready:
        """Lowers, verifies and simulates a plan, and adds hints for the allocator. `may_switch` says that its steps may
        turn out to be of another kind. With a `search`, the planning process does the work."""
        step = self.as_run(trace, in_place=in_place)
        if search is None:
            prepared = prepare(step, plan, self.machine, residency=self.residency)
        else:
            part = ("program", plan.budget.device_bytes)
            prepared = search.ask(part, prepare_planned, step, plan, self.machine).with_trace(step)
        peak, most_bytes = prepared.predicted, max(prepared.predicted.peak_bytes, plan.predicted_peak_bytes)
        if peak.peak_bytes > self.budget.device_bytes:  # a plan that was given, for another budget
            raise BudgetTooSmall(peak.peak_bytes, self.budget.device_bytes, peak.peak_at, where=str(self.memory.device))
        if peak.host_peak_bytes > self.budget.host_bytes:
            raise BudgetTooSmall(peak.host_peak_bytes, self.budget.host_bytes, "what is swapped", where="the host")
        hints = AllocatorHints()
        if headroom is not None and headroom.is_fragmented:
            there = self.memory.places()
            hints = headroom.arrange(prepared.trace, prepared.schedule, most_bytes, there)
        made, pools = (prepared.trace, prepared.schedule, hints.placeholders), bool(hints.pooled)
        program = Program(*made, pools_gradients=pools, may_switch=may_switch)
        return Ready(prepared, program, max(plan.before_bytes, trace.before_bytes), in_place)

    def made_to_switch(self, ready: Ready) -> Ready:
        """Returns the same plan for steps that may turn out to be of another kind."""
        old = ready.program
        program = Program(
            ready.prepared.trace,
            ready.prepared.schedule,
            old.placeholders,
            pools_gradients=old.pools_gradients,
            may_switch=True,
        )
        return replace(ready, program=program)

    def spare_bytes(self, trace: Trace, before_bytes: int, gradient_bytes: int) -> int:
        """Returns how many bytes of saved tensors a step like this one can keep on the device, whatever it saves. That
        is the budget less the peak of the step with everything swapped, less gradients that this step did not make."""
        trace_index = index_of(trace)
        swapped = swap_all(trace_index, self.machine, self.budget, lambda what, part: None)
        lean_peak_bytes = int(lean_bytes(trace_index, self.budget, swapped).max(initial=trace.before_bytes))
        share = self.settings.shared_share if self.memory.has_caching_allocator else 1.0
        last = trace.num_slots - 1
        left_bytes = sum(one.bytes for one in trace.storages if not one.external and one.dies >= last)
        more_bytes = max(0, gradient_bytes - left_bytes) + max(0, before_bytes - trace.before_bytes)
        # Recomputing a value on demand brings values to the device only for that purpose.
        largest_bytes = max((trace_index.value_bytes[value] for value in trace_index.evictable), default=0)
        needed_bytes = lean_peak_bytes + more_bytes + self.settings.num_transient * largest_bytes
        return max(0, int(share * self.budget.device_bytes) - needed_bytes)

    def reserve(self, predicted: Timeline) -> None:
        """Pins the host memory that a plan will swap to, before its first step."""
        if self.store.missing_bytes(predicted.host_peak_bytes):
            with shown_if_long(f"pinning {format_bytes(predicted.host_peak_bytes)} of host memory"):
                self.store.reserve(predicted.host_peak_bytes)

    def reserve_beside(self, predicted: Timeline) -> Future[None]:
        """Pins the host memory that a plan will swap to, in a thread, while training continues."""
        return self.store.reserve_beside(predicted.host_peak_bytes)

    @property
    def pinned_bytes(self) -> int:
        return self.store.pinned_bytes  # that plans may swap to without pinning more

    def slow_copies_down(self) -> None:
        """Assumes slower copies: they take longer while kernels run than when they were measured alone."""
        self.machine = self.machine.with_copies_at(self.settings.slowed_share)

    def with_times(self, ready: Ready, trace: Trace) -> Ready:
        """The same plan, which keeps everything, with the seconds of `trace`."""
        made = ready.prepared.plan
        step = as_planned(replace(self.as_run(trace, in_place=False), before_bytes=made.before_bytes), made)
        return replace(ready, prepared=with_times(ready.prepared, step, self.machine))

    def at_pace(self, ready: Ready, pace: float) -> Ready:
        """Returns the same plan with a prediction in which every op takes `pace` times as long."""
        return replace(ready, prepared=at_pace(ready.prepared, pace, self.machine))
