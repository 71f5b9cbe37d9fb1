"""A function that makes models -> further initial weights of the same model, loaded into the one that is tried.

How soon a training comes to its target depends on its initial weights more than on the order of its data: a length that
suffices for one start is too short for another. So every order of the data beyond the first has initial weights of its
own, made once and kept in host memory. Where no new model can be made there is one set of weights: a user may give a
model instead of a function, or a function that returns the same one (a model that refers to itself cannot be told from
that), or have no memory for a second one beside the first.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from outcore.tuning.data.restore import keep_generators

MakeModel = Callable[[], torch.nn.Module] | torch.nn.Module
FIRST_SEED = 715_000_000  # users train from seeds 0, 1 and 2: what is tried must not be what they train


def seed_everything(start: int) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(FIRST_SEED + start)


@dataclass
class InitialWeights:
    """Weights by the start that they belong to; `model` has those of start 0."""

    make_model: MakeModel
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device_bytes: int  # for everything, including another model beside the one that is tried
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # an empty list: there are no others

    def load(self, start: int) -> bool:
        """Copies them into the model; whether they differ from its own."""
        if start == 0 or isinstance(self.make_model, torch.nn.Module):
            return False
        if start not in self.weights:
            self.weights[start] = self._make(start) if self._fits() else []
        with torch.no_grad():
            for tensor, initial in zip(_tensors_of(self.model), self.weights[start]):
                tensor.copy_(initial)
        return bool(self.weights[start])

    def _make(self, start: int) -> list[torch.Tensor]:
        """In host memory. A function that cannot be called again leaves none."""
        assert not isinstance(self.make_model, torch.nn.Module)
        restore, own = keep_generators(), _tensors_of(self.model)
        seed_everything(start)
        try:
            others = [tensor.detach().to("cpu", copy=True) for tensor in _tensors_of(self.make_model())]
        except Exception:
            others = []
        finally:
            restore()
        gc.collect()  # a model may refer to itself, through a hook
        if own[0].is_cuda:
            torch.cuda.empty_cache()
        alike = [tensor.shape for tensor in others] == [tensor.shape for tensor in own]
        same = alike and all(torch.equal(other, tensor.detach().cpu()) for other, tensor in zip(others, own))
        return others if alike and not same else []

    def _fits(self) -> bool:
        device = next(self.model.parameters()).device
        model_bytes = sum(tensor.nbytes for tensor in _tensors_of(self.model))
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device) + model_bytes <= self.device_bytes
        state = [part for part in tree_leaves(list(self.optimizer.state.values())) if isinstance(part, torch.Tensor)]
        num_models = 3 + sum(bool(weights) for weights in self.weights.values())  # the new one, and what is kept of it
        return num_models * model_bytes + sum(part.nbytes for part in state) <= self.device_bytes


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
