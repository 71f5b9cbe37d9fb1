"""On CUDA: what is done for the allocator changes no number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outcore.limit import limit
from outcore.units import MIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers).cuda(), torch.randn(8192, 1024, device="cuda")


def gradients(memory: int | None, num_steps: int) -> tuple[list[Tensor], bool]:
    model, x = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ooc = limit(model, memory) if memory else None
    found: list[Tensor] = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        if ooc is None:
            model(x).square().mean().backward()
        else:
            with ooc.step():
                model(x).square().mean().backward()
        found = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        optimizer.step()
    if ooc is None:
        return [grad.clone() for grad in found], False
    aside = any(hasattr(grad, "_outcore_aside") for grad in found)
    assert ooc.timeline is not None
    assert ooc.timeline.peak_bytes <= memory  # type: ignore[operator]
    ooc.close()
    return [grad.clone() for grad in found], aside


def test_gradients_moved_aside_are_the_same_while_rooms_are_tried() -> None:
    num_steps = 16
    expected, _ = gradients(None, num_steps)
    got, aside = gradients(260 * MIB, num_steps)
    assert aside
    assert len(expected) == len(got)
    for one, other in zip(expected, got):
        assert torch.equal(one, other)
