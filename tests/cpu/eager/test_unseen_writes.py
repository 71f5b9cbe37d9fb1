"""Memory that changes without an op that says so: custom functions, running statistics, buffers, tensor subclasses."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FusedMovingAvgObsFakeQuantize
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from outcore.eager.remaking import checksum, has_same_bytes
from outcore.errors import ReplayError
from outcore.limit import limit
from outcore.memory.device import CpuMemory
from outcore.memory.store import Store
from tests.cpu.eager.test_unusual_programs import assert_same, data, gradients

pytestmark = pytest.mark.usefixtures("both_ways")

PLANNERS = ["recompute-all", "swap-all", "keep-all"]


@pytest.fixture
def drops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: while a step is recorded, what is quickly made again is not swapped."""
    monkeypatch.setattr(CpuMemory, "is_slow_to_pin", True)


def state_after(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for buffer in model.buffers()]


def check(
    make: Callable[[], nn.Module], loss_of: Callable[[nn.Module, int], Tensor], planner: str, **memory: Any
) -> None:
    """Gradients and buffers, over steps that update buffers."""
    plain, model = make(), make()
    model.load_state_dict(plain.state_dict())
    wanted = gradients(plain, lambda step: loss_of(plain, step), None, 5)
    ooc = limit(model, memory.get("memory", "100%"), planner=planner)
    got = gradients(model, lambda step: loss_of(model, step), ooc, 5)
    ooc.close()
    for one, other in zip([*wanted, *state_after(plain)], [*got, *state_after(model)], strict=True):
        assert torch.equal(one, other)


class Recurrent(nn.Module):
    """Gates are chunks of one storage, each with a version counter of its own, and written in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gru, self.changes = nn.Linear(32, 32), nn.GRU(32, 48), False

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        out: Tensor = self.gru(x * x if self.changes else x)[0]
        return out


@pytest.mark.parametrize("planner", PLANNERS)
def test_gates_that_are_chunks_of_one_storage_in_a_step_that_leaves_its_plan(planner: str) -> None:
    torch.manual_seed(0)
    model = Recurrent()

    def loss_of(step: int) -> Tensor:
        model.changes = step == 3
        out: Tensor = model(data(step, 12, 32, 32)).square().mean()
        return out

    plain = gradients(model, loss_of, None, 6)
    ooc = limit(model, "100%", planner=planner)
    got = gradients(model, loss_of, ooc, 6)
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
    assert any(kind.num_left for kind in ooc.kinds.values())
    ooc.close()


@pytest.mark.parametrize("planner", PLANNERS)
def test_statistics_that_their_own_op_reads_and_writes(planner: str) -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.fake = nn.Linear(64, 64), FusedMovingAvgObsFakeQuantize()
            self.second = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.second(torch.tanh(self.fake(self.first(x)))).sigmoid()
            return out

    check(Quantised, lambda model, step: model(data(step, 128, 64)).square().sum(), planner)


class PutsGradient(torch.autograd.Function):
    """As Liger's cross entropy: a kernel that is no op puts the gradient where the logits were."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        numbers = logits.detach().numpy()
        loss = float((numbers**2).sum())
        numbers[...] = 2 * numbers
        ctx.save_for_backward(logits.detach())
        return torch.tensor(loss)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0]


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grads[0]


class UsesAsMemory(Square):
    """As Liger's SwiGLU: its backward writes what it computes into what it saved, by a kernel that is no op."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        numbers = x.detach().numpy()
        numbers[...] = 2 * numbers * grads[0].numpy()
        return torch.from_numpy(numbers.copy())


class Thrice(torch.autograd.Function):
    """A kernel that is no op writes in place, and the function says so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        numbers = x.detach().numpy()
        numbers *= 3
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 3 * grads[0]


