"""On CUDA plans count on gradients being added in place, and hold where they are not."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.errors import BudgetTooSmall
from outcore.fitting.phases import Settled
from outcore.limit import Limited, limit
from outcore.units import GIB, MIB
from outcore.values import Plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]
NUM_STEPS = 24  # until the plan is final, and some more


@pytest.fixture(autouse=True)
def _repeats(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    gc.collect()  # what earlier tests left would be counted into the first plan, and gone when it is followed
    torch.cuda.empty_cache()
    yield
    torch.use_deterministic_algorithms(False)


class Quiet(TorchDispatchMode):
    """Looks at every op, and does nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(1024, 512), nn.Linear(512, 1024)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.wide(torch.nn.functional.gelu(self.narrow(x)))
        return out


class Projected(nn.Module):
    """q, k and v of an input with three axes: its gradients are views, and into those autograd never adds."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (part(x.tanh()) for part in self.parts)
        out: Tensor = x + query.sigmoid() * key.tanh() * value
        return out


def train(
    memory: int | None, *, given: Plan | None = None, under: bool = False, block: type[nn.Module] = Block
) -> tuple[list[Tensor], Limited | None]:
    """Blocks whose input's gradient is a sum, of 64 MiB: the peak of a lean backward is there."""
    torch.manual_seed(0)
    model = nn.Sequential(*(block() for _ in range(12)), nn.Linear(1024, 8)).cuda()
    x = torch.randn(16, 1024, 1024, device="cuda")
    x = x.flatten(0, 1) if block is Block else x
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ooc = limit(model, memory, plan=given) if memory else None
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        if under:
            with Quiet(), ooc.step() if ooc is not None else torch.enable_grad():
                model(x).square().mean().backward()
        else:
            with ooc.step() if ooc is not None else torch.enable_grad():
                model(x).square().mean().backward()
        optimizer.step()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], ooc


def check(expected: list[Tensor], got: list[Tensor], ooc: Limited | None, *, in_place: bool) -> Limited:
    for one, other in zip(expected, got, strict=True):
        assert torch.equal(one, other)
    assert ooc is not None
    assert ooc.timeline is not None
    assert ooc.predicted is not None
    (kind,) = ooc.kinds
    assert kind.phase.ready is not None
    assert kind.phase.ready.sums_in_place is in_place
    assert kind.num_left == 0
    assert ooc.timeline.peak_bytes <= ooc.predicted.peak_bytes + 4 * MIB
    assert ooc.timeline.peak_bytes <= ooc.budget.device_bytes
    if in_place:
        assert ooc.timeline.peak_bytes >= 0.98 * ooc.predicted.peak_bytes
    return ooc


def test_plans_count_on_sums_in_place_and_the_peak_is_as_predicted() -> None:
    expected, _ = train(None)
    ooc = check(expected, *train(GIB), in_place=True)
    plan = ooc.plan
    ooc.close()
    del ooc  # and its model: the plan that is given has no room for both
    ooc = check(expected, *train(GIB, given=plan), in_place=True)
    assert isinstance(next(iter(ooc.kinds)).phase, Settled)
    ooc.close()


def test_under_another_mode_they_do_not() -> None:
    expected, _ = train(None)
    check(expected, *train(GIB, under=True), in_place=False).close()


def test_gradients_that_are_views_are_not_counted_on() -> None:
    expected, _ = train(None, block=Projected)
    check(expected, *train(2 * GIB, block=Projected), in_place=True).close()


def test_a_budget_too_small_to_time_ops_is_still_planned() -> None:
    expected, _ = train(None)
    with pytest.raises(BudgetTooSmall) as caught:
        train(200 * MIB)
    needed_bytes: int = caught.value.needed_bytes
    del caught
    gc.collect()  # what the failed run held would count as somebody else's
    check(expected, *train(int(1.01 * needed_bytes)), in_place=True).close()
