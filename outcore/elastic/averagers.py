"""The interface of the averagers, one small class per way of exchanging.

An averager has three methods. `prepare` runs at the end of the step before an exchange, and starts what may overlap.
`before_step` runs just before the local step, when the weights are those of the gradient (the OLD pair of the
equations). `after_step` runs just after it. The collective methods are in sync_averagers.py, those with a centre
process in center_averagers.py; the equations are in rules.py, the messages in sync.py and link.py.

If a worker's weights are no longer finite, alpha times NaN would make the centre NaN, and through it all workers.
Therefore such a worker abstains and restarts from the centre. The published methods do not consider this case.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outcore.elastic.flat import FlatModel
from outcore.elastic.frozen import Frozen
from outcore.elastic.methods import Method
from outcore.elastic.wire import Traffic, is_finite
from outcore.errors import ElasticError


@dataclass
class Local:
    """The part of a worker that an averager may read and write. `weights` is W_i in the equations; `global_step` is the
    number of steps of this training so far, which a late worker takes over with the weights."""

    flat: FlatModel
    frozen: Frozen
    weights: Tensor
    velocity: Tensor | None
    method: Method
    alpha: float | None
    mu: float
    outer_rate: float
    num_ranks: int
    optimizer: torch.optim.Optimizer
    checkpoint: Path | None
    checkpoint_every_s: float
    keeps_center_on_host: bool
    global_step: int = 0

    def start_again(self, center: Tensor) -> None:
        """Restarts this worker, which diverged, from the centre, without its momentum."""
        if not is_finite(center):
            raise ElasticError("the centre is no longer finite: training diverged; lower the learning rate")
        warnings.warn(
            "this worker's weights are no longer finite: it starts again from the centre; lower the learning rate",
            stacklevel=2,
        )
        for place in (self.weights, self.flat.vector):
            place.copy_(center)
        self.optimizer.state.clear()
        if self.velocity is not None:
            self.velocity.zero_()


def exchange_dtype(weights: Tensor) -> torch.dtype:
    """Returns float32 for half-precision weights: a small pull on a bfloat16 centre would be rounded away."""
    return torch.float32 if weights.dtype in (torch.float16, torch.bfloat16) else weights.dtype


class Averager(ABC):
    """The three methods; a subclass overrides those it needs."""

    num_exchanges: int

    def prepare(self) -> None:  # noqa: B027
        """Called at the end of the step before an exchange."""

    def is_over(self) -> bool:
        """Whether `before_step` would not have to wait for the exchange that `prepare` began."""
        return True

    def before_step(self) -> None:  # noqa: B027
        """Called before the local step, when the weights are those of the gradient."""

    def after_step(self) -> None:  # noqa: B027
        """Called after the local step."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic: ...

    @abstractmethod
    def read_center(self) -> Tensor: ...

    @abstractmethod
    def members(self) -> list[int]: ...

    @abstractmethod
    def busy_s(self) -> float: ...

    @abstractmethod
    def close(self, *, finished: bool) -> None:
        """Ends an exchange in progress. With `finished` the worker leaves; otherwise the others count it as missing."""
