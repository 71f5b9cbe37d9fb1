"""Micro-batches -> how noisy their gradients are: |G|^2, tr(Sigma) and the noise scale. Scalars only.

A hook on each parameter sees the gradient of one backward on its way to `.grad` and keeps its length, nothing else.
The mean of the squared lengths of k micro-batches and the squared length of their mean are two batch sizes, which is
all the equations need (McCandlish et al., arXiv 1812.06162, appendix A). Together they are the sample variance over
micro-batches: what all of them share cancels, so a few already tell much, where comparing a single micro-batch with
the accumulated gradient would carry the error of that one. AdaptDL keeps a copy of the last gradient for the case of
one micro-batch per step; here two are asked for, and no copy is ever made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, ClassVar

import torch

from outcore.errors import TuningError
from outcore.tuning.batches import LossFn, generators_of, loss_of, size_of
from outcore.tuning.goodput import moments, noise_scale
from outcore.tuning.shares import mean_over_ranks
from outcore.tuning.state import untouched
from outcore.values.codec import Saved

DECAY = 0.95  # of the running moments, per measurement: about the last twenty count


@dataclass(frozen=True)
class Noise(Saved):
    """`sqr` is |G|^2, `var` is tr(Sigma) of single samples, `scale` their quotient in samples."""

    KIND: ClassVar[str] = "noise"

    sqr: float
    var: float
    micro_batch: int
    num_micro: int

    @property
    def scale(self) -> float:
        return noise_scale(self.sqr, self.var)


class Norms:
    """The squared length of the gradient of each backward, seen as it passes.

    Needs one backward per `take`. Costs a reduction per parameter; switched off, a call of a function that returns.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.on = True
        self._found: list[torch.Tensor] = []
        self._hooks = [parameter.register_hook(self._see) for parameter in parameters if parameter.requires_grad]
        if not self._hooks:
            raise TuningError("no parameter of this model is trained; noise is measured on gradients")

    def _see(self, grad: torch.Tensor) -> None:
        if self.on:
            self._found.append(torch.linalg.vector_norm(_values(grad.detach()), dtype=torch.float32))

    def take(self) -> torch.Tensor:
        """The squared length since the last call, still on its device."""
        found, self._found = self._found, []
        if not found:
            raise TuningError("no gradient reached the parameters; call backward() on the loss of each micro-batch")
        return torch.stack([norm.to(found[0].device) for norm in found]).square().sum()

    def drop(self) -> None:
        """Forgets a backward that is not to be counted."""
        self._found = []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def squared_length(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """|g|^2 of what the gradients hold now."""
    grads = [_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads).float().square()


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def measure_noise(
    model: torch.nn.Module, loss_fn: LossFn, batches: Iterable[Any], *, num_micro: int = 16, group: Any = None
) -> Noise:
    """The noise of gradients at the present parameters, over `num_micro` micro-batches of the size that comes.

    `loss_fn(model(x), y)` must be a mean over samples. The model is the same afterwards. With ranks, each measures on
    its own micro-batches, and all return the mean. Micro-batches of another size than the first are left out.
    """
    found = _measure(model, loss_fn, batches, num_micro)
    sqr, var = mean_over_ranks([found.sqr, found.var], group)
    return _finite(replace(found, sqr=sqr, var=var))


def noise_here(model: torch.nn.Module, loss_fn: LossFn, batches: Iterable[Any], *, num_micro: int = 16) -> Noise:
    """The same as this rank alone sees it: the others need not measure too."""
    return _finite(_measure(model, loss_fn, batches, num_micro))


def visible(noise: Noise) -> Noise:
    """No more than so many samples can show: a scale of as many.

    Where it is beyond them, |G|^2 is lost in its own error and comes out near zero or below it, and the scale is
    anything up to infinity.
    """
    num_samples = noise.micro_batch * noise.num_micro
    return replace(noise, sqr=max(noise.sqr, noise.var / num_samples)) if noise.var > 0 else noise


def _finite(noise: Noise) -> Noise:
    if not (math.isfinite(noise.sqr) and math.isfinite(noise.var)):
        raise TuningError("the gradients are not finite; lower the learning rate or look for the layer that overflows")
    return noise


def _measure(model: torch.nn.Module, loss_fn: LossFn, batches: Iterable[Any], num_micro: int) -> Noise:
    if num_micro < 2:
        raise TuningError(f"noise shows between micro-batches, and {num_micro} was asked for; take at least 2")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alone: AbstractContextManager[Any] = getattr(model, "no_sync", nullcontext)()
    with untouched(model, others=generators_of(batches)), alone:
        model.zero_grad(set_to_none=True)
        norms = Norms(parameters)
        try:
            small, micro_batch = _pass_micro_batches(model, loss_fn, batches, num_micro, norms)
        finally:
            norms.close()
        large_sqr = float(squared_length(parameters)) / len(small) ** 2
    small_sqr = float(torch.stack(small).mean())
    sqr, var = moments(small_sqr, micro_batch, large_sqr, micro_batch * len(small))
    return Noise(sqr, var, micro_batch, len(small))


def _pass_micro_batches(
    model: torch.nn.Module, loss_fn: LossFn, batches: Iterable[Any], num_micro: int, norms: Norms
) -> tuple[list[torch.Tensor], int]:
    small: list[torch.Tensor] = []
    micro_batch = 0
    for batch in islice(batches, num_micro):
        micro_batch = micro_batch or size_of(batch)
        if size_of(batch) == micro_batch:
            loss_of(model, loss_fn, batch).backward()
            small.append(norms.take())
    if len(small) < 2:
        raise TuningError(f"{len(small)} whole micro-batch came, noise shows between two; pass more or smaller batches")
    return small, micro_batch


class RunningNoise:
    """Noise while training: both moments are averaged over steps, then divided, never the other way round."""

    def __init__(self, decay: float = DECAY) -> None:
        self.decay = decay
        self.num_measured = 0
        self._sqr = self._var = self._weight = 0.0
        self._micro = (0, 0)

    def add(self, small_sqr: float, small_batch: int, large_sqr: float, large_batch: int) -> None:
        """One step: the mean squared length of micro-batches, and that of the whole batch. Overflows are left out."""
        if not (math.isfinite(small_sqr) and math.isfinite(large_sqr)):
            return
        sqr, var = moments(small_sqr, small_batch, large_sqr, large_batch)
        keep, take = self.decay, 1 - self.decay
        self._sqr, self._var = keep * self._sqr + take * sqr, keep * self._var + take * var
        self._weight = keep * self._weight + take
        self._micro = small_batch, large_batch // small_batch
        self.num_measured += 1

    @property
    def now(self) -> Noise | None:
        """None before the first measurement."""
        return Noise(self._sqr / self._weight, self._var / self._weight, *self._micro) if self._weight else None

    def state_dict(self) -> dict[str, Any]:
        return {key: part for key, part in vars(self).items() if key != "decay"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_micro": tuple(state["_micro"])})
