"""Builds the curve, with measurements where they matter, and chooses the micro-batch.

Predictions select the batches for real steps; the choice is made by real steps. First, batches are spaced geometrically
and planned. Then the batch that would be chosen and the fastest one are run, and the curve is corrected by their
timings, until the choice and the fastest batch are both measured. A batch only ever runs under a plan that fits it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from outcore.errors import TuningError
from outcore.planning.families.scaling import Family
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.bench import Bench, Measurement, Progress
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.throughput.prediction import BatchPlanner, Point, PredictedBatch, swap_s_per_byte
from outcore.tuning.throughput.probes import Probes, round_batch

CURVE, TIMING = SETTINGS.curve, SETTINGS.timing
Pick = Callable[[Curve], int]


@dataclass
class CurveBuilder:
    """The curve under construction, and the plans behind its points."""

    bench: Bench
    planner: BatchPlanner
    curve: Curve
    predicted: dict[int, PredictedBatch] = field(default_factory=dict)
    swapping_s: dict[int, float] = field(default_factory=dict)  # batches beyond in-core: seconds of a real step
    swap_s_per_byte: float = 0.0  # measured, in addition to the simulated cost
    probed: dict[int, Measurement] = field(default_factory=dict)  # batches of which real steps ran as probes
    interleaved: set[int] = field(default_factory=set)  # batches that ran alternately with others

    @classmethod
    def start(cls, bench: Bench, family: Family, probed: Iterable[Measurement] = ()) -> CurveBuilder:
        planner = bench.planner(family)
        batches = tuple(recorded.batch for recorded in family.recorded)
        curve = Curve((), bench.budget.device_bytes, bench.optimizer_s, probed=batches, device=bench.machine.device)
        busy = {one.batch: one for one in probed if one.step_s > TIMING.busy_step_s}
        return cls(bench, planner, curve, probed=busy)

    def predict(self, batches: Iterable[int], progress: Progress) -> None:
        """Plans these batches in ascending order; stops where larger ones cannot be worth it."""
        wanted = sorted(set(batches) - set(self.curve.batches))
        for at, batch in enumerate(wanted):
            progress(f"planning a batch of {batch}", at / len(wanted))
            point = self.add(self.planner.predict(batch, brief=True))
            hopeless = not point.in_core and point.samples_per_s < CURVE.hopeless_share * self._best_rate()
            if not point.fits or hopeless:
                break

    def predict_fully(self, batch: int) -> Point:
        """Plans a batch with as long a search as a training does."""
        return self.add(self.planner.predict(batch))

    def add(self, predicted: PredictedBatch) -> Point:
        """Adds a planned batch, with its measurement if it ran as a probe."""
        batch = predicted.point.micro_batch
        self.predicted[batch] = predicted
        point = predicted.point.with_swap_cost(self.swap_s_per_byte)
        self.curve = self.curve.with_points([point])
        known = self.probed.get(batch)
        if known is not None and predicted.point.in_core:
            self.curve = self.curve.measured(batch, known.step_s, known.peak_bytes)
        return point

    def find_accumulation_limits(self) -> None:
        """Finds the micro-batches that fit beside accumulated gradients; one that fits alone may not."""
        accumulating = self.bench.planner(self.planner.family, accumulating=True)
        sizes = [point.micro_batch for point in self.curve.fitting]
        num = bisect.bisect_left(sizes, True, key=lambda size: accumulating.predict(size).plan is None)
        in_core = accumulating.largest_in_core(max(1, self.curve.largest_in_core))
        self.curve = replace(self.curve, most_accumulating=sizes[num - 1] if num else 0, most_in_core=in_core)

    def _best_rate(self) -> float:
        return max(point.samples_per_s for point in self.curve.points)

    # -- real steps ---------------------------------------------------------------------------------------------------

    def measure_contenders(self, pick: Pick, progress: Progress) -> int:
        """Runs real steps of the batch that would be chosen and of its competitors, until the choice is stable.

        On a CPU, whose speed changes within seconds, the in-core batches run alternately, together with a batch beyond
        in-core that would be chosen.
        """
        interleaves = self.bench.device.type == "cpu"
        for at in range(CURVE.max_measured + interleaves):
            unknown = [batch for batch in self._contenders(pick) if self.curve.point(batch).measured_step_s is None]
            if interleaves:
                unknown = [batch for batch in unknown if not self.curve.point(batch).in_core]
            if unknown:
                progress(f"real steps with a batch of {unknown[0]}", at / CURVE.max_measured)
                self.measure(unknown[0])
            elif not interleaves or not self._interleave(self._in_core_contenders(pick), progress):
                break
        return pick(self.curve)

    def _interleave(self, contenders: list[int], progress: Progress) -> bool:
        """Runs real steps alternately; returns False if all batches already ran so, or if a single one is measured.

        Batches that are added later alternate with the best of the earlier ones and are scaled to it.
        """
        alone = len(contenders) == 1 and self.curve.point(contenders[0]).measured_step_s is not None
        if alone or self.interleaved.issuperset(contenders):
            return False
        before = max(self.interleaved, key=self.curve.rate, default=0)
        batches = sorted({before, *contenders} - (self.interleaved - {before}) - {0})
        progress(f"real steps in turn with batches of {', '.join(map(str, batches))}", 0.9)
        timings = dict(zip(batches, self.bench.run_interleaved([self.predicted[batch] for batch in batches])))
        level = self.curve.seconds(before) / timings.pop(before).step_s if before else 1.0
        for batch, timing in timings.items():
            self.curve = self.curve.measured(batch, timing.step_s * level, timing.peak_bytes, timing.spread)
        self.interleaved.update(contenders)
        return True

    def _contenders(self, pick: Pick) -> list[int]:
        """Returns the batch that would be chosen, and those it has to be faster than."""
        picked = pick(self.curve)
        wanted = [picked, _fastest(self.curve), self._next_larger(picked), self._first_swapping()]
        return [batch for batch in dict.fromkeys(wanted) if batch]

    def _in_core_contenders(self, pick: Pick) -> list[int]:
        """Returns the in-core batches to choose from, with some larger ones if the largest may be as good.

        A batch beyond in-core is added if it would be chosen, because it may have run in a fast moment.
        """
        points, picked = [point for point in self.curve.fitting if point.in_core], pick(self.curve)
        rates = {point.micro_batch: self.curve.rate(point.micro_batch) for point in points}
        larger = [batch for batch in rates if batch > picked or picked not in rates]
        if larger and rates[larger[-1]] < CURVE.close_share * max(rates.values()):
            larger = []
        contenders = {batch for batch in self._contenders(pick) if batch in rates}
        return sorted({picked, *contenders, *larger[-CURVE.num_larger :]})

    def _next_larger(self, batch: int) -> int:
        """Returns the next larger batch, to verify that it gains nothing; 0 if it swaps at a known cost and is
        slower."""
        rate, larger = self.curve.rate, (point for point in self.curve.fitting if point.micro_batch > batch)
        above = next(larger, None)
        if above is None or (not above.in_core and self.swapping_s and rate(above.micro_batch) < rate(batch)):
            return 0
        return above.micro_batch

    def _first_swapping(self) -> int:
        """Returns the best batch beyond in-core if none there was measured and it may be the best one; otherwise 0."""
        outside = [point for point in self.curve.fitting if not point.in_core]
        if not outside or any(point.measured_step_s is not None for point in outside):
            return 0
        best = max(outside, key=lambda point: self.curve.rate(point.micro_batch))
        worth_it = self.curve.rate(best.micro_batch) >= self.curve.rate(self.curve.best.micro_batch)
        return best.micro_batch if worth_it else 0

    def measure(self, batch: int) -> Point:
        """Runs real steps of one batch with a plan as a training would use; the measured cost of swapping is applied to
        every other batch."""
        if self.predicted[batch].brief:
            self.predict_fully(batch)
        predicted = self.predicted[batch]
        try:
            measured = self.bench.run_planned(predicted, self._reference(predicted))
        except torch.OutOfMemoryError:
            self.curve = self.curve.with_points([replace(predicted.point, fits=False)])
            return self.curve.point(batch)
        self.curve = self.curve.measured(batch, measured.step_s, measured.peak_bytes)
        self.curve = replace(self.curve, looped=tuple(other for other in self.curve.looped if other != batch))
        if not predicted.point.in_core:
            self.swapping_s[batch] = measured.step_s
            self._learn_swap_cost()
        return self.curve.point(batch)

    def _reference(self, predicted: PredictedBatch) -> tuple[PredictedBatch, float] | None:
        """Returns the largest in-core batch on the curve with its seconds, for a CPU. The cost of swapping is the time
        that a batch beyond takes in addition, measured in the same moments."""
        inside = [point.micro_batch for point in self.curve.fitting if point.in_core]
        if self.bench.device.type != "cpu" or predicted.point.in_core or not inside:
            return None
        return self.predicted[inside[-1]], self.curve.seconds(inside[-1])

    def time_in_loop(self, batch: int) -> None:
        """Times a short step in a loop on CUDA, for trainings whose length is counted in seconds."""
        point = self.curve.point(batch)
        is_short = self.bench.device.type == "cuda" and self.curve.seconds(batch) < TIMING.short_step_s
        if is_short and point.in_core and batch not in self.curve.looped:
            peak_bytes = point.measured_peak_bytes or point.peak_bytes
            curve = self.curve.measured(batch, self.bench.loop_step_s(batch), peak_bytes)
            self.curve = replace(curve, looped=(*curve.looped, batch))

    def _learn_swap_cost(self) -> None:
        simulated = [self.predicted[batch].point for batch in self.swapping_s]
        self.swap_s_per_byte = swap_s_per_byte(simulated, self.swapping_s.values(), self.curve.in_core_error)
        points = []
        for point in self.curve.points:
            charged = self.predicted[point.micro_batch].point.with_swap_cost(self.swap_s_per_byte)
            points.append(replace(point, step_s=charged.step_s, samples_per_s=charged.samples_per_s))
        self.curve = self.curve.with_points(points)


def _fastest(curve: Curve) -> int:
    """Returns the smallest of the batches that are about as fast as the fastest."""
    enough = 0.995 * curve.rate(curve.best.micro_batch)
    return next(point.micro_batch for point in curve.fitting if curve.rate(point.micro_batch) >= enough)


def free_batches(builder: CurveBuilder, largest: int, smallest: int) -> list[int]:
    """Returns powers of two, the largest in-core batch, and some batches beyond it."""
    edge = builder.planner.largest_in_core(largest)
    builder.curve = replace(builder.curve, largest_in_core=edge)
    end = min(largest, max(CURVE.far_factor * edge, CURVE.far_factor * smallest))
    doubled = [2**power for power in range(int(math.log2(end)) + 1) if 2**power >= smallest]
    others = {*builder.curve.probed[-1:], *([edge] if edge < largest else []), *([end] if end == largest else [])}
    return sorted({*doubled, *(batch for batch in others if smallest <= batch <= end)})


def refined(curve: Curve) -> list[int]:
    """Returns one batch on each side of the knee, half-way to its neighbours."""
    batches, knee = curve.batches, curve.knee.micro_batch
    at = batches.index(knee)
    sides = [batches[side] for side in (at - 1, at + 1) if 0 <= side < len(batches)]
    middles = {round_batch((knee + side) // 2) for side in sides}
    return sorted(middles - set(batches) - {0})


def divisors(batch: int, smallest: int) -> list[int]:
    """Returns the micro-batches that an effective batch can be split into: the largest `max_divisors` of them."""
    return [size for size in range(smallest, batch + 1) if batch % size == 0][-CURVE.max_divisors :]


def micro_batch_for(effective: int) -> Pick:
    """Returns a function that picks the smallest micro-batch within 1 % of the fastest way to train a batch."""

    def pick(curve: Curve) -> int:
        whole = [point.micro_batch for point in curve.fitting if effective % point.micro_batch == 0]
        if not whole:
            raise TuningError(f"no micro-batch that divides {effective} fits the memory; raise it or free the batch")
        whole = [size for size in whole if size == effective or curve.accumulates(size)] or whole
        rates = {size: curve.rate(size, effective // size) for size in whole}
        return next(size for size in whole if rates[size] >= CURVE.knee_share * max(rates.values()))

    return pick


def effective_batches(curve: Curve, largest: int) -> dict[int, int]:
    """Returns effective batches with their micro-batches: those that fit at once, and multiples of the knee, or of the
    fastest smaller micro-batch that fits beside accumulated gradients."""
    knee = curve.knee.micro_batch
    alone = {point.micro_batch: point.micro_batch for point in curve.fitting if point.micro_batch <= largest}
    sizes = [size for size in alone if size <= knee and curve.accumulates(size)]
    size = max(sizes, key=lambda size: (size == knee, curve.rate(size)), default=0)
    multiples = {size * 2**power: size for power in range(7) if 0 < size * 2**power <= largest}
    return alone | multiples if size == knee else multiples | alone


def single_point_curve(bench: Bench, probes: Probes) -> Curve:
    """Returns the curve of the only batch size that could be recorded."""

    (only,) = probes.measured[-1:]
    trace_s = sum(op.seconds for op in only.trace.ops) + bench.optimizer_s
    rate = only.batch / only.step_s
    point = Point(only.batch, only.peak_bytes, trace_s, rate, 0, 0, 0, False, True, only.step_s, only.peak_bytes)
    return Curve((point,), bench.budget.device_bytes, bench.optimizer_s, 0, (only.batch,), bench.machine.device)
