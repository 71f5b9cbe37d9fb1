"""A learning-rate range test: the rates at which the loss falls, and a suggested rate.

In the range test of Smith, arXiv 1506.01186, a model trains for a few steps while the rate rises from far too low to
far too high. Noise misleads many implementations, because losses of consecutive batches differ by more than one step
improves them. Here the whole curve is recorded first, then straight lines are fitted around each rate over its
logarithm: a line gives level and slope together and, unlike a running mean, has no lag. A slope counts only if it
exceeds the scatter around its line. Several seeds (orders of the data, dropout) are averaged first. Lightning 2.5.3 and
later use the slope with respect to the rate itself, which favours the smallest rates, where a step in the rate is tiny.

The suggestion is the geometric mean of the rate of steepest descent and that of the lowest loss, and at most a third of
the rate at which the loss diverged. The test is too short to show how gradient noise affects a rate: use large batches
for it, and convert the result to the batch you train with by `goodput.lr_factor("adascale", ...)`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from outcore.errors import TuningError
from outcore.tuning.data.batches import LossFn, again_and_again, generators_of, loss_of
from outcore.tuning.data.restore import untouched
from outcore.tuning.settings import SETTINGS
from outcore.values.codec import Saved

GRADIENTS = SETTINGS.gradients
Vector = np.ndarray[tuple[int], np.dtype[np.float64]]


@dataclass(frozen=True)
class RangeTest(Saved):
    """Losses over rates, in ascending order. `smoothed` and `slopes` (per decade) belong to the fitted lines."""

    KIND: ClassVar[str] = "range test"

    suggested_lr: float
    steepest_lr: float
    lowest_loss_lr: float
    num_seeds: int
    lrs: tuple[float, ...]
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    slopes: tuple[float, ...]
    diverged: bool  # whether the loss diverged; if not, the range was too short


def range_test(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    *,
    lowest: float = 1e-5,
    highest: float = 10.0,
    num_steps: int = 120,
    num_seeds: int = 1,
    progress: Callable[[float], None] = lambda part: None,
) -> RangeTest:
    """Trains `num_seeds` times for up to `num_steps` steps with rising rates; everything is restored afterwards.

    The learning rates of several parameter groups keep their ratios; the rates of the test are those of the first
    group. `progress` is called with the share that is done.
    """
    if not 0 < lowest < highest or num_steps < 10 or num_seeds < 1:
        raise TuningError(
            f"a range from {lowest:g} to {highest:g} in {num_steps} steps and {num_seeds} seeds cannot be tested; take "
            "0 < lowest < highest, 10 steps or more, and a seed"
        )
    lrs = np.geomspace(lowest, highest, num_steps)
    stream = again_and_again(batches)  # shared by all seeds, so that each gets other samples
    runs: list[list[float]] = []
    with untouched(model, optimizer, others=generators_of(batches)):
        for seed in range(num_seeds):
            with untouched(model, optimizer):
                torch.manual_seed(seed)
                steps = _rising(model, loss_fn, stream, optimizer, list(map(float, lrs)))
                runs.append(_until_diverged(steps, lambda part: progress((len(runs) + part) / num_seeds), num_steps))
        stream.close()
    num_kept = int(np.median([len(run) for run in runs]))  # one bad seed does not shorten the others
    if num_kept < 10:
        raise TuningError(
            f"the loss left all bounds after {num_kept} steps, at a learning rate of {lrs[num_kept]:.2g}; start lower, "
            "or look at the data"
        )
    padded = [run[:num_kept] + [math.nan] * (num_kept - len(run)) for run in runs]
    losses = np.nanmean(padded, axis=0)
    return _suggest(lrs[:num_kept], losses, num_seeds, diverged=num_kept < num_steps)


def _rising(
    model: torch.nn.Module,
    loss_fn: LossFn,
    batches: Iterator[Any],
    optimizer: torch.optim.Optimizer,
    lrs: list[float],
) -> Iterator[float]:
    """Yields the loss before each step; the step's rate is the next one of `lrs`."""
    model.train()
    first = float(optimizer.param_groups[0]["lr"]) or 1.0
    ratios = [float(group["lr"]) / first or 1.0 for group in optimizer.param_groups]
    for lr in lrs:
        for group, ratio in zip(optimizer.param_groups, ratios):
            group["lr"] = lr * ratio
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, loss_fn, next(batches))
        loss.backward()
        optimizer.step()
        yield float(loss.detach())


def _until_diverged(steps: Iterator[float], progress: Callable[[float], None], num_steps: int) -> list[float]:
    """Returns the losses up to where several in a row are too high; a single one may recover."""
    losses: list[float] = []
    limit = math.inf
    for loss in steps:
        if not math.isfinite(loss):
            break
        losses.append(loss)
        start = max(losses[: GRADIENTS.num_first_losses])
        limit = start + (GRADIENTS.diverged_factor - 1) * abs(start)  # losses may lie below zero
        if len(losses) > GRADIENTS.num_first_losses and min(losses[-GRADIENTS.num_diverged :]) > limit:
            break
        progress(len(losses) / num_steps)
    while losses and losses[-1] > limit:
        losses.pop()
    return losses


def _suggest(lrs: Vector, losses: Vector, num_seeds: int, *, diverged: bool) -> RangeTest:
    at = np.log10(lrs)
    calm = np.minimum(
        losses, np.max(losses[: GRADIENTS.num_first_losses])
    )  # how far a step overshot says nothing about the slope
    smoothed, slopes, errors = _fit_lines(at, calm)
    bottom = int(np.argmin(smoothed))
    falling = slopes[: bottom + 1] < -GRADIENTS.sure_errors * errors[: bottom + 1]
    if not falling.any():
        raise TuningError(
            f"the loss does not fall visibly between learning rates {lrs[0]:.2g} and {lrs[-1]:.2g}; take larger "
            "batches, more steps or seeds, or another range"
        )
    steepest = int(np.argmin(np.where(falling, slopes[: bottom + 1], math.inf)))
    between = math.sqrt(lrs[steepest] * lrs[bottom])
    return RangeTest(
        suggested_lr=float(min(between, lrs[-1] / GRADIENTS.diverged_margin) if diverged else between),
        steepest_lr=float(lrs[steepest]),
        lowest_loss_lr=float(lrs[bottom]),
        num_seeds=num_seeds,
        lrs=tuple(map(float, lrs)),
        losses=tuple(map(float, losses)),
        smoothed=tuple(map(float, smoothed)),
        slopes=tuple(map(float, slopes)),
        diverged=diverged,
    )


def _fit_lines(at: Vector, losses: Vector) -> tuple[Vector, Vector, Vector]:
    """Returns level, slope and standard error of the slope of a weighted line around each point."""
    apart = at[None, :] - at[:, None]
    weights = np.exp(-0.5 * (apart / GRADIENTS.range_width_decades) ** 2)
    weights /= weights.sum(1, keepdims=True)
    center, level = (weights * apart).sum(1), weights @ losses
    spread = (weights * apart**2).sum(1) - center**2
    slopes = (weights * (apart - center[:, None]) * losses).sum(1) / spread
    fitted = (level - slopes * center)[:, None] + slopes[:, None] * apart
    scatter = (weights * (losses - fitted) ** 2).sum(1)
    effective = 1 / (weights**2).sum(1)
    return level - slopes * center, slopes, np.sqrt(scatter / spread / np.maximum(effective - 2, 1))
