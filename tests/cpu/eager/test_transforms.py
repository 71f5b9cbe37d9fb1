"""Transforms of torch.func inside a step: the same bits, no plan left, and what is saved around them still planned."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacrev, vjp, vmap
from torch.nn import functional as F

from outcore.limit import limit
from tests.cpu.eager.training import assert_same_steps, data

pytestmark = pytest.mark.usefixtures("both_ways")


class Net(nn.Module):
    """A transform between layers whose saved tensors are planned."""

    def __init__(self, transform: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid())
        self.small, self.last = nn.Linear(32, 2), nn.Linear(32, 32)
        self.transform = transform

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h * self.transform(self.small, h).mean()
        out: Tensor = torch.tanh(self.last(h)).square()
        return out


def score(model: nn.Module, row: Tensor) -> Tensor:
    return torch.as_tensor(model(row)).sin().square().sum()


def use_grad(model: nn.Module, h: Tensor) -> Tensor:
    return torch.as_tensor(grad(lambda z: score(model, z))(h))


def use_vjp(model: nn.Module, h: Tensor) -> Tensor:
    value, pull = vjp(lambda z: torch.tanh(model(z)), h)[:2]
    return torch.as_tensor(pull(value.cos())[0])


def use_jacrev(model: nn.Module, h: Tensor) -> Tensor:
    return torch.as_tensor(jacrev(lambda z: torch.tanh(model(z)))(h[:4]))


def use_hessian(model: nn.Module, h: Tensor) -> Tensor:
    return torch.as_tensor(hessian(lambda z: score(model, z))(h[0]))


def use_vmap_of_grad(model: nn.Module, h: Tensor) -> Tensor:
    """Gradients of each sample, with respect to weights."""

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.as_tensor(functional_call(model, weights, (row,))).sin().sum()

    per_sample = vmap(grad(loss), in_dims=(None, 0))(dict(model.named_parameters()), h)
    return torch.stack([gradient.square().mean() for gradient in per_sample.values()])


def use_functional_call(model: nn.Module, h: Tensor) -> Tensor:
    weights = {name: weight * 1.5 for name, weight in model.named_parameters()}
    return torch.as_tensor(functional_call(model, weights, (h,)))


TRANSFORMS = [use_grad, use_vjp, use_jacrev, use_hessian, use_vmap_of_grad, use_functional_call]


def loss_of(model: nn.Module, step: int) -> Tensor:
    return F.mse_loss(model(data(step, 256, 32)), data(step + 100, 256, 32))


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transform_inside_a_step(transform: Callable[[nn.Module, Tensor], Tensor]) -> None:
    assert_same_steps(lambda: Net(transform), loss_of, planners=("hybrid", "recompute-all"), shares=(0.8,), num_steps=3)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_its_plan_is_followed(transform: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Net(transform)
    with limit(model, "100%", planner="swap-all") as ooc:
        for step in range(4):
            model.zero_grad()
            with ooc.step():
                loss_of(model, step).backward()
        assert (ooc.stats()["planned"], ooc.stats()["left"]) == (3, 0)
        assert ooc.predicted is not None
        assert ooc.predicted.swapped_bytes >= 6 * 256 * 32 * 4  # what is saved before and after the transform


def ensemble(model: nn.Module, x: Tensor) -> Tensor:
    """Several models as one: `vmap` lets saved-tensor hooks be."""
    weights = {name: torch.stack([weight, weight * 1.5]) for name, weight in model.named_parameters()}
    outs = vmap(lambda some: functional_call(model, some, (x,)), in_dims=(0,))(weights)
    return torch.as_tensor(outs).square().mean()


def learning_to_learn(model: nn.Module, x: Tensor) -> Tensor:
    """A step of gradient descent inside, and the gradient through it outside."""
    weights = dict(model.named_parameters())
    slopes = grad(lambda some: functional_call(model, some, (x,)).square().mean())(weights)
    moved = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
    return torch.as_tensor(functional_call(model, moved, (x,))).square().mean()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("loss", [ensemble, learning_to_learn])
def test_the_whole_model_is_called_inside_of_one(loss: Callable[[nn.Module, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32), nn.Sigmoid())

    def gradients(step: int, around: AbstractContextManager[Any]) -> list[Tensor]:
        model.zero_grad()
        with around:
            loss(model, data(step, 64, 32)).backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = [gradients(step, nullcontext()) for step in range(4)]
    with limit(model, "100%", planner="recompute-all") as ooc:
        for step in range(4):
            got = gradients(step, ooc.step())
            assert len(got) == 4
            assert all(map(torch.equal, got, expected[step]))
        assert ooc.stats()["planned"] >= 2  # of 4; one more is recorded where the compiler was used before
        assert ooc.stats()["left"] == ooc.stats()["unplanned"] == 0


def test_a_step_that_is_nothing_but_a_transform_is_told_to_be_unlimited() -> None:
    """What is saved inside is nobody's but the transform's: the promise cannot be kept, and that is said."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh())
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    per_sample = vmap(grad(lambda some, row: functional_call(model, some, (row,)).square().mean()), in_dims=(None, 0))
    x = data(0, 64, 32)
    expected = per_sample(weights, x)
    with limit(model, "100%") as ooc:
        with pytest.warns(UserWarning, match="the step is not limited"), ooc.step():
            got = per_sample(weights, x)
        assert all(torch.equal(got[name], expected[name]) for name in weights)
