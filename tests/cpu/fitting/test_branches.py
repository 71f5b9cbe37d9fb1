"""Steps that do different work under one limit: GANs, random depth. The same bits, within the budget, planned."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore.eager.execution import Execution
from outcore.fitting.running import RunningStep
from outcore.limit import Limited, limit

pytestmark = pytest.mark.usefixtures("both_ways")

Around = Callable[[str], AbstractContextManager[Any]]


class Gan(nn.Module):
    """Two networks under one limit; nobody calls the model that holds both."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.Tanh(), nn.Linear(128, 64), nn.Tanh(), nn.Linear(64, 32))
        self.critic = nn.Sequential(nn.Linear(32, 128), nn.Sigmoid(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1))

    def train_critic(self, noise: Tensor, real: Tensor) -> Tensor:
        fake = self.generator(noise).detach()
        loss: Tensor = self.critic(fake).mean() - self.critic(real).mean()
        return loss

    def train_generator(self, noise: Tensor) -> Tensor:
        loss: Tensor = -self.critic(self.generator(noise)).mean()
        return loss


def gan_steps(model: Gan, around: Around, num_steps: int, critics: int) -> Iterator[list[Tensor]]:
    """`critics` steps of the critic for one of the generator."""
    optimizers = [torch.optim.Adam(net.parameters(), 1e-3) for net in (model.generator, model.critic)]
    for step in range(num_steps):
        draw = torch.Generator().manual_seed(step)
        noise, real = torch.randn(64, 16, generator=draw), torch.randn(64, 32, generator=draw)
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


def counts(ooc: Limited) -> tuple[float, ...]:
    """Steps that were recorded, planned, left their plan, ran unplanned."""
    stats = ooc.stats()
    return stats["recorded"], stats["planned"], stats["left"], stats["unplanned"]


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
    num_recorded, num_planned, *others = counts(ooc)
    assert num_recorded <= 3  # the first step may have been recorded as one with compiled functions
    assert num_recorded + num_planned == 10
    assert others == [0, 0]


def test_steps_that_take_turns_are_told_apart_without_names() -> None:
    ooc = compare(Gan, lambda model, around: gan_steps(model, around, 16, critics=1), "100%")
    num_recorded, num_planned, num_left, _ = counts(ooc)
    assert num_recorded <= 3
    assert num_left <= 2
    assert num_planned >= 11


def test_a_pattern_of_five_and_one_is_learned() -> None:
    ooc = compare(Gan, lambda model, around: gan_steps(model, around, 30, critics=5), "100%")
    stats = ooc.stats()
    assert stats["recorded"] <= 4
    assert stats["left"] <= 3
    assert stats["planned"] >= 23


class RandomDepth(nn.Module):
    """Skips layers at random, as LayerDrop and stochastic depth do."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(8))
        self.layers = nn.ModuleList(layers)
        self.draw = random.Random(0)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x) if self.draw.random() < 0.8 else x
        return x


def depth_steps(model: RandomDepth, around: Around) -> Iterator[list[Tensor]]:
    for step in range(28):
        x = torch.randn(128, 64, generator=torch.Generator().manual_seed(step))
        with around("step"):
            loss = model(x).square().mean()
            loss.backward()
        yield [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
        model.zero_grad()


@pytest.mark.parametrize("planner", ["hybrid", "swap-all"])
def test_random_depth_runs_planned_as_far_as_it_goes(planner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is over the budget, also none that leaves its plan, but for the first one that does: what its plan keeps
    cannot be put away. No kind of step is given up."""
    peaks, complete = list[int](), RunningStep.complete

    def look(step: RunningStep) -> None:
        kind, listener = step._kind, step.listener
        assert kind is not None
        if step._watch is not None and isinstance(listener, Execution) and (kind.may_switch or listener.plan.on_plan):
            peaks.append(step._watch.peak.read().allocated_bytes)
        complete(step)

    monkeypatch.setattr(RunningStep, "complete", look)
    whole = RandomDepth()
    whole.draw.random = lambda: 0.0  # type: ignore[method-assign]
    memory = int(0.7 * in_core_bytes(lambda: whole, lambda model: model(torch.randn(128, 64)).square().mean()))
    peaks.clear()
    ooc = compare(RandomDepth, depth_steps, memory, planner=planner)
    assert len(peaks) > 15
    assert max(peaks) <= memory
    stats = ooc.stats()
    assert stats["unplanned"] == 0
    assert stats["recorded"] <= 10
    assert stats["planned"] + stats["left"] >= 18
    assert len(ooc.kinds) <= 8
