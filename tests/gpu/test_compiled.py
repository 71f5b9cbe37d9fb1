"""On CUDA: a compiled step in a byte budget has the bits of the same step compiled in-core.

cuDNN's fastest kernels for some convolutions do not repeat their own bits: they are told to be deterministic. What a
step compiled in-core does not repeat all the same is not compared, and must be little.
"""

from __future__ import annotations

from collections.abc import Iterator

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


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.backends.cudnn.deterministic = True
    yield
    torch.backends.cudnn.deterministic = False


def in_core(found: Training) -> tuple[list[torch.Tensor], list[int]]:
    """What a step computes, and which of it a second, third and fourth one compute, too."""
    first, *others = (found.step() for _ in range(4))
    repeated = [at for at, one in enumerate(first) if all(torch.equal(one, other[at]) for other in others)]
    assert 0 in repeated, "the loss does not repeat itself"
    assert len(repeated) >= 0.9 * len(first), f"only {len(repeated)} of {len(first)} repeat themselves"
    return first, repeated


@pytest.mark.parametrize("name", ["convolutions", "residuals"])
def test_bits_and_peak_in_a_budget(name: str) -> None:
    torch._dynamo.reset()
    found = training(name)
    found.model.compile()
    found.step()
    expected, repeated = in_core(found)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    found.step()
    in_core_bytes = torch.cuda.max_memory_allocated()
    for share in (0.8, 0.6):
        budget_bytes = int(share * in_core_bytes)
        ooc = limit(found.model, budget_bytes)
        for _ in range(8):
            got = found.step(ooc)
            assert same([got[at] for at in repeated], [expected[at] for at in repeated])
            del got
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
