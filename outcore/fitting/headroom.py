"""Measured steps -> how much of a CUDA budget plans may use.

A plan counts what is allocated, a budget also what the allocator has mapped and cannot use: holes. How many there will
be is known for sure only when a plan was followed. When no hole is long enough and the budget allows no further page,
the allocator gives every free page back and starts over, which drains the device for 15 ms and more; another plan often
costs less than that. So the headroom is found by trying: a plan is followed for a few steps, and where the allocator
started over another one is tried, as long as it could be faster than the best so far: of a few sizes from the largest
down the one that in a model of the allocator (`planning.allocator.fragmentation`) should be fastest, restarts included.
The fastest, measured, stays. Without restarts the size never changes: what could be gained is a percent, what could be
lost is a step that runs out of memory.
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
    """The worst that the allocator did so far in steps of these plans."""

    NONE = 0
    STARTED_OVER = 1  # from here on steps follow allocator hints: placeholders, or a pool for small gradients
    RAN_OUT = 2  # and keep no places any more


@dataclass(frozen=True)
class Attempt:
    """What a plan of one size came to."""

    usable_bytes: int
    step_s: float
    num_restarts: int
    reserved_bytes: int
    ready: Ready


@dataclass
class Headroom:
    """How much of `memory_bytes` plans may use: `usable_bytes`, and the plans that were tried so far."""

    memory_bytes: int
    trouble: Trouble = Trouble.NONE
    settings: FittingSettings = FITTING
    usable_bytes: int = field(init=False)
    is_paced: bool = False  # predictions were corrected by what was measured
    attempts: list[Attempt] = field(default_factory=list)
    _looked: dict[int, Placement] = field(default_factory=dict)  # by size
    _num_looks: int = 0  # since the last plan was followed: what is searched for beside training is asked for again
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
    def fits(self) -> bool:
        """Was a plan measured in whose steps the allocator did not start over, and is it the best?"""
        return bool(self.attempts) and self.best.num_restarts == 0

    def keep_best(self, ready: Ready) -> None:
        """The best plan in other words."""
        self.attempts[self.attempts.index(self.best)] = replace(self.best, ready=ready)

    def is_hopeless(self, predicted_s: float) -> bool:
        """Whether a plan cannot beat what was measured already, even if everything goes as predicted."""
        return bool(self.attempts) and predicted_s >= self.best.step_s

    def another(self, look: Callable[[int], Placement]) -> Plan | None:
        """The next plan to try, and `usable_bytes` for it. None: no size is left that could be faster. `look` plans for
        a size and asks the model of the allocator."""
        left = self._untried(look)
        known = {size: seen for size, seen in left.items() if seen.step_s < math.inf}
        if known:
            self.usable_bytes = min(known, key=lambda size: known[size].step_s)
            return known[self.usable_bytes].plan
        # The model runs out of memory everywhere: it knows too little of this step. Down, as after running out.
        lowest = min((attempt.usable_bytes for attempt in self.attempts), default=self._largest_bytes)
        smaller = [size for size in left if size <= lowest - 0.9 * self.settings.shrink_share * self.memory_bytes]
        if not smaller:
            return None
        self.usable_bytes = max(smaller)
        return left[self.usable_bytes].plan

    def _untried(self, look: Callable[[int], Placement]) -> dict[int, Placement]:
        """Sizes that could be faster than what was measured, from the largest down, until smaller ones have nothing to
        win: two at least, since searches for plans do not end equally far from the best."""
        settings = self.settings
        tried = {
            attempt.usable_bytes for attempt in self.attempts[1:]
        }  # the first was planned before memory was fragmented
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
                if self.is_hopeless(seen.planned_s):
                    break  # smaller ones are slower
                if not self.is_hopeless(seen.plan.predicted_step_s):
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
        """Those that were tried, and those that were only looked at."""
        tried = [attempt.ready.prepared.plan for attempt in self.attempts]
        return [*tried, *(seen.plan for seen in self._looked.values())]

    def arrange(self, trace: Trace, schedule: Schedule, peak_bytes: int, there: Places) -> AllocatorHints:
        """What a step does for an allocator that is in trouble. `there`: where the weights lie."""
        return arrange(trace, schedule, self.memory_bytes, peak_bytes, there, keeps_places=self.keeps_places)

    def forget(self) -> None:
        """What was looked at so far was planned with other times."""
        self._looked.clear()

    def begin(self) -> None:
        """A new plan is about to be followed."""
        self._steps, self._num_looks = [], 0

    def note(self, step_s: float, num_restarts: int, reserved_bytes: int) -> bool:
        """One more step of the plan at hand; whether it can be judged now."""
        self._steps.append((step_s, num_restarts, reserved_bytes))
        return len(self._steps) == self.settings.num_measured

    def judge(self, ready: Ready, *, again: bool = False) -> bool:
        """Whether another plan should be tried; if not, `best` is the one to follow from here on.

        `again`: the owner has learned something and wants to plan for the same size once more."""
        counted = self._steps[1:]
        num_restarts = max(restarts for _, restarts, _ in counted)
        reserved_bytes = max(reserved for _, _, reserved in self._steps)
        # Without restarts whatever else is slow passes: the host's first times, pages that are still being mapped.
        typical = statistics.median if num_restarts else min
        step_s = typical([step_s for step_s, _, _ in counted])
        if num_restarts and not self.is_fragmented:
            self.trouble = Trouble.STARTED_OVER
        self.attempts.append(Attempt(self.usable_bytes, step_s, num_restarts, reserved_bytes, ready))
        if len(self.attempts) < self.settings.num_attempts and (again or num_restarts > 0):
            if again:
                self.forget()  # copies are slower than was thought then
            return True
        self.settle()
        return False

    def settle(self) -> None:
        """No other size will be tried."""
        if self.attempts:
            self.usable_bytes = self.best.usable_bytes

    def ran_out(self) -> bool:
        """A step of the plan at hand ran out of memory. Whether a smaller one should be planned; if not, either an
        earlier one that did not run out is `best`, or there is nothing smaller."""
        self.trouble = Trouble.RAN_OUT
        self.forget()
        self.attempts = [attempt for attempt in self.attempts if attempt.usable_bytes < self.usable_bytes]
        if not self.fits and self._shrink():
            return True
        self.settle()
        return False

    def _shrink(self) -> bool:
        """A smaller size, unless it is the smallest already."""
        smaller = self.usable_bytes - int(self.settings.shrink_share * self.memory_bytes)
        if smaller < self.settings.least_share * self.memory_bytes:
            return False
        self.usable_bytes = self._largest_bytes = smaller
        return True
