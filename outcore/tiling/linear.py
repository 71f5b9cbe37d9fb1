"""A linear layer whose weight lives on the host; all three products of training stream it through the device.

As in arXiv 1511.04348, forward and backward of a fully connected layer are three matrix products,

    y = x W'        dx = dy W        dW = dy' x

each of which is a `Job`, so that neither W nor dW is ever on the device as a whole. Unlike in the paper, activations
may stay on the device: then only W is loaded (twice) and only dW is stored (once). In that case the two products of the
backward run side by side. dx needs columns of W, which are strided in host memory and load slowly (on an H200 dx alone
took half as long again as its products); dW loads nothing and multiplies meanwhile.

If an optimizer updates the weight during the backward (`adamw.py`), dW is not stored at all: its tiles are used on the
device, after dx has read the weight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn

from outcore.errors import BudgetTooSmall, TilingError
from outcore.tiling.host_weight import HostWeight, autocast_dtype
from outcore.tiling.product import Job, Report, matmul, run_side_by_side
from outcore.tiling.update import Update


class TiledLinear(HostWeight):
    """`nn.Linear` whose weight and weight gradient stay in host memory. Inputs may be on the host or on one device.

    Host inputs are multiplied on `devices` (default: every CUDA device, else the CPU) and the result is on the host;
    device inputs are multiplied where they are. `memory` limits the device bytes of the tiles, without activations.
    Moving the model (`.to()`, `.cuda()`) moves the bias and leaves the weight on the host; a change of dtype
    (`.half()`) applies to both. Under autocast products have autocast's dtype, with a copy of the weight in it on the
    host.

    ```python
    import outcore
    import torch

    layer = outcore.TiledLinear(256, 1024, memory="1MiB")
    out = layer(torch.randn(32, 256))  # (32, 1024)
    out.sum().backward()
    ```
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        memory: int | str | None = None,
        devices: Sequence[str] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.memory, self.devices = memory, devices
        self.weight = nn.Parameter(torch.empty(out_features, in_features, dtype=dtype))
        self.register_parameter("bias", nn.Parameter(torch.empty(out_features, dtype=dtype)) if bias else None)
        self.reports: list[tuple[str, Report]] = []  # (product, report) of the last step
        self.make_update: MakeUpdate = _no_update  # set by an optimizer that updates during the backward
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: nn.Linear, **options: Any) -> TiledLinear:
        """Returns a tiled layer that shares the parameters; a weight on a device is moved to the host."""
        layer = cls(1, 1, linear.bias is not None, **options)
        layer.in_features, layer.out_features = linear.in_features, linear.out_features
        layer.register_parameter("weight", cast(nn.Parameter, linear.weight))
        layer.register_parameter("bias", linear.bias)
        layer.bring_home()
        return layer

    def to_linear(self) -> nn.Linear:
        """Returns torch's layer, which shares the parameters; its weight is still on the host."""
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, self.bias is not None)
        linear.register_parameter("weight", self.weight)
        linear.register_parameter("bias", self.bias)
        return linear

    def reset_parameters(self) -> None:
        """Initializes like `nn.Linear`: the same seed gives the same numbers."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))
        if self.bias is not None:
            bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.check_on_host()
        if x.shape[-1] != self.in_features:
            raise TilingError(f"the input has {x.shape[-1]} features, the layer takes {self.in_features}")
        dtype = autocast_dtype(x.device) or self.weight.dtype
        if x.dtype != dtype and dtype == self.weight.dtype:
            raise TilingError(f"the input is {x.dtype} and the weight {self.weight.dtype}; convert one of them")
        self.reports = []
        if x.is_cuda or self.devices != ["cpu"]:
            self.lock_weight()
        rows = x.to(dtype).reshape(-1, self.in_features)
        y: torch.Tensor = _StreamedProduct.apply(rows, self.weight, self)  # type: ignore[no-untyped-call]
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.device, y.dtype)

    def multiply(self, name: str, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        on_device = a.is_cuda or b.is_cuda
        devices = None if on_device else self.devices
        if out is None and not a.numel() * b.numel():
            result = matmul(a, b, devices=devices)
            assert isinstance(result, torch.Tensor)
            return result
        job = Job(a, b, out=out, memory=self.memory, devices=devices)
        self.reports.append((name, job.run()))
        assert isinstance(job.out, torch.Tensor)
        return job.out

    def differentiate(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns dx and dW, computed side by side if the activations are on one device and both fit the memory."""
        gradient = self.empty_like_weight(x.dtype)
        jobs = self._pair(dy, x, weight, gradient) if on_one_device(dy, x) and dy.numel() * x.numel() else None
        if jobs is None:
            dx = self.multiply("backward input", dy, weight)
            return dx, self.multiply("backward weight", dy.t(), x, out=gradient)
        self.reports += zip(("backward input", "backward weight"), run_side_by_side(jobs))
        return cast(torch.Tensor, jobs[0].out), gradient

    def update(self, dy: torch.Tensor, x: torch.Tensor, update: Update) -> None:
        """Computes dW, whose tiles update the weight instead of being stored."""
        devices = None if dy.is_cuda else self.devices
        job = Job(dy.t(), x, memory=self.memory, devices=devices, update=update)
        self.reports.append(("update", job.run()))
        self.weight_was_written(copies_too=True)

    def _pair(
        self, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[Job, Job] | None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)  # before the free memory is read
        options: dict[str, Any] = {"memory": self.memory, "share": 0.5}
        try:
            of_weight = Job(dy.t(), x, out=gradient, **options)
            return Job(dy, weight, out=dx, urgent=True, rates=of_weight.lane_rates[0], **options), of_weight
        except BudgetTooSmall:
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "reports": [], "make_update": _no_update}

    def extra_repr(self) -> str:
        bias = self.bias is not None
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={bias}, memory={self.memory}"


