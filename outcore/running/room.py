"""Measured steps -> how much of a CUDA budget plans may use.

A plan counts what is allocated, a budget also what the allocator has mapped and cannot use: holes. How many there will
be nobody can tell beforehand. When no hole is long enough and the budget allows no further page, the allocator gives
every free page back and starts over, which drains the device for 25 ms and more; a smaller plan often costs less than
that. So the room is found by trying: a plan is followed for a few steps, and where the allocator started over a smaller
one is tried, as long as it could be faster than the best so far. The fastest, measured, stays. A room never grows:
what could be gained is a percent, what could be lost is a step that runs out of memory.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

FIRST_SHARE = 0.92  # of the budget, for the first plan
LEAST_SHARE = 0.70
SHRINK_SHARE = 0.04
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
    """The part of `memory_bytes` that plans may use. `settled`: no other will be tried. `crowded`: the allocator had to
    start over in a plan's steps, or ran out."""

    memory_bytes: int
    room_bytes: int = 0
    settled: bool = False
    crowded: bool = False
    attempts: list[Attempt] = field(default_factory=list)
    _steps: list[tuple[float, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.room_bytes = self.room_bytes or int(FIRST_SHARE * self.memory_bytes)

    @property
    def best(self) -> Attempt:
        return min(self.attempts, key=lambda attempt: attempt.step_s)

    def is_hopeless(self, predicted_s: float) -> bool:
        """Whether a plan cannot beat what was measured already, even if everything goes as predicted."""
        return bool(self.attempts) and predicted_s >= self.best.step_s

    def begin(self) -> None:
        """A new plan is about to be followed."""
        self._steps = []

    def note(self, step_s: float, num_restarts: int, reserved_bytes: int) -> bool:
        """One more step of the plan at hand; whether it can be judged now."""
        self._steps.append((step_s, num_restarts, reserved_bytes))
        return len(self._steps) == NUM_STEPS

    def judge(self, made: Any, *, again: bool = False) -> bool:
        """Whether another plan should be tried, for `room_bytes`; if not, `best` is the one to follow from here on.

        `again`: the owner has learned something and wants to plan for the same room once more."""
        counted = self._steps[1:]
        num_restarts = max(restarts for _, restarts, _ in counted)
        reserved_bytes = max(reserved for _, _, reserved in self._steps)
        step_s = statistics.median(step_s for step_s, _, _ in counted)
        self.crowded = self.crowded or num_restarts > 0
        self.attempts.append(Attempt(self.room_bytes, step_s, num_restarts, reserved_bytes, made))
        if len(self.attempts) < NUM_ATTEMPTS and (again or (num_restarts > 0 and self._shrink())):
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
        self.crowded = True
        self.attempts = [attempt for attempt in self.attempts if attempt.room_bytes < self.room_bytes]
        if not self.attempts and self._shrink():
            self.settled = False
            return True
        self.settle()
        return False

    def _shrink(self) -> bool:
        """A smaller room, unless it is the smallest already."""
        smaller = self.room_bytes - int(SHRINK_SHARE * self.memory_bytes)
        if smaller < LEAST_SHARE * self.memory_bytes:
            return False
        self.room_bytes = smaller
        return True
