"""On CUDA: a part of a forward in another precision, or by another library, has the same numbers as without us."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore.eager.switches import changed, switches
from outcore.limit import limit
from tests.cpu.eager.test_unusual_programs import gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]
Switch = Callable[[], AbstractContextManager[Any]]
SHAPES = ((64, 3), (128, 3), (256, 3), (256, 1), (16, 3))  # channels, size: an H200 convolves 16 to 32 without cuDNN


def without_cudnn() -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(enabled=False)


def without_tf32() -> AbstractContextManager[Any]:
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)


@contextmanager
def with_tf32_products() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


class Part(nn.Module):
    def __init__(self, switch: Switch, channels: int, size: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(channels, channels, size, padding=size // 2), nn.Linear(channels, 64)
        self.third, self.switch = nn.Linear(64, 8), switch

    def forward(self, x: Tensor) -> Tensor:
        with self.switch():
            x = self.second(self.first(x).tanh().movedim(1, -1)).tanh()
        out: Tensor = self.third(x).sigmoid()
        return out


def loss_of(model: nn.Module, channels: int) -> Callable[[int], Tensor]:
    def loss(step: int) -> Tensor:
        generator = torch.Generator("cuda").manual_seed(step)
        out: Tensor = model(torch.randn(16, channels, 56, 56, device="cuda", generator=generator)).square().sum()
        return out

    return loss


def plainly(switch: Switch, channels: int, size: int) -> list[Tensor]:
    model = Part(switch, channels, size).to("cuda")
    return gradients(model, loss_of(model, channels), None, 6)


@pytest.mark.parametrize("switch", [without_cudnn, without_tf32, with_tf32_products])
@pytest.mark.parametrize("planner", ["recompute-all", "swap-all", "hybrid"])
def test_a_part_of_the_forward_under_other_switches(
    switch: Switch, planner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        began = switches()
        with switch():
            assert changed(began, switches())
        for channels, size in SHAPES:
            plain = plainly(switch, channels, size)
            if not all(map(torch.equal, plain, plainly(nullcontext, channels, size))):
                break
        else:
            pytest.skip("all networks tried here have the same bits under these switches: this could not fail")
        model = Part(switch, channels, size).to("cuda")
        memory = torch.cuda.memory_allocated() + channels * 3 * 2**19 if planner == "hybrid" else "100%"
        ooc = limit(model, memory, planner=planner)
        got = gradients(model, loss_of(model, channels), ooc, 6)
        assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
        assert not any(kind.num_left for kind in ooc.kinds.values())
        ooc.close()
    finally:
        torch.use_deterministic_algorithms(False)
