"""On CUDA: the zoo of networks under budgets, bit for bit, also with copies slowed down."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from outcore.errors import BudgetTooSmall
from outcore.limit import limit
from tests.cpu import zoo
from tests.cpu.training import build, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(zoo.WHERE, "device", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("delay_s", [0.0, 0.002], ids=["at-speed", "slowed"])
@pytest.mark.parametrize("planner", ["hybrid", "swap-all", "recompute-all"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_same_numbers(name: str, planner: str, delay_s: float) -> None:
    plain = train(*build(name))
    model, loss = build(name)
    ooc = limit(model, "100%", planner="keep-all")
    train(model, loss, ooc, num_steps=2)
    assert ooc.plan is not None
    budget = (ooc.plan.in_core_peak_bytes + 3 * ooc.plan.before_bytes) // 4
    ooc.close()
    del model, loss, ooc
    gc.collect()
    model, loss = build(name)
    ooc = limit(model, budget, planner=planner)
    ooc.store.delay_s = delay_s
    try:
        got = train(model, loss, ooc)
    except BudgetTooSmall as error:
        budget = error.needed_bytes + 1024**2  # the allocator's baseline moves a little from run to run
        ooc.close()
        del model, loss, ooc
        gc.collect()
        model, loss = build(name)
        ooc = limit(model, budget, planner=planner)
        ooc.store.delay_s = delay_s
        got = train(model, loss, ooc)
    plain.assert_same(got)
    assert ooc.predicted is not None
    assert ooc.timeline is not None
    assert ooc.timeline.actions == ooc.predicted.actions
    assert ooc.timeline.peak_bytes <= budget
    assert ooc.store.num_parcels == 0
    ooc.close()
