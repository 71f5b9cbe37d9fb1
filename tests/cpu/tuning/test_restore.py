"""`untouched`: whatever is tried inside, everything is the same afterwards, and is the same object."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outcore.errors import TuningError
from outcore.tuning.data.restore import untouched, without_state

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw-tensor-lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), capturable=False, foreach=False),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3),
}


class Net(nn.Module):
    """Tied weights, BatchNorm, dropout, and a buffer that is replaced and not written."""

    drift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.register_buffer("drift", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.drop(self.norm(self.first(x)))
        self.drift = 0.9 * self.drift + h.detach().mean(0)
        out: torch.Tensor = self.tied(h)
        return out


def train(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    for _ in range(num_steps):
        x = torch.randn(8, 6) + random.random() + float(np.random.rand())

        def closure(x: torch.Tensor = x) -> float:
            optimizer.zero_grad()
            loss = F.mse_loss(net(x), x)
            loss.backward()
            return float(loss.detach())

        optimizer.step(closure)


def facts(net: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Everything that must be equal, and the identities that must stay."""
    tensors = [*net.parameters(), *net.buffers(), *(p.grad for p in net.parameters() if p.grad is not None)]
    found: list[Any] = [(id(t), t.data_ptr(), t.detach().clone()) for t in tensors]
    found.append(copy.deepcopy(optimizer.state_dict()))
    found.append([module.training for module in net.modules()])
    found += [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    return found


def same(one: Any, two: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, two)
    if isinstance(one, np.ndarray):
        return bool(np.array_equal(one, two))
    if isinstance(one, dict):
        return one.keys() == two.keys() and all(same(one[key], two[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    return bool(one == two)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("trained", [0, 3])
def test_everything_is_put_back(name: str, trained: int) -> None:
    torch.manual_seed(0)
    net = Net()
    optimizer = OPTIMIZERS[name](net.parameters())
    train(net, optimizer, trained)
    before = facts(net, optimizer)
    with untouched(net, optimizer):
        train(net, optimizer, 4)
        net.eval()
        net.norm.train()
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 10
            group["new"] = 1
        net.first.weight.data = torch.zeros(6, 6)
        assert not same(before, facts(net, optimizer))
    assert same(before, facts(net, optimizer))
    assert net.tied.weight is net.first.weight


def test_training_goes_on_as_if_nothing_had_been_tried() -> None:
    ends = []
    for tried in (False, True):
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        net = Net()
        optimizer = OPTIMIZERS["adam"](net.parameters())
        train(net, optimizer, 2)
        if tried:
            with untouched(net, optimizer):
                train(net, optimizer, 3)
        train(net, optimizer, 2)
        ends.append([p.detach().clone() for p in net.parameters()])
    assert same(ends[0], ends[1])


def test_also_after_an_exception_and_with_others() -> None:
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    shuffle, numbers, dice = torch.Generator().manual_seed(3), np.random.default_rng(3), random.Random(3)
    weight = other.weight.detach().clone()
    expected = (
        torch.rand(2, generator=torch.Generator().manual_seed(3)).tolist(),
        np.random.default_rng(3).random(),
        random.Random(3).random(),
    )

    def fail() -> None:
        with untouched(net, optimizer, others=(other, scheduler, shuffle, numbers, dice)):
            nn.init.zeros_(other.weight)
            torch.rand(5, generator=shuffle)
            numbers.random(), dice.random()
            for _ in range(3):
                optimizer.step()
                scheduler.step()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert torch.equal(other.weight, weight)
    assert scheduler.last_epoch == 0
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert (torch.rand(2, generator=shuffle).tolist(), numbers.random(), dice.random()) == expected


def test_what_cannot_be_put_back_is_refused_before_anything_runs() -> None:
    with pytest.raises(TuningError, match="give it state_dict"), untouched(nn.Linear(1, 1), others=[object()]):
        raise AssertionError("must not run")
    with pytest.raises(TuningError, match="pass one batch"), untouched(nn.LazyLinear(3)):
        raise AssertionError("must not run")


def test_tensors_of_a_graph_that_is_still_to_be_walked_stay_usable() -> None:
    net = nn.Linear(3, 3)
    x = torch.ones(2, 3, requires_grad=True)
    loss = net(x).sum()
    with untouched(net, torch.optim.SGD(net.parameters(), lr=0.1)), torch.no_grad():
        net.weight.data.mul_(2)
    loss.backward()
    assert x.grad is not None
    assert torch.allclose(x.grad[0], net.weight.detach().sum(0))


def test_a_state_that_is_no_dictionary_is_refused_in_a_sentence() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.state[net.first.weight] = [torch.zeros(1)]
    with pytest.raises(TuningError, match="what SGD keeps of a parameter is no dictionary"), without_state(optimizer):
        pass
