"""On CUDA: what is done for the allocator changes no number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from outcore.limit import limit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(6)]
    return nn.Sequential(*layers).cuda(), torch.randn(8192, 1024, device="cuda")


def gradients(memory: int | None, num_steps: int) -> tuple[list[Tensor], int]:
    """Gradients after some steps, and the blocks they lie in that belong to another stream, or else the peak."""
    model, x = network()
    torch.cuda.reset_peak_memory_stats()
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
        return [grad.cpu() for grad in found], torch.cuda.max_memory_allocated()
    streams = {
        block["address"]: segment["stream"] for segment in torch.cuda.memory_snapshot() for block in segment["blocks"]
    }
    num_aside = sum(streams[grad.untyped_storage().data_ptr()] != 0 for grad in found)
    assert ooc.timeline is not None
    assert memory is not None
    assert ooc.timeline.peak_bytes <= memory
    ooc.close()
    return [grad.cpu() for grad in found], num_aside


def test_gradients_moved_aside_are_the_same_while_rooms_are_tried() -> None:
    num_steps = 16
    expected, peak_bytes = gradients(None, num_steps)
    got, num_aside = gradients(int(0.75 * peak_bytes), num_steps)
    assert num_aside > 0
    assert len(expected) == len(got)
    for one, other in zip(expected, got):
        assert torch.equal(one, other)
