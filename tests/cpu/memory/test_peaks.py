"""The peak that is measured on the CPU is the one that was predicted, also where storages are made without an op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from outcore.limit import limit


class FromNumpy(nn.Module):
    """A mask that NumPy makes in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(256, 256)
        self.mask = np.ones(1024 * 256, dtype=np.float32)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.from_numpy(self.mask.copy()).view(1024, 256)
        return torch.sum(self.linear(x) * mask)


class InNumpy(torch.autograd.Function):
    """A product, forward and backward, without any op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradients[0].contiguous().numpy()
        return torch.from_numpy(gradient @ weight.numpy().T), torch.from_numpy(x.numpy().T @ gradient)


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(256, 256) / 16) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = InNumpy.apply(x, weight)  # type: ignore[no-untyped-call]
        return torch.sum(x)


class Views(nn.Module):
    """Much that is returned is not new: views, changes in place, buffers and constants from before the step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(256, 256), nn.Linear(256, 256)
        self.register_buffer("buffer", torch.ones(1024, 256))
        self.constant = torch.ones(1024, 256)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).view(32, 32, 256).transpose(0, 1).reshape(1024, 256).relu_()
        assert isinstance(self.buffer, Tensor)
        self.buffer.mul_(1.0)
        y = self.second(y.view(32, 32, 256)).view(1024, 256) * self.constant.view(1024, 256)
        left, right = y.chunk(2, -1)
        return torch.sum(left * right) + torch.sum(self.buffer.expand(2, 1024, 256))


@pytest.mark.parametrize("make", [FromNumpy, Products, Views])
def test_measured_is_predicted(make: Callable[[], nn.Module], tmp_path: Any) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(1024, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    ooc = limit(model, "100%", measure=True, disk=tmp_path)
    for _ in range(4):
        with ooc.step():
            model(x).backward()
        optimizer.step()
        optimizer.zero_grad()
    predicted, measured, trace = ooc.predicted, ooc.timeline, ooc.trace
    ooc.close()
    assert predicted is not None
    assert measured is not None
    assert trace is not None
    assert measured.peak_bytes == predicted.peak_bytes
    assert trace.has_unseen == (make is not Views)
