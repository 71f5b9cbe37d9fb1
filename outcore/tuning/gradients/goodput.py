"""Goodput: the progress per second of a batch under gradient noise, and the learning rate that goes with it.

The gradient over a batch of B samples is the true one, G, plus noise with a squared length of tr(Sigma) / B. The *noise
scale* phi = tr(Sigma) / |G|^2 is the batch at which both are equally large: below it a larger batch saves as many steps
as it costs samples, far above it the additional samples are wasted.

    gain(B)       = (phi / B0 + 1) / (phi / B + 1)        steps of batch B0 that one step of batch B is worth
    efficiency(B) = (phi + B0) / (phi + B)                progress per sample, against batch B0: gain x B0 / B
    goodput(B)    = samples per second x efficiency(B)    = B0 x gain per second

The noise scale is from McCandlish et al., arXiv 1812.06162; goodput from Pollux, Qiao et al., arXiv 2008.12260; the
gain from AdaScale, Johnson et al., arXiv 2007.05105; LEGW from You et al., arXiv 1901.08256. Marek et al., arXiv
2507.07101, show that the half-life of a decay belongs to samples and not to steps. In contrast to Pollux, seconds are
not fitted here: they are predicted from a memory plan or measured. This module has floats only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from outcore.errors import TuningError

RULES = ("adascale", "sqrt", "linear", "legw", "fixed")


def moments(small_sqr: float, small_batch: float, large_sqr: float, large_batch: float) -> tuple[float, float]:
    """Returns unbiased estimates of |G|^2 and tr(Sigma) from the mean squared gradient norms at two batch sizes.

    The expected squared norm at batch b is |G|^2 + tr(Sigma) / b, so two batch sizes give two equations. Average the
    norms, or these two results, over many steps before dividing one by the other; a single |G|^2 may be negative.
    """
    if not 0 < small_batch < large_batch:
        raise TuningError(f"noise shows between two batch sizes, not between {small_batch:g} and {large_batch:g}")
    var = (small_sqr - large_sqr) / (1 / small_batch - 1 / large_batch)
    sqr = (large_batch * large_sqr - small_batch * small_sqr) / (large_batch - small_batch)
    return sqr, var


def noise_scale(sqr: float, var: float) -> float:
    """Returns phi = tr(Sigma) / |G|^2 in samples: infinite if no gradient is visible, zero if there is no noise."""
    if var <= 0:
        return 0.0
    return var / sqr if sqr > 0 else math.inf


def efficiency(batch: float, first_batch: float, noise: float) -> float:
    """Returns the progress per sample at `batch`, relative to `first_batch`."""
    _check_batches(batch, first_batch)
    return 1.0 if math.isinf(noise) else (noise + first_batch) / (noise + batch)


def gain(batch: float, first_batch: float, noise: float) -> float:
    """Returns AdaScale's gain, between 1 (no noise) and batch / first_batch (only noise)."""
    return batch / first_batch * efficiency(batch, first_batch, noise)


def goodput(samples_per_s: float, batch: float, first_batch: float, noise: float) -> float:
    """Returns samples per second, each weighted by its worth relative to `first_batch`."""
    return samples_per_s * efficiency(batch, first_batch, noise)


def best_batch(
    candidates: Iterable[int], step_s: Callable[[int], float], first_batch: float, noise: float
) -> tuple[int, float]:
    """Returns the candidate with the highest goodput, and that goodput; `step_s(batch)` gives seconds of a step."""
    worth = [(goodput(batch / step_s(batch), batch, first_batch, noise), -batch) for batch in candidates]
    if not worth:
        raise TuningError("there is no batch size to choose from; name at least one candidate")
    best, negative = max(worth)
    return -negative, best


def lr_factor(
    rule: str, batch: float, first_batch: float, noise: float | None = None, *, normalised: bool = False
) -> float:
    """Returns the factor of the learning rate at `batch`, relative to that of `first_batch`.

    `normalised` means that the optimizer divides by the size of its gradients, as Adam does; its step then grows with
    the square root of AdaScale's gain. "fixed" leaves the rate unchanged.
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
    """Returns the factor at `step` (from 0) on a line from `start` to 1, which the last of `num_steps` reaches."""
    if step + 1 >= num_steps:
        return 1.0
    return start + (1 - start) * (step + 1) / num_steps


def num_warm_up_steps(rule: str, num_first_steps: int, batch: float, first_batch: float) -> int:
    """Returns the warm-up steps at `batch`, given `num_first_steps` at `first_batch`.

    The warm-up covers the same number of samples in fewer steps. LEGW covers `batch / first_batch` times the samples,
    in as many steps as before.
    """
    _check_batches(batch, first_batch)
    return num_first_steps if rule == "legw" else math.ceil(num_first_steps * first_batch / batch)


def beta2_for(beta2: float, batch: float, first_batch: float) -> float:
    """Returns the decay per step that forgets as much per sample as `beta2` does at `first_batch`. The first beta is
    not changed, because learning rates are measured with the present momentum."""
    _check_batches(batch, first_batch)
    return float(beta2 ** (batch / first_batch))


def _check_batches(batch: float, first_batch: float) -> None:
    if batch <= 0 or first_batch <= 0:
        raise TuningError(f"a batch holds at least one sample; got {batch:g} and {first_batch:g}")
