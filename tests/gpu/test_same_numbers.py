"""On CUDA: the zoo of networks under budgets, bit for bit, also with copies slowed down."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator

import pytest
import torch

from outcore.errors import BudgetTooSmall
from outcore.limit import limit
from outcore.planning import PLANNERS
from outcore.planning.planners.scoring import Planner
from tests.cpu import zoo
from tests.cpu.eager.test_remade import anything, remake_all
from tests.cpu.training import Outcome, build, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]


@pytest.fixture(autouse=True)
def _on_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(zoo.WHERE, "device", "cuda")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)  # with warn_only, attention would stay as it is
    yield
    torch.use_deterministic_algorithms(False)


@functools.cache
def plain(name: str) -> Outcome:
    """Plain PyTorch's numbers; a network whose own numbers change from run to run could show nothing."""
    first, second = train(*build(name)), train(*build(name))
    first.assert_same(second)
    return first


def under(name: str, budget: int, planner: str, delay_s: float) -> Outcome:
    """Trains under a budget and checks everything but the numbers."""
    gc.collect()  # the allocator's baseline must not hold another test's model
    model, loss = build(name)
    ooc = limit(model, budget, planner=planner)
    ooc.store.delay_s = delay_s
    try:
        got = train(model, loss, ooc)
        predicted, measured = ooc.predicted, ooc.timeline
        assert predicted is not None
        assert measured is not None
        assert measured.actions == predicted.actions
        assert measured.peak_bytes <= budget
        assert ooc.store.num_parcels == 0
    finally:
        ooc.close()
    return got


def least_bytes(name: str, planner: str) -> int:
    """What the error of a recorded step asks for; `limit` itself only knows the weights. A traceback holds the model
    and must not outlive this."""
    needed_bytes = 1
    for _ in range(2):
        try:
            under(name, needed_bytes, planner, 0.0)
        except BudgetTooSmall as error:
            needed_bytes = error.needed_bytes
        else:
            pytest.fail("the weights alone were enough")
    return needed_bytes


@pytest.mark.parametrize("delay_s", [0.0, 0.002], ids=["at-speed", "slowed"])
@pytest.mark.parametrize("planner", ["hybrid", "swap-all", "recompute-all"])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_same_numbers(name: str, planner: str, delay_s: float) -> None:
    expected = plain(name)
    expected.assert_same(under(name, least_bytes(name, planner), planner, delay_s))


@pytest.mark.parametrize("decided", [anything, remake_all])
@pytest.mark.parametrize("name", zoo.ZOO)
def test_same_numbers_where_values_are_remade(name: str, decided: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = plain(name)
    monkeypatch.setitem(PLANNERS, "recompute-all", decided)
    expected.assert_same(under(name, least_bytes(name, "recompute-all"), "recompute-all", 0.0))
