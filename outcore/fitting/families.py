"""Steps of a few sizes -> SharedPlan: plans that serve all sizes.

Steps that do the same work on inputs of other sizes form a family (`outcore.planning.families`). Two or three members
are recorded, and the trace of any other size is predicted from them. A plan for one size serves every smaller one: its
decisions are about the same tensors, its actions happen at the same points of the step, and nothing is larger. So plans
are made for a few sizes only, each some percent larger than the previous one, and shared by all sizes in between.

Training does not wait for them. The first shared plan is a brief one for the largest size so far and is made at once.
All others are made in the planning process while steps follow the smallest shared plan that covers them. A step that
differs from its prediction leaves the plan with the same numbers; its size is recorded when it occurs again, and
becomes another member of the family.

The ops of a recorded step look slow if the host was slower than the device, or if they ran for the first time. The ops
of two steps of different sizes are therefore timed without the recorder, and plans are made anew. Earlier plans serve
until the new ones exist.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from outcore.eager.program import Program
from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.fitting.kinds import Kind
from outcore.fitting.phases import Shared
from outcore.fitting.preparing import Preparer
from outcore.fitting.ready import Ready
from outcore.fitting.retiming import TimedOps, are_ops_of
from outcore.planning.families.scaling import difference
from outcore.planning.families.sharing import plan_shared
from outcore.planning.families.sizes import Family, Member, Sizes, TimedAt
from outcore.planning.preparing import Planned, plan_step
from outcore.reporting.long_work import shown_if_long
from outcore.values import Trace

log = logging.getLogger("outcore")


@dataclass
class SharedPlan:
    """A plan for one size that serves all smaller ones; it may still be in the making."""

    sizes: Sizes
    trace: Trace
    kind: Kind | None = None  # the kind of the steps that follow it, once the plan exists
    coming: Future[Planned] | None = None  # from the planning process
    planned: Planned | None = None  # the plan, until host memory is pinned for it
    pinned: Future[None] | None = None

    @property
    def is_in_core(self) -> bool:
        """Whether the plan keeps everything, so that no plan for a smaller size can be faster."""
        plan = self.kind.plan if self.kind is not None else None
        return plan is not None and plan.keeps_all


@dataclass
class SizeFamily:
    """The members of one family and the plans that its sizes share."""

    members: dict[Sizes, Trace] = field(default_factory=dict)
    model: Family | None = None
    timed: dict[Sizes, TimedAt] = field(default_factory=dict)
    shared: dict[Sizes, SharedPlan] = field(default_factory=dict)
    earlier: list[SharedPlan] = field(default_factory=list)  # made before the last step was timed
    apart: set[Sizes] = field(default_factory=set)  # sizes whose steps differed from their prediction
    seen: set[Sizes] = field(default_factory=set)  # the first few sizes that occurred
    largest: Sizes = ()  # the largest size of each dimension so far

    def note(self, sizes: Sizes, num_sizes: int) -> bool:
        """Notes that a step of these sizes begins. Returns whether sizes vary: at least `num_sizes` different ones
        occurred."""
        self.largest = tuple(map(max, self.largest, sizes)) if self.largest else sizes
        if len(self.seen) < num_sizes:
            self.seen.add(sizes)
        return len(self.seen) >= num_sizes

    def add(self, sizes: Sizes, trace: Trace) -> None:
        """Adds a recorded step as the newest member. The model uses it and those earlier members that do the same
        work."""
        self.members.pop(sizes, None)
        self.members[sizes] = trace
        self.apart.discard(sizes)
        newest, *others = [Member(*item) for item in reversed(self.members.items())]
        alike = [other for other in others if not difference(newest.trace, other.trace)]
        if alike:
            known = Family([newest, *alike])
            if self.model is not None and difference(newest.trace, self.model.members[0].trace):
                self.timed.clear()  # of other work
            self.timed = {timed.sizes: timed for timed in self.timed.values() if known.knows(timed.sizes)}
            self.model = Family(known.members, list(self.timed.values()))
            self.forget_plans()

    def forget_plans(self) -> None:
        self.shared.clear()
        self.earlier.clear()

    def was_timed(self, timed: TimedAt) -> None:
        """Adds the times of a step whose ops were timed without the recorder."""
        assert self.model is not None
        self.timed[timed.sizes] = timed
        self.model = Family(self.model.members, list(self.timed.values()))
        self.earlier += [shared for shared in self.shared.values() if shared.kind is not None]
        self.shared.clear()

    def serving(self, sizes: Sizes, before_bytes: int) -> SharedPlan | None:
        """Returns the plan for the smallest size that serves these sizes. New plans come before earlier ones."""
        for plans in (self.shared.values(), self.earlier):
            fitting = [shared for shared in plans if _serves(shared, sizes, before_bytes)]
            if fitting:
                return min(fitting, key=lambda shared: math.prod(shared.sizes))
        return None


class Families:
    """All families of one loop."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer, self._settings = preparer, preparer.settings
        self._families: dict[Hashable, SizeFamily] = {}
        self._usable_share = 1.0

    def note_recorded(self, structure: Hashable, sizes: Sizes, trace: Trace) -> None:
        """Adds a recorded step to its family."""
        self._families.setdefault(structure, SizeFamily()).add(sizes, trace)

    def left(self, structure: Hashable, sizes: Sizes, because: str) -> None:
        """Called when a step left a shared plan: its size is recorded when it occurs again."""
        log.info("a step of sizes %s left the plan it shared: %s; it is recorded when it comes again", sizes, because)
        self._families[structure].apart.add(sizes)

    def ran_out(self, structure: Hashable) -> None:
        """Called when a step of a shared plan ran out of memory: makes smaller plans from now on."""
        self._usable_share = min(self._usable_share, self._settings.shared_share) - self._settings.shrink_share
        self._families[structure].forget_plans()

    def to_be_timed(self, structure: Hashable, sizes: Sizes) -> Trace | None:
        """Returns the trace of a step of these sizes if its ops should be timed, else None. Two sizes that differ
        enough are timed."""
        family = self._families[structure]
        if family.model is None:
            return None
        works = [math.prod(timed) for timed in family.timed]
        work, apart = math.prod(sizes), self._settings.timed_ratio
        if len(works) > 1 or any(max(work, other) < apart * min(work, other) for other in works):
            return None
        return family.model.at(sizes)

    def was_timed(self, structure: Hashable, sizes: Sizes, ops: TimedOps) -> None:
        """Called when the ops of a step that followed a shared plan were timed one by one."""
        family = self._families.get(structure)
        if family is None or family.model is None or not family.model.knows(sizes):
            return
        if are_ops_of(family.model.members[0].trace, ops.names):
            family.was_timed(TimedAt(sizes, tuple(ops.seconds), tuple(ops.host_s)))

    def find(self, structure: Hashable, sizes: Sizes, before_bytes: int, input_bytes: int) -> Kind | None:
        """Returns the kind of the steps that share a plan for these sizes. Returns None if the step should be recorded
        or planned by itself, because too little is known of the family or its sizes do not vary."""
        family = self._families.setdefault(structure, SizeFamily())
        varies = family.note(sizes, self._settings.num_sizes)
        if not varies or family.model is None or sizes in family.apart or not family.model.knows(sizes):
            return None
        wanted = self._rounded(family, sizes)
        covers_bytes = before_bytes + math.ceil(input_bytes * math.prod(wanted) / max(1, math.prod(sizes)))
        self._take_up(family)
        best = family.serving(sizes, before_bytes)
        if best is not None and best.kind is not None and best.kind.asked_late:
            family.model = None  # a backward ran after its step, for which shared plans do not provide
            return None
        if wanted not in family.shared and not (best is not None and best.is_in_core):
            self._order(family, wanted, covers_bytes, in_loop=best is None)
            best = best or family.shared[wanted]
        return best.kind if best is not None else None

    # -- plans --------------------------------------------------------------------------------------------------------

    def _rounded(self, family: SizeFamily, sizes: Sizes) -> Sizes:
        """Rounds sizes up to one of a few sizes, but not beyond the largest so far."""
        assert family.model is not None
        members = zip(*(member.sizes for member in family.model.members), strict=True)
        rounded = tuple(
            size if len(set(column)) == 1 else _round_up(size, most, self._settings.size_step)
            for size, most, column in zip(sizes, family.largest, members, strict=True)
        )
        return rounded if family.model.knows(rounded) else sizes  # rounding may break a relation between dimensions

    def _order(self, family: SizeFamily, sizes: Sizes, before_bytes: int, *, in_loop: bool) -> None:
        """Makes a plan: a brief one at once if no other plan serves the step (`in_loop`), else one in the planning
        process."""
        assert family.model is not None
        trace = replace(family.model.at(sizes), before_bytes=before_bytes)
        shared = family.shared[sizes] = SharedPlan(sizes, trace)
        if in_loop:
            with shown_if_long("planning for another size"):
                self._plan_in_loop(shared)
            return
        process, step = self._preparer.process, (trace, self._preparer.machine, self._preparer.budget)
        if self._preparer.memory.has_caching_allocator:
            share, there = self._usable_share, self._preparer.memory.places()
            shared.coming = process.submit(plan_shared, *step, self._preparer.planner, share, there)
        else:
            shared.coming = process.submit(plan_step, *step, self._preparer.planner, brief=True)

    def _plan_in_loop(self, shared: SharedPlan) -> None:
        """Makes a brief plan that swaps only to memory which is already pinned, if there is one: pinning takes
        seconds."""
        preparer, trace, budget = self._preparer, shared.trace, self._preparer.budget
        share = min(self._usable_share, self._settings.shared_share) if preparer.memory.has_caching_allocator else 1.0
        host_bytes = min(budget.host_bytes, preparer.pinned_bytes)
        pinned = replace(budget, device_bytes=int(share * budget.device_bytes), host_bytes=host_bytes)
        try:
            planned = plan_step(trace, preparer.machine, pinned, preparer.brief_planner)
        except BudgetTooSmall:
            planned = self._plan_in_all_memory(shared)
        self._adopt(shared, planned)

    def _plan_in_all_memory(self, shared: SharedPlan) -> Planned:
        preparer = self._preparer
        try:
            planned = plan_step(shared.trace, preparer.machine, preparer.budget, preparer.brief_planner)
        except BudgetTooSmall as error:
            self._withdraw(shared)
            where = str(preparer.memory.device)
            raise BudgetTooSmall(error.needed_bytes, error.budget_bytes, error.at_op, where=where) from None
        preparer.reserve(planned.predicted)
        return planned

    def _withdraw(self, shared: SharedPlan) -> None:
        """Removes a shared plan that could not be made."""
        for family in self._families.values():
            if family.shared.get(shared.sizes) is shared:
                del family.shared[shared.sizes]

    def _take_up(self, family: SizeFamily) -> None:
        """Takes one finished plan of the planning process into use, once host memory is pinned for it."""
        for shared in family.shared.values():
            if shared.coming is not None and shared.coming.done():
                coming, shared.coming = shared.coming, None
                try:
                    shared.planned = coming.result()
                    shared.pinned = self._preparer.reserve_beside(shared.planned.predicted)
                except OutcoreError as error:
                    log.info("no plan was made for sizes %s: %s", shared.sizes, error)
        for shared in family.shared.values():
            if shared.planned is not None and shared.pinned is not None and shared.pinned.done():
                planned, shared.planned, shared.pinned = shared.planned, None, None
                self._adopt(shared, planned)
                return

    def _adopt(self, shared: SharedPlan, planned: Planned) -> None:
        prepared = planned.with_trace(shared.trace)
        program = Program(prepared.trace, prepared.schedule, exact_shapes=False)
        ready = Ready(prepared, program, shared.trace.before_bytes, sums_in_place=False)
        shared.kind = Kind(self._preparer, phase=Shared(shared.trace, ready))
        log.info("steps of up to %s are planned: %.3f s predicted", shared.sizes, prepared.predicted.step_s)


def _serves(shared: SharedPlan, sizes: Sizes, before_bytes: int) -> bool:
    large_enough = all(mine >= size for mine, size in zip(shared.sizes, sizes, strict=True))
    return shared.kind is not None and large_enough and before_bytes <= shared.trace.before_bytes


def _round_up(size: int, most: int, step: float) -> int:
    """Returns the next power of (1 + step), at most `most`."""
    if size <= 1:
        return size
    return min(math.ceil((1 + step) ** math.ceil(math.log(size) / math.log1p(step) - 1e-9)), most)
