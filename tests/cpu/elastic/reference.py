"""The equations once more, in NumPy and float64, one process, written from the papers and not from the package."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from .town import ETA, Array, first_weights, gradient


class Replica:
    """W_i with its momentum, in the notation of 1708.02983."""

    def __init__(self) -> None:
        self.w, self.v, self.t = first_weights(), np.zeros_like(first_weights()), 0


def elastic_sync(
    num: int, steps: int, period: int, alpha: float, lost: tuple[int, int] | None = None
) -> tuple[list[Array], Array]:
    """`lost` = (rank, step): that worker is nowhere from then on, pulls nothing at the next exchange, and comes back
    at the centre."""
    replicas, center = [Replica() for _ in range(num)], first_weights()
    for t in range(1, steps + 1):
        old_center, pulls = center.copy(), []
        for rank, r in enumerate(replicas):
            pull = alpha * (r.w - old_center) if t % period == 0 else np.zeros_like(r.w)
            pulls.append(pull)
            r.w = r.w - ETA * gradient(r.w, rank, t - 1) - pull
        if lost is not None and t % period == 0 and t > lost[1]:
            center = old_center + sum(pull for rank, pull in enumerate(pulls) if rank != lost[0])
            replicas[lost[0]].w, lost = center.copy(), None
        else:
            center = old_center + sum(pulls)
    return [r.w for r in replicas], center


def elastic_ahead(extras: list[tuple[int, ...]], period: int, alpha: float) -> tuple[list[Array], Array]:
    """`extras[round][rank]` local steps lie between the taking of a difference and the step it is pulled with."""
    replicas, center = [Replica() for _ in extras[0]], first_weights()
    for extra in extras:
        apart = []
        for rank, r in enumerate(replicas):
            for number in range(period + extra[rank]):
                if number == period - 1:
                    apart.append(r.w - center)
                r.w = r.w - ETA * gradient(r.w, rank, r.t)
                r.t += 1
        for r, difference in zip(replicas, apart):
            r.w = r.w - alpha * difference
        center = center + alpha * sum(apart)
    return [r.w for r in replicas], center


def elastic_one_by_one(
    order: Iterable[int], num: int, period: int, alpha: float, mu: float = 0.0, look_ahead: bool = False
) -> tuple[list[Array], Array]:
    """Round robin, first come first served and Hogwild agree once the order of arrival is given."""
    replicas, center = [Replica() for _ in range(num)], first_weights()
    for rank in order:
        r = replicas[rank]
        r.t += 1
        pull = alpha * (r.w - center) if r.t % period == 0 else np.zeros_like(center)
        at = r.w + mu * r.v if look_ahead else r.w
        r.v = mu * r.v - ETA * gradient(at, rank, r.t - 1)
        r.w = r.w + r.v - pull
        center = center + pull
    return [r.w for r in replicas], center


def steps_one_by_one(order: Iterable[int], num: int, mu: float) -> tuple[list[Array], Array]:
    """Async SGD (mu = 0) and Async MSGD with period 1."""
    replicas, center, velocity = [Replica() for _ in range(num)], first_weights(), np.zeros_like(first_weights())
    for rank in order:
        r = replicas[rank]
        r.t += 1
        velocity = mu * velocity - ETA * gradient(r.w, rank, r.t - 1)
        center = center + velocity
        r.w = center.copy()
    return [r.w for r in replicas], center


def diloco(num: int, steps: int, period: int, rate: float, mu: float) -> tuple[list[Array], Array]:
    replicas, center, velocity = [Replica() for _ in range(num)], first_weights(), np.zeros_like(first_weights())
    for t in range(1, steps + 1):
        for rank, r in enumerate(replicas):
            r.w = r.w - ETA * gradient(r.w, rank, t - 1)
        if t % period == 0:
            outer = np.mean([center - r.w for r in replicas], axis=0)
            velocity = mu * velocity + outer
            center = center - rate * (outer + mu * velocity)
            for r in replicas:
                r.w = center.copy()
    return [r.w for r in replicas], center


def streaming_diloco(
    num: int, steps: int, period: int, num_fragments: int, delay: int, mix: float, rate: float, mu: float
) -> tuple[list[Array], Array]:
    """2501.18512, algorithm 2: every `period / num_fragments` steps one fragment's outer step is applied; its outer
    gradient was taken `delay` steps before."""
    replicas, center, velocity = [Replica() for _ in range(num)], first_weights(), np.zeros_like(first_weights())
    edges = [len(center) * number // num_fragments for number in range(num_fragments + 1)]
    between, number, outer = period // num_fragments, 0, np.zeros(0)
    for t in range(1, steps + 1):
        for rank, r in enumerate(replicas):
            r.w = r.w - ETA * gradient(r.w, rank, t - 1)
        part = slice(edges[number % num_fragments], edges[number % num_fragments + 1])
        if (t + delay) % between == 0:
            outer = np.mean([center[part] - r.w[part] for r in replicas], axis=0)
        if t % between == 0:
            velocity[part] = mu * velocity[part] + outer
            center[part] = center[part] - rate * (outer + mu * velocity[part])
            for r in replicas:
                r.w[part] = mix * r.w[part] + (1 - mix) * center[part]
            number += 1
    return [r.w for r in replicas], center


def sync_sgd(num: int, steps: int) -> tuple[list[Array], Array]:
    w = first_weights()
    for t in range(steps):
        w = w - ETA * np.mean([gradient(w, rank, t) for rank in range(num)], axis=0)
    return [w] * num, w


Reference = Callable[[], tuple[list[Array], Array]]
