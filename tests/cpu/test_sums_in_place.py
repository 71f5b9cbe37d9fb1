"""Where gradients meet: autograd adds in place, but not under a mode. The model of the allocator knows."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.limit import limit
from outcore.planning import lower, plan
from outcore.planning.holes import allocations
from outcore.values import Budget


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


def test_the_model_of_the_allocator_adds_in_place() -> None:
    model = nn.Sequential(nn.Linear(64, 64), Block(), Block())
    x = torch.randn(4096, 64)
    ooc = limit(model, "1GiB")
    with ooc.step():
        model(x).square().mean().backward()
    trace, machine = ooc.trace, ooc.machine
    ooc.close()
    assert trace is not None
    sums = [op for op in trace.ops if op.phase == "backward" and op.name == "aten.add.Tensor"]
    assert len(sums) == 2
    schedule = lower(trace, plan(trace, machine, Budget(10**9, 0, 10**9)), machine)
    events = list(allocations(trace, schedule))
    taken = [who for kind, who, _ in events if kind == "take" and isinstance(who, int)]
    given = [who for kind, who, _ in events if kind == "give" and isinstance(who, int)]
    made = {trace.values[op.writes[0]].storage for op in sums}
    assert made.isdisjoint(taken)
    assert sorted(taken) == sorted(set(given))
    for op in sums:  # what was added to is there until its sum goes
        first = trace.values[op.reads[0]].storage
        assert given.count(first) == 1
        at = next(i for i, (kind, who, _) in enumerate(events) if kind == "give" and who == first)
        later = [who for kind, who, _ in events[:at] if kind == "take" and isinstance(who, int)]
        assert any(trace.storages[who].born > op.slot for who in later)
