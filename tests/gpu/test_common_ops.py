"""On CUDA: what several layers cast of one tensor is planned once, with the same numbers, inside the budget."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from outcore.limit import limit
from tests.cpu.eager.test_common_ops import Attention, num_merged
from tests.cpu.training import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]
NUM_LAYERS = 4


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention() for _ in range(NUM_LAYERS)), nn.Linear(64, 4)).to("cuda")


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(step)
    x = torch.randn(128, 256, 64, device="cuda", generator=generator)
    with torch.autocast("cuda", torch.bfloat16):
        out: Tensor = model(x)
    return out.float().square().mean()


@pytest.mark.parametrize("share", [0.95, 0.75])
def test_repeated_ops_are_one_value_with_the_same_numbers(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        gc.collect()
        wanted, model = train(net(), loss_of, num_steps=20), net()
        ooc = limit(model, "4GiB")
        train(model, loss_of, ooc, num_steps=3)
        trace, plan = ooc.trace, ooc.plan
        ooc.close()
        assert trace is not None
        assert plan is not None
        assert not plan.merges_ops
        assert num_merged(trace) == 2 * NUM_LAYERS
        memory, model = int(share * plan.in_core_peak_bytes), net()
        ooc = limit(model, memory)
        try:
            train(model, loss_of, ooc, num_steps=20).assert_same(wanted)
            assert ooc.plan is not None
            assert ooc.timeline is not None
            assert ooc.plan.merges_ops
            assert ooc.timeline.peak_bytes <= memory
            assert not any(kind.num_left for kind in ooc.kinds.values())
        finally:
            ooc.close()
    finally:
        torch.use_deterministic_algorithms(False)