class InPlace(nn.Module):
    """What is saved is made from what was written into, which itself is not saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        apply: Any = Thrice.apply
        out: Tensor = self.second(apply(self.first(x)).tanh()).sum()
        return out


class Foreign(nn.Module):
    def __init__(self, last: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(64, 64), nn.Linear(64, 64), last

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(torch.tanh(self.first(x)))
        apply: Callable[[Tensor], Tensor] = self.last.apply
        if self.last is PutsGradient:
            return apply(h)
        grown = h.exp()  # made before, so asked for after
        out: Tensor = apply(h).sum() + grown.sum()
        return out


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("last", [PutsGradient, UsesAsMemory])
def test_kernels_that_write_into_what_a_custom_function_saves(last: Any, planner: str) -> None:
    check(lambda: Foreign(last), lambda model, step: model(data(step, 256, 64)), planner)


def test_what_a_backward_uses_as_memory_is_read_by_no_rerun() -> None:
    model = Foreign(UsesAsMemory)
    ooc = limit(model, "100%", planner="recompute-all")
    gradients(model, lambda step: model(data(step, 256, 64)), ooc, 2)
    assert ooc.trace is not None
    assert {op.name: op.replay for op in ooc.trace.ops}["aten.exp.default"] == "no"
    ooc.close()


@pytest.mark.usefixtures("drops")
def test_a_kernel_that_wrote_into_what_is_saved_while_it_is_recorded() -> None:
    check(lambda: Foreign(PutsGradient), lambda model, step: model(data(step, 256, 64)), "hybrid")


@pytest.mark.parametrize("planner", PLANNERS)
def test_what_is_made_from_what_a_kernel_wrote_into(planner: str) -> None:
    check(InPlace, lambda model, step: model(data(step, 256, 64)), planner)


@pytest.mark.usefixtures("drops")
def test_what_is_made_from_what_a_kernel_wrote_into_while_it_is_recorded() -> None:
    check(InPlace, lambda model, step: model(data(step, 256, 64)), "hybrid")


def test_what_a_custom_function_saves_unchanged_may_be_made_again() -> None:
    """That is found out while it is recorded: else no network with custom functions would recompute much."""

    torch.manual_seed(0)
    first, second = nn.Linear(64, 64), nn.Linear(64, 64)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = first, second

        def forward(self, x: Tensor) -> Tensor:
            square: Any = Square.apply
            out: Tensor = self.second(square(torch.tanh(self.first(x))).sin())
            return out

    model = Net()
    ooc = limit(model, "100%", planner="recompute-all")
    plain = gradients(model, lambda step: model(data(step, 256, 64)).sum(), None)
    got = gradients(model, lambda step: model(data(step, 256, 64)).sum(), ooc)
    assert all(torch.equal(one, other) for one, other in zip(plain, got, strict=True))
    assert ooc.plan is not None
    assert ooc.trace is not None
    tanh = next(op for op in ooc.trace.ops if op.name == "aten.tanh.default").writes[0]
    assert ooc.plan.decisions[tanh] == "recompute"
    ooc.close()


class Squared(nn.Module):
    """A custom function, called under other switches than the ops before it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Conv2d(4, 8, 3), UsesAsMemory

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        apply: Callable[[Tensor], Tensor] = self.last.apply
        with torch.backends.mkldnn.flags(enabled=False):
            return apply(h)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
@pytest.mark.parametrize("planner", PLANNERS)
def test_a_custom_function_under_other_switches(planner: str) -> None:
    check(Squared, lambda model, step: model(data(step, 8, 4, 16, 16)).sum(), planner)


@pytest.mark.usefixtures("drops")
def test_what_is_made_in_time_stays_where_nothing_can_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The queue's copy is made before the queue is written into, and there is no room for it on the host."""
    monkeypatch.setattr(Store, "send", lambda self, data, tiers=("host", "disk"): None)
    check(Queue, lambda model, step: model(data(step, 256, 64)).square().sum(), "hybrid")


def test_a_storage_is_told_from_another_by_its_sums() -> None:
    one = torch.arange(1001, dtype=torch.uint8)
    other = one.clone()
    assert checksum(one.untyped_storage()) == checksum(other.untyped_storage())
    assert has_same_bytes(one, other)
    other[1000] += 1
    assert checksum(one.untyped_storage()) != checksum(other.untyped_storage())
    assert not has_same_bytes(one, other)
    assert not has_same_bytes(one, one[:8].clone())
    turned = torch.randn(256).flip(0)
    assert checksum(turned.untyped_storage()) != checksum(turned.flip(0).untyped_storage())
    assert checksum(torch.empty(0).untyped_storage()) == checksum(torch.empty(0).untyped_storage())


