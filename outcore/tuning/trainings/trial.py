"""A training at one setting with some samples held out, and its metric over time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from outcore.errors import TuningError
from outcore.tuning.data.batches import LossFn, loss_of, size_of
from outcore.tuning.data.samples import Samples
from outcore.tuning.settings import SETTINGS
from outcore.tuning.trainings.schedule import rate_factor
from outcore.tuning.trainings.target import PROBABILITY, Target, predict_target_s

DATA = SETTINGS.data


@dataclass
class TrainingProgress:
    """The progress of a training, and its metric over time."""

    num_samples: int = 0
    train_s: float = 0.0
    seen: list[tuple[int, float, float]] = field(default_factory=list)  # samples, seconds of training, metric


@dataclass(frozen=True)
class TrialSetting:
    """The setting of a training."""

    micro_batch: int
    accumulation: int
    num_warm_up_steps: int = 0
    num_steps: int = 0  # if above zero, the rate falls to zero over the last third of them

    @property
    def batch(self) -> int:
        return self.micro_batch * self.accumulation


class Trial:
    """A training at one setting with some samples held out.

    `start` seeds the order of the data; `split` selects the held-out samples if no validation set was given.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        samples: Samples,
        optimizer: torch.optim.Optimizer,
        setting: TrialSetting,
        target: Target,
        *,
        validation: Samples | None = None,
        evaluation_batch: int = 0,
        start: int = 0,
        split: int = 0,
    ) -> None:
        self.evaluation_batch = max(2, evaluation_batch or setting.micro_batch)  # constant, so that batches can be kept
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.samples, self.setting, self.target, self.validation = samples, setting, target, validation
        self.progress = TrainingProgress()
        self._rates = [group["lr"] for group in optimizer.param_groups]
        trained, self._held_out = _split(samples, validation, split)
        if trained is not None and len(trained) < setting.batch:
            raise TuningError(
                f"the data set has {len(trained)} samples to train on, fewer than the batch of {setting.batch}; lower "
                "the batch or give more data"
            )
        self._batches = samples.shuffled(setting.micro_batch, seed=start, only=trained)

    def train(self, around_step: Callable[[], Any], limit_s: float) -> Iterator[tuple[float, float]]:
        """Trains for `limit_s` seconds; yields seconds of training and the metric at growing intervals."""
        began_s, evaluate_at = time.perf_counter(), 1.0
        while time.perf_counter() - began_s < limit_s:
            step_began_s = _now_s(self.samples.device)
            self.step(around_step)
            self.progress.train_s += _now_s(self.samples.device) - step_began_s
            if self.progress.num_samples >= evaluate_at * self.setting.batch:
                metric = self.evaluate()
                self.progress.seen.append((self.progress.num_samples, self.progress.train_s, metric))
                yield self.progress.train_s, metric
                evaluate_at = max(evaluate_at * 1.3, evaluate_at + 4)

    def step(self, around_step: Callable[[], Any]) -> None:
        setting, at = self.setting, self.progress.num_samples // self.setting.batch
        factor = rate_factor(at, setting.num_steps, setting.num_warm_up_steps)
        for group, lr in zip(self.optimizer.param_groups, self._rates):
            group["lr"] = lr * factor
        for _ in range(setting.accumulation):
            batch = next(self._batches)
            with around_step():
                (loss_of(self.model, self.loss_fn, batch) / setting.accumulation).backward()
            self.progress.num_samples += size_of(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def evaluate(self) -> float:
        """Returns the present metric."""
        with _evaluating(self.model):
            if callable(self.target.metric):
                return float(self.target.metric(self.model))
            total, num = 0.0, 0
            for batch in self._held_out_batches():
                total += self._score(batch) * size_of(batch)
                num += size_of(batch)
            return total / max(num, 1)

    def _score(self, batch: Any) -> float:
        if self.target.metric == "val_loss":
            return float(loss_of(self.model, self.loss_fn, batch))
        if not (isinstance(batch, list | tuple) and len(batch) == 2):
            raise TuningError("val_accuracy needs batches of (inputs, labels); give a function of the model instead")
        out = self.model(batch[0])
        if not isinstance(out, torch.Tensor) or out.ndim < 2:
            raise TuningError("val_accuracy needs one output per class; give a function of the model instead")
        if self.target.metric == PROBABILITY:
            return float(right_class_probability(out, batch[1].to(out.device)).mean())
        return float((out.argmax(1) == batch[1]).float().mean())

    def _held_out_batches(self) -> Iterator[Any]:
        held_out, size = self.validation or self.samples, self.evaluation_batch
        if held_out.num is None:
            yield held_out.any_batch(size)
            return
        for start in range(0, len(self._held_out), size):
            yield held_out.kept_batch_of(self._held_out[start : start + size])

    def verdict(self) -> tuple[float | None, str]:
        """Returns the seconds to the target, or None, with a sentence."""
        return predict_target_s(self.target, self.progress.seen)


def _split(samples: Samples, validation: Samples | None, split: int = 0) -> tuple[list[int] | None, list[int]]:
    """Returns the indices to train on (None: all) and those held out: about a tenth, without a validation set."""
    if validation is not None:
        num = min(validation.num or 0, DATA.max_held_out)
        return None, [at * (validation.num or 0) // max(num, 1) for at in range(num)]
    if samples.num is None:
        return None, []
    shuffled = torch.randperm(samples.num, generator=torch.Generator().manual_seed(split)).tolist()
    num = num_held_out(samples.num)
    return shuffled[num:], shuffled[:num]


def num_evaluated(samples: Samples, validation: Samples | None) -> int:
    """Returns the number of held-out samples of every evaluation; 0: unknown."""
    if validation is not None:
        return min(validation.num or 0, DATA.max_held_out)
    return num_held_out(samples.num) if samples.num is not None else 0


def num_held_out(num_samples: int) -> int:
    """Returns how many samples are held out of a data set without a validation set."""
    return min(max(1, num_samples // 10, min(DATA.min_held_out, num_samples // 4)), DATA.max_held_out)


def right_class_probability(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Returns the probability of the right class. Labels that name no class (below zero, 255) mean "ignore" and get
    zero, as they count as wrong in the accuracy."""
    is_class = (labels >= 0) & (labels < out.shape[1])
    classes = labels.long().where(is_class, 0).unsqueeze(1)
    return out.float().softmax(1).gather(1, classes).squeeze(1) * is_class


@contextmanager
def _evaluating(model: torch.nn.Module) -> Iterator[None]:
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _now_s(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
