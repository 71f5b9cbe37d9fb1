"""Where gradients meet: autograd adds in place, but not in a recorded step. `sums_in_place` knows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.limit import limit
from outcore.planning import lower, plan, simulate, verify
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.planning.trace_index import index_of
from outcore.values import Budget, Machine, Op, Trace
from tests.cpu.fitting.pretended import Pretend, Unwatched


class Block(nn.Module):
    """Two branches, whose gradients meet at its input."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.one(x.tanh()) + self.other(x.sin())
        return out


class Adds(TorchDispatchMode):
    """Which ops a step makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def num_bytes_added(backward: Callable[[], object]) -> int:
    """How much a backward allocates where gradients meet."""
    with torch.profiler.profile(profile_memory=True) as seen:
        backward()
    return sum(max(0, event.self_cpu_memory_usage) for event in seen.key_averages() if event.key == "aten::add")


def test_autograd_adds_in_place_and_not_under_a_mode() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Block(), Block())
    x = torch.randn(512, 64)
    losses = [model(x).square().mean() for _ in range(2)]
    assert num_bytes_added(losses[0].backward) == 0
    with Adds() as adds:
        losses[1].backward()
    assert "aten.add.Tensor" in adds.names


def recorded(model: nn.Module, x: Tensor) -> tuple[Trace, Machine]:
    ooc = limit(model, "1GiB")
    with ooc.step():
        model(x).square().mean().backward()
    trace, machine = ooc.trace, ooc.machine
    ooc.close()
    assert trace is not None
    return trace, machine


def sums_of(trace: Trace) -> list[Op]:
    return [op for op in trace.ops if op.phase == "backward" and op.name == "aten.add.Tensor"]


def test_a_recorded_step_is_turned_into_the_one_that_runs() -> None:
    trace, machine = recorded(nn.Sequential(nn.Linear(64, 64), Block(), Block()), torch.randn(4096, 64))
    joined = sums_in_place(trace)
    assert len(sums_of(trace)) == 2
    for op in sums_of(joined):
        first, total = joined.values[op.reads[0]], joined.values[op.writes[0]]
        assert (total.storage, total.version) == (first.storage, first.version + 1)
        was = trace.values[op.writes[0]].storage
        assert joined.storages[was].bytes == 0
        assert joined.storages[first.storage].dies == trace.storages[was].dies
    schedule = lower(trace, plan(trace, machine, Budget(10**9, 0, 10**9)), machine)
    verify(joined, replace(schedule, fingerprint=joined.fingerprint))
    before, after = simulate(trace, schedule, machine), simulate(joined, schedule, machine)
    assert after.step_s == before.step_s
    assert after.peak_bytes <= before.peak_bytes
    for op in sums_of(trace):  # the first, the second, and in the recorded step what was made of them
        was, now = (int(index_of(step).natural_bytes[op.slot]) for step in (trace, joined))
        assert was - now == 4096 * 64 * 4


def test_sums_of_sums_lie_in_one_block() -> None:
    class Three(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() + x.sin() + x.cos()

    trace, _ = recorded(nn.Sequential(nn.Linear(64, 64), Three()), torch.randn(256, 64))
    joined = sums_in_place(trace)
    sums = sums_of(joined)
    assert len(sums) == 2
    assert len({joined.values[op.writes[0]].storage for op in sums}) == 1
    assert [joined.values[op.writes[0]].version for op in sums] == [1, 2]


def test_a_gradient_that_somebody_holds_is_not_added_into() -> None:
    kept: list[Tensor] = []

    class Watched(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            left, right = x.tanh(), x.sin()
            for branch in (left, right):
                assert branch.grad_fn is not None
                branch.grad_fn.register_hook(lambda made, given: kept.extend(made))
            return left + right

    trace, _ = recorded(nn.Sequential(nn.Linear(64, 64), Watched()), torch.randn(256, 64))
    assert len(kept) == 2
    assert len(sums_of(trace)) == 1
    assert sums_in_place(trace) == trace


def test_a_gradient_that_comes_twice_is_not_added_into_itself() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + x

    trace, _ = recorded(nn.Sequential(nn.Linear(64, 64), Twice()), torch.randn(256, 64))
    assert sums_of(trace)
    assert sums_in_place(trace) == trace


def test_a_sum_in_a_formula_is_not_autograds_own() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            return x * 2

        @staticmethod
        def backward(ctx, given):  # type: ignore[no-untyped-def]
            return given + torch.ones_like(given)

    class Formulas(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            variance, mean = torch.var_mean(x, dim=1, keepdim=True)  # its formula adds two gradients of its own
            doubled: Tensor = Doubled.apply(x * variance + mean)  # type: ignore[no-untyped-call]
            return doubled

    trace, _ = recorded(nn.Sequential(nn.Linear(64, 64), Formulas()), torch.randn(256, 64))
    assert len(sums_of(trace)) == 3  # of the function, of var_mean, and where x's gradients meet
    assert sum(op.joins for op in trace.ops) == 1


def test_a_backward_that_is_differentiated_adds_nothing_in_place() -> None:
    model, x = nn.Sequential(nn.Linear(64, 64), Block(), Block()), torch.randn(256, 64, requires_grad=True)
    ooc = limit(model, "1GiB")
    with ooc.step():
        (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        slope.square().sum().backward()
    ooc.close()
    assert ooc.trace is not None
    assert any(op.joins for op in ooc.trace.ops)
    assert sums_in_place(ooc.trace) is ooc.trace


def test_it_stays_the_same_step() -> None:
    trace, _ = recorded(nn.Sequential(nn.Linear(64, 64), Block(), Block()), torch.randn(256, 64))
    joined = sums_in_place(trace)
    assert joined != trace
    assert joined.fingerprint == trace.fingerprint


def bytes_of_sums(trace: Trace) -> int:
    """What a step's own sums allocate in its backward."""
    return sum(trace.bytes_of(op.writes[0]) for op in sums_of(trace) if trace.values[op.writes[0]].version == 0)


