"""The target of a training: whether it is reached, how much error remains, and how long it should take.

Learning curves are mostly straight lines in log(error) over log(samples), and are extrapolated on such a line. If there
is no line, or the target is far beyond the measured range, nothing is predicted and the reason is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outcore.errors import TuningError
from outcore.tuning.settings import SETTINGS
from outcore.units import format_seconds

TRAINING = SETTINGS.training
METRICS = ("val_accuracy", "val_loss")
PROBABILITY = "val_probability"  # of the right class: a smooth accuracy, for internal use
Metric = str | Callable[[torch.nn.Module], float]


@dataclass(frozen=True)
class Target:
    """A target: `metric` of at least `value`, or of at most `value` for a loss."""

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
        return f"{self.metric_name} {'>=' if self.grows else '<='} {self.value:g}"

    @property
    def metric_name(self) -> str:
        return self.metric if isinstance(self.metric, str) else str(getattr(self.metric, "__name__", "metric"))

    @property
    def is_builtin(self) -> bool:
        """Whether the metric is built in. A user's function may be slow, and is called as rarely as possible."""
        return isinstance(self.metric, str)

    @property
    def grows(self) -> bool:
        return self.metric != "val_loss"

    def reached(self, metric: float) -> bool:
        return metric >= self.value if self.grows else metric <= self.value

    def remaining(self, metric: float) -> float | None:
        """Returns the remaining error, which falls along a line; None if the metric has no such number."""
        return {"val_loss": metric, "val_accuracy": 1 - metric, PROBABILITY: 1 - metric}.get(str(self.metric))

    def held_out_error(self, num_held_out: int) -> float:
        """Returns the standard error of an accuracy over this many samples, as a share of the error at the target.

        It is at most 0.5. 0 means that it is unknown.
        """
        if self.metric != "val_accuracy" or num_held_out < 1 or self.value >= 1:
            return 0.0
        return min(math.sqrt(self.value / (1 - self.value) / num_held_out), 0.5)

    @property
    def at_the_end(self) -> Target:
        """The target for comparing trainings at their end; no finite value reaches it."""
        if self.metric == "val_accuracy":
            return Target(PROBABILITY, math.inf)
        return Target("val_loss", -math.inf)


NO_TARGET = Target("val_loss", 0.0)  # compares the loss on held-out samples


def predict_target_s(target: Target, seen: list[tuple[int, float, float]]) -> tuple[float | None, str]:
    """Returns the seconds to the target, or None, with a reason. `seen` has samples, seconds and metric."""
    if not seen:
        return None, "not one step could be trained in the time given; give more with trial_s"
    num_samples, train_s, metric = seen[-1]
    where = f"{target.metric_name} was {metric:.4g} after {format_seconds(train_s)} of training"
    if target.reached(metric):
        return train_s, f"{where}: the target was reached in the trial"
    if target.remaining(metric) is None:
        return None, f"{where}; how it goes on is only known for {' and '.join(METRICS)}: train on, or raise trial_s"
    errors = [(num, target.remaining(metric) or 0.0) for num, _, metric in seen]
    line = [(math.log(num), math.log(error)) for num, error in errors if error > 0]
    line = line[len(line) // 3 :]  # the beginning has another slope
    wanted = target.remaining(target.value) or 0.0
    if len(line) < 3 or wanted <= 0:
        return None, f"{where}, too few evaluations to go on from; raise trial_s"
    slope, level = np.polyfit([at for at, _ in line], [error for _, error in line], 1)
    if slope > -TRAINING.min_slope:
        return None, (
            f"{where} and hardly improves any more: the target is out of reach at this setting; lower the target, "
            "change the model or the data, or search (num_trials)"
        )
    times = math.exp((math.log(wanted) - level) / slope) / num_samples
    if times > TRAINING.max_extrapolation:
        far = f"the target is more than {TRAINING.max_extrapolation} times as far, too far to predict"
        return None, f"{where}; {far}: raise trial_s"
    return train_s * max(times, 1.0), f"{where}; the rest is continued along its learning curve, a rough guess"
