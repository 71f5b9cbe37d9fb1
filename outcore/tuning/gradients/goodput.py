"""Noise, batch, seconds -> how far a second of training gets, and the learning rate that goes with it. Floats only.

A gradient over a batch of B samples is the true one, G, plus noise whose squared length is tr(Sigma) / B. The *noise
scale* phi = tr(Sigma) / |G|^2 is the batch at which both weigh the same: below it a larger batch saves as many steps as
it costs samples, far above it the extra samples are wasted.

    gain(B)       = (phi / B0 + 1) / (phi / B + 1)        steps of batch B0 that one step of batch B is worth
    efficiency(B) = (phi + B0) / (phi + B)                progress per sample, against batch B0: gain x B0 / B
    goodput(B)    = samples per second x efficiency(B)    = B0 x gain per second

The noise scale is McCandlish et al., arXiv 1812.06162; goodput is Pollux, Qiao et al., arXiv 2008.12260; the gain is
AdaScale, Johnson et al., arXiv 2007.05105; LEGW is You et al., arXiv 1901.08256; that a decay's half-life belongs to
samples and not to steps is Marek et al., arXiv 2507.07101. Unlike Pollux, seconds are not fitted here: they come from
a memory plan's prediction or from a clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from outcore.errors import TuningError

RULES = ("adascale", "sqrt", "linear", "legw", "fixed")


def moments(small_sqr: float, small_batch: float, large_sqr: float, large_batch: float) -> tuple[float, float]:
    """|G|^2 and tr(Sigma) from the mean squared gradient norms at two batch sizes. Both are without bias.

    The squared norm at batch b is |G|^2 + tr(Sigma) / b on average: two of them are two equations. Average the norms,
    or these two results, over many steps before dividing one by the other; a single |G|^2 may come out negative.
    """
    if not 0 < small_batch < large_batch:
        raise TuningError(f"noise shows between two batch sizes, not between {small_batch:g} and {large_batch:g}")
    var = (small_sqr - large_sqr) / (1 / small_batch - 1 / large_batch)
    sqr = (large_batch * large_sqr - small_batch * small_sqr) / (large_batch - small_batch)
    return sqr, var


def noise_scale(sqr: float, var: float) -> float:
    """phi = tr(Sigma) / |G|^2, in samples. Infinite where no gradient is left to be seen, zero where no noise is."""
    if var <= 0:
        return 0.0
    return var / sqr if sqr > 0 else math.inf


def efficiency(batch: float, first_batch: float, noise: float) -> float:
    """Progress per sample at `batch`, against `first_batch` (1.0)."""
    _check_batches(batch, first_batch)
    return 1.0 if math.isinf(noise) else (noise + first_batch) / (noise + batch)


def gain(batch: float, first_batch: float, noise: float) -> float:
    """AdaScale's gain: between 1 (no noise: a larger batch says nothing new) and batch / first_batch (all noise)."""
    return batch / first_batch * efficiency(batch, first_batch, noise)


def goodput(samples_per_s: float, batch: float, first_batch: float, noise: float) -> float:
    """Samples per second, each counted for what it is worth at `first_batch`."""
    return samples_per_s * efficiency(batch, first_batch, noise)


def best_batch(
    candidates: Iterable[int], step_s: Callable[[int], float], first_batch: float, noise: float
) -> tuple[int, float]:
    """The candidate with the highest goodput, and that goodput; `step_s(batch)` are the seconds of a whole step."""
    worth = [(goodput(batch / step_s(batch), batch, first_batch, noise), -batch) for batch in candidates]
    if not worth:
        raise TuningError("there is no batch size to choose from; name at least one candidate")
    best, negative = max(worth)
    return -negative, best


def lr_factor(
    rule: str, batch: float, first_batch: float, noise: float | None = None, *, normalised: bool = False
) -> float:
    """What to multiply the learning rate of `first_batch` with, at `batch`.

    `normalised` says that the optimizer divides by the size of its gradients (Adam and its kin): their step grows with
    the square root of AdaScale's gain. "fixed" leaves the rate alone.
    """
    _check_batches(batch, first_batch)
    scale = batch / first_batch
    if rule == "adascale":
        if noise is None:
            raise TuningError("the rule 'adascale' needs a noise scale; measure one, or take 'sqrt' or 'linear'")
        factor = gain(batch, first_batch, noise)
        return math.sqrt(factor) if normalised else factor
    if rule == "linear":
        return scale
    if rule in ("sqrt", "legw"):
        return math.sqrt(scale)
    if rule == "fixed":
        return 1.0
    raise TuningError(f"there is no learning-rate rule {rule!r}; choose one of {', '.join(RULES)}")


def warm_up(step: int, num_steps: int, start: float = 0.0) -> float:
    """The factor at `step` (from 0) of a straight line from `start` to 1, reached at the last of `num_steps`."""
    if step + 1 >= num_steps:
        return 1.0
    return start + (1 - start) * (step + 1) / num_steps


def num_warm_up_steps(rule: str, num_first_steps: int, batch: float, first_batch: float) -> int:
    """Warm-up at `batch`, where it took `num_first_steps` at `first_batch`.

    The warm-up covers the same samples, so fewer steps; LEGW stretches it over `batch / first_batch` times the
    samples, which are as many steps as before.
    """
    _check_batches(batch, first_batch)
    return num_first_steps if rule == "legw" else math.ceil(num_first_steps * first_batch / batch)


def beta2_for(beta2: float, batch: float, first_batch: float) -> float:
    """The decay per step that forgets as much per sample as `beta2` does at `first_batch`. Momentum stays: with
    it a rate would change its meaning, and rates are measured with the momentum that there is."""
    _check_batches(batch, first_batch)
    return float(beta2 ** (batch / first_batch))


def _check_batches(batch: float, first_batch: float) -> None:
    if batch <= 0 or first_batch <= 0:
        raise TuningError(f"a batch holds at least one sample; got {batch:g} and {first_batch:g}")
