"""Steps that do different work under one limit: GANs, random depth. The same bits, within the budget, planned."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from outcore.limit import Limited, limit

Around = Callable[[str], AbstractContextManager[Any]]


class Gan(nn.Module):
    """Two networks under one limit; nobody calls the model that holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32))
        self.critic = nn.Sequential(nn.Linear(32, 128), nn.Sigmoid(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))

    def train_critic(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        return self.critic(fake).mean() - self.critic(real).mean()

    def train_generator(self, noise: Tensor) -> Tensor:
        return -self.critic(self.generator(noise)).mean()


def gan_steps(model: Gan, around: Around, num_steps: int, critics: int) -> Iterator[list[Tensor]]:
    """`critics` steps of the critic for one of the generator."""
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (model.generator, model.critic)]
    for step in range(num_steps):
        draw = torch.Generator().manual_seed(step)
        noise, real = torch.randn(256, 16, generator=draw), torch.randn(256, 32, generator=draw)
        of_generator = step % (critics + 1) == critics
        with around("generator" if of_generator else "critic"):
            loss = model.train_generator(noise) if of_generator else model.train_critic(noise, real)
            loss.backward()
        yield [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizers[not of_generator].step()
        model.zero_grad()


def compare(
    make: Callable[[], nn.Module],
    steps: Callable[[Any, Around], Iterator[list[Tensor]]],
    memory: int | str,
    *,
    named: bool = False,
    planner: str = "hybrid",
) -> Limited:
    """Every step's numbers, and the peaks of those that follow a plan. The closed limit, for its counts."""
    torch.manual_seed(0)
    plain = list(steps(make(), lambda name: nullcontext()))
    torch.manual_seed(0)
    model = make()
    with warnings.catch_warnings(), limit(model, memory, planner=planner, measure=True) as ooc:
        warnings.simplefilter("error")
        for numbers, expected in zip(steps(model, lambda name: ooc.step(name if named else None)), plain, strict=True):
            assert all(map(torch.equal, numbers, expected))
            assert ooc.timeline is None or ooc.timeline.peak_bytes <= ooc.budget.device_bytes
    return ooc


def in_core_bytes(make: Callable[[], nn.Module], step: Callable[[nn.Module], Tensor]) -> int:
    with limit(make(), "100%", planner="keep-all") as ooc:
        for _ in range(2):
            with ooc.step():
                step(ooc.model).backward()
            ooc.model.zero_grad()
        assert ooc.plan is not None
        return ooc.plan.in_core_peak_bytes


def test_steps_with_names_have_plans_of_their_own_at_once() -> None:
    ooc = compare(Gan, lambda model, around: gan_steps(model, around, 10, critics=1), "100%", named=True)
    assert ooc.stats() == {"recorded": 2, "planned": 8, "left": 0, "unplanned": 0}
    assert len(ooc.kinds) == 2
