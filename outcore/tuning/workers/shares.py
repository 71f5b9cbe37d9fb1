"""Splits a global batch over workers by their speeds, and averages gradients accordingly.

Every worker takes samples in proportion to its measured speed, so that all finish at the same time. Its gradient, a
mean over its own samples, is weighted by their number: the sum over the workers is the gradient of one process with the
whole batch. Speeds are measured on the shares themselves: if a step has a part that does not grow with its samples,
splitting by `samples / seconds` repeatedly still converges to equal seconds.

The seconds of a step are the slowest worker's compute (predicted or measured) plus the communication after it (measured
or given). No overlap is assumed, so the prediction is rather too slow.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from outcore.errors import TuningError
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.timing import spread
from outcore.tuning.workers.pooling import pooled

WORKERS = SETTINGS.workers


def split(batch: int, speeds: Sequence[float], most: Sequence[int] | None = None) -> list[int]:
    """Returns the samples of each worker such that the slowest one ends as early as possible.

    `most` limits each worker's samples. Every worker gets the floor of its ideal share; the rest is assigned one by one
    to the worker that would finish first with one more sample.
    """
    limits = [batch] * len(speeds) if most is None else list(most)
    if batch < 1 or not speeds or min(speeds) < 0 or max(speeds) <= 0:
        raise TuningError(f"a batch of {batch} cannot be split over speeds {list(speeds)}; both must be above zero")
    if sum(limit for limit, speed in zip(limits, speeds) if speed > 0) < batch:
        raise TuningError(
            f"a batch of {batch} does not fit the workers' {sum(limits)} samples; take a smaller batch, or accumulate"
        )
    total = sum(speeds)
    counts = [min(int(batch * speed / total), limit) for speed, limit in zip(speeds, limits)]
    for _ in range(batch - sum(counts)):
        open_workers = [i for i, speed in enumerate(speeds) if speed > 0 and counts[i] < limits[i]]
        counts[min(open_workers, key=lambda i: (counts[i] + 1) / speeds[i])] += 1
    return counts


def step_s(counts: Sequence[int], compute_s: Sequence[Callable[[int], float]], communication_s: float) -> float:
    """Returns the seconds of a step: worker i computes for `compute_s[i](counts[i])`, then all communicate."""
    return max(seconds(count) for seconds, count in zip(compute_s, counts) if count) + communication_s


def of_ideal(counts: Sequence[int], speeds: Sequence[float]) -> float:
    """Returns samples per second under these counts, relative to the sum of all speeds."""
    slowest_s = max(count / speed for count, speed in zip(counts, speeds) if count)
    return sum(counts) / slowest_s / sum(speeds)


class Shares:
    """This rank's share of every global batch. All ranks create it with the same arguments.

        shares = Shares(batch=512)
        for x, y in loader:                       # global batches, the same ones on every rank
            x, y = shares.take(x), shares.take(y)
            with shares.timed():
                loss_fn(model(x), y).backward()
            shares.average(model.parameters())    # in place of what DistributedDataParallel does
            optimizer.step(); optimizer.zero_grad()
            shares.rebalance()                    # once in a while; all ranks get the same new shares

    Under DistributedDataParallel, leave out `average` and multiply the loss by `shares.weight`: its mean over the ranks
    is then the weighted one. `most` is the number of samples that fit this rank's memory. `clock` may be
    `time.process_time` if workers on the CPU share cores with others. Losses are means over samples.
    """

    def __init__(
        self,
        batch: int,
        *,
        most: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
        group: Any = None,
    ) -> None:
        self.batch, self.group, self._clock = batch, group, clock
        self.rank, self.num_workers = dist.get_rank(group), dist.get_world_size(group)
        told = gather([float(batch), float(batch if most is None else most)], group)
        if len({row[0] for row in told}) > 1:
            raise TuningError(f"the ranks were given different batches, {[int(row[0]) for row in told]}; give all one")
        self._most = [int(row[1]) for row in told]
        self.counts = split(batch, [1.0] * self.num_workers, self._most)
        self.speeds: list[float] = []
        self.communication_s = 0.0
        self._seconds: list[float] = []

    @property
    def mine(self) -> int:
        """The samples of this rank in each global batch."""
        return self.counts[self.rank]

    @property
    def weight(self) -> float:
        """The weight of the loss under DistributedDataParallel, which averages over ranks and not over samples."""
        return self.mine * self.num_workers / self.batch

    def take(self, batch: Any) -> Any:
        """Returns this rank's rows of a global batch, which can be anything that supports slicing."""
        if len(batch) != self.batch:
            raise TuningError(f"a batch of {len(batch)} came where {self.batch} are shared out; drop the last batch")
        start = sum(self.counts[: self.rank])
        return batch[start : start + self.mine]

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Times this rank's forward and backward. It synchronizes the device, so use it on some steps only."""
        _wait_for_device()
        began_s = self._clock()
        yield
        _wait_for_device()
        self._seconds.append(self._clock() - began_s)

    def rebalance(self) -> bool:
        """Computes new shares from the timings since the last call; returns whether they changed. Call it on every
        rank.

        A rank without samples or timings keeps its speed. Ranks whose speeds differ by no more than the spread of their
        timings count as equally fast.
        """
        seconds = statistics.median(self._seconds) if self._seconds else 0.0
        mine, self._seconds = [self.mine / seconds if seconds else 0.0, spread(self._seconds)], []
        measured, spreads = map(list, zip(*gather(mine, self.group)))
        known, weight = self.speeds or [0.0] * self.num_workers, WORKERS.smoothing
        speeds = [
            new if not old else old if not new else weight * old + (1 - weight) * new
            for old, new in zip(known, measured)
        ]
        if min(speeds) <= 0:
            return False
        self.speeds = speeds
        before, self.counts = self.counts, split(self.batch, pooled(speeds, spreads), self._most)
        return self.counts != before

    def average(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replaces every rank's `.grad` by the gradient of the whole batch."""
        began_s = time.perf_counter()
        for bucket in _buckets([p for p in parameters if p.requires_grad]):
            self._average_bucket(bucket)
        self.communication_s = time.perf_counter() - began_s

    def _average_bucket(self, parameters: list[torch.nn.Parameter]) -> None:
        with torch.no_grad():
            flat = torch.cat([_grad_of(parameter).reshape(-1) for parameter in parameters])
            flat.mul_(self.mine / self.batch)
            dist.all_reduce(flat, group=self.group)
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters])):
                assert parameter.grad is not None
                parameter.grad.copy_(part.view_as(parameter.grad))

    def step_s(self) -> float:
        """Returns the predicted seconds of a step under the present shares; zero before any measurement."""
        if not self.speeds:
            return 0.0
        return step_s(self.counts, [_at(speed) for speed in self.speeds], self.communication_s)


