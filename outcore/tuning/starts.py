"""A function that makes models -> further starts of the same model, put into the one that is tried.

How soon a training comes to its target depends on the weights it begins with more than on the order of its data: a
length that does for one start is too short for another. So every order of the data beyond the first has a start of its
own, made once and kept in host memory. Where a user gives a model instead of a function there is one start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MakeModel = Callable[[], torch.nn.Module] | torch.nn.Module


@dataclass
class Starts:
    """Weights by the order of the data that they go with; `model` has those of order 0."""

    make_model: MakeModel
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    device_bytes: int  # for the model, the optimizer's state, and another model beside them while it is made
    made: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def put(self, order: int) -> None:
        """Into the model. It keeps its own where no other can be made: in so little memory, or of other shapes."""
        if order == 0 or isinstance(self.make_model, torch.nn.Module) or not self._has_room():
            return
        if order not in self.made:
            torch.manual_seed(order)
            self.made[order] = [tensor.detach().to("cpu", copy=True) for tensor in _tensors_of(self.make_model())]
        there, start = _tensors_of(self.model), self.made[order]
        if [tensor.shape for tensor in there] == [tensor.shape for tensor in start]:
            with torch.no_grad():
                for tensor, begins_with in zip(there, start):
                    tensor.copy_(begins_with)

    def _has_room(self) -> bool:
        model_bytes = sum(tensor.nbytes for tensor in _tensors_of(self.model))
        gathered = [part for found in self.optimizer.state.values() for part in found.values()]
        state_bytes = sum(part.nbytes for part in gathered if isinstance(part, torch.Tensor))
        return 2 * model_bytes + state_bytes <= self.device_bytes


def _tensors_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
