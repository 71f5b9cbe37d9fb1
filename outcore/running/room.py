"""Measured steps -> how much of a CUDA budget plans may use.

A plan counts what is allocated, a budget also what the allocator has mapped and cannot use: holes. How many there will
be is known for sure only when a plan was followed. When no hole is long enough and the budget allows no further page,
the allocator gives every free page back and starts over, which drains the device for 15 ms and more; another plan often
costs less than that. So the room is found by trying: a plan is followed for a few steps, and where the allocator
started over another one is tried, as long as it could be faster than the best so far: of a few rooms from the largest
down the one that in a model of the allocator (`outcore.planning.tidy`) should be fastest, starts over included. The
fastest, measured, stays. Without restarts a room never changes: what could be gained is a percent, what could be lost
is a step that runs out of memory.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from outcore.errors import BudgetTooSmall
from outcore.planning.crowd import Crowd
from outcore.planning.holes import Places
from outcore.planning.placeholders import arrange
from outcore.planning.tidy import Tidied
from outcore.values import Plan, Schedule, Trace

FIRST_SHARE = 0.92  # of the budget, for the first plan
LARGEST_SHARE = 0.94  # for one that the model of the allocator has seen
LEAST_SHARE = 0.70
LOOK_SHARE = 0.02  # between rooms that are looked at
NUM_LOOKS = 4  # rooms planned for and looked at before one is tried
NEAR = 5e-3  # what is as near to the fastest that smaller rooms promise is not looked further for
SHRINK_SHARE = 0.04  # after running out of memory, in a step or in the model
NUM_ATTEMPTS = 6
NUM_STEPS = 3  # a plan is followed this long before it is judged; the first step maps memory and does not count


@dataclass(frozen=True)
class Attempt:
    """What a plan for one room came to. `made` is whatever the owner needs to go back to it."""

    room_bytes: int
    step_s: float
    num_restarts: int
    reserved_bytes: int
    made: Any


@dataclass
class Room:
    """The part of `memory_bytes` that plans may use. `settled`: no other will be tried. `again`: the next plan is for
    the same room. `is_paced`: predictions were corrected by what was measured. `crowded`: the allocator had to start
    over in a plan's steps, or ran out. `keeps_places`: plans may, for blocks to come; not after running out."""

    memory_bytes: int
    room_bytes: int = 0
    settled: bool = False
    again: bool = False
    is_paced: bool = False
    crowded: bool = False
    keeps_places: bool = True
    attempts: list[Attempt] = field(default_factory=list)
    _looked: dict[int, Tidied] = field(default_factory=dict)
    _largest_bytes: int = 0
    _steps: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room_bytes = self.room_bytes or int(FIRST_SHARE * self.memory_bytes)
        self._largest_bytes = int(LARGEST_SHARE * self.memory_bytes)

    @property
    def best(self) -> Attempt:
        return min(self.attempts, key=lambda attempt: attempt.step_s)

    @property
    def fits(self) -> bool:
        """Is a plan settled on in whose steps the allocator did not start over?"""
        return self.settled and bool(self.attempts) and self.best.num_restarts == 0

    def keep_best(self, made: Any) -> None:
        """The best plan in other words."""
        self.attempts[self.attempts.index(self.best)] = replace(self.best, made=made)

    def is_hopeless(self, predicted_s: float) -> bool:
        """Whether a plan cannot beat what was measured already, even if everything goes as predicted."""
        return bool(self.attempts) and predicted_s >= self.best.step_s

    def another(self, look: Callable[[int], Tidied]) -> Plan | None:
        """The next plan to try, and `room_bytes` for it. None: no room is left that could be faster. `look` plans for a
        room and asks the model of the allocator."""
        left = self._untried(look)
        known = {room: seen for room, seen in left.items() if seen.step_s < math.inf}
        if known:
            self.room_bytes = min(known, key=lambda room: known[room].step_s)
            return known[self.room_bytes].plan
        # The model runs out of memory everywhere: it knows too little of this step. Down, as after running out.
        lowest = min((attempt.room_bytes for attempt in self.attempts), default=self._largest_bytes)
        smaller = [room for room in left if room <= lowest - 0.9 * SHRINK_SHARE * self.memory_bytes]
        if not smaller:
            return None
        self.room_bytes = max(smaller)
        return left[self.room_bytes].plan

    def _untried(self, look: Callable[[int], Tidied]) -> dict[int, Tidied]:
        """Rooms that could be faster than what was measured, from the largest down, until smaller ones have nothing to
        win: two at least, since searches for plans do not end equally far from the best."""
        tried = {attempt.room_bytes for attempt in self.attempts[1:]}  # the first was not planned for a crowd
        room, found, num_looks, num_known = self._largest_bytes, dict[int, Tidied](), 0, 0
        while room >= LEAST_SHARE * self.memory_bytes and num_looks < NUM_LOOKS and num_known < NUM_LOOKS:
            if room not in tried:
                if room not in self._looked:
                    num_looks += 1
                    try:
                        self._looked[room] = look(room)
                    except BudgetTooSmall:
                        break
                seen = self._looked[room]
                if self.is_hopeless(seen.planned_s):
                    break  # smaller ones are slower
                if not self.is_hopeless(seen.plan.predicted_step_s):
                    found[room] = seen
                    num_known += seen.step_s < math.inf
                    fastest = min(found.values(), key=lambda one: one.step_s)
                    if len(found) > 1 and not fastest.restarts and fastest.step_s <= (1 + NEAR) * seen.planned_s:
                        break
            room -= int(LOOK_SHARE * self.memory_bytes)
        return found

    def arrange(self, trace: Trace, schedule: Schedule, peak_bytes: int, there: Places) -> Crowd:
        """What a step of a crowded room does for the allocator. `there`: where the weights lie."""
        return arrange(trace, schedule, self.memory_bytes, peak_bytes, there, keeps_places=self.keeps_places)

    def forget(self) -> None:
        """What was looked at so far was planned with other times."""
        self._looked.clear()

    def begin(self) -> None:
        """A new plan is about to be followed."""
        self._steps = []

    def note(self, step_s: float, num_restarts: int, reserved_bytes: int) -> bool:
        """One more step of the plan at hand; whether it can be judged now."""
        self._steps.append((step_s, num_restarts, reserved_bytes))
        return len(self._steps) == NUM_STEPS

    def judge(self, made: Any, *, again: bool = False) -> bool:
        """Whether another plan should be tried; if not, `best` is the one to follow from here on.

        `again`: the owner has learned something and wants to plan for the same room once more."""
        counted = self._steps[1:]
        num_restarts = max(restarts for _, restarts, _ in counted)
        reserved_bytes = max(reserved for _, _, reserved in self._steps)
        # Without restarts whatever else is slow passes: the host's first times, pages that are still being mapped.
        typical = statistics.median if num_restarts else min
        step_s = typical([step_s for step_s, _, _ in counted])
        self.crowded = self.crowded or num_restarts > 0
        self.attempts.append(Attempt(self.room_bytes, step_s, num_restarts, reserved_bytes, made))
        if len(self.attempts) < NUM_ATTEMPTS and (again or num_restarts > 0):
            self.again = again
            if again:
                self.forget()  # copies are slower than was thought then
            return True
        self.settle()
        return False

    def settle(self) -> None:
        self.settled = True
        if self.attempts:
            self.room_bytes = self.best.room_bytes

    def ran_out(self) -> bool:
        """A step of the plan at hand ran out of memory. Whether a smaller one should be planned; if not, either an
        earlier one that did not run out is `best`, or there is nothing smaller."""
        self.crowded, self.again, self.keeps_places = True, False, False
        self.forget()
        self.attempts = [attempt for attempt in self.attempts if attempt.room_bytes < self.room_bytes]
        if not (self.attempts and self.best.num_restarts == 0) and self._shrink():
            self.settled = False
            return True
        self.settle()
        return False

    def _shrink(self) -> bool:
        """A smaller room, unless it is the smallest already."""
        smaller = self.room_bytes - int(SHRINK_SHARE * self.memory_bytes)
        if smaller < LEAST_SHARE * self.memory_bytes:
            return False
        self.room_bytes = self._largest_bytes = smaller
        return True
