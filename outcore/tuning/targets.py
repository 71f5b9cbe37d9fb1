"""A setting and a target -> how long training to it takes: by training for a while, and no longer.

A fresh model is trained at the advised setting and looked at more and more rarely. If it reaches the target, that is
the answer. Else what is left of the error is continued along its line in log(error) over log(samples), as learning
curves mostly run; where there is no such line, or the target lies far beyond it, nothing is predicted and the reason is
given.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from outcore.errors import TuningError
from outcore.tuning.annealing import rate_factor
from outcore.tuning.batches import LossFn, loss_of, size_of
from outcore.tuning.samples import Samples
from outcore.units import format_seconds

METRICS = ("val_accuracy", "val_loss")
SURENESS = "val_probability"  # of the right class, a smoother accuracy; not for users, who know accuracies
FAR = 30  # times the samples seen so far: a target beyond that is not predicted
LEAST_SLOPE = 0.03  # log error per log samples: below that, nothing is learnt any more
LEAST_HELD_OUT, MAX_HELD_OUT = 500, 2000  # a tenth of a small data set would tell little: up to a quarter of it
Metric = str | Callable[[torch.nn.Module], float]


@dataclass(frozen=True)
class Target:
    """`metric` of at least (a loss: at most) `value`."""

    metric: Metric
    value: float

    @classmethod
    def read(cls, given: Any) -> Target:
        if not (isinstance(given, list | tuple) and len(given) == 2):
            raise TuningError(f"{given!r} is no target; write a metric and a value, such as ('val_accuracy', 0.97)")
        metric, value = given
        if not callable(metric) and metric not in METRICS:
            raise TuningError(
                f"there is no metric {metric!r}; take one of {', '.join(METRICS)}, or a function of the model whose "
                "value grows"
            )
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise TuningError(f"{value!r} is no value a metric can reach; give a finite number")
        if metric == "val_accuracy" and not 0 < value <= 1:
            raise TuningError(f"an accuracy of {value:g} cannot be reached; accuracies lie between 0 and 1: take 0.97")
        if metric == "val_loss" and value <= 0:
            raise TuningError(f"a loss of {value:g} cannot be reached; give a value above zero")
        return cls(metric, float(value))

    @property
    def name(self) -> str:
        name = self.metric if isinstance(self.metric, str) else getattr(self.metric, "__name__", "metric")
        return f"{name} {'>=' if self.grows else '<='} {self.value:g}"

    @property
    def is_known(self) -> bool:
        """A function of the user's may take long: it is not called more often than it must be."""
        return isinstance(self.metric, str)

    @property
    def grows(self) -> bool:
        return self.metric != "val_loss"

    def reached(self, found: float) -> bool:
        return found >= self.value if self.grows else found <= self.value

    def left(self, found: float) -> float | None:
        """What is left of the error, a number that falls along a line; None: this metric has no such number."""
        return {"val_loss": found, "val_accuracy": 1 - found, SURENESS: 1 - found}.get(str(self.metric))

    def unsure(self, num_held_out: int) -> float:
        """One standard error of an accuracy that so many samples tell, as a share of the error at the target, 0.5 at
        most: other samples may be as much harder. 0: not known."""
        if self.metric != "val_accuracy" or num_held_out < 1 or self.value >= 1:
            return 0.0
        return min(math.sqrt(self.value / (1 - self.value) / num_held_out), 0.5)

    @property
    def at_the_end(self) -> Target:
        """The same to compare ends by, however far they come: no value is enough."""
        if self.metric == "val_accuracy":
            return Target(SURENESS, math.inf)
        return Target("val_loss", -math.inf)


@dataclass
class Training:
    """Training so far, and what the metric was on the way."""

    num_samples: int = 0
    train_s: float = 0.0
    seen: list[tuple[int, float, float]] = field(default_factory=list)  # samples, seconds of training, metric


@dataclass(frozen=True)
class Setting:
    """How to train."""

    micro_batch: int
    accumulation: int
    num_warm_up_steps: int = 0
    num_steps: int = 0  # above zero: the rate falls to zero over the last third of so many


