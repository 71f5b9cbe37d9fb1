"""Further initial weights for the model that trials use.

The time to a target depends on the initial weights more than on the order of the data: a length that suffices for one
start is too short for another. So every order of the data except the first gets its own initial weights, made once and
kept in host memory. If no new model can be made, there is one set of weights. That is the case if the user passes a
model instead of a function, if the function returns the same model again (a model that refers to itself looks the
same), or if there is no memory for a second model.
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
FIRST_SEED = 715_000_000  # differs from common seeds, so that trials are not the user's training


def seed_everything(start: int) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(FIRST_SEED + start)


@dataclass
class InitialWeights:
    """Initial weights by start; `model` has those of start 0."""

    make_model: MakeModel
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device_bytes: int  # the budget, which a second model must fit too
    weights: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # an empty list: the model's own

    def load(self, start: int) -> bool:
        """Copies the start's weights into the model; returns whether they differ from its own."""
        if start == 0 or isinstance(self.make_model, torch.nn.Module):
            return False
        if start not in self.weights:
            self.weights[start] = self._make(start) if self._fits() else []
        with torch.no_grad():
            for tensor, initial in zip(_tensors_of(self.model), self.weights[start]):
                tensor.copy_(initial)
        return bool(self.weights[start])

    def _make(self, start: int) -> list[torch.Tensor]:
        """Returns new weights in host memory; none if the function cannot be called again."""
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
        num_models = 3 + sum(bool(weights) for weights in self.weights.values())  # the model, the new one and its copy
        return num_models * model_bytes + sum(part.nbytes for part in state) <= self.device_bytes


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
