"""Micro-batches -> how noisy their gradients are: |G|^2, tr(Sigma) and the noise scale. Scalars only.

A hook on each parameter sees the gradient of one backward on its way to `.grad` and keeps its length, nothing else.
The mean of the squared lengths of k micro-batches and the squared length of their mean are two batch sizes, which is
all the equations need (McCandlish et al., arXiv 1812.06162, appendix A). Together they are the sample variance over
micro-batches: what all of them share cancels, so a few already tell much, where comparing a single micro-batch with
the accumulated gradient would carry the error of that one. AdaptDL keeps a copy of the last gradient for the case of
one micro-batch per step; here two are asked for, and no copy is ever made.

How far off the quotient is follows from scalars, too (`scale_error`), and that is what tells when enough were seen:
a small network's scale was up to 73 % off after 200 steps of training with 64 micro-batches, and 7 % with 4,096.
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
    """`sqr` is |G|^2, `var` is tr(Sigma) of single samples, `scale` their quotient in samples, `error` the standard
    error of that, as a share of it."""

    KIND: ClassVar[str] = "noise"

    sqr: float
    var: float
    micro_batch: int
    num_micro: int
    error: float | None = None  # None: not known
    at_least: bool = False  # the scale may be larger: so many samples cannot show it

    @property
    def scale(self) -> float:
        return noise_scale(self.sqr, self.var)

    @property
    def description(self) -> str:
        """The scale in words, with as many digits as are known."""
        if self.at_least:
            return f"at least {self.scale:.0f} samples"
        if self.error is None:
            return f"about {two_digits(self.scale)} samples"
        if self.error > GRADIENTS.unsure_share:
            return f"very roughly {two_digits(self.scale)} samples, perhaps half or several times as many"
        return f"about {two_digits(self.scale)} samples, give or take {max(1, round(100 * self.error))} %"


class Norms:
    """The squared length of the gradient of each backward, seen as it passes.

    Needs one backward per `take`. Costs a reduction per parameter; switched off, a call of a function that returns.
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
        """The squared length since the last call, still on its device."""
        norms, self._norms = self._norms, []
        if not norms:
            raise TuningError("no gradient reached the parameters; call backward() on the loss of each micro-batch")
        return torch.stack([norm.to(norms[0].device) for norm in norms]).square().sum()

    def drop(self) -> None:
        """Forgets a backward that is not to be counted."""
        self._norms = []

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
    its own micro-batches, and all return the mean, and the error that each would have alone. Micro-batches of another
    size than the first are left out.
    """
    mine = _measure(model, loss_fn, batches, num_micro)
    sqr, var, error = mean_over_ranks([mine.sqr, mine.var, mine.error or 0.0], group)
    return _finite(replace(mine, sqr=sqr, var=var, error=error))


def measure_noise_until(
    model: torch.nn.Module, loss_fn: LossFn, batches: Iterable[Any], *, num_micro: int, error: float, for_s: float
) -> Noise:
    """The noise on this rank alone, from `num_micro` micro-batches, and from more until the scale's error is at most
    `error` or measuring has taken `for_s` seconds.

    Gradients of half precision are not summed for longer: their sum would no longer see what is added to it.
    """
    if any(parameter.requires_grad and parameter.element_size() < 4 for parameter in model.parameters()):
        for_s = 0.0
    return _finite(_measure(model, loss_fn, batches, num_micro, error=error, for_s=for_s))


def capped(noise: Noise, num_samples: int | None = None) -> Noise:
    """A noise scale no larger than the samples that showed it, of which there are `num_samples` in all.

    Beyond them |G|^2 is lost in its own error and comes out near zero or below, and the scale is anything up to
    infinity.
    """
    num_seen = noise.micro_batch * noise.num_micro
    num_seen = num_seen if num_samples is None else min(num_seen, num_samples)
    if noise.var <= 0 or noise.sqr > noise.var / num_seen:
        return noise
    return replace(noise, sqr=noise.var / num_seen, at_least=True)


def scale_error(small: Sequence[float], sums: Sequence[float], micro_batch: int) -> float:
    """The standard error of a noise scale as a share of it, to first order; infinite where no gradient shows.

    `small` are the squared lengths of the micro-batches' gradients, `sums` those of the running sum after each. Both
    together tell the product of each gradient with the mean of those before it, |S + g|^2 = |S|^2 + 2 S g + |g|^2: its
    part in |G|^2. What one micro-batch moves the scale by follows from that and its length. The second half is looked
    at, where the mean before is known best; what that is still off by makes the error a little larger, not smaller.
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
    """The squared lengths of micro-batches' gradients and of their running sum, which `.grad` is."""

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
            if num == next_look:  # seldom: a look waits for the device
                next_look *= 2
                if scale_error(*self.lengths(), self.micro_batch) <= error:
                    return

    def lengths(self) -> tuple[list[float], list[float]]:
        small, sums = (torch.stack(part).tolist() if part else [] for part in (self._small, self._sums))
        return small, sums


class RunningNoise:
    """Noise while training: both moments are averaged over steps, then divided, never the other way round."""

    def __init__(self, decay: float = GRADIENTS.decay) -> None:
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