class Projected(nn.Module):
    """q, k and v, as attention makes them: their input has three axes, so its gradients are views."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        return torch.stack([part(x) for part in (self.q, self.k, self.v)]).sin()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.words((x * 100).long().abs() % 512).mean(1), self.words.weight)


class Hooked(nn.Module):
    """A hook adds to a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        noise = torch.full_like(y, 1e-3)
        y.register_hook(lambda given: given + noise)
        return y.sin()


class Residual(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + x.tanh() * x.sin()


@pytest.mark.parametrize(
    "model", [Projected(), Tied(), Hooked(), Residual(), nn.GRUCell(64, 64)], ids=lambda m: type(m).__name__
)
def test_planned_sums_allocate_what_real_ones_do(model: nn.Module) -> None:
    x = torch.randn(8, 32, 64) if isinstance(model, Projected) else torch.randn(256, 64)
    whole = nn.Sequential(nn.Identity() if isinstance(model, Tied) else nn.Linear(64, 64), model)
    trace, _ = recorded(whole, x)
    assert bytes_of_sums(sums_in_place(trace)) == num_bytes_added(whole(x).square().mean().backward)


@pytest.mark.parametrize("around", ["backward", "the model's end", "nothing"])
def test_a_backward_under_a_mode_is_planned_for_that(around: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class End(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with Adds() if around == "the model's end" else nullcontext():
                return x.tanh().sin().sum()

    pretend = Pretend(monkeypatch)
    pretend.settings(num_measured=0)
    model = nn.Sequential(nn.Linear(64, 64), Block(), Block(), End())
    ooc = pretend.limit(model, "1GiB", Unwatched, planner="swap-all")
    in_place, num_bytes = [], []
    for _ in range(4):
        model.zero_grad()
        with ooc.step():
            loss = model(torch.randn(256, 64))
            with Adds() if around == "backward" else nullcontext():
                num_bytes.append(num_bytes_added(loss.backward))
        (kind,) = ooc.kinds
        in_place.append(kind.phase.ready is not None and kind.phase.ready.sums_in_place)
    ooc.close()
    assert in_place == ([False, True, False, False] if around == "backward" else [False, True, True, True])
    assert kind.is_watched is (around == "backward")
    assert kind.num_left == 0
    sums_bytes = 2 * 256 * 64 * 4
    assert num_bytes == ([sums_bytes] * 4 if around == "backward" else [sums_bytes, 0, 0, 0])
