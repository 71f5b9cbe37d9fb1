"""On CUDA: a compiled step in a byte budget has the bits of the same step compiled in-core."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outcore.limit import limit
from tests.cpu.compiled.training import Convolutions, Residual, Training, same

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
    pytest.mark.timeout(600),
]


def training(name: str) -> Training:
    torch.manual_seed(0)
    with torch.device("cuda"):
        if name == "convolutions":
            return Training(Convolutions(64, 8), torch.randn(64, 3, 64, 64), torch.randint(0, 10, (64,)))
        model = nn.Sequential(*[Residual(1024, 0.1) for _ in range(8)])
        return Training(model, torch.randn(8192, 1024), torch.randint(0, 1024, (8192,)))


@pytest.mark.parametrize("name", ["convolutions", "residuals"])
def test_bits_and_peak_in_a_budget(name: str) -> None:
    torch._dynamo.reset()
    found = training(name)
    found.model.compile()
    found.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    expected = found.step()
    assert same(found.step(), expected)
    in_core_bytes = torch.cuda.max_memory_allocated()
    for share in (0.8, 0.6):
        budget_bytes = int(share * in_core_bytes)
        ooc = limit(found.model, budget_bytes)
        for _ in range(8):
            assert same(found.step(ooc), expected)
        found.model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with ooc.step():
            found.loss().backward()
        assert torch.cuda.max_memory_allocated() <= budget_bytes
        assert ooc.trace is not None
        assert any(op.name.startswith("triton") for op in ooc.trace.ops)
        assert ooc.store.num_parcels == 0
        ooc.close()
        found.model.zero_grad(set_to_none=True)
