"""What a process is set to changes what its kernels compute: an op made again must find it as it was, or not be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore.eager.replay import Call
from outcore.eager.switches import changed, switches
from outcore.errors import ReplayError
from outcore.limit import limit
from tests.cpu.eager.test_unusual_programs import data, gradients

pytestmark = [
    pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN"),
    pytest.mark.usefixtures("both_ways"),
]
Switch = Callable[[], AbstractContextManager[Any]]


def without_mkldnn() -> AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


@contextmanager
def in_double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Convolved(nn.Module):
    """Another library of convolutions in a part of the forward: it sums in another order."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.switch = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 16, 3), switch

    def forward(self, x: Tensor) -> Tensor:
        with self.switch():
            x = self.first(x).tanh()
        out: Tensor = self.second(x).sigmoid()
        return out


class Divided(nn.Module):
    """A quotient of whole numbers has the default type."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self.weight, self.switch = nn.Parameter(data(0, 4096)), switch

    def forward(self, x: Tensor) -> Tensor:
        with self.switch():
            share = (x[0, :, 0, 0].abs() * 100).long().repeat(512) / 7
        return (self.weight * share).tanh()


CASES = [(Convolved, without_mkldnn), (Divided, in_double)]


def loss_of(model: nn.Module) -> Callable[[int], Tensor]:
    return lambda step: model(data(step, 4, 8, 32, 32)).square().sum()


def test_the_switches_do_change_the_numbers() -> None:
    """Else the tests below could not fail."""
    x = data(0, 4, 8, 32, 32)
    for kind, switch in CASES:
        assert not torch.equal(kind(switch)(x).double(), kind(nullcontext)(x).double())


@pytest.mark.parametrize("planner", ["recompute-all", "swap-all", "keep-all"])
@pytest.mark.parametrize(("kind", "switch"), CASES)
def test_a_part_of_the_forward_under_other_switches(kind: type[Convolved], switch: Switch, planner: str) -> None:
    model = kind(switch)
    plain = gradients(model, loss_of(model), None)
    ooc = limit(model, "100%", planner=planner)
    got = gradients(model, loss_of(model), ooc)
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
    assert not any(kind.num_left for kind in ooc.kinds.values())
    ooc.close()


@pytest.mark.parametrize(("kind", "switch"), CASES)
def test_a_forward_inside_the_step_under_other_switches_than_its_backward(
    kind: type[Convolved], switch: Switch
) -> None:
    """The whole model: what counts is how the step began, not how the first op found it."""
    model = kind(nullcontext)
    loss = loss_of(model)

    def switched(step: int) -> Tensor:
        with switch():
            return loss(step)

    plain = gradients(model, switched, None)
    ooc = limit(model, "100%", planner="recompute-all")
    got = gradients(model, switched, ooc)
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
    ooc.close()


@pytest.mark.parametrize(("kind", "switch"), CASES)
def test_a_later_step_with_other_switches_leaves_its_plan(kind: type[Convolved], switch: Switch) -> None:
    model = kind(nullcontext)
    loss = loss_of(model)

    def switched(step: int) -> Tensor:
        model.switch = switch if step == 2 else nullcontext
        return loss(step)

    plain = gradients(model, switched, None, 6)
    ooc = limit(model, "100%", planner="recompute-all")
    got = gradients(model, switched, ooc, 6)
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
    assert [kind.num_left for kind in ooc.kinds.values()] == [1]
    assert ooc.plan is not None
    ooc.close()


def test_steps_that_all_run_under_other_switches_are_planned_as_any() -> None:
    model = Convolved(nullcontext)
    with without_mkldnn():
        plain = gradients(model, loss_of(model), None)
        ooc = limit(model, "100%", planner="recompute-all")
        got = gradients(model, loss_of(model), ooc)
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
    assert ooc.plan is not None
    assert "recompute" in ooc.plan.decisions.values()
    assert not any(kind.num_left for kind in ooc.kinds.values())
    ooc.close()


def test_a_backward_under_other_switches_is_refused_not_guessed() -> None:
    model = Convolved(nullcontext)
    ooc = limit(model, "100%", planner="recompute-all")
    gradients(model, loss_of(model), ooc)
    model.zero_grad()

    def train_once() -> None:
        with ooc.step():
            loss = loss_of(model)(0)
            with without_mkldnn():
                loss.backward()

    with pytest.raises(ReplayError) as caught:
        train_once()
    said = str(caught.value)
    assert "cannot be recomputed: torch.backends.mkldnn.enabled was True and is False since the forward" in said
    assert "before the step begins or after it ends, or use planner='swap'" in said
    model.zero_grad()
    plain = gradients(model, loss_of(model), None, 1)
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients(model, loss_of(model), ooc, 1)))
    ooc.close()


def test_calls_under_other_switches_are_not_the_same() -> None:
    one, matmul, clone = torch.ones(4, 4), torch.ops.aten.mm.default, torch.ops.aten.clone.default
    calls = {func: Call(func, (one, one), {}) for func in (matmul, clone)}
    torch.use_deterministic_algorithms(True)
    try:
        assert not calls[matmul].is_same((one, one), {})
        assert calls[clone].is_same((one, one), {})  # it has one kernel
    finally:
        torch.use_deterministic_algorithms(False)
    with in_double():
        assert not calls[clone].is_same((one, one), {})
    assert all(call.is_same((one, one), {}) for call in calls.values())


def test_few_are_the_first_of_all() -> None:
    everything, few = switches(), switches(few=True)
    assert everything[: len(few)] == few
    assert changed(everything, few) == changed(everything, everything) == ""
    precision, now = torch.get_float32_matmul_precision(), ""
    try:
        torch.set_float32_matmul_precision("medium" if precision != "medium" else "highest")
        now = changed(everything, switches())
    finally:
        torch.set_float32_matmul_precision(precision)
    assert now.startswith("the fp32 precision of matmul")
