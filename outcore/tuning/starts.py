"""A function that makes models -> further starts of the same model, put into the one that is tried.

How soon a training comes to its target depends on the weights it begins with more than on the order of its data: a
length that does for one start is too short for another. So every order of the data beyond the first has a start of its
own, made once and kept in host memory. Where no new model can be made there is one start: a user may give a model
instead of a function, or a function that hands out the same one (a model that holds itself cannot be told from that),
or have no memory for a second one beside the first.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from outcore.tuning.state import keep_generators

MakeModel = Callable[[], torch.nn.Module] | torch.nn.Module
FIRST_SEED = 715_000_000  # users train from 0, 1 and 2: what is tried should not be what they train


@dataclass
class Starts:
    """Weights by the order of the data that they go with; `model` has those of order 0."""

    make_model: MakeModel
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device_bytes: int  # for everything, another model beside the one that is tried among it
    made: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # empty: there is no other

    def put(self, order: int) -> bool:
        """Into the model; whether they are others than its own."""
        if order == 0 or isinstance(self.make_model, torch.nn.Module):
            return False
        if order not in self.made:
            self.made[order] = self._make(order) if self._has_room() else []
        with torch.no_grad():
            for tensor, begins_with in zip(_tensors_of(self.model), self.made[order]):
                tensor.copy_(begins_with)
        return bool(self.made[order])

    def _make(self, order: int) -> list[torch.Tensor]:
        """A start, in host memory. A function may not be made to be called again: then there is none."""
        assert not isinstance(self.make_model, torch.nn.Module)
        back, there = keep_generators(), _tensors_of(self.model)
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(FIRST_SEED + order)
        try:
            found = [tensor.detach().to("cpu", copy=True) for tensor in _tensors_of(self.make_model())]
        except Exception:
            found = []
        finally:
            back()
        gc.collect()  # a model may hold itself, through a hook
        if there[0].is_cuda:
            torch.cuda.empty_cache()
        alike = [tensor.shape for tensor in found] == [tensor.shape for tensor in there]
        same = alike and all(torch.equal(one, tensor.detach().cpu()) for one, tensor in zip(found, there))
        return found if alike and not same else []

    def _has_room(self) -> bool:
        device = next(self.model.parameters()).device
        model_bytes = sum(tensor.nbytes for tensor in _tensors_of(self.model))
        if device.type == "cuda":
            return torch.cuda.memory_allocated(device) + model_bytes <= self.device_bytes
        gathered = [part for part in tree_leaves(list(self.optimizer.state.values())) if isinstance(part, torch.Tensor)]
        num_models = 3 + sum(bool(start) for start in self.made.values())  # the new one, and what is kept of it
        return num_models * model_bytes + sum(part.nbytes for part in gathered) <= self.device_bytes


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
