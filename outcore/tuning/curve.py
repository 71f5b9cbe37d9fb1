"""Family + Machine + memory -> Curve: peak, seconds and samples per second of a step over its batch size.

Each batch is planned and simulated on the scaled trace, also beyond what fits in-core. Real steps are compared with it
afterwards: where one was run, the curve knows how far off it was, and reads every other batch through that error.

The batch to take is the *knee*: the smallest whose samples per second are within 1 % of the best. Whatever lies beyond
costs memory, swapping or recomputing and buys nothing. Peers (Lightning's and Accelerate's finders) return the largest
batch that did not run out of memory, which is neither the fastest nor known before it ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from outcore.errors import BudgetTooSmall, TuningError
from outcore.planning import lower, plan, simulate, verify
from outcore.planning.sums import sums_in_place
from outcore.running.execute import is_distributed
from outcore.tuning.scaling import Family
from outcore.values import Budget, Machine, Plan, Trace
from outcore.values.codec import Saved

KNEE_SHARE = 0.99  # of the best samples per second: steps are not told apart more finely
MOST_OPTIMIZER = 0.8  # of a step: timed in a slow moment it took longer than all of one, and to accumulate cost nothing
NUM_ON_LINE = 8  # batches known, after which halves are looked at: there is no line
SWAP_BYTES = 256 * 1024  # that a swapped value costs besides its own, on a CPU: two copies begin and end
SURE_SHARE = 0.03  # of a step: a smaller difference may be the line's error and is no cost of swapping


@dataclass(frozen=True)
class Point:
    """One micro-batch. `step_s` and `samples_per_s` are of a whole step, the optimizer's part included."""

    micro_batch: int
    peak_bytes: int
    step_s: float
    samples_per_s: float
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    in_core: bool  # everything is kept
    fits: bool
    measured_step_s: float | None = None
    measured_peak_bytes: int | None = None
    num_swapped: int = 0  # values

    @property
    def charged_bytes(self) -> int:
        """What swapping is paid for by: bytes, and each of the values."""
        return self.swapped_bytes + SWAP_BYTES * self.num_swapped

    @property
    def error(self) -> float | None:
        """Measured over predicted seconds; None where no real step ran."""
        return None if self.measured_step_s is None else self.measured_step_s / self.step_s

    def dearer(self, swap_s_per_byte: float) -> Point:
        step_s = self.step_s + swap_s_per_byte * self.charged_bytes
        return replace(self, step_s=step_s, samples_per_s=self.micro_batch / step_s)


@dataclass(frozen=True)
class Curve(Saved):
    """Points in ascending order of their micro-batch, under one memory budget."""

    KIND: ClassVar[str] = "curve"

    points: tuple[Point, ...]
    memory_bytes: int
    optimizer_s: float  # part of every step, once per effective batch
    largest_in_core: int = 0  # 0: not even the smallest batch is in-core
    probed: tuple[int, ...] = ()  # batches that were recorded
    device: str = ""
    most_accumulating: int | None = None  # the largest micro-batch that fits besides gradients; None: all that fit do
    most_in_core: int | None = None  # and the largest that is in-core besides them; None: as without
    looped: tuple[int, ...] = ()  # batches whose measured seconds are those of a loop that waits for nothing

    def accumulates(self, micro_batch: int) -> bool:
        """Whether it fits while the gradients of those before it are there."""
        return self.most_accumulating is None or micro_batch <= self.most_accumulating

    @property
    def in_core_accumulating(self) -> int:
        """The largest in-core batch while gradients are there from the beginning."""
        return self.largest_in_core if self.most_in_core is None else min(self.most_in_core, self.largest_in_core)

    def seconds(self, micro_batch: int, accumulation: int = 1) -> float:
        """Of an effective batch of `accumulation` micro-batches: measured, or predicted and corrected by the nearest
        batches that were measured."""
        point = self.point(micro_batch)
        whole_s = point.step_s * self._correction(micro_batch)
        once_s = min(self.optimizer_s, MOST_OPTIMIZER * whole_s)
        return accumulation * (whole_s - once_s) + once_s

    def rate(self, micro_batch: int, accumulation: int = 1) -> float:
        """Samples per second."""
        return micro_batch * accumulation / self.seconds(micro_batch, accumulation)

    def point(self, micro_batch: int) -> Point:
        for point in self.points:
            if point.micro_batch == micro_batch:
                return point
        raise TuningError(f"a batch of {micro_batch} is not on the curve ({', '.join(map(str, self.batches))})")

    @property
    def batches(self) -> tuple[int, ...]:
        return tuple(point.micro_batch for point in self.points)

    @property
    def fitting(self) -> tuple[Point, ...]:
        return tuple(point for point in self.points if point.fits)

    @property
    def best(self) -> Point:
        """The most samples per second."""
        if not self.fitting:
            raise TuningError("no batch size fits the memory; raise it or make the model smaller")
        return max(self.fitting, key=lambda point: self.rate(point.micro_batch))

    @property
    def knee(self) -> Point:
        """The smallest batch whose samples per second are within 1 % of the best."""
        enough = KNEE_SHARE * self.rate(self.best.micro_batch)
        return next(point for point in self.fitting if self.rate(point.micro_batch) >= enough)

    def with_points(self, points: Iterable[Point]) -> Curve:
        """These points added, or put in the place of those with the same batch."""
        merged = {point.micro_batch: point for point in (*self.points, *points)}
        return replace(self, points=tuple(merged[batch] for batch in sorted(merged)))

    @property
    def knows_swapping(self) -> bool:
        """Whether real steps beyond in-core ran."""
        return any(point.measured_step_s is not None and not point.in_core for point in self.points)

    @property
    def in_core_error(self) -> float:
        """Measured over predicted seconds of the largest in-core batch that ran; 1 where none did."""
        return next((p.error for p in reversed(self.points) if p.in_core and p.error is not None), 1.0)

    def measured(self, micro_batch: int, step_s: float, peak_bytes: int) -> Curve:
        found = replace(self.point(micro_batch), measured_step_s=step_s, measured_peak_bytes=peak_bytes)
        return self.with_points([found])

    def _correction(self, micro_batch: int) -> float:
        """Measured over predicted, on a log-log line between the batches that were measured.

        What swapping and recomputing do to the error begins where in-core ends: a measured batch beyond says nothing
        about those in-core.
        """
        known = [(math.log(p.micro_batch), math.log(p.error)) for p in self.points if p.error is not None and p.fits]
        edge = math.log(max(self.largest_in_core, 1))
        in_core = [pair for pair in known if pair[0] <= edge]
        if not in_core or in_core[-1][0] < edge < known[-1][0]:
            known = sorted([*known, (edge, in_core[-1][1] if in_core else 0.0)])
        at = math.log(micro_batch)
        low = max((pair for pair in known if pair[0] <= at), default=None)
        high = min((pair for pair in known if pair[0] >= at), default=None)
        if low is None or high is None or low == high:
            return math.exp((low or high or (0.0, 0.0))[1])
        part = (at - low[0]) / (high[0] - low[0])
        return math.exp(low[1] + part * (high[1] - low[1]))