def measure_communication_s(num_bytes: int, *, group: Any = None, device: str = "cpu", num_repeats: int = 5) -> float:
    """Returns the seconds to sum `num_bytes` of gradients over the ranks: the slowest rank's, on every rank."""
    vector = torch.zeros(max(1, num_bytes // 4), device=device)
    dist.all_reduce(vector, group=group)
    times_s = []
    for _ in range(num_repeats):
        _wait_for_device()
        began_s = time.perf_counter()
        dist.all_reduce(vector, group=group)
        _wait_for_device()
        times_s.append(time.perf_counter() - began_s)
    return max(row[0] for row in gather([statistics.median(times_s)], group))


def gather(mine: list[float], group: Any = None) -> list[list[float]]:
    """Returns every rank's numbers on every rank, in the order of ranks. Without a group, only its own."""
    if not (dist.is_available() and dist.is_initialized()):
        return [mine]
    on_device = dist.get_backend(group) == "nccl"
    row = torch.tensor(mine, dtype=torch.float64, device="cuda" if on_device else "cpu")
    rows = [torch.empty_like(row) for _ in range(dist.get_world_size(group))]
    dist.all_gather(rows, row, group=group)
    return [list(map(float, row.tolist())) for row in rows]


def mean_over_ranks(mine: list[float], group: Any = None) -> list[float]:
    """Returns the mean over ranks, the same on every rank, so that all ranks decide alike."""
    rows = gather(mine, group)
    return [statistics.fmean(column) for column in zip(*rows)]


def _buckets(parameters: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Yields runs of parameters with one dtype and device, up to the size of a message. The same on every rank."""
    bucket: list[torch.nn.Parameter] = []
    num_bytes = 0
    for parameter in parameters:
        alike = not bucket or (bucket[0].dtype, bucket[0].device) == (parameter.dtype, parameter.device)
        if bucket and (not alike or num_bytes + parameter.nbytes > WORKERS.bucket_bytes):
            yield bucket
            bucket, num_bytes = [], 0
        bucket.append(parameter)
        num_bytes += parameter.nbytes
    if bucket:
        yield bucket


def _grad_of(parameter: torch.nn.Parameter) -> torch.Tensor:
    """Returns the gradient; a rank without samples, or with an unused layer, contributes zeros to the sum."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


def _at(speed: float) -> Callable[[int], float]:
    return lambda count: count / speed


def _wait_for_device() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
