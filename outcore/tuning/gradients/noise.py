"""Measures gradient noise over micro-batches: |G|^2, tr(Sigma) and the noise scale.

A hook on each parameter sees the gradient of one backward on its way to `.grad` and keeps its norm only. The mean of
the squared norms of k micro-batches and the squared norm of their mean belong to two batch sizes, which is all that the
equations need (McCandlish et al., arXiv 1812.06162, appendix A). Together they are the sample variance over
micro-batches, in which whatever all of them share cancels, so that a few are informative. Comparing a single
micro-batch with the accumulated gradient would include the error of that one. AdaptDL keeps a copy of the last gradient
for the case of one micro-batch per step; here at least two are required, and gradients are never copied.

The error of the quotient follows from scalars too (`scale_error`), and decides when enough micro-batches were seen: a
small network's scale was up to 73 % off after 200 steps of training with 64 micro-batches, and 7 % with 4,096.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from outcore.errors import TuningError
from outcore.tuning.data.batches import LossFn, generators_of, loss_of, size_of
from outcore.tuning.data.restore import untouched
from outcore.tuning.gradients.goodput import moments, noise_scale
from outcore.tuning.settings import SETTINGS
from outcore.tuning.workers.shares import mean_over_ranks
from outcore.units import two_digits
from outcore.values.codec import Saved

GRADIENTS = SETTINGS.gradients


@dataclass(frozen=True)
class Noise(Saved):
    """A measurement of gradient noise.

    `sqr` is |G|^2, `var` is tr(Sigma) of single samples, `scale` their quotient in samples, and `error` the standard
    error of the scale as a share of it.
    """

    KIND: ClassVar[str] = "noise"

    sqr: float
    var: float
    micro_batch: int
    num_micro: int
    error: float | None = None  # None: unknown
    at_least: bool = False  # the scale may be larger than these samples can show

    @property
    def scale(self) -> float:
        return noise_scale(self.sqr, self.var)

    @property
    def description(self) -> str:
        """The scale in words, with the significant digits only."""
        if self.at_least:
            return f"at least {self.scale:.0f} samples"
        if self.error is None:
            return f"about {two_digits(self.scale)} samples"
        if self.error > GRADIENTS.unsure_share:
            return f"very roughly {two_digits(self.scale)} samples, perhaps half or several times as many"
        return f"about {two_digits(self.scale)} samples, give or take {max(1, round(100 * self.error))} %"


class Norms:
    """The squared gradient norm of each backward, from hooks on the parameters.

    Call `take` after each backward. The cost is a reduction per parameter, or a function call while `on` is False.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.on = True
        self._norms: list[torch.Tensor] = []
        self._hooks = [parameter.register_hook(self._see) for parameter in parameters if parameter.requires_grad]
        if not self._hooks:
            raise TuningError("no parameter of this model is trained; noise is measured on gradients")

    def _see(self, grad: torch.Tensor) -> None:
        if self.on:
            self._norms.append(torch.linalg.vector_norm(_values(grad.detach()), dtype=torch.float32))

    def take(self) -> torch.Tensor:
        """Returns the squared norm since the last call, still on the device."""
        norms, self._norms = self._norms, []
        if not norms:
            raise TuningError("no gradient reached the parameters; call backward() on the loss of each micro-batch")
        return torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()

    def drop(self) -> None:
        """Discards a backward that is not to be counted."""
        self._norms = []

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def squared_length(parameters: Iterable[torch.nn.Parameter]) -> torch.Tensor:
    """Returns the squared norm of the present gradients."""
    grads = [_values(parameter.grad) for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(grads).float().square()


def _values(grad: torch.Tensor) -> torch.Tensor:
    return grad.coalesce().values() if grad.is_sparse else grad


def measure_noise(
    model: torch.nn.Module, loss_fn: LossFn, batches: Iterable[Any], *, num_micro: int = 16, group: Any = None
) -> Noise:
    """Returns the gradient noise at the present parameters, over `num_micro` micro-batches of the given size.

    `loss_fn(model(x), y)` must be a mean over samples. The model is restored afterwards. In a process group each rank
    measures its own micro-batches, and all ranks return the mean, with the error that each would have alone.
    Micro-batches whose size differs from the first one's are skipped.
    """
    mine = _measure(model, loss_fn, batches, num_micro)
    sqr, var, error = mean_over_ranks([mine.sqr, mine.var, mine.error or 0.0], group)
    return _finite(replace(mine, sqr=sqr, var=var, error=error))


def measure_noise_until(
    model: torch.nn.Module, loss_fn: LossFn, batches: Iterable[Any], *, num_micro: int, error: float, for_s: float
) -> Noise:
    """Returns the gradient noise of this rank alone, from at least `num_micro` micro-batches; more are taken until the
    scale's error is at most `error` or measuring has taken `for_s` seconds.

    Gradients in half precision are not summed for longer, because small addends would be lost in their sum.
    """
    if any(parameter.requires_grad and parameter.element_size() < 4 for parameter in model.parameters()):
        for_s = 0.0
    return _finite(_measure(model, loss_fn, batches, num_micro, error=error, for_s=for_s))


def capped(noise: Noise, num_samples: int | None = None) -> Noise:
    """Returns the noise with its scale limited to the number of different samples that were measured.

    Beyond that, |G|^2 is smaller than its own error and comes out near zero or negative, and the scale could be
    anything up to infinity. `num_samples` is the size of the data set.
    """
    num_seen = noise.micro_batch * noise.num_micro
    num_seen = num_seen if num_samples is None else min(num_seen, num_samples)
    if noise.var <= 0 or noise.sqr > noise.var / num_seen:
        return noise
    return replace(noise, sqr=noise.var / num_seen, at_least=True)


def scale_error(small: Sequence[float], sums: Sequence[float], micro_batch: int) -> float:
    """Returns the standard error of a noise scale as a share of it, to first order; infinite if no gradient is visible.

    `small` has the squared norms of the micro-batches' gradients, `sums` those of the running sum S after each.
    Together they give the product of each gradient g with the mean of those before it, |S + g|^2 = |S|^2 + 2 S g +
    |g|^2, which is its contribution to |G|^2. From that and its norm follows by how much one micro-batch moves the
    scale. Only the second half is used, where the mean is known best; the remaining uncertainty makes the error
    slightly too large.
    """
    num, half = len(small), len(small) // 2
    sqr, var = moments(sum(small) / num, micro_batch, sums[-1] / num**2, micro_batch * num)
    if num < 4 or not (0 < sqr < math.inf and 0 < var < math.inf):
        return math.inf
    lengths, running = (torch.tensor(part, dtype=torch.float64) for part in (small[half:], sums[half - 1 :]))
    along = (running.diff() - lengths) / 2 / torch.arange(half, num)
    moved = micro_batch * (lengths - 2 * along) / var - 2 * along / sqr
    return float(moved.std()) / math.sqrt(num)


def _finite(noise: Noise) -> Noise:
    if not (math.isfinite(noise.sqr) and math.isfinite(noise.var)):
        raise TuningError("the gradients are not finite; lower the learning rate or look for the layer that overflows")
    return noise


def _measure(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    num_micro: int,
    *,
    error: float = math.inf,
    for_s: float = 0.0,
) -> Noise:
    if num_micro < 2:
        raise TuningError(f"noise shows between micro-batches, and {num_micro} was asked for; take at least 2")
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    alone: AbstractContextManager[Any] = getattr(model, "no_sync", nullcontext)()
    with untouched(model, others=generators_of(batches)), alone:
        model.zero_grad(set_to_none=True)
        seen = _Seen(parameters)
        try:
            seen.run(model, loss_fn, batches, num_micro, error, for_s)
        finally:
            seen.norms.close()
        small, sums = seen.lengths()
    num, micro_batch = len(small), seen.micro_batch
    if num < 2:
        raise TuningError(f"{num} whole micro-batch came, noise shows between two; pass more or smaller batches")
    sqr, var = moments(sum(small) / num, micro_batch, sums[-1] / num**2, micro_batch * num)
    return Noise(sqr, var, micro_batch, num, scale_error(small, sums, micro_batch))


class _Seen:
    """The squared norms of the micro-batches' gradients and of their running sum, which is in `.grad`."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        self.parameters, self.norms, self.micro_batch = parameters, Norms(parameters), 0
        self._small: list[torch.Tensor] = []
        self._sums: list[torch.Tensor] = []

    def run(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        batches: Iterable[Any],
        num_micro: int,
        error: float,
        for_s: float,
    ) -> None:
        end_s, next_look = time.perf_counter() + for_s, num_micro
        for num, batch in enumerate(batches, 1):
            self.micro_batch = self.micro_batch or size_of(batch)
            if size_of(batch) == self.micro_batch:
                loss_of(model, loss_fn, batch).backward()
                self._small.append(self.norms.take())
                self._sums.append(squared_length(self.parameters))
            if num >= num_micro and time.perf_counter() >= end_s:
                return
            if num == next_look:  # rarely, because reading the norms waits for the device
                next_look *= 2
                if scale_error(*self.lengths(), self.micro_batch) <= error:
                    return

    def lengths(self) -> tuple[list[float], list[float]]:
        small, sums = (torch.stack(part).tolist() if part else [] for part in (self._small, self._sums))
        return small, sums


class RunningNoise:
    """Gradient noise during training: both moments are averaged over steps before they are divided."""

    def __init__(self, decay: float = GRADIENTS.decay) -> None:
        self.decay = decay
        self.num_measured = 0
        self._sqr = self._var = self._weight = 0.0
        self._micro = (0, 0)

    def add(self, small_sqr: float, small_batch: int, large_sqr: float, large_batch: int) -> None:
        """Adds one step: the mean squared norm of micro-batches and that of the whole batch. Overflows are skipped."""
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
        """The present noise; None before the first measurement."""
        return Noise(self._sqr / self._weight, self._var / self._weight, *self._micro) if self._weight else None

    def state_dict(self) -> dict[str, Any]:
        return {key: part for key, part in vars(self).items() if key != "decay"}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state | {"_micro": tuple(state["_micro"])})
