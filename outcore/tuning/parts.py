"""The objects of one call of `tune`: request, model and optimizer for trials, data and bench."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from outcore.errors import TuningError
from outcore.tuning.data.restore import without_state
from outcore.tuning.data.samples import Samples
from outcore.tuning.options import Request
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.bench import Bench, Progress
from outcore.tuning.trainings.trial import num_held_out

TUNER, DATA = SETTINGS.tuner, SETTINGS.data


@dataclass
class Parts:
    request: Request
    model: torch.nn.Module
    is_new: bool  # nobody else holds the model, and others like it can be made
    optimizer: torch.optim.Optimizer | None
    samples: Samples
    validation: Samples | None
    progress: Progress
    bench: Bench
    has_state: bool = False  # whether the optimizer has state before its first step
    why: list[str] = field(default_factory=list)  # sentences for the advice

    @property
    def normalises(self) -> bool:
        return any(isinstance(module, _BatchNorm) for module in self.model.modules())

    @property
    def smallest_batch(self) -> int:
        return 2 if self.normalises else 1

    def without_momentum(self) -> AbstractContextManager[None]:
        """A context in which the optimizer has no state: timed steps leave momentum behind, although their rate is
        zero, and trainings must begin without it."""
        return nullcontext() if self.optimizer is None or self.has_state else without_state(self.optimizer)

    def largest_batch(self, largest: int | None = None) -> int:
        """Returns the largest batch to consider."""
        limits = (self._num_trained_on(), largest, self.request.batch.kept, TUNER.largest_batch)
        return max(1, min(limit for limit in limits if limit is not None))

    def _num_trained_on(self) -> int | None:
        """Returns the number of samples that batches are drawn from, without those that are held out."""
        num, goal = self.samples.num, self.request.goal
        trains = goal.target is not None or goal.has_length
        if num is not None and self.request.batch.is_free and trains and self.validation is None:
            num -= num_held_out(num)
        return num

    def why_one(self) -> tuple[str, str]:
        """Returns why no batch above 1 is considered, and what to change about that."""
        num, num_left = self.samples.num, self._num_trained_on()
        if self.request.batch.kept == 1:
            return "a batch of 1 is to be kept", "ask for a batch of 2 or more"
        if num == 1:
            return "the data set has one sample", "give more data"
        if num_left is not None and num_left <= 1:
            return f"of the data set's {num} samples one is left when others are held out", "give more data"
        return "the largest batch allowed is 1", "allow 2 or more"

    @property
    def has_few_samples(self) -> bool:
        """Whether the samples are too few to measure noise, find a rate or compare trainings."""
        return self.samples.num is not None and self.samples.num < DATA.min_samples


def check_data(request: Request, samples: Samples) -> None:
    if request.goal.num_epochs is not None and samples.num is None:
        raise TuningError("a function's samples have no epochs; give train_s=... instead of num_epochs=...")
    size = request.batch.size
    if size is not None and samples.num is not None and samples.num < size:
        raise TuningError(
            f"the data set has {samples.num} samples, fewer than the batch of {size}; lower the batch or give more data"
        )
