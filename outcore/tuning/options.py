"""The options of `tune`: objects that are read from plain values and checked before any work is done.

tune(make_model, loss_fn, dataset, memory="16GiB", optimizer=..., batch=256)                      plain values
tune(make_model, loss_fn, Data(train, validation=val), memory=Memory("16GiB", disk="/scratch"),   option objects
     optimizer=..., batch=Batch(256, free=True), goal=Goal(("val_accuracy", 0.97), num_epochs=30),
     effort=Effort(trial_s=60, num_trials=20))
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from outcore.errors import TuningError
from outcore.tuning.data.batches import LossFn
from outcore.tuning.data.restore import untouched
from outcore.tuning.data.samples import Collate
from outcore.tuning.gradients.goodput import RULES
from outcore.tuning.trainings.initial_weights import MakeModel
from outcore.tuning.trainings.target import Target

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]


@dataclass(frozen=True)
class Data:
    """The training data, and what belongs to it.

    `samples` is a map-style data set or a function batch_size -> batch. `validation`, likewise, is where targets are
    evaluated (else a tenth of `samples` is held out). `collate` makes a batch of a list of samples.
    """

    samples: Any
    validation: Any = None
    collate: Collate | None = None

    @classmethod
    def read(cls, given: Any) -> Data:
        return given if isinstance(given, Data) else cls(given)


@dataclass(frozen=True)
class Memory:
    """Bytes of the model's device, of pinned host memory, and a folder for a swap file (see `outcore.limit`)."""

    device: int | str
    host: int | str = "auto"
    disk: str | Path | None = None

    @classmethod
    def read(cls, given: int | str | Memory) -> Memory:
        return given if isinstance(given, Memory) else cls(given)

    @property
    def limits(self) -> dict[str, Any]:
        return {"memory": self.device, "host": self.host, "disk": self.disk}


@dataclass(frozen=True)
class Batch:
    """The effective batch that is trained with today, and whether it may change.

    It is kept by accumulation unless `free=True`; without a size it is free. No micro-batch beyond `largest` is tried.
    """

    size: int | None = None
    free: bool | None = None
    largest: int | None = None

    @classmethod
    def read(cls, given: int | Batch | None) -> Batch:
        batch = given if isinstance(given, Batch) else cls(given)
        for number, why in (
            (batch.size, f"a batch of {batch.size!r} cannot be trained; give a whole number above zero"),
            (batch.largest, f"no batch is as small as largest={batch.largest!r}; give a whole number above zero"),
        ):
            if number is not None and not _is_whole(number, 1):
                raise TuningError(why)
        if batch.size is None and batch.free is False:
            raise TuningError("no batch was given to keep; give batch=..., or leave it free")
        return batch

    @property
    def is_free(self) -> bool:
        return self.size is None if self.free is None else self.free

    @property
    def kept(self) -> int | None:
        """The batch that has to stay, or None if it may change."""
        return None if self.is_free else self.size


@dataclass(frozen=True)
class LearningRate:
    """The rate that belongs to today's batch (the optimizer's, if not given), or "find" for a range test.

    `rule` says how it follows a batch that is free: "adascale", "sqrt", "linear", "legw" or "fixed".
    """

    rate: float | str | None = None
    rule: str = "adascale"

    @classmethod
    def read(cls, given: float | str | LearningRate | None) -> LearningRate:
        rate = given if isinstance(given, LearningRate) else cls(given)
        is_number = isinstance(rate.rate, Real) and not isinstance(rate.rate, bool)
        if isinstance(rate.rate, str) and rate.rate != "find":
            raise TuningError(f"{rate.rate!r} is no learning rate; give a number, or 'find'")
        if not (rate.rate is None or rate.rate == "find" or (is_number and 0 < float(rate.rate) < math.inf)):
            raise TuningError(f"{rate.rate!r} is no learning rate; give a number above zero, or 'find'")
        if rate.rule not in RULES:
            raise TuningError(f"there is no learning-rate rule {rate.rule!r}; choose one of {', '.join(RULES)}")
        return rate


@dataclass(frozen=True)
class Goal:
    """The purpose of the training.

    With `target`, such as `("val_accuracy", 0.97)` or `(function of the model, value)`, the time to reach it is
    predicted. `num_epochs`, or `train_s` in seconds, is the intended length of the training; the advice is then the
    setting that is best at the end of it.
    """

    target: Any = None
    num_epochs: float | None = None
    train_s: float | None = None

    @classmethod
    def read(cls, given: Any) -> Goal:
        goal = given if isinstance(given, Goal) else cls(given)
        lengths = [length for length in (goal.num_epochs, goal.train_s) if length is not None]
        if not all(isinstance(length, int | float) for length in lengths):
            raise TuningError(f"a training cannot be {lengths[0]!r} long; give a number")
        if len(lengths) > 1:
            raise TuningError("a training has one length; give num_epochs=... or train_s=..., not both")
        if not all(0 < length < math.inf for length in lengths):
            raise TuningError(f"a training cannot be {lengths[0]!r} long; give a number above zero")
        target = goal.target
        is_read = target is None or isinstance(target, Target)
        return cls(target if is_read else Target.read(target), goal.num_epochs, goal.train_s)

    @property
    def has_length(self) -> bool:
        return self.num_epochs is not None or self.train_s is not None

    def length_s(self, num_samples: int | None, batch: int, step_s: float) -> float | None:
        """Returns the intended seconds of training with this batch; None if no length was given."""
        if self.num_epochs is None or self.train_s is not None:
            return self.train_s
        return max(1.0, self.num_epochs * (num_samples or 0) / batch) * step_s


