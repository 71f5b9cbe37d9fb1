"""Curves of several workers + the seconds they communicate -> a global batch, and each worker's part of it.

In every step all workers run the same number of micro-batches, each with micro-batches of its own size: as many samples
as it finishes in the time of the others, or equal ones where that is nearly as fast. Then gradients are summed. A step
takes the slowest worker's compute and the communication; nothing is assumed to overlap, so predictions err on the slow
side.

`shares` balances a loop that runs, by the clock. Here the seconds of a size nobody ran come from the worker's plan: on
a line between the micro-batches its curve knows. Numbers only, so that ranks with the same curves choose alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from outcore.errors import TuningError
from outcore.tuning.curve import KNEE_SHARE, Curve
from outcore.tuning.goodput import best_batch

NUM_HALVINGS = 50  # of the seconds in which all have to finish
MAX_DOUBLINGS = 6  # of accumulation


@dataclass(frozen=True)
class Worker:
    """What micro-batches take on one worker."""

    sizes: tuple[int, ...]  # micro-batches that fit, ascending
    sizes_s: tuple[float, ...]  # forward and backward of each, never falling
    optimizer_s: float
    most_accumulating: int  # samples that fit besides gradients that are accumulated; 0: none

    @classmethod
    def of(cls, curve: Curve, most_accumulating: int, speed: float = 1.0) -> Worker:
        """A worker `speed` times as fast as the curve's device, with the same memory."""
        sizes = tuple(point.micro_batch for point in curve.fitting)
        if not sizes:
            raise TuningError("no batch size fits the memory; raise it or make the model smaller")
        seconds = np.array([curve.seconds(size) - curve.optimizer_s for size in sizes]) / speed
        # Whatever else a machine does only adds: where a larger micro-batch took less, the smaller one was held up.
        never_falling = np.minimum.accumulate(seconds[::-1])[::-1]
        return cls(sizes, tuple(map(float, never_falling)), curve.optimizer_s / speed, most_accumulating)

    @property
    def least(self) -> int:
        return self.sizes[0]

    def most(self, accumulation: int) -> int:
        return self.sizes[-1] if accumulation == 1 else self.most_accumulating

    def seconds(self, size: int, accumulation: int = 1) -> float:
        return accumulation * float(np.interp(size, self.sizes, self.sizes_s)) + self.optimizer_s

    def size_in(self, seconds: float, accumulation: int = 1) -> int:
        """The micro-batch that takes so long: the most samples that do, within what it can run at all."""
        found = int(np.interp((seconds - self.optimizer_s) / accumulation, self.sizes_s, self.sizes))
        return max(self.least, min(found, self.most(accumulation)))

    def rate_alone(self, batch: int) -> float:
        """Samples per second if this worker trained batches of this size by itself."""
        rates = []
        for size, size_s in zip(self.sizes, self.sizes_s):
            if size == batch or (size < batch and size <= self.most_accumulating):
                rates.append(batch / (batch / size * size_s + self.optimizer_s))
        return max(rates, default=self.sizes[-1] / self.seconds(self.sizes[-1]))


@dataclass(frozen=True)
class Way:
    """A global batch: `accumulation` micro-batches of `sizes[i]` samples on worker i."""

    sizes: tuple[int, ...]
    accumulation: int

    @property
    def batch(self) -> int:
        return sum(self.sizes) * self.accumulation

    @property
    def shares(self) -> tuple[int, ...]:
        """Samples of each worker in a step."""
        return tuple(size * self.accumulation for size in self.sizes)


