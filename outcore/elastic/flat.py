"""Model -> one flat buffer of which its parameters, gradients and float buffers are views.

One exchange is then one message without a packing copy (section 5.2 of 1708.02983, "packed layers"). Layout:
[parameters | float buffers such as BatchNorm's running statistics]. The tail is in no published equation; here it is
averaged over the workers, and the centre holds the average. A float buffer of another dtype than the weights is copied
in, rounded, and only what differs from that copy is ever copied back: a float32 table in a bfloat16 model stays exact.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from outcore.errors import ElasticError


class FlatModel:
    """`vector` holds all of `model`'s parameters and float buffers; writing it writes the model."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.buffers = [b for b in model.buffers() if b.is_floating_point()]
        dtype, device = self._one_dtype_and_device()
        self.num_params = sum(p.numel() for p in self.parameters)
        self.num_elements = self.num_params + sum(b.numel() for b in self.buffers)
        self.vector = torch.empty(self.num_elements, dtype=dtype, device=device)
        self.gradient = torch.zeros(self.num_params, dtype=dtype, device=device)
        with torch.no_grad():
            self._adopt()
        self._gradient_views = list(self._views(self.gradient, self.parameters))
        self.bind_gradients()

    def _one_dtype_and_device(self) -> tuple[torch.dtype, torch.device]:
        if not self.parameters:
            raise ElasticError("the model has no parameter that requires a gradient; nothing can be averaged")
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ElasticError(
                f"one flat buffer needs one dtype and device, found {listed}; convert with model.to(...)"
            )
        return kinds.pop()

    def _adopt(self) -> None:
        for tensor, view in zip([*self.parameters, *self.buffers], self.tensor_views(self.vector)):
            view.copy_(tensor)
            tensor.data = view if tensor.dtype == view.dtype else tensor.data

    def _views(self, vector: Tensor, tensors: list[Tensor] | list[nn.Parameter]) -> Iterator[Tensor]:
        offset = 0
        for tensor in tensors:
            part = vector[offset : offset + tensor.numel()]
            # A channels_last weight keeps its strides: kernels chosen for it must not change with the packing.
            yield part.as_strided(tensor.size(), _dense_strides(tensor), part.storage_offset())
            offset += tensor.numel()

    def tensor_views(self, vector: Tensor) -> Iterator[Tensor]:
        """`vector` cut like the model: one view per parameter, then per float buffer."""
        yield from self._views(vector, [*self.parameters, *self.buffers])

    def parts(self, vector: Tensor) -> list[Tensor]:
        """`vector` cut like the model, each part flat: what a per-layer exchange sends."""
        sizes = [tensor.numel() for tensor in (*self.parameters, *self.buffers)]
        return list(torch.split(vector[: self.num_elements], sizes))

    def bind_gradients(self) -> None:
        """Makes every `.grad` a view again (an optimizer's `zero_grad` sets them to None) and keeps what they hold."""
        for parameter, view in zip(self.parameters, self._gradient_views):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad.data_ptr() != view.data_ptr():
                view.copy_(parameter.grad)
            else:
                continue
            parameter.grad = view

    def refresh_buffers(self) -> None:
        """Copies float buffers of another dtype in; the others are views already."""
        for buffer, view in self._foreign_buffers():
            view.copy_(buffer)

    def restore_buffers(self) -> None:
        """Copies back what an exchange changed of float buffers of another dtype."""
        for buffer, view in self._foreign_buffers():
            buffer.copy_(self._unrounded(buffer, view))

    def _unrounded(self, tensor: Tensor, view: Tensor) -> Tensor:
        """`view` in the tensor's dtype; an element that is the tensor's own, rounded on its way, is the tensor's."""
        if tensor.dtype == self.vector.dtype:
            return view.to(tensor.dtype)
        rounded = tensor.to(self.vector.dtype).to(view.dtype)
        return torch.where(view == rounded, tensor, view.to(tensor.dtype))

    def _foreign_buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        if all(buffer.dtype == self.vector.dtype for buffer in self.buffers):
            return
        for buffer, view in zip(self.buffers, list(self.tensor_views(self.vector))[len(self.parameters) :]):
            if buffer.dtype != self.vector.dtype:
                yield buffer, view

    def state_dict(self, model: nn.Module, vector: Tensor) -> dict[str, Tensor]:
        """`model.state_dict()` with the values of `vector`: copies, on the model's device."""
        by_address = {
            tensor.data_ptr(): self._unrounded(tensor, view)
            for tensor, view in zip([*self.parameters, *self.buffers], self.tensor_views(vector))
        }
        state = model.state_dict()
        return {name: by_address.get(value.data_ptr(), value).clone() for name, value in state.items()}


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own strides where it fills its memory without gaps, row-major ones otherwise."""
    expected = 1
    for size, stride in sorted(zip(tensor.size(), tensor.stride()), key=lambda pair: pair[1]):
        if size != 1 and stride != expected:
            return torch.empty(tensor.size(), device="meta").stride()
        expected *= size
    return tensor.stride()