@dataclass(frozen=True)
class Effort:
    """How much work `tune` may do.

    The range test, the comparison, the training towards a target and each run of a search scale with `trial_s` seconds
    of compute. With `race=False` nothing is trained for comparison, and only today's setting is advised. `num_trials`
    is the number of runs of an Optuna study around the advice; `study` names its file, from which an interrupted study
    continues.
    """

    trial_s: float = 20.0
    race: bool = True
    num_trials: int = 0
    study: str | Path | None = None

    def check(self) -> None:
        if not _is_whole(self.num_trials, 0):
            raise TuningError(
                f"a search cannot have num_trials={self.num_trials!r} runs; give a whole number, 0 for no search"
            )
        if not isinstance(self.trial_s, Real) or not 0 <= self.trial_s < math.inf:
            raise TuningError(f"a trial of {self.trial_s!r} seconds cannot be run; give a number that is not negative")


@dataclass(frozen=True)
class Workers:
    """Workers that will train together but are not available now: their number, or their speeds relative to this
    device.

    `communication_s` is the time to sum their gradients, in seconds. In a process group of torch.distributed the ranks
    are the workers; then only `communication_s` may be given, and it is measured if it is not.
    """

    speeds: int | Sequence[float] | None = None
    communication_s: float | None = None

    @classmethod
    def read(cls, given: int | Sequence[float] | Workers | None) -> Workers:
        workers = given if isinstance(given, Workers) else cls(given)
        seconds = workers.communication_s
        if seconds is not None and not 0 <= seconds < math.inf:
            raise TuningError(f"communication cannot take {seconds!r} seconds; give zero or more")
        return workers


@dataclass(frozen=True)
class Request:
    """The arguments of one call of `tune`, read and checked."""

    make_model: MakeModel
    loss_fn: LossFn
    make_optimizer: MakeOptimizer | None
    data: Data
    memory: Memory
    batch: Batch = field(default_factory=Batch)
    rate: LearningRate = field(default_factory=LearningRate)
    goal: Goal = field(default_factory=Goal)
    effort: Effort = field(default_factory=Effort)
    workers: Workers = field(default_factory=Workers)

    @property
    def target(self) -> Target | None:
        target: Target | None = self.goal.target
        return target

    @property
    def trial_s(self) -> float:
        return self.effort.trial_s

    @property
    def facts(self) -> dict[str, Any]:
        """The arguments that must be the same on all ranks."""
        return {
            "batch": self.batch.size,
            "free": self.batch.is_free,
            "learning_rate": self.rate.rate,
            "rule": self.rate.rule,
            "largest": self.batch.largest,
            "workers": self.workers.speeds,
            "communication_s": self.workers.communication_s,
            "num_trials": self.effort.num_trials,
            "optimizer": self.make_optimizer is not None,
            "target": self.target is not None,
        }

    def check(self, *, alone: bool) -> None:
        """Raises `TuningError` for requests that cannot be fulfilled, before any work. `alone` means one worker."""
        if self.rate.rate is not None and self.make_optimizer is None:
            raise TuningError("a learning rate belongs to an optimizer; give optimizer=..., such as torch.optim.AdamW")
        if self.goal.has_length and self.make_optimizer is None:
            raise TuningError(
                "what is best in the end is found by training; give optimizer=..., such as torch.optim.SGD"
            )
        if self.goal.has_length and not (self.effort.race and alone):
            raise TuningError(
                "what is best in the end is found by a race on one device; leave race on and workers out, or leave out "
                "num_epochs and train_s"
            )
        if self.effort.num_trials:
            self._check_search(alone=alone)
        if self.target is not None and self.make_optimizer is None:
            raise TuningError("time to a target is found by training; give optimizer=..., such as torch.optim.AdamW")

    def _check_search(self, *, alone: bool) -> None:
        if self.target is None or self.make_optimizer is None:
            raise TuningError("a search needs target=... and optimizer=... to compare runs by; give both")
        if self.goal.has_length:
            raise TuningError("a search looks for what is soonest at the target; leave out num_trials, or the length")
        if not alone:
            raise TuningError("a search trains on one device; search without workers, then keep the batch it found")

    def make(self) -> tuple[torch.nn.Module, bool]:
        """Returns the model to use for trials, and whether it is new and referenced by nobody else."""
        if isinstance(self.make_model, torch.nn.Module):
            return self.make_model, False
        model = self.make_model()
        if not isinstance(model, torch.nn.Module):
            raise TuningError(f"make_model() returned a {type(model).__name__}; it must return a torch.nn.Module")
        unshared = object()
        is_new = sys.getrefcount(model) <= sys.getrefcount(unshared)
        return model, is_new

    @contextmanager
    def model(self) -> Iterator[torch.nn.Module]:
        """Yields the same model in training mode; a model that belongs to the user is restored afterwards."""

        model, is_new = self.make()
        with nullcontext() if is_new else untouched(model):
            yield model.train()

    @property
    def starts_anew(self) -> bool:
        """Whether the model begins with initial weights, as far as can be told."""
        return not isinstance(self.make_model, torch.nn.Module)


def _is_whole(number: Any, least: int) -> bool:
    return isinstance(number, Integral) and not isinstance(number, bool) and int(number) >= least
