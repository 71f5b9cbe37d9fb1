"""Chooses a global batch for several workers, and each worker's part of it, from their curves.

In every step all workers run the same number of micro-batches, each with a size of its own: as many samples as the
worker finishes in the time of the others, or equal numbers if that is nearly as fast. Then gradients are summed. A step
takes the slowest worker's compute plus the communication. No overlap is assumed, so predictions are rather too slow.
Workers that differ by no more than the spread of their timings count as equally fast.

`shares` balances a running loop by measurements. Here the seconds of a size that never ran are interpolated on the
worker's curve. This module has numbers only, so that ranks with the same curves make the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from outcore.errors import TuningError
from outcore.tuning.gradients.goodput import best_batch
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.workers.pooling import pooled

CURVE, WORKERS = SETTINGS.curve, SETTINGS.workers


@dataclass(frozen=True)
class Worker:
    """The seconds of micro-batches on one worker."""

    sizes: tuple[int, ...]  # micro-batches that fit, ascending
    sizes_s: tuple[float, ...]  # of forward and backward, never falling
    optimizer_s: float
    most_accumulating: int  # samples that fit beside accumulated gradients; 0: none
    spread: float = 0.0  # of its timings, as a share of them

    @classmethod
    def of(cls, curve: Curve, most_accumulating: int, speed: float = 1.0, spread: float = 0.0) -> Worker:
        """Returns a worker `speed` times as fast as the curve's device, with the same memory."""
        sizes = tuple(point.micro_batch for point in curve.fitting)
        if not sizes:
            raise TuningError("no batch size fits the memory; raise it or make the model smaller")
        seconds = np.array([curve.seconds(size) - curve.optimizer_s for size in sizes]) / speed
        # Other load only adds time: if a larger micro-batch took less, the smaller one was disturbed.
        never_falling = np.minimum.accumulate(seconds[::-1])[::-1]
        return cls(sizes, tuple(map(float, never_falling)), curve.optimizer_s / speed, most_accumulating, spread)

    @property
    def least(self) -> int:
        return self.sizes[0]

    def most(self, accumulation: int) -> int:
        return self.sizes[-1] if accumulation == 1 else self.most_accumulating

    def seconds(self, size: int, accumulation: int = 1) -> float:
        return accumulation * float(np.interp(size, self.sizes, self.sizes_s)) + self.optimizer_s

    def size_in(self, seconds: float, accumulation: int = 1) -> int:
        """Returns the largest number of samples that takes no longer, within the sizes that fit."""
        size = int(np.interp((seconds - self.optimizer_s) / accumulation, self.sizes_s, self.sizes))
        return max(self.least, min(size, self.most(accumulation)))

    def rate_alone(self, batch: int) -> float:
        """Returns samples per second if this worker trained batches of this size alone."""
        rates = []
        for size, size_s in zip(self.sizes, self.sizes_s):
            if size == batch or (size < batch and size <= self.most_accumulating):
                rates.append(batch / (batch / size * size_s + self.optimizer_s))
        return max(rates, default=self.sizes[-1] / self.seconds(self.sizes[-1]))

    def slower_by(self, factor: float) -> Worker:
        seconds = tuple(factor * size_s for size_s in self.sizes_s)
        return replace(self, sizes_s=seconds, optimizer_s=factor * self.optimizer_s)

    def by_samples(self) -> Worker:
        """Returns a worker whose seconds are proportional to samples, for timings that cannot be trusted."""
        sample_s = self.seconds(self.sizes[-1]) / self.sizes[-1]
        return replace(self, sizes_s=tuple(sample_s * size for size in self.sizes), optimizer_s=0.0)


def without_noise(workers: Iterable[Worker]) -> tuple[Worker, ...]:
    """Returns the workers, with equal speeds for those that differ by no more than their spreads."""
    workers = tuple(workers)
    low, high = max(worker.least for worker in workers), min(worker.sizes[-1] for worker in workers)
    if low > high:
        return workers
    sizes = sorted({low, high, *(size for worker in workers for size in worker.sizes if low <= size <= high)})
    levels = [float(np.exp(np.mean([np.log(worker.seconds(size)) for size in sizes]))) for worker in workers]
    means = pooled(levels, [worker.spread for worker in workers])
    return tuple(worker.slower_by(mean / level) for worker, mean, level in zip(workers, means, levels))