@dataclass(frozen=True)
class Team:
    workers: tuple[Worker, ...]
    communication_s: float

    def step_s(self, way: Way) -> float:
        slowest_s = max(w.seconds(size, way.accumulation) for w, size in zip(self.workers, way.sizes))
        return slowest_s + self.communication_s

    def rate(self, way: Way) -> float:
        return way.batch / self.step_s(way)

    def scaling(self, way: Way) -> float:
        """Samples per second against the sum of what each worker would do alone, with nobody to talk to."""
        alone = {worker: worker.rate_alone(way.batch) for worker in set(self.workers)}
        return self.rate(way) / sum(alone[worker] for worker in self.workers)

    def share_out(self, total: int, accumulation: int = 1) -> Way | None:
        """Micro-batches of `total` samples that end as early as they can, within 1 %; None where they cannot be run."""
        most = [worker.most(accumulation) for worker in self.workers]
        if not sum(worker.least for worker in self.workers) <= total <= sum(most):
            return None
        if any(limit < worker.least for worker, limit in zip(self.workers, most)):
            return None
        low_s, high_s = 0.0, max(w.seconds(limit, accumulation) for w, limit in zip(self.workers, most))
        for _ in range(NUM_HALVINGS):
            middle_s = (low_s + high_s) / 2
            fits = sum(self._sizes_in(middle_s, accumulation)) <= total
            low_s, high_s = (middle_s, high_s) if fits else (low_s, middle_s)
        sizes = self._sizes_in(low_s, accumulation)
        for _ in range(total - sum(sizes)):
            room = [at for at, limit in enumerate(most) if sizes[at] < limit]
            sizes[min(room, key=lambda at: self.workers[at].seconds(sizes[at] + 1, accumulation))] += 1
        return self._rather_equal(Way(tuple(sizes), accumulation), most)

    def _rather_equal(self, way: Way, most: list[int]) -> Way:
        """Equal parts where they are nearly as fast: what clocks see between two alike devices is not worth weights."""
        size, rest = divmod(sum(way.sizes), len(self.workers))
        if rest or size > min(most) or size < max(worker.least for worker in self.workers):
            return way
        equal = replace(way, sizes=(size,) * len(self.workers))
        return equal if KNEE_SHARE * self.step_s(equal) <= self.step_s(way) else way

    def _sizes_in(self, seconds: float, accumulation: int) -> list[int]:
        found = {worker: worker.size_in(seconds, accumulation) for worker in set(self.workers)}
        return [found[worker] for worker in self.workers]

    # -- which batch --------------------------------------------------------------------------------------------------

    def keep(self, batch: int) -> Way:
        """The way to train exactly this batch: the smallest micro-batches within 1 % of the fastest."""
        cuts = [parts for parts in range(1, batch + 1) if batch % parts == 0]
        ways = [way for parts in cuts if (way := self.share_out(batch // parts, parts)) is not None]
        if not ways:
            raise TuningError(
                f"a batch of {batch} cannot be cut into equal steps that fit {len(self.workers)} workers; take a "
                "multiple of them that has more divisors, raise the memory, or free the batch"
            )
        return min(self._nearly_fastest(ways), key=lambda way: sum(way.sizes))

    def fastest(self, largest: int) -> Way:
        """Without accumulating: the smallest batch within 1 % of the most samples per second."""
        return min(self._nearly_fastest(self._alone(largest)), key=lambda way: way.batch)

    def furthest(self, largest: int, first_batch: int, noise: float) -> Way:
        """The batch that gets furthest per second, for gradients of this noise."""
        ways: dict[int, Way] = {}
        for way in self._free(largest):
            if way.batch not in ways or self.rate(way) > self.rate(ways[way.batch]):
                ways[way.batch] = way
        batch, _ = best_batch(sorted(ways), lambda batch: self.step_s(ways[batch]), first_batch, noise)
        return ways[batch]

    def silent(self) -> Team:
        """The same if communication took no time."""
        return replace(self, communication_s=0.0)

    def _nearly_fastest(self, ways: Iterable[Way]) -> list[Way]:
        rates = {way: self.rate(way) for way in ways}
        return [way for way, rate in rates.items() if rate >= KNEE_SHARE * max(rates.values())]

    def _alone(self, largest: int) -> list[Way]:
        """Without accumulating: all finish when one worker finishes a micro-batch of its curve."""
        times_s = {worker.seconds(size) for worker in set(self.workers) for size in worker.sizes}
        found, num = {sum(self._sizes_in(second, 1)) for second in times_s}, len(self.workers)
        totals = sorted(found | {total // num * num for total in found})
        ways = [way for total in totals if total <= largest and (way := self.share_out(total)) is not None]
        if not ways:
            raise TuningError(
                f"{len(self.workers)} workers train {totals[0]} samples at least, and there are {largest}; take fewer "
                "workers or give more data"
            )
        return ways

    def _free(self, largest: int) -> list[Way]:
        """Those, and the knee of what all compute together, accumulated."""
        knee = self.silent().fastest(largest)
        total = min(knee.batch, sum(worker.most_accumulating for worker in self.workers))
        wanted = [2**power for power in range(1, MAX_DOUBLINGS + 1) if total * 2**power <= largest]
        accumulated = [way for parts in wanted if (way := self.share_out(total, parts)) is not None]
        return [*self._alone(largest), *accumulated]
