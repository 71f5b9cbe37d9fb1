"""Ops are looked at as long as the plan needs it, and no longer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outcore.eager import intercept
from outcore.eager.intercept import Interception, Listener, in_backward
from outcore.fitting.settings import FITTING
from outcore.limit import limit
from outcore.memory.device import CpuMemory
from outcore.units import MIB
from tests.cpu.fitting.pretended import Pretend
from tests.cpu.training import build, train


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every op that came to Python: was it in a backward?"""
    found: list[bool] = []
    really = Interception.listen

    def listen(self: Interception, listener: Listener, *, ops: bool) -> None:
        run, on_op = cast(Any, listener), listener.op

        def op(func: Any, args: Any, kwargs: Any) -> Any:
            found.append(in_backward())
            return on_op(func, args, kwargs)

        run.op = op
        really(self, listener, ops=ops)

    monkeypatch.setattr(Interception, "listen", listen)
    return found


def seen_in_the_last_step(seen: list[bool]) -> tuple[int, int]:
    """Ops of the forward and of the backward that Python saw in a step that nobody measures any more."""
    model, loss_of = build("resnet")
    ooc = limit(model, 1 * MIB, planner="recompute-all")
    train(model, loss_of, ooc, 2 + FITTING.num_measured)
    seen.clear()
    train(model, loss_of, ooc, 1)
    assert ooc.predicted is not None
    assert ooc.predicted.recomputed_bytes > 0
    ooc.close()
    return seen.count(False), seen.count(True)


def test_an_optimizer_that_is_known_is_not_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """To walk through a model's modules takes as long as many ops, after every step; and with several limits in a
    process each of them heard of every optimizer."""
    model, loss_of = build("resnet")
    ooc, optimizer = limit(model, "50%"), torch.optim.SGD(model.parameters(), lr=0.0)
    other = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.0)
    num_walks, walk = [0], model.parameters

    def parameters(*args: Any, **kwargs: Any) -> Any:
        num_walks[0] += 1
        return walk(*args, **kwargs)

    def walks_of(stepped: torch.optim.Optimizer) -> int:
        before = num_walks[0]
        stepped.step()
        return num_walks[0] - before

    monkeypatch.setattr(model, "parameters", parameters)
    with ooc.step():
        loss_of(model, 0).backward()
    assert isinstance(ooc.device_memory, CpuMemory)
    known = ooc.device_memory.optimizers
    assert [walks_of(one) for one in (optimizer, other, optimizer, other)] == [1, 1, 0, 0]
    assert set(known) == {optimizer}
    other.add_param_group({"params": [next(walk())]})  # ours, too, from now on
    assert [walks_of(other), walks_of(other)] == [1, 0]
    assert set(known) == {optimizer, other}
    ooc.close()


def test_no_op_of_a_backward_is_looked_at(seen: list[bool]) -> None:
    num_forward, num_backward = seen_in_the_last_step(seen)
    assert num_forward > 10
    assert num_backward == 0


def penalised(model: nn.Sequential, x: Tensor) -> Tensor:
    """Nothing is saved between the last op that is watched and the first backward, which saves."""
    out = model(x).tanh().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    penalty: Tensor = out + grad.square().sum()
    return penalty


def checkpointed(model: nn.Sequential, x: Tensor) -> Tensor:
    """The backward runs a forward, and that one saves."""
    out: Tensor = checkpoint(model[2:], model[:2](x).sigmoid(), use_reentrant=True)
    return out.sum()


@pytest.mark.parametrize("loss_of", [penalised, checkpointed])
def test_nothing_is_left_behind_by_a_backward_that_saves(
    loss_of: Callable[[nn.Sequential, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    Pretend(monkeypatch).settings(num_measured=0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Sigmoid(), nn.Linear(128, 64))
    ooc = limit(model, "100%", planner="recompute-all")
    for _ in range(3):
        model.zero_grad()
        with ooc.step():
            loss_of(model, torch.randn(128, 64, requires_grad=True)).backward()
        assert not is_watched()
    assert ooc.predicted is not None
    assert ooc.predicted.recomputed_bytes > 0
    ooc.close()


def test_our_kernel_keeps_the_compiler_away_only_where_it_is_near() -> None:
    """Keeping it away costs every op two microseconds, and how it is avoided depends on names inside PyTorch."""
    assert intercept._compiler_is_near is not None
    assert not intercept._compiler_is_near()


def is_watched() -> bool:
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(intercept._OPS))
