"""A step that is looked at computes what plain PyTorch computes, whatever it is made of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.limit import limit
from tests.cpu.eager.training import assert_same_steps, data

FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda h: -h.max(),
    "median": lambda h: -h.median(),
    "nanmedian": lambda h: -h.nanmedian(),
    "prod": lambda h: (h * 0.1 + 1).prod(1).square().mean(),
    "prod with zeros": lambda h: torch.relu(h[:2]).prod(1).sum(),
    "cumprod": lambda h: (h * 0.1 + 1).cumprod(1).sum(),
    "norm": lambda h: -h.norm(float("inf")),
}


class Linear(nn.Module):
    def __init__(self, then: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.then = nn.Linear(32, 32), then

    def forward(self, x: Tensor) -> Tensor:
        return self.then(torch.tanh(self.linear(x)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    loss: Tensor = model(data(step, 64, 32)).sum()
    return loss


@pytest.mark.parametrize("name", FORMULAS)
def test_formulas_that_ask_whether_a_mode_is_active(name: str) -> None:
    assert_same_steps(
        lambda: Linear(FORMULAS[name]), loss_of, planners=("keep-all", "hybrid"), shares=(1.0,), num_steps=3
    )


class Branch(nn.Module):
    """A branch calls a module: a hook on it would be compiled along."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        out: Tensor = torch.cond(h.sum() > 0, lambda t: self.second(t).sin(), lambda t: t.cos(), (h,))
        return out


@pytest.mark.timeout(120)
def test_operators_that_call_functions() -> None:
    torch._dynamo.reset()
    assert_same_steps(Branch, loss_of, planners=("hybrid", "swap-all"), shares=(1.0,), num_steps=3)


def made_in_the_step(h: Tensor) -> Tensor:
    """PyTorch makes a parameter from a view, and that must have come through no Python."""
    return h * nn.Parameter(torch.full((32,), 0.5))


class Marked(torch.Tensor):
    pass


def of_another_class(h: Tensor) -> Tensor:
    return h.as_subclass(Marked).cos().as_subclass(Tensor)


def vectorised(h: Tensor) -> Tensor:
    out: Tensor = torch.vmap(lambda row: row.sin() * row.sum())(h)
    return out


def with_a_tangent(h: Tensor) -> Tensor:
    value, tangent = torch.func.jvp(torch.tanh, (h,), (torch.ones_like(h),))[:2]
    return torch.as_tensor(value * tangent)


def compiled_in_the_step(h: Tensor) -> Tensor:
    out: Tensor = torch.compile(lambda t: (t.sin() * t).tanh(), backend="aot_eager")(h)
    return out


@pytest.mark.timeout(120)
@pytest.mark.parametrize("then", [made_in_the_step, of_another_class, vectorised, with_a_tangent, compiled_in_the_step])
def test_what_runs_inside_a_step(then: Callable[[Tensor], Tensor]) -> None:
    torch._dynamo.reset()
    assert_same_steps(lambda: Linear(then), loss_of, planners=("recompute-all", "swap-all"), shares=(1.0,), num_steps=3)


class Quiet(TorchDispatchMode):
    """Looks at every op, and does nothing."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("planner", ["recompute-all", "swap-all"])
@pytest.mark.parametrize("around", ["step", "model", "backward"])
def test_a_mode_of_the_users_around_any_part_of_a_step(around: str, planner: str) -> None:
    """It is on the stack of modes, where nothing of ours is: no plan is left, and the numbers are the same."""

    def gradients(*, ours: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid())
        ooc = limit(model, "100%", planner=planner) if ours else None
        for step in range(4):
            model.zero_grad()
            with Quiet() if around == "step" else torch.enable_grad(), ooc.step() if ooc else torch.enable_grad():
                with Quiet() if around == "model" else torch.enable_grad():
                    loss = model(data(step, 64, 32)).sin().sum()
                with Quiet() if around == "backward" else torch.enable_grad():
                    loss.backward()
        if ooc is not None:
            (kind,) = ooc.kinds.values()
            assert (kind.num_left, kind.num_steps) == (0, 3)
            ooc.close()
        assert torch._C._len_torch_dispatch_stack() == 0
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    assert all(torch.equal(a, b) for a, b in zip(gradients(ours=False), gradients(ours=True), strict=True))


class CompiledLater(nn.Module):
    """It compiles a part of itself when steps are no longer measured."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.num_calls = nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 32), nn.Tanh()), 0
        self.compiled = torch.compile(self.last, backend="aot_eager")

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        h = torch.tanh(self.first(x))
        out: Tensor = self.compiled(h) if self.num_calls > 6 else self.last(h)
        return out


@pytest.mark.timeout(120)
def test_what_is_compiled_in_a_step_that_looks_at_writes_only() -> None:
    torch._dynamo.reset()
    assert_same_steps(CompiledLater, loss_of, planners=("swap-all", "keep-all"), shares=(1.0,), num_steps=9)
