"""Local weights + the others' -> averaged weights: one small class per way of exchanging.

Each has three moments. `prepare` runs at the end of the step before an exchange (what may overlap starts here),
`before_step` just before the local step (weights are still those of the gradient: the OLD pair of the equations),
`after_step` just after it. The collective methods are in sync_averagers.py, those with a centre process in
center_averagers.py; the numbers are in rules.py, the messages in sync.py and link.py.

A worker whose weights are no longer finite would end everybody: alpha times NaN is NaN in the centre, and from there in
all. So it abstains, and starts again from the centre. The published methods do not speak of it.
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
    """What an averager may read and write of its worker. `weights` is the vector the equations call W_i, `global_step`
    how many steps this training has had so far: a late comer takes it over with the weights."""

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
        """This worker diverged: back to the centre, without momentum's memory of how it got lost."""
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
    """Half-precision weights meet a float32 centre: a small pull on a bfloat16 centre would round to nothing."""
    return torch.float32 if weights.dtype in (torch.float16, torch.bfloat16) else weights.dtype


class Averager(ABC):
    """The three moments; a method fills in those it needs."""

    num_exchanges: int

    def prepare(self) -> None:  # noqa: B027
        """End of the step before an exchange."""

    def is_over(self) -> bool:
        """Whether `before_step` would not have to wait for the exchange that `prepare` began."""
        return True

    def before_step(self) -> None:  # noqa: B027
        """Before the local step: the weights are those of the gradient."""

    def after_step(self) -> None:  # noqa: B027
        """After the local step."""

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
        """Ends an exchange under way. `finished` says goodbye; without it the others count this worker as missing."""