@dataclass(frozen=True)
class Split:
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
class WorkerGroup:
    workers: tuple[Worker, ...]
    communication_s: float

    def step_s(self, split: Split) -> float:
        slowest_s = max(w.seconds(size, split.accumulation) for w, size in zip(self.workers, split.sizes))
        return slowest_s + self.communication_s

    def rate(self, split: Split) -> float:
        return split.batch / self.step_s(split)

    def scaling(self, split: Split) -> float:
        """Returns samples per second, relative to the sum over workers that train alone without communication."""
        alone = {worker: worker.rate_alone(split.batch) for worker in set(self.workers)}
        return self.rate(split) / sum(alone[worker] for worker in self.workers)

    def share_out(self, total: int, accumulation: int = 1) -> Split | None:
        """Returns micro-batches of `total` samples that end as early as possible; None if they do not fit."""
        most = [worker.most(accumulation) for worker in self.workers]
        if not sum(worker.least for worker in self.workers) <= total <= sum(most):
            return None
        if any(limit < worker.least for worker, limit in zip(self.workers, most)):
            return None
        low_s, high_s = 0.0, max(w.seconds(limit, accumulation) for w, limit in zip(self.workers, most))
        for _ in range(WORKERS.num_bisections):
            middle_s = (low_s + high_s) / 2
            fits = sum(self._sizes_in(middle_s, accumulation)) <= total
            low_s, high_s = (middle_s, high_s) if fits else (low_s, middle_s)
        sizes = self._sizes_in(low_s, accumulation)
        for _ in range(total - sum(sizes)):
            below = [at for at, limit in enumerate(most) if sizes[at] < limit]
            sizes[min(below, key=lambda at: self.workers[at].seconds(sizes[at] + 1, accumulation))] += 1
        return self._rather_equal(Split(tuple(sizes), accumulation), most)

    def _rather_equal(self, split: Split, most: list[int]) -> Split:
        """Returns equal parts if they are nearly as fast: a percent, or the uncertainty of timings, does not justify
        weighted gradients."""
        size, rest = divmod(sum(split.sizes), len(self.workers))
        if rest or size > min(most) or size < max(worker.least for worker in self.workers):
            return split
        equal = replace(split, sizes=(size,) * len(self.workers))
        tolerance = max(1 / CURVE.knee_share - 1, *(worker.spread for worker in self.workers))
        return equal if self.step_s(equal) <= (1 + tolerance) * self.step_s(split) else split

    def _sizes_in(self, seconds: float, accumulation: int) -> list[int]:
        sizes = {worker: worker.size_in(seconds, accumulation) for worker in set(self.workers)}
        return [sizes[worker] for worker in self.workers]

    # -- which batch --------------------------------------------------------------------------------------------------

    def keep(self, batch: int) -> Split:
        """Returns the split of exactly this batch: the smallest micro-batches within 1 % of the fastest."""
        cuts = [parts for parts in range(1, batch + 1) if batch % parts == 0]
        splits = [split for parts in cuts if (split := self.share_out(batch // parts, parts)) is not None]
        if not splits:
            raise TuningError(
                f"a batch of {batch} cannot be cut into equal steps that fit {len(self.workers)} workers; take a "
                "multiple of them that has more divisors, raise the memory, or free the batch"
            )
        return min(self._nearly_fastest(splits), key=lambda split: sum(split.sizes))

    def fastest(self, largest: int) -> Split:
        """Returns the smallest batch without accumulation within 1 % of the most samples per second."""
        return min(self._nearly_fastest(self._unaccumulated(largest)), key=lambda split: split.batch)

    def furthest(self, largest: int, first_batch: int, noise: float) -> Split:
        """Returns the split with the highest goodput at this gradient noise."""
        splits: dict[int, Split] = {}
        for split in self._all_splits(largest):
            if split.batch not in splits or self.rate(split) > self.rate(splits[split.batch]):
                splits[split.batch] = split
        batch, _ = best_batch(sorted(splits), lambda batch: self.step_s(splits[batch]), first_batch, noise)
        return splits[batch]

    def silent(self) -> WorkerGroup:
        """Returns the same group without communication time."""
        return replace(self, communication_s=0.0)

    def _nearly_fastest(self, splits: Iterable[Split]) -> list[Split]:
        rates = {split: self.rate(split) for split in splits}
        return [split for split, rate in rates.items() if rate >= CURVE.knee_share * max(rates.values())]

    def _unaccumulated(self, largest: int) -> list[Split]:
        """Returns splits without accumulation in which all finish when one worker finishes a size of its curve."""
        times_s = {worker.seconds(size) for worker in set(self.workers) for size in worker.sizes}
        ends, num = {sum(self._sizes_in(second, 1)) for second in times_s}, len(self.workers)
        totals = sorted(ends | {total // num * num for total in ends})
        splits = [split for total in totals if total <= largest and (split := self.share_out(total)) is not None]
        if not splits:
            raise TuningError(
                f"{len(self.workers)} workers train {totals[0]} samples at least, and there are {largest}; take fewer "
                "workers or give more data"
            )
        return splits

    def _all_splits(self, largest: int) -> list[Split]:
        """Returns the splits without accumulation, and accumulated multiples of the knee of all workers together."""
        knee = self.silent().fastest(largest)
        total = min(knee.batch, sum(worker.most_accumulating for worker in self.workers))
        wanted = [2**power for power in range(1, WORKERS.max_doublings + 1) if total * 2**power <= largest]
        accumulated = [split for parts in wanted if (split := self.share_out(total, parts)) is not None]
        return [*self._unaccumulated(largest), *accumulated]
