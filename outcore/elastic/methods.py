"""The published methods by name: what each sends, who averages, in which order, and with which momentum.

The methods differ in four choices only, so they are rows of a table and not classes. The rows follow 1708.02983
(sections 5 and 6), 1412.6651 (`eamsgd`), 2311.08105 (`diloco`) and 2501.18512 (`streaming-diloco`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from outcore.errors import ElasticError

Sends = Literal["weights", "steps", "gradients"]
Order = Literal["sync", "turns", "locked", "free"]
Momentum = Literal["none", "worker", "look_ahead", "center", "outer"]


@dataclass(frozen=True)
class Method:
    """One method. `order`: sync = collective, turns = round robin, locked = first come first served, free = Hogwild."""

    name: str
    sends: Sends
    order: Order
    momentum: Momentum = "none"
    mu: float = 0.0

    @property
    def is_sync(self) -> bool:
        return self.order == "sync"

    @property
    def is_elastic(self) -> bool:
        """Whether the worker keeps weights of its own and is pulled towards the centre."""
        return self.sends == "weights" and self.momentum != "outer"


_ROWS = (
    Method("original-easgd", "weights", "turns"),
    Method("async-sgd", "steps", "locked"),
    Method("async-msgd", "steps", "locked", "center", 0.9),
    Method("hogwild-sgd", "steps", "free"),
    Method("async-easgd", "weights", "locked"),
    Method("async-measgd", "weights", "locked", "worker", 0.9),
    Method("hogwild-easgd", "weights", "free"),
    Method("eamsgd", "weights", "locked", "look_ahead", 0.9),
    Method("sync-easgd", "weights", "sync"),
    Method("diloco", "weights", "sync", "outer", 0.9),
    Method("streaming-diloco", "weights", "sync", "outer", 0.9),
    Method("sync-sgd", "gradients", "sync"),
)
METHODS: dict[str, Method] = {row.name: row for row in _ROWS}

OUTER_RATE = 0.7  # DiLoCo's published outer learning rate
BETA = 0.9  # P * alpha of 1412.6651; the whole centre moves by this share of the mean difference


def find_method(name: str) -> Method:
    if name not in METHODS:
        raise ElasticError(f"{name!r} is no elastic method; choose one of {', '.join(METHODS)}")
    return METHODS[name]


def default_alpha(method: Method, num_workers: int) -> float:
    """Returns beta / P: stable for the synchronous form at any P, and the 2015 paper's choice for the asynchronous."""
    return BETA / num_workers if method.is_elastic else 0.0


def alpha_bound(method: Method, num_workers: int, ahead: int = 0) -> float:
    """Returns the largest stable alpha; beyond it the centre and the workers diverge. Without `ahead` it holds for a
    vanishing learning rate, with it for any up to 1 / curvature (see `ahead_alpha_bound`)."""
    if not method.is_sync:
        return round_robin_alpha_bound()
    return ahead_alpha_bound(num_workers) if ahead else sync_alpha_bound(num_workers)


def sync_alpha_bound(num_workers: int, eta: float = 0.0) -> float:
    """Returns the bound on alpha below which the synchronous form is stable; `eta` is learning rate times curvature.

    Derived from the eigenvalues of the averaged 1-D quadratic: 2 (2 - eta) / (P (2 - eta) + 2). It shrinks with P,
    unlike the round-robin bound; for P = 1 it is the bound published in 1412.6651.
    """
    return 2 * (2 - eta) / (num_workers * (2 - eta) + 2)


def ahead_alpha_bound(num_workers: int, kept: float = 0.0) -> float:
    """Returns the bound for the synchronous form in which workers take more steps between the difference and its pull.

    `kept` is the share of a deviation that these steps leave, (1 - eta)^(1 + steps ahead) with period 1. It replaces
    1 - eta: 2 (1 + kept) / (P (1 + kept) + 2), down to 2 / (P + 2) if nothing of the deviation is left. Below that
    bound a round is a symmetric matrix with a norm of at most 1, however far each worker is ahead, times the effect of
    the steps before the difference. Thus any sequence of rounds is stable, with any period.
    """
    return 2 * (1 + kept) / (num_workers * (1 + kept) + 2)


def round_robin_alpha_bound(eta: float = 0.0) -> float:
    """Returns the bound of 1412.6651, section 4: (4 - 2 eta) / (4 - eta), for any number of workers."""
    return (4 - 2 * eta) / (4 - eta)
