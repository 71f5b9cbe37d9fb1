"""Trains a network from the zoo, plain or under a budget, and notes everything that must not change."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outcore.limit import Limited
from tests.cpu.zoo import WHERE, ZOO, Step


@dataclass
class Outcome:
    losses: list[float]
    grads: list[Tensor | None]
    state: dict[str, Tensor]
    rng: Tensor

    def is_same(self, other: Outcome) -> bool:
        try:
            self.assert_same(other)
        except AssertionError:
            return False
        return True

    def assert_same(self, other: Outcome) -> None:
        assert self.losses == other.losses
        for mine, theirs in zip(self.grads, other.grads, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert torch.equal(mine, theirs)
        for name, tensor in self.state.items():
            assert torch.equal(tensor, other.state[name]), name
        assert torch.equal(self.rng, other.rng)


def build(name: str) -> tuple[nn.Module, Step]:
    torch.manual_seed(0)
    model, loss = ZOO[name]()
    model.train().to(WHERE["device"])
    return model, loss


def train(model: nn.Module, loss_of: Step, ooc: Limited | None = None, num_steps: int = 5) -> Outcome:
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses, grads = [], []
    for step in range(num_steps):
        optimizer.zero_grad()
        with guard(ooc):
            loss = loss_of(model, step)
            loss.backward()
        losses.append(loss.item())
        grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    return Outcome(losses, grads, state, torch.get_rng_state())


def guard(ooc: Limited | None) -> AbstractContextManager[Any]:
    return ooc.step() if ooc is not None else nullcontext()