class Queue(nn.Module):
    """As MoCo: what is compared with a queue, which then takes what came."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(64, 64)
        self.queue = nn.Buffer(torch.randn(64, 512))

    def forward(self, x: Tensor) -> Tensor:
        keys = torch.tanh(self.first(x))
        out: Tensor = (keys @ self.queue.clone().detach()).logsumexp(1)
        with torch.no_grad():
            self.queue[:, :32] = keys[:32].T
        return out


class Codebook(nn.Module):
    """As a VQ-VAE with moving averages: a codebook is read, and moved by its `.data` before what it gave is saved."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.codes = nn.Buffer(torch.randn(32, 64))

    def forward(self, x: Tensor) -> Tensor:
        z = torch.tanh(self.first(x))
        nearest = torch.cdist(z, self.codes).argmin(1)
        quantised = F.embedding(nearest, self.codes)
        with torch.no_grad():
            self.codes.data.mul_(0.9).add_(F.one_hot(nearest, 32).float().T @ z, alpha=0.01)
        out: Tensor = self.second(z + (quantised - z).detach()) * quantised
        return out


class Twice(nn.Module):
    """Statistics are read in a pass that does not train, and then written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(64, 64), nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        self.norm.eval()
        one = torch.tanh(self.norm(self.first(x)))
        other = self.norm(self.first(x).sin())
        self.norm.train()
        return one.sum(1) + torch.tanh(self.norm(self.first(2 * x))).sum(1) + torch.tanh(other).sum(1)


@pytest.mark.usefixtures("drops")
@pytest.mark.parametrize("planner", ["recompute-all", "hybrid", "swap"])
@pytest.mark.parametrize("make", [Queue, Codebook, Twice])
def test_buffers_that_a_step_reads_and_then_changes(make: Callable[[], nn.Module], planner: str) -> None:
    check(make, lambda model, step: model(data(step, 256, 64)).square().sum(), planner)


@pytest.mark.usefixtures("drops")
@pytest.mark.parametrize("planner", ["keep-all", "swap", "swap-all"])
def test_who_asks_that_nothing_be_made_again_has_it_so_from_the_first_step_on(planner: str) -> None:
    """A backward under another default type is refused, and told of these planners."""

    def gradients_of(planner: str, num_steps: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
        ooc = limit(model, "100%", planner=planner) if planner else None
        for step in range(num_steps):
            with ooc.step() if ooc is not None else nullcontext():
                loss = model(data(step, 256, 64)).sum()
                torch.set_default_dtype(torch.float64)
                try:
                    loss.backward()
                finally:
                    torch.set_default_dtype(torch.float32)
        if ooc is not None:
            ooc.close()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    with pytest.raises(ReplayError, match="planner='swap'"):
        gradients_of("hybrid", 1)
    plain = gradients_of("", 3)
    assert all(torch.equal(one, other) for one, other in zip(plain, gradients_of(planner, 3), strict=True))


class Batched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layers[0](x)).sin()
        weights = torch.stack([layer.weight for layer in self.layers])  # type: ignore[misc]
        out: Tensor = torch.func.vmap(lambda w, x: torch.tanh(x @ w), in_dims=(0, None))(weights, h).mean(0)
        return out


def test_the_last_op_that_is_looked_at_before_a_vmap() -> None:
    """Our mode was taken off inside it, and the thread could not compute any more, for good."""
    model = Batched()
    ooc = limit(model, "100%", planner="recompute-all")
    gradients(model, lambda step: model(data(step, 512, 64)).square().mean(), ooc, 2)
    trace, plan = ooc.trace, ooc.plan
    ooc.close()
    assert trace is not None
    assert plan is not None
    first = next(
        value for value in plan.decisions if trace.ops[trace.values[value].producer].name == "aten.sin.default"
    )
    plan = replace(plan, decisions={value: "recompute" if value == first else "keep" for value in plan.decisions})
    wanted = gradients(model, lambda step: model(data(step, 512, 64)).square().mean(), None, 8)
    ooc = limit(model, "100%", plan=plan)
    got = gradients(model, lambda step: model(data(step, 512, 64)).square().mean(), ooc, 8)
    ooc.close()
    assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
    assert float(torch.ones(3).sum()) == 3


@pytest.mark.parametrize("planner", PLANNERS)
def test_tensors_that_are_more_than_what_lies_below_python(planner: str) -> None:
    """A wrapper, and ragged batches of both layouts: kept, as they are."""
    torch.manual_seed(0)
    weight, other = nn.Parameter(torch.randn(64, 64)), nn.Parameter(torch.randn(64, 64))

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.other = weight, other

        def forward(self, x: Tensor) -> Tensor:
            pair: Any = TwoTensor(x @ self.weight, x @ self.other).sin().cos()
            parts = [x[:100] @ self.weight, x[100:] @ self.other]
            strided = torch.nested.as_nested_tensor(parts).sin()
            jagged = torch.nested.as_nested_tensor(parts, layout=torch.jagged).sin()
            rest = torch.cat([*strided.unbind(), *jagged.unbind()])
            out: Tensor = (pair.a * pair.b).tanh().sum() + rest.tanh().sum()
            return out

    model = Odd()
    assert_same(model, lambda step: model(data(step, 256, 64)), planner)


def test_tangents_that_have_bytes_and_no_memory() -> None:
    """An efficient zero of forward-mode differentiation; swapping it read where nothing is."""
    model = nn.Linear(64, 64)

    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(torch._efficientzerotensor((64, 64)))
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0] * 2 + ctx.saved_tensors[0].sum()

    double: Any = Saves.apply
    assert_same(model, lambda step: double(model(data(step, 64, 64))).sum(), "swap-all")


class Sometimes(nn.Module):
    """Through `.data`, whose versions are its own, what is saved is written into in some steps and not in others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.changes = nn.Linear(64, 64), nn.Linear(64, 64), False

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.first(x))
        aside = torch.ones_like(h)
        (h if self.changes else aside).data.mul_(0.5)
        out: Tensor = torch.tanh(self.last(torch.tanh(h) * h))
        return out


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_saved_result_that_only_some_steps_write_into(planner: str) -> None:
    def loss_of(model: nn.Module, step: int) -> Tensor:
        model.changes = step >= 3  # type: ignore[assignment]
        out: Tensor = model(data(step, 256, 64)).square().sum()
        return out

    check(Sometimes, loss_of, planner)