class _StreamedProduct(torch.autograd.Function):
    """x W' with both of its derivatives by streamed products, in the dtype of x."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, layer: TiledLinear) -> torch.Tensor:
        streamed = layer.weight_as(x.dtype)
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return layer.multiply("forward", x, streamed.t())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        x, weight = ctx.saved_tensors
        with torch.no_grad():
            dx, gradient = _StreamedProduct.differentiate(ctx, grads[0], x, weight)
        if not torch.is_grad_enabled():
            return dx, gradient, None
        # Under create_graph=True, dx and dW depend on all of these, but no graph represents it.
        once = [None if d is None else _Once.apply(d, grads[0], x, weight) for d in (dx, gradient)]  # type: ignore[no-untyped-call]
        return once[0], once[1], None

    @staticmethod
    def differentiate(
        ctx: Any, dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Returns dx and dW if they are needed; dW is None if it has updated the weight."""
        layer: TiledLinear = ctx.layer
        streamed = layer.weight_as(x.dtype)
        if ctx.needs_input_grad[1] and x.numel() and (update := layer.make_update(layer)) is not None:
            dx = layer.multiply("backward input", dy, streamed) if ctx.needs_input_grad[0] else None
            layer.update(dy, x, update)  # after dx, which reads the weight
            return dx, None
        if all(ctx.needs_input_grad[:2]):
            dx, gradient = layer.differentiate(dy, x, streamed)
            return dx, gradient.to(weight.dtype)
        if ctx.needs_input_grad[0]:
            return layer.multiply("backward input", dy, streamed), None
        gradient = layer.multiply("backward weight", dy.t(), x, out=layer.empty_like_weight(x.dtype))
        return None, gradient.to(weight.dtype)


class _Once(torch.autograd.Function):
    """Returns a first derivative unchanged, and raises an error if a second one is requested, which would otherwise
    silently lack this layer's part."""

    @staticmethod
    def forward(ctx: Any, derivative: torch.Tensor, *depends_on: torch.Tensor) -> torch.Tensor:
        return derivative.view_as(derivative)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise TilingError(
            "a second derivative of a TiledLinear was asked for, and its products have a first one only; call "
            "outcore.untile(model), or leave layers out of outcore.tile by a higher larger_than"
        )


def _no_update(layer: TiledLinear) -> Update | None:
    return None


MakeUpdate = Callable[[TiledLinear], Update | None]


def on_one_device(dy: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether both tensors are on one device. Host activations use the same link as the weight, with no gain."""
    return dy.is_cuda and dy.device == x.device
