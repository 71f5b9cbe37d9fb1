"""Where gradients meet: autograd adds in place, but not under a mode. `sums_in_place` knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.limit import limit
from outcore.planning import lower, plan, simulate, verify
from outcore.planning.sums import sums_in_place
from outcore.planning.terrain import terrain_of
from outcore.values import Budget, Machine, Op, Trace


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
        was, now = (int(terrain_of(step).natural_bytes[op.slot]) for step in (trace, joined))
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