class Named(Tensor):
    """A subclass that does nothing more."""


@pytest.mark.parametrize("made_in_place", [False, True])
@pytest.mark.parametrize("changes", [False, True])
def test_a_subclass_in_the_place_of_a_recorded_tensor(made_in_place: bool, changes: bool) -> None:
    """Below autograd its alias counts versions for itself: a change in place was never noticed, and one before the step
    taken for one in it."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = torch.tanh(self.linear(torch.tanh(x * 2.0)) + x).sin()
            return out

    torch.manual_seed(0)
    model = Net()
    ooc = limit(model, "1GiB", planner="recompute-all")

    def gradients_of(number: int, around: AbstractContextManager[Any]) -> list[Tensor]:
        model.zero_grad()
        leaf = data(number, 32, 64).requires_grad_()
        x = (leaf * 1.5).mul_(2) if made_in_place else leaf * 3
        x = x.as_subclass(Named) if number >= 3 else x
        with around:
            out = model(x)
            if changes and number >= 3:
                with torch.no_grad():
                    x.add_(1)
            out.sum().backward()
        found = [leaf.grad, *(parameter.grad for parameter in model.parameters())]
        return [grad for grad in found if grad is not None]

    for number in range(6):
        wanted, got = gradients_of(number, nullcontext()), gradients_of(number, ooc.step())
        assert len(wanted) == 3
        assert all(torch.equal(one, other) for one, other in zip(wanted, got, strict=True))
    ooc.close()


def test_a_wrapper_in_the_place_of_a_recorded_tensor() -> None:
    model = nn.Sequential(nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    ooc = limit(model, "1GiB", planner="recompute-all")

    def gradient_of(number: int, around: AbstractContextManager[Any]) -> Tensor:
        x: Any = data(number, 32, 64)
        x = (TwoTensor(x, x * 2) if number >= 3 else x).requires_grad_()
        with around:
            model(x).sum().backward()
        return torch.cat([x.grad.a, x.grad.b]) if number >= 3 else x.grad

    for number in range(6):
        assert torch.equal(gradient_of(number, nullcontext()), gradient_of(number, ooc.step()))
    ooc.close()
