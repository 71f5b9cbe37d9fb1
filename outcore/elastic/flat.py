"""A flat buffer that a model's parameters, gradients and float buffers are views of.

One exchange is then one message without a packing copy (section 5.2 of 1708.02983, "packed layers"). The layout is
[parameters | float buffers such as BatchNorm's running statistics]. The buffers are in no published equation; here they
are averaged over the workers, and the centre has their average. A float buffer of another dtype than the weights is
copied in with rounding, and only elements that differ from that copy are copied back, so a float32 table in a bfloat16
model stays exact. Parameters that FSDP2 has sharded are copied in and back, too, because FSDP2 owns their memory
(sharded.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from outcore.elastic.sharded import is_sharded, local, with_local
from outcore.errors import ElasticError


class FlatModel:
    """`vector` contains all parameters and float buffers of `model`; writing to it changes the model."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        dtype, device = self._one_dtype_and_device()
        self.is_sharded = any(is_sharded(p) for p in self.parameters)
        self.num_params = sum(local(p).numel() for p in self.parameters)
        self.num_elements = self.num_params + sum(b.numel() for b in self.buffers)
        self.vector = torch.empty(self.num_elements, dtype=dtype, device=device)
        self.gradient = torch.zeros(0 if self.is_sharded else self.num_params, dtype=dtype, device=device)
        with torch.no_grad():
            self._adopt()
        self._gradient_views = [] if self.is_sharded else list(self._views(self.gradient, self.parameters))
        self.bind_gradients()

    def _one_dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        if not self.parameters:
            raise ElasticError("the model has no parameter that requires a gradient; nothing can be averaged")
        kinds = {(p.dtype, local(p).device) for p in self.parameters}
        if len(kinds) > 1:
            listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ElasticError(
                f"one flat buffer needs one dtype and device, found {listed}; convert with model.to(...)"
            )
        return kinds.pop()

    def _adopt(self) -> None:
        for tensor, view in zip([*self.parameters, *self.buffers], self.tensor_views(self.vector)):
            view.copy_(local(tensor))
            if not self._is_foreign(tensor):
                tensor.data = view

    def _is_foreign(self, tensor: Tensor) -> bool:
        """Whether a tensor has memory of its own besides the vector."""
        return tensor.dtype != self.vector.dtype or is_sharded(tensor)

    def _views(self, vector: Tensor, tensors: list[Tensor] | list[nn.Parameter]) -> Iterator[Tensor]:
        offset = 0
        for whole in tensors:
            tensor = local(whole)
            part = vector[offset : offset + tensor.numel()]
            # A channels_last weight keeps its strides, so that packing does not change the choice of kernels.
            yield part.as_strided(tensor.size(), _dense_strides(tensor), part.storage_offset())
            offset += tensor.numel()

    def tensor_views(self, vector: Tensor) -> Iterator[Tensor]:
        """Yields views of `vector`, one per parameter and then one per float buffer."""
        yield from self._views(vector, [*self.parameters, *self.buffers])

    def parts(self, vector: Tensor) -> list[Tensor]:
        """Returns flat views of `vector`, one per tensor, as a per-layer exchange sends them."""
        sizes = [local(tensor).numel() for tensor in (*self.parameters, *self.buffers)]
        return list(torch.split(vector[: self.num_elements], sizes))

    def fragments(self, num: int) -> list[slice]:
        """Returns `num` parts of the vector with equally many parameters; buffers belong to the last one."""
        if num > self.num_params:
            raise ElasticError(f"{num} fragments are more than the model's {self.num_params} parameters; choose fewer")
        edges = [self.num_params * number // num for number in range(num)] + [self.num_elements]
        return [slice(first, last) for first, last in pairwise(edges)]

    def bind_gradients(self) -> None:
        """Makes every `.grad` a view again, with its content; an optimizer's `zero_grad` sets them to None."""
        if self.is_sharded:  # gradients are FSDP2's
            return
        for parameter, view in zip(self.parameters, self._gradient_views):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            else:
                continue
            parameter.grad = view

    def zero_gradients(self) -> None:
        if self.is_sharded:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self.gradient.zero_()

    def refresh(self, *, only_parameters: bool = False) -> None:
        """Copies tensors with memory of their own into the vector: buffers of another dtype, sharded parameters."""
        for tensor, view in self._foreign(only_parameters=only_parameters):
            view.copy_(tensor)

    def restore(self) -> None:
        """Copies elements of these tensors that an exchange changed back."""
        for tensor, view in self._foreign():
            tensor.copy_(self._unrounded(tensor, view))

    def _unrounded(self, tensor: Tensor, view: Tensor) -> Tensor:
        """Returns `view` in the tensor's dtype; elements that are the tensor's own, rounded, keep the tensor's
        value."""
        if tensor.dtype == self.vector.dtype:
            return view.to(tensor.dtype)
        rounded = tensor.to(self.vector.dtype).to(view.dtype)
        return torch.where(view == rounded, tensor, view.to(tensor.dtype))

    def _foreign(self, *, only_parameters: bool = False) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields this rank's elements of these tensors with their views of the vector."""
        if not self.is_sharded and all(buffer.dtype == self.vector.dtype for buffer in self.buffers):
            return
        tensors = self.parameters if only_parameters else [*self.parameters, *self.buffers]
        for tensor, view in zip(tensors, self.tensor_views(self.vector)):
            if self._is_foreign(tensor):
                yield local(tensor), view

    def state_dict(self, model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
        """Returns `model.state_dict()` with the values of `vector`, as copies on the model's device."""
        by_address = {
            local(tensor).data_ptr(): self._unrounded(local(tensor), view)
            for tensor, view in zip([*self.parameters, *self.buffers], self.tensor_views(vector))
        }
        found = {}
        for name, value in model.state_dict().items():
            part = local(value)
            mine = by_address.get(part.data_ptr(), part).clone() if part.numel() else part
            found[name] = with_local(value, mine) if is_sharded(value) else mine
        return found


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Returns the tensor's strides if it has no gaps, otherwise row-major ones."""
    expected = 1
    for size, stride in sorted(zip(tensor.size(), tensor.stride()), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return torch.empty(tensor.size(), device="meta").stride()
        expected *= size
    return tensor.stride()
