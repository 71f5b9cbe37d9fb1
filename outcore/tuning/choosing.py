"""Bench + Family -> Curve, confirmed where it matters, and the micro-batch to take.

Predictions choose which batches are worth real steps; real steps have the last word. First the batches are laid out
geometrically and planned; then the one that would be taken, and the fastest one it is compared with, are run, and the
curve is read through what they showed, until both are measured. A batch is only ever run under a plan that fits it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import torch

from outcore.errors import TuningError
from outcore.tuning.climbing import Climb, round_batch
from outcore.tuning.curve import KNEE_SHARE, Curve, Planned, Point, Predicted, swap_s_per_byte
from outcore.tuning.probing import BUSY_S, SHORT_S, Bench, Measured, Tell
from outcore.tuning.scaling import Family

NUM_CONFIRMED = 4  # batches that are tried with real steps, at most
NUM_LARGER = 2  # in-core batches that take turns with the one that would be taken
CLOSE = 0.8  # of the best samples per second: noise may hide that it is better
FAR = 4  # times the largest in-core batch: the curve ends there
HOPELESS = 0.8  # of the best samples per second: beyond the in-core batches nothing slower is planned
MAX_DIVISORS = 14
Pick = Callable[[Curve], int]


@dataclass
class Choosing:
    """The curve as it grows, and the plans behind its points."""

    bench: Bench
    planned: Planned
    curve: Curve
    predicted: dict[int, Predicted] = field(default_factory=dict)
    beyond_s: dict[int, float] = field(default_factory=dict)  # batches beyond in-core: what a real step took
    swap_s_per_byte: float = 0.0  # beyond what the simulator knows, as measured
    known: dict[int, Measured] = field(default_factory=dict)  # batches of which real steps ran on the way
    compared: set[int] = field(default_factory=set)  # batches that took turns

    @classmethod
    def start(cls, bench: Bench, family: Family, measured: Iterable[Measured] = ()) -> Choosing:
        planned = bench.planned(family)
        probed = tuple(recorded.batch for recorded in family.recorded)
        curve = Curve((), bench.budget.device_bytes, bench.optimizer_s, probed=probed, device=bench.machine.device)
        return cls(bench, planned, curve, known={found.batch: found for found in measured if found.step_s > BUSY_S})

    def lay_out(self, batches: Iterable[int], tell: Tell) -> None:
        """Plans these batches, smallest first; stops where the rest is hopeless."""
        wanted = sorted(set(batches) - set(self.curve.batches))
        for at, batch in enumerate(wanted):
            tell(f"planning a batch of {batch}", at / len(wanted))
            point = self.put(self.planned.at(batch, brief=True))
            if not point.fits or (not point.in_core and point.samples_per_s < HOPELESS * self._best_rate()):
                break

    def add(self, batch: int) -> Point:
        return self.put(self.planned.at(batch))

    def put(self, found: Predicted) -> Point:
        """A planned batch, with what is known of it besides."""
        batch = found.point.micro_batch
        self.predicted[batch] = found
        point = found.point.dearer(self.swap_s_per_byte)
        self.curve = self.curve.with_points([point])
        known = self.known.get(batch)
        if known is not None and found.point.in_core:
            self.curve = self.curve.measured(batch, known.step_s, known.peak_bytes)
        return point

    def look_at_accumulating(self) -> None:
        """Which micro-batches fit while gradients are accumulated: one that fits alone may not."""
        accumulating = self.bench.planned(self.planned.family, accumulating=True)
        sizes = [point.micro_batch for point in self.curve.fitting]
        num = bisect.bisect_left(sizes, True, key=lambda size: accumulating.at(size).plan is None)
        in_core = accumulating.largest_in_core(max(1, self.curve.largest_in_core))
        self.curve = replace(self.curve, most_accumulating=sizes[num - 1] if num else 0, most_in_core=in_core)

    def _best_rate(self) -> float:
        return max(point.samples_per_s for point in self.curve.points)

    def settle(self, pick: Pick, tell: Tell) -> int:
        """Real steps at the batch that would be taken and at the fastest, until neither changes. On a CPU, whose speed
        is another a second later, those that are in-core take turns, and with them one beyond that would be taken."""
        takes_turns = self.bench.device.type == "cpu"
        for at in range(NUM_CONFIRMED + takes_turns):
            unknown = [batch for batch in self._wanted(pick) if self.curve.point(batch).measured_step_s is None]
            if takes_turns:
                unknown = [batch for batch in unknown if not self.curve.point(batch).in_core]
            if unknown:
                tell(f"real steps with a batch of {unknown[0]}", at / NUM_CONFIRMED)
                self.confirm(unknown[0])
            elif not takes_turns or not self._take_turns(self._rivals(pick), tell):
                break
        return pick(self.curve)

    def _take_turns(self, rivals: list[int], tell: Tell) -> bool:
        """Real steps in turn; False where that has happened already, or one alone was measured already. Who comes later
        takes turns with the best of those before, and counts in proportion to it."""
        alone = len(rivals) == 1 and self.curve.point(rivals[0]).measured_step_s is not None
        if alone or self.compared.issuperset(rivals):
            return False
        before = max(self.compared, key=self.curve.rate, default=0)
        turning = sorted({before, *rivals} - (self.compared - {before}) - {0})
        tell(f"real steps in turn with batches of {', '.join(map(str, turning))}", 0.9)
        took = dict(zip(turning, self.bench.in_turn([self.predicted[batch] for batch in turning])))
        level = self.curve.seconds(before) / took.pop(before)[0] if before else 1.0
        for batch, (step_s, peak_bytes) in took.items():
            self.curve = self.curve.measured(batch, step_s * level, peak_bytes)
        self.compared.update(rivals)
        return True

    def _wanted(self, pick: Pick) -> list[int]:
        """What would be taken, and what it has to be better than."""
        picked = pick(self.curve)
        wanted = [picked, _fastest(self.curve), self._above(picked), self._beyond()]
        return [batch for batch in dict.fromkeys(wanted) if batch]

    def _rivals(self, pick: Pick) -> list[int]:
        """In-core batches from which one is chosen, and some of the larger ones up to the largest, if that may be as
        good. One beyond, too, if it would be taken: what it ran in may have been a fast moment."""
        points, picked = [point for point in self.curve.fitting if point.in_core], pick(self.curve)
        rates = {point.micro_batch: self.curve.rate(point.micro_batch) for point in points}
        larger = [batch for batch in rates if batch > picked or picked not in rates]
        if larger and rates[larger[-1]] < CLOSE * max(rates.values()):
            larger = []
        return sorted({picked, *(batch for batch in self._wanted(pick) if batch in rates), *larger[-NUM_LARGER:]})

    def _above(self, batch: int) -> int:
        """The next larger batch: that nothing is gained there is worth a look, unless it swaps, what that takes was
        seen at another, and it is slower by that."""
        rate, larger = self.curve.rate, (point for point in self.curve.fitting if point.micro_batch > batch)
        above = next(larger, None)
        if above is None or (not above.in_core and self.beyond_s and rate(above.micro_batch) < rate(batch)):
            return 0
        return above.micro_batch

    def _beyond(self) -> int:
        """The first batch beyond in-core, where nothing out there was measured and it may be the better one."""
        outside = [point for point in self.curve.fitting if not point.in_core]
        if not outside or any(point.measured_step_s is not None for point in outside):
            return 0
        best = max(outside, key=lambda point: self.curve.rate(point.micro_batch))
        worth_it = self.curve.rate(best.micro_batch) >= self.curve.rate(self.curve.best.micro_batch)
        return best.micro_batch if worth_it else 0

    def confirm(self, batch: int) -> Point:
        """Real steps of one batch, with a plan as a training gets it; what they show of the cost of swapping goes into
        every other."""
        if self.predicted[batch].brief:
            self.add(batch)
        before = self.predicted[batch]
        try:
            found = self.bench.confirm(before, self._beside(before))
        except torch.OutOfMemoryError:
            self.curve = self.curve.with_points([replace(before.point, fits=False)])
            return self.curve.point(batch)
        self.curve = self.curve.measured(batch, found.step_s, found.peak_bytes)
        self.curve = replace(self.curve, looped=tuple(other for other in self.curve.looped if other != batch))
        if not before.point.in_core:
            self.beyond_s[batch] = found.step_s
            self._learn_swapping()
        return self.curve.point(batch)

    def _beside(self, predicted: Predicted) -> tuple[Predicted, float] | None:
        """What swapping costs is what a batch beyond in-core takes longer than one in-core would, on a CPU in the same
        moments: the largest that is on the curve."""
        inside = [point.micro_batch for point in self.curve.fitting if point.in_core]
        if self.bench.device.type != "cpu" or predicted.point.in_core or not inside:
            return None
        return self.predicted[inside[-1]], self.curve.seconds(inside[-1])

    def loop(self, batch: int) -> None:
        """Where a training with this batch is to be counted in seconds: on CUDA those of a short step are taken in a
        loop."""
        point = self.curve.point(batch)
        is_short = self.bench.device.type == "cuda" and self.curve.seconds(batch) < SHORT_S
        if is_short and point.in_core and batch not in self.curve.looped:
            peak_bytes = point.measured_peak_bytes or point.peak_bytes
            found = self.curve.measured(batch, self.bench.loop_s(batch), peak_bytes)
            self.curve = replace(found, looped=(*found.looped, batch))

    def _learn_swapping(self) -> None:
        simulated = [self.predicted[batch].point for batch in self.beyond_s]
        self.swap_s_per_byte = swap_s_per_byte(simulated, self.beyond_s.values(), self.curve.in_core_error)
        points = []
        for point in self.curve.points:
            dearer = self.predicted[point.micro_batch].point.dearer(self.swap_s_per_byte)
            points.append(replace(point, step_s=dearer.step_s, samples_per_s=dearer.samples_per_s))
        self.curve = self.curve.with_points(points)


def _fastest(curve: Curve) -> int:
    """The smallest of the batches that are as good as the fastest."""
    enough = 0.995 * curve.rate(curve.best.micro_batch)
    return next(point.micro_batch for point in curve.fitting if curve.rate(point.micro_batch) >= enough)


def free_batches(choosing: Choosing, largest: int, smallest: int) -> list[int]:
    """Doublings, the last batch that is in-core, and some beyond."""
    edge = choosing.planned.largest_in_core(largest)
    choosing.curve = replace(choosing.curve, largest_in_core=edge)
    end = min(largest, max(FAR * edge, FAR * smallest))
    doubled = [2**power for power in range(int(math.log2(end)) + 1) if 2**power >= smallest]
    far = {*choosing.curve.probed[-1:], *([edge] if edge < largest else []), *([end] if end == largest else [])}
    return sorted({*doubled, *(batch for batch in far if smallest <= batch <= end)})


def refined(curve: Curve) -> list[int]:
    """One batch on each side of the knee, half-way to its neighbours."""
    batches, knee = curve.batches, curve.knee.micro_batch
    at = batches.index(knee)
    sides = [batches[side] for side in (at - 1, at + 1) if 0 <= side < len(batches)]
    middles = {round_batch((knee + side) // 2) for side in sides}
    return sorted(middles - set(batches) - {0})


def divisors(batch: int, smallest: int) -> list[int]:
    """The micro-batches an effective batch can be cut into, at most 14 of them, the largest first to stay."""
    found = [size for size in range(smallest, batch + 1) if batch % size == 0]
    return found[-MAX_DIVISORS:]


def micro_batch_for(effective: int) -> Pick:
    """The smallest micro-batch that trains an effective batch within 1 % of the fastest way."""

    def pick(curve: Curve) -> int:
        whole = [point.micro_batch for point in curve.fitting if effective % point.micro_batch == 0]
        if not whole:
            raise TuningError(f"no micro-batch that divides {effective} fits the memory; raise it or free the batch")
        whole = [size for size in whole if size == effective or curve.accumulates(size)] or whole
        rates = {size: curve.rate(size, effective // size) for size in whole}
        return next(size for size in whole if rates[size] >= KNEE_SHARE * max(rates.values()))

    return pick


def ways_to(curve: Curve, largest: int) -> dict[int, int]:
    """Effective batch -> its micro-batch: each that fits by itself, and multiples of the knee, or of the fastest one
    below it that fits while gradients are accumulated."""
    knee = curve.knee.micro_batch
    alone = {point.micro_batch: point.micro_batch for point in curve.fitting if point.micro_batch <= largest}
    sizes = [size for size in alone if size <= knee and curve.accumulates(size)]
    size = max(sizes, key=lambda size: (size == knee, curve.rate(size)), default=0)
    multiples = {size * 2**power: size for power in range(7) if 0 < size * 2**power <= largest}
    return alone | multiples if size == knee else multiples | alone


def single_curve(bench: Bench, climb: Climb) -> Curve:
    """Where only one batch size could be recorded at all: that one, as measured."""
    (found,) = climb.measured[-1:]
    trace_s = sum(op.seconds for op in found.trace.ops) + bench.optimizer_s
    rate = found.batch / found.step_s
    point = Point(found.batch, found.peak_bytes, trace_s, rate, 0, 0, 0, False, True, found.step_s, found.peak_bytes)
    return Curve((point,), bench.budget.device_bytes, bench.optimizer_s, 0, (found.batch,), bench.machine.device)
