"""Ops are looked at as long as the plan needs it, and no longer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outcore.limit import NUM_MEASURED, limit
from outcore.recording.intercept import OpMode, in_backward
from outcore.units import MIB
from tests.cpu.training import build, train


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every op that came to Python: was it in a backward?"""
    found: list[bool] = []
    really = OpMode.__torch_dispatch__

    def dispatch(self: OpMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.append(in_backward())
        return really(self, func, types, args, kwargs)

    monkeypatch.setattr(OpMode, "__torch_dispatch__", dispatch)
    return found


@pytest.fixture
def alone_in_a_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seen_in_the_last_step(seen: list[bool]) -> tuple[int, int]:
    """Ops of the forward and of the backward that Python saw in a step that nobody measures any more."""
    model, loss_of = build("resnet")
    ooc = limit(model, 1 * MIB, planner="recompute-all")
    train(model, loss_of, ooc, 2 + NUM_MEASURED)
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
    assert [walks_of(one) for one in (optimizer, other, optimizer, other)] == [1, 1, 0, 0]
    assert set(ooc._optimizers or ()) == {optimizer}
    other.add_param_group({"params": [next(walk())]})  # ours, too, from now on
    assert [walks_of(other), walks_of(other)] == [1, 0]
    assert set(ooc._optimizers or ()) == {optimizer, other}
    ooc.close()


def test_no_op_of_a_backward_is_looked_at(seen: list[bool]) -> None:
    num_forward, num_backward = seen_in_the_last_step(seen)
    assert num_forward > 10
    assert num_backward == 0


@pytest.mark.usefixtures("alone_in_a_group")
def test_all_are_where_a_collective_may_write_unsaid(seen: list[bool]) -> None:
    _, num_backward = seen_in_the_last_step(seen)
    assert num_backward > 10


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
def test_no_mode_is_left_behind_by_a_backward_that_saves(
    loss_of: Callable[[nn.Sequential, Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["outcore.limit"], "NUM_MEASURED", 0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 128), nn.Sigmoid(), nn.Linear(128, 64))
    ooc = limit(model, "100%", planner="recompute-all")
    for _ in range(3):
        model.zero_grad()
        with ooc.step():
            loss_of(model, torch.randn(128, 64, requires_grad=True)).backward()
        assert torch._C._len_torch_dispatch_stack() == 0
    assert ooc.predicted is not None
    assert ooc.predicted.recomputed_bytes > 0
    ooc.close()


def test_no_wrapper_is_around_our_mode_where_no_compiler_is_near() -> None:
    """It costs every op two microseconds, and how it is avoided depends on names inside PyTorch."""
    assert OpMode.__torch_dispatch__.__name__ == "_dispatch"
