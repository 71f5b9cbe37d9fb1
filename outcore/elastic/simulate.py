"""Simulates how a method scales beyond this machine, from measured costs. Does not need torch.

A message of n bytes costs a + n b (the alpha-beta model of 1708.02983, table 2), fitted to measured messages; a step
costs its measured mean with its measured spread. Workers are simulated one by one, because with thousands of workers
the slowest determines the time, and a mean would be too optimistic for every synchronous method.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from outcore.elastic.methods import find_method
from outcore.errors import ElasticError

WHOLE_BYTES = 1 << 20  # sums of up to this many bytes are sent as whole vectors, here and on the wire
Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Costs:
    """Measured costs: of a message (`latency_s` + bytes * `s_per_byte`), of adding two buffers, and of a local step."""

    latency_s: float
    s_per_byte: float
    add_s_per_byte: float
    step_s: float
    step_spread_s: float
    message_bytes: int

    def message_s(self) -> float:
        return self.latency_s + self.message_bytes * self.s_per_byte

    def round_s(self) -> float:
        """Returns the seconds of one round of the butterfly: a message and an addition."""
        return self.message_s() + self.message_bytes * self.add_s_per_byte

    def sum_s(self, num_workers: int) -> float:
        """Returns the seconds of a sum over all workers: by a butterfly, or by halving and doubling if it is large."""
        if num_workers == 1 or self.message_bytes <= WHOLE_BYTES:
            return tree_rounds(num_workers) * self.round_s()
        rounds = num_workers.bit_length() - 1
        part_bytes = self.message_bytes * (1 - 0.5**rounds)
        folded_s = self.round_s() + self.message_s() if num_workers != 1 << rounds else 0.0
        return (
            2 * (rounds * self.latency_s + part_bytes * self.s_per_byte) + part_bytes * self.add_s_per_byte + folded_s
        )


@dataclass(frozen=True)
class Scaling:
    """One simulated run. `efficiency` is weak scaling: one worker's time per step over this run's."""

    num_workers: int
    s_per_step: float
    efficiency: float
    communication_share: float


def fit_message_costs(sizes_bytes: list[int], seconds: list[float]) -> tuple[float, float]:
    """Returns (latency_s, s_per_byte), both at least 0, by least squares of the relative error; needs two sizes."""
    if len(set(sizes_bytes)) < 2 or len(sizes_bytes) != len(seconds) or min(seconds) <= 0:
        raise ElasticError("fitting latency and bandwidth needs messages of two sizes or more, with their seconds")
    sizes, times = np.array(sizes_bytes, dtype=float), np.array(seconds)
    rows = np.stack([np.ones_like(sizes), sizes], axis=1) / times[:, None]
    latency_s, s_per_byte = np.linalg.lstsq(rows, np.ones_like(times), rcond=None)[0]
    if latency_s < 0:
        return 0.0, float((sizes / times) @ np.ones_like(times) / ((sizes / times) @ (sizes / times)))
    if s_per_byte < 0:
        return float(np.mean(times)), 0.0
    return float(latency_s), float(s_per_byte)


def simulate(
    method: str,
    num_workers: int,
    costs: Costs,
    *,
    period: int = 4,
    level: int = 3,
    num_periods: int = 40,
    seed: int = 0,
) -> Scaling:
    """Returns the time per local step of `method`, with every worker at its own pace."""
    kind = find_method(method)
    if kind.name == "streaming-diloco":
        raise ElasticError("fragments that travel beside several steps are not modelled; ask about diloco, their bound")
    if kind.is_sync:
        if kind.sends == "gradients" or kind.momentum == "outer":
            level = 2
        total_s, waited_s = _run_sync(num_workers, costs, period, level, num_periods, seed)
    else:
        total_s, waited_s = _run_center(num_workers, costs, period, kind.order == "turns", num_periods, seed)
    num_steps = period * num_periods
    s_per_step = total_s / num_steps
    return Scaling(num_workers, s_per_step, costs.step_s / s_per_step, waited_s / total_s)


def scale(method: str, workers: list[int], costs: Costs, *, period: int = 4, level: int = 3) -> list[Scaling]:
    return [simulate(method, num, costs, period=period, level=level) for num in workers]


def with_network(costs: Costs, latency_s: float, s_per_byte: float) -> Costs:
    """Returns the costs of the same computation with another network."""
    return replace(costs, latency_s=latency_s, s_per_byte=s_per_byte)


def tree_rounds(num_workers: int) -> int:
    """Returns the rounds of the butterfly: log2 P, and one more each way if P is not a power of two."""
    whole = num_workers.bit_length() - 1
    return whole if num_workers == 1 << whole else whole + 2


def _steps(chance: np.random.Generator, costs: Costs, shape: tuple[int, ...]) -> Array:
    """Returns log-normal step times with the measured mean and spread, since steps are often late and never early."""
    if costs.step_spread_s <= 0:
        return np.full(shape, costs.step_s)
    variance = math.log(1 + (costs.step_spread_s / costs.step_s) ** 2)
    return chance.lognormal(math.log(costs.step_s) - variance / 2, math.sqrt(variance), shape)


def replay_sync(steps_s: Array, sum_s: float, *, overlaps: bool) -> tuple[Array, float]:
    """Returns when each worker ends, and the mean wait, for steps [worker, period, step of a period].

    An exchange ends `sum_s` after the last worker began it, which is before its last step if it overlaps, or after it.
    """
    clock, waited_s = np.zeros(len(steps_s)), 0.0
    for steps in steps_s.swapaxes(0, 1):
        arrived = clock + steps.sum(axis=1)
        begun = arrived - steps[:, -1] if overlaps else arrived
        clock = np.maximum(arrived, begun.max() + sum_s) if len(steps) > 1 else arrived
        waited_s += float((clock - arrived).mean())
    return clock, waited_s


def _run_sync(num: int, costs: Costs, period: int, level: int, num_periods: int, seed: int) -> tuple[float, float]:
    chance = np.random.default_rng(seed)
    sum_s = costs.sum_s(num) + (tree_rounds(num) * costs.message_s() if level == 1 else 0.0)
    steps_s = _steps(chance, costs, (num_periods, num, period)).swapaxes(0, 1)
    clock, waited_s = replay_sync(steps_s, sum_s, overlaps=level == 3)
    return float(clock.max()), waited_s


def _run_center(num: int, costs: Costs, period: int, turns: bool, num_periods: int, seed: int) -> tuple[float, float]:
    """Simulates a centre that serves one exchange at a time, overlapped with a step unless the order is strict."""
    chance = np.random.default_rng(seed)
    serve_s = 2 * costs.message_s() + costs.message_bytes * costs.add_s_per_byte
    waiting = [(float(_steps(chance, costs, (period,)).sum()), rank, 0) for rank in range(num)]
    heapq.heapify(waiting)
    free_s, waited_s, ends, next_rank = 0.0, 0.0, [0.0] * num, 0
    held: dict[int, tuple[float, int]] = {}
    while waiting or held:
        if turns:
            while next_rank not in held:
                when_s, rank, done = heapq.heappop(waiting)
                held[rank] = (when_s, done)
            rank = next_rank
            (when_s, done), next_rank = held.pop(rank), (next_rank + 1) % num
        else:
            when_s, rank, done = heapq.heappop(waiting)
        # An overlapped exchange was posted one step before it is due.
        posted_s = when_s if turns else when_s - costs.step_s
        free_s = max(free_s, posted_s) + serve_s
        resumed_s = max(when_s, free_s)
        waited_s += (resumed_s - when_s) / num
        ends[rank] = resumed_s
        if done + 1 < num_periods:
            heapq.heappush(waiting, (resumed_s + float(_steps(chance, costs, (period,)).sum()), rank, done + 1))
    return max(ends), waited_s