class Trial:
    """A model in training at one setting, with some samples held out."""

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        samples: Samples,
        optimizer: torch.optim.Optimizer,
        setting: Setting,
        target: Target,
        *,
        validation: Samples | None = None,
        look_batch: int = 0,
        order: int = 0,
        split: int = 0,
    ) -> None:
        self.look_batch = max(2, look_batch or setting.micro_batch)  # one for all settings: then samples are kept
        self.model, self.loss_fn, self.optimizer = model, loss_fn, optimizer
        self.samples, self.setting, self.target, self.validation = samples, setting, target, validation
        self.training = Training()
        self._rates = [group["lr"] for group in optimizer.param_groups]
        trained, self._held_out = _split(samples, validation, split)
        effective = setting.micro_batch * setting.accumulation
        if trained is not None and len(trained) < effective:
            raise TuningError(
                f"the data set has {len(trained)} samples to train on, fewer than the batch of {effective}; lower the "
                "batch or give more data"
            )
        self._batches = samples.shuffled(setting.micro_batch, seed=order, only=trained)

    def looks(self, around: Callable[[], Any], limit_s: float) -> Iterator[tuple[float, float]]:
        """Trains for `limit_s` seconds; yields seconds of training and the metric, at growing distances."""
        began_s, look_at = time.perf_counter(), 1.0
        while time.perf_counter() - began_s < limit_s:
            step_began_s = _now_s(self.samples.device)
            self.step(around)
            self.training.train_s += _now_s(self.samples.device) - step_began_s
            if self.training.num_samples >= look_at * self.setting.micro_batch * self.setting.accumulation:
                found = self.look()
                self.training.seen.append((self.training.num_samples, self.training.train_s, found))
                yield self.training.train_s, found
                look_at = max(look_at * 1.3, look_at + 4)

    def step(self, around: Callable[[], Any]) -> None:
        effective = self.setting.micro_batch * self.setting.accumulation
        at = self.training.num_samples // effective
        factor = rate_factor(at, self.setting.num_steps, self.setting.num_warm_up_steps)
        for group, lr in zip(self.optimizer.param_groups, self._rates):
            group["lr"] = lr * factor
        for _ in range(self.setting.accumulation):
            batch = next(self._batches)
            with around():
                (loss_of(self.model, self.loss_fn, batch) / self.setting.accumulation).backward()
            self.training.num_samples += size_of(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def look(self) -> float:
        """The metric, now."""
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
        if self.target.metric == SURENESS:
            return float(_probability(out, batch[1].to(out.device)).mean())
        return float((out.argmax(1) == batch[1]).float().mean())

    def _held_out_batches(self) -> Iterator[Any]:
        held_out, size = self.validation or self.samples, self.look_batch
        if held_out.num is None:
            yield held_out.any_batch(size)
            return
        for start in range(0, len(self._held_out), size):
            yield held_out.kept_batch_of(self._held_out[start : start + size])

    def verdict(self) -> tuple[float | None, str]:
        """Seconds to the target, or None, and one sentence."""
        return predict_target_s(self.target, self.training.seen)


def predict_target_s(target: Target, seen: list[tuple[int, float, float]]) -> tuple[float | None, str]:
    """Samples, seconds, metric on the way -> seconds to the target, or None, and why."""
    if not seen:
        return None, "not one step could be trained in the time given; give more with trial_s"
    num_samples, train_s, found = seen[-1]
    where = f"{target.name.split()[0]} was {found:.4g} after {format_seconds(train_s)} of training"
    if target.reached(found):
        return train_s, f"{where}: the target was reached in the trial"
    if target.left(found) is None:
        return None, f"{where}; how it goes on is only known for {' and '.join(METRICS)}: train on, or raise trial_s"
    known = [(math.log(n), math.log(left)) for n, _, metric in seen if (left := target.left(metric) or 0.0) > 0]
    known = known[len(known) // 3 :]  # the beginning runs on another line
    wanted = target.left(target.value) or 0.0
    if len(known) < 3 or wanted <= 0:
        return None, f"{where}, too few looks to go on from; raise trial_s"
    slope, level = np.polyfit([at for at, _ in known], [left for _, left in known], 1)
    if slope > -LEAST_SLOPE:
        return None, (
            f"{where} and hardly improves any more: the target is out of reach at this setting; lower the target, "
            "change the model or the data, or search (num_trials)"
        )
    times = math.exp((math.log(wanted) - level) / slope) / num_samples
    if times > FAR:
        return None, f"{where}; the target is more than {FAR} times as far, too far to predict: raise trial_s"
    return train_s * max(times, 1.0), f"{where}; the rest is continued along its learning curve, a rough guess"


def _split(samples: Samples, validation: Samples | None, split: int = 0) -> tuple[list[int] | None, list[int]]:
    """Indices to train on (None: all) and held out: a tenth or so, where no validation set was given."""
    if validation is not None:
        num = min(validation.num or 0, MAX_HELD_OUT)
        return None, [at * (validation.num or 0) // max(num, 1) for at in range(num)]
    if samples.num is None:
        return None, []
    shuffled = torch.randperm(samples.num, generator=torch.Generator().manual_seed(split)).tolist()
    num = num_held_out(samples.num)
    return shuffled[num:], shuffled[:num]


def num_looked_at(samples: Samples, validation: Samples | None) -> int:
    """Held-out samples at every look; 0: not known."""
    if validation is not None:
        return min(validation.num or 0, MAX_HELD_OUT)
    return num_held_out(samples.num) if samples.num is not None else 0


def num_held_out(num_samples: int) -> int:
    """Of a data set that comes without another one to look at."""
    return min(max(1, num_samples // 10, min(LEAST_HELD_OUT, num_samples // 4)), MAX_HELD_OUT)


def _probability(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Given to the right class. Labels that are none (below zero, 255) mean "ignore" and get nothing, as they count as
    wrong in accuracy."""
    known = (labels >= 0) & (labels < out.shape[1])
    there = labels.long().where(known, 0).unsqueeze(1)
    return out.float().softmax(1).gather(1, there).squeeze(1) * known


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
