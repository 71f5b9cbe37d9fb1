"""The curve: seconds, samples per second and bytes of a step over its micro-batch.

Where a real step ran, the error of its prediction is known, and every other prediction is corrected by it. The batch to
take is the *knee*: the smallest whose samples per second are within 1 % of the best. A larger batch costs memory,
swapping or recomputing without any gain. The finders of Lightning and Accelerate return the largest batch that did not
run out of memory, which is neither the fastest nor known before it ran.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from outcore.errors import TuningError
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.prediction import Point
from outcore.values.codec import Saved

CURVE = SETTINGS.curve


@dataclass(frozen=True)
class Curve(Saved):
    """Points in ascending order of their micro-batch, under one memory budget."""

    KIND: ClassVar[str] = "curve"

    points: tuple[Point, ...]
    memory_bytes: int
    optimizer_s: float  # part of every step, once per effective batch
    largest_in_core: int = 0  # 0: not even the smallest batch is in-core
    probed: tuple[int, ...] = ()  # the recorded batches
    device: str = ""
    most_accumulating: int | None = None  # the largest micro-batch that fits beside gradients; None: all that fit do
    most_in_core: int | None = None  # the largest that is in-core beside gradients; None: no difference
    looped: tuple[int, ...] = ()  # batches whose seconds were measured in a loop that never waits

    def accumulates(self, micro_batch: int) -> bool:
        """Whether the micro-batch fits beside the gradients of earlier micro-batches."""
        return self.most_accumulating is None or micro_batch <= self.most_accumulating

    @property
    def in_core_accumulating(self) -> int:
        """The largest micro-batch that is in-core beside accumulated gradients."""
        return self.largest_in_core if self.most_in_core is None else min(self.most_in_core, self.largest_in_core)

    def seconds(self, micro_batch: int, accumulation: int = 1) -> float:
        """Returns the seconds of an effective batch of `accumulation` micro-batches: measured, or predicted and
        corrected by the nearest measured batches."""
        point = self.point(micro_batch)
        whole_s = point.step_s * self._correction(micro_batch)
        once_s = min(self.optimizer_s, CURVE.max_optimizer_share * whole_s)
        return accumulation * (whole_s - once_s) + once_s

    def rate(self, micro_batch: int, accumulation: int = 1) -> float:
        """Returns samples per second."""
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
        """The point with the most samples per second."""
        if not self.fitting:
            raise TuningError("no batch size fits the memory; raise it or make the model smaller")
        return max(self.fitting, key=lambda point: self.rate(point.micro_batch))

    @property
    def knee(self) -> Point:
        """The smallest batch whose samples per second are within 1 % of the best."""
        enough = CURVE.knee_share * self.rate(self.best.micro_batch)
        return next(point for point in self.fitting if self.rate(point.micro_batch) >= enough)

    def with_points(self, points: Iterable[Point]) -> Curve:
        """Returns the curve with these points added; points with the same batch are replaced."""
        merged = {point.micro_batch: point for point in (*self.points, *points)}
        return replace(self, points=tuple(merged[batch] for batch in sorted(merged)))

    @property
    def in_core_error(self) -> float:
        """Measured over predicted seconds of the largest in-core batch that ran; 1 if none did."""
        return next((p.error for p in reversed(self.points) if p.in_core and p.error is not None), 1.0)

    def measured(self, micro_batch: int, step_s: float, peak_bytes: int, spread: float = 0.0) -> Curve:
        point = self.point(micro_batch)
        return self.with_points([replace(point, measured_step_s=step_s, measured_peak_bytes=peak_bytes, spread=spread)])

    @property
    def compared(self) -> tuple[Point, ...]:
        """Points that were measured in single steps, as they were predicted."""
        measured = (point for point in self.points if point.measured_step_s is not None)
        return tuple(point for point in measured if point.micro_batch not in self.looped)

    @property
    def worst_error(self) -> float:
        """The largest error of a prediction, as a share of the measured seconds."""
        return max((abs(1 / point.error - 1) for point in self.compared if point.error), default=0.0)

    @property
    def is_trusted(self) -> bool:
        """Whether timings tell batches apart: prediction errors are no larger than on an undisturbed machine."""
        return self.worst_error <= CURVE.trusted_error

    def _correction(self, micro_batch: int) -> float:
        """Returns measured over predicted seconds, interpolated on log-log lines between measured batches.

        The effect of swapping and recomputing on the error begins beyond in-core, so a batch measured there does not
        correct those in-core.
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
