"""Measured steps -> Headroom: how much of a CUDA budget plans may use.

A plan counts allocated bytes. A budget also covers what the allocator has mapped and cannot use because of
fragmentation, which is known only after a plan was followed. If no free block is large enough and the budget allows no
further page, the allocator restarts: it frees all unused pages, which stalls the device for 15 ms or more. Another plan
often costs less than that. So the headroom is found by trying. A plan is followed for a few steps; if the allocator
restarted, another plan is tried, as long as it could be faster than the best so far. It is chosen among plans of a few
sizes, as the one that should be fastest by a model of the allocator (`planning.allocator.fragmentation`), restarts
included. The plan that was measured to be the fastest stays.

If the allocator did not restart and left a good part of the budget unmapped, one larger plan is tried: the steps of
compiled graphs leave hardly any holes. It must not run out of memory in the model of the allocator. If little is left
unmapped the size stays: a larger plan could gain a percent, but might run out of memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum

from outcore.errors import BudgetTooSmall
from outcore.fitting.ready import Ready
from outcore.fitting.settings import FITTING, FittingSettings
from outcore.planning.allocator.fragmentation import Placement
from outcore.planning.allocator.hints import AllocatorHints
from outcore.planning.allocator.model import Places
from outcore.planning.allocator.placeholders import arrange
from outcore.values import Plan, Schedule, Trace


class Trouble(Enum):
    """The worst that has happened in steps of these plans."""

    NONE = 0
    STARTED_OVER = 1  # steps follow allocator hints from now on: placeholders, or a pool for small gradients
    RAN_OUT = 2  # steps make no placeholders any more


@dataclass(frozen=True)
class Attempt:
    """A plan that was tried, and what was measured."""

    usable_bytes: int
    step_s: float
    num_restarts: int
    reserved_bytes: int
    ready: Ready


@dataclass
class Headroom:
    """Plans may use `usable_bytes` of `memory_bytes`. Holds the plans that were tried so far."""

    memory_bytes: int
    trouble: Trouble = Trouble.NONE
    settings: FittingSettings = FITTING
    usable_bytes: int = field(init=False)
    is_paced: bool = False  # predictions were corrected by measured times
    has_grown: bool = False  # a larger size was tried, or planned for, because the one before left memory unmapped
    attempts: list[Attempt] = field(default_factory=list)
    _looked: dict[int, Placement] = field(default_factory=dict)  # plans that were examined but not tried, by size
    _num_looks: int = 0  # plans examined since the last one was followed; a search in parallel asks for them again
    _largest_bytes: int = field(init=False)
    _steps: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.usable_bytes = int(self.settings.first_share * self.memory_bytes)
        self._largest_bytes = int(self.settings.largest_share * self.memory_bytes)

    @property
    def best(self) -> Attempt:
        return min(self.attempts, key=lambda attempt: attempt.step_s)

    @property
    def is_fragmented(self) -> bool:
        return self.trouble is not Trouble.NONE

    @property
    def keeps_places(self) -> bool:
        return self.trouble is not Trouble.RAN_OUT

    @property
    def is_larger(self) -> bool:
        """Is the size one that no plan was measured in yet, larger than those of the others?"""
        return self.has_grown and all(self.usable_bytes > attempt.usable_bytes for attempt in self.attempts)

    @property
    def fits(self) -> bool:
        """Whether the best plan was measured without an allocator restart."""
        return bool(self.attempts) and self.best.num_restarts == 0

    def keep_best(self, ready: Ready) -> None:
        """Replaces the best plan by another form of it."""
        self.attempts[self.attempts.index(self.best)] = replace(self.best, ready=ready)

    def cannot_win(self, predicted_s: float) -> bool:
        """Whether a plan with this prediction cannot be faster than the best measured one."""
        return bool(self.attempts) and predicted_s >= self.best.step_s

    def another(self, look: Callable[[int], Placement]) -> Plan | None:
        """Returns the next plan to try and sets `usable_bytes` for it, or returns None if no remaining size could be
        faster. `look` makes a plan for a size and asks the model of the allocator about it."""
        left = self._untried(look)
        known = {size: seen for size, seen in left.items() if seen.step_s < math.inf}
        if known:
            self.usable_bytes = min(known, key=lambda size: known[size].step_s)
            return known[self.usable_bytes].plan
        # By the model every size runs out of memory, so it knows too little of this step. Try smaller sizes instead.
        lowest = min((attempt.usable_bytes for attempt in self.attempts), default=self._largest_bytes)
        shrink_bytes = self.settings.least_shrink * self.settings.shrink_share * self.memory_bytes
        smaller = [size for size in left if size <= lowest - shrink_bytes]
        if not smaller:
            return None
        self.usable_bytes = max(smaller)
        return left[self.usable_bytes].plan

    def _untried(self, look: Callable[[int], Placement]) -> dict[int, Placement]:
        """Returns the sizes that could be faster than the best measured plan, from the largest down, until smaller ones
        cannot be faster. At least two are examined, because searches do not all end equally near to the optimum."""
        settings = self.settings
        # The first attempt was planned before memory was fragmented, so its size may be tried again.
        tried = {attempt.usable_bytes for attempt in self.attempts[1:]}
        size, found, num_known = self._largest_bytes, dict[int, Placement](), 0
        while (
            size >= settings.least_share * self.memory_bytes
            and (size in self._looked or self._num_looks < settings.num_looks)
            and num_known < settings.num_looks
        ):
            if size not in tried:
                if size not in self._looked:
                    try:
                        self._looked[size] = look(size)
                    except BudgetTooSmall:
                        break
                    self._num_looks += 1
                seen = self._looked[size]
                if self.cannot_win(seen.planned_s):
                    break  # plans of smaller sizes are slower still
                if not self.cannot_win(seen.plan.predicted_step_s):
                    found[size] = seen
                    num_known += seen.step_s < math.inf
                    fastest = min(found.values(), key=lambda one: one.step_s)
                    near_s = (1 + settings.near_share) * seen.planned_s
                    if len(found) > 1 and not fastest.restarts and fastest.step_s <= near_s:
                        break
            size -= int(settings.look_share * self.memory_bytes)
        return found

    @property
    def plans(self) -> list[Plan]:
        """The plans that were tried, and those that were only examined."""
        tried = [attempt.ready.prepared.plan for attempt in self.attempts]
        return [*tried, *(seen.plan for seen in self._looked.values())]

    def arrange(self, trace: Trace, schedule: Schedule, peak_bytes: int, there: Places) -> AllocatorHints:
        """Returns what a step does against fragmentation. `there` holds the addresses of the weights."""
        return arrange(trace, schedule, self.memory_bytes, peak_bytes, there, keeps_places=self.keeps_places)

    def forget(self) -> None:
        """Drops examined plans, which were made with other times."""
        self._looked.clear()

    def begin(self) -> None:
        """Called before a new plan is followed."""
        self._steps, self._num_looks = [], 0

    def note(self, step_s: float, num_restarts: int, reserved_bytes: int) -> bool:
        """Notes a measured step of the current plan. Returns whether the plan can be judged now."""
        self._steps.append((step_s, num_restarts, reserved_bytes))
        return len(self._steps) == self.settings.num_measured

    def judge(self, ready: Ready, *, again: bool = False) -> bool:
        """Returns whether another plan should be tried. If not, `best` is the plan to follow.

        `again` says that the caller wants to plan for the same size once more, for example with slower copies.
        """
        counted = self._steps[1:]
        num_restarts = max(restarts for _, restarts, _ in counted)
        reserved_bytes = max(reserved for _, _, reserved in self._steps)
        # Without restarts, other delays are temporary: first calls on the host, pages that are still being mapped.
        typical = statistics.median if num_restarts else min
        step_s = typical([step_s for step_s, _, _ in counted])
        was_larger = self.is_larger
        if num_restarts and not self.is_fragmented and not was_larger:
            self.trouble = Trouble.STARTED_OVER
        self.attempts.append(Attempt(self.usable_bytes, step_s, num_restarts, reserved_bytes, ready))
        if was_larger:  # it is the fastest, or the one before it stays
            self.settle()
            return False
        if len(self.attempts) < self.settings.num_attempts and (again or num_restarts > 0):
            if again:
                self.forget()  # examined plans assume faster copies
            return True
        if num_restarts == 0 and self._grow(reserved_bytes):
            return True
        self.settle()
        return False

    def _grow(self, reserved_bytes: int) -> bool:
        """A larger size, once, where the last plan's steps left much of the budget unmapped."""
        settings = self.settings
        left_bytes = int((1 - settings.margin_share) * self.memory_bytes) - reserved_bytes
        if self.has_grown or self.is_fragmented or not reserved_bytes:
            return False
        if left_bytes < settings.grow_share * self.memory_bytes:
            return False
        self.has_grown = True
        self.usable_bytes += left_bytes
        return True

    def settle(self) -> None:
        """Ends the search for a size."""
        if self.attempts:
            self.usable_bytes = self.best.usable_bytes

    def ran_out(self) -> bool:
        """Called when a step of the current plan ran out of memory. Returns whether to plan for a smaller size. If not,
        `best` is an earlier plan that did not run out, or there is no smaller size."""
        self.trouble = Trouble.RAN_OUT
        self.forget()
        self.attempts = [attempt for attempt in self.attempts if attempt.usable_bytes < self.usable_bytes]
        if not self.fits and self._shrink():
            return True
        self.settle()
        return False

    def _shrink(self) -> bool:
        """Reduces the size and returns True, or returns False if it is the smallest already."""
        smaller = self.usable_bytes - int(self.settings.shrink_share * self.memory_bytes)
        if smaller < self.settings.least_share * self.memory_bytes:
            return False
        self.usable_bytes = self._largest_bytes = smaller
        return True