def swap_s_per_byte(simulated: Iterable[Point], measured_s: Iterable[float], in_core_error: float) -> float:
    """What batches that ran beyond in-core show of the cost of a swapped byte, beyond what was simulated.

    Ops that run again are simulated with their own seconds; a copy is not always as hidden as it seems: on the CPU it
    takes turns with compute. At most it doubles a step: whatever takes longer is something else.
    """
    beyond_s, whole_s, charged_bytes = 0.0, 0.0, 0
    for point, step_s in zip(simulated, measured_s):
        expected_s = in_core_error * point.step_s
        beyond_s += min(step_s - expected_s, expected_s)
        whole_s += expected_s
        charged_bytes += point.charged_bytes
    return beyond_s / charged_bytes if charged_bytes and beyond_s > SURE_SHARE * whole_s else 0.0


@dataclass(frozen=True)
class Predicted:
    """A point with the trace and the plan behind it, ready to be run."""

    point: Point
    trace: Trace
    plan: Plan | None  # None: nothing fits
    brief: bool = False  # a training may find a faster plan


@dataclass(frozen=True)
class Planned:
    """Plans any batch of a family for one machine and budget. Remembers nothing."""

    family: Family
    machine: Machine
    budget: Budget
    optimizer_s: float
    resident_bytes: int = 0  # there besides the recorded step: gradients, while they are accumulated

    def at(self, batch: int, *, brief: bool = False) -> Predicted:
        """`brief`: as long a search for a plan as it takes to tell whether the batch is worth a real step."""
        trace = self.family.at(batch)
        if self.resident_bytes:
            trace = replace(trace, before_bytes=trace.before_bytes + self.resident_bytes)
        step = _as_run(trace)
        try:
            made = plan(step, self.machine, self.budget, brief=brief)
        except BudgetTooSmall as error:
            return Predicted(self._outside(batch, error.needed_bytes), trace, None)
        schedule = lower(step, made, self.machine)
        verify(step, schedule)
        found = simulate(step, schedule, self.machine)
        step_s = found.step_s + self.optimizer_s
        in_core = found.swapped_bytes + found.recomputed_bytes == 0
        kept, swapped, recomputed = found.kept_bytes, found.swapped_bytes, found.recomputed_bytes
        rate = batch / step_s
        sizes, num_swapped = (kept, swapped, recomputed), made.count("swap")
        point = Point(batch, found.peak_bytes, step_s, rate, *sizes, in_core, fits=True, num_swapped=num_swapped)
        return Predicted(point, trace, made, brief=brief and not in_core)

    def _outside(self, batch: int, needed_bytes: int) -> Point:
        step_s = self.family.step_s(batch) + self.optimizer_s  # if there were room
        return Point(batch, needed_bytes, step_s, batch / step_s, 0, 0, 0, in_core=False, fits=False)

    def in_core_bytes(self, batch: int) -> int:
        """The peak with everything kept."""
        trace = _as_run(self.family.at(batch))
        made = Plan(trace.fingerprint, "keep-all", self.budget, {}, trace.before_bytes)
        found = simulate(trace, lower(trace, made, self.machine), self.machine)
        return found.peak_bytes + self.resident_bytes

    def largest_in_core(self, at_most: int) -> int:
        """Where a line says; bytes lie nearly on one. 0: not even one sample."""
        room_bytes, low, high = self.budget.device_bytes, 0, at_most
        known = {0: self.family.recorded[0].trace.before_bytes + self.resident_bytes, high: self.in_core_bytes(high)}
        if known[high] <= room_bytes:
            return high
        while high - low > 1:
            slope_bytes = max(1, known[high] - known[low])
            part = (room_bytes - known[low]) / slope_bytes if len(known) < NUM_ON_LINE else 0.5
            batch = min(max(low + int(part * (high - low)), low + 1), high - 1)
            known[batch] = self.in_core_bytes(batch)
            low, high = (batch, high) if known[batch] <= room_bytes else (low, batch)
        return low


def _as_run(trace: Trace) -> Trace:
    """The step that `limit` plans for: on a GPU, and without other workers, nobody looks at its backward."""
    return trace if trace.device == "cpu" or is_distributed() else sums_in_place(trace)
