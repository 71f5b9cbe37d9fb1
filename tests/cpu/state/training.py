"""The same training twice: plain PyTorch, and with the state beside the device. Every bit is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import outcore
from outcore.errors import BudgetTooSmall
from outcore.state.state import State
from outcore.units import GIB, KIB

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
WHERE = {"device": "cpu"}  # tests on a GPU set another
WIDTH = 192  # a weight of this width has 144 KiB: it gets a home


class Net(nn.Module):
    """An embedding tied to the head, linear layers, a norm, and a weight that is read by a function."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, width)
        self.first = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, width, bias=False)
        self.borrowed = nn.Linear(width, width)
        self.head = nn.Linear(width, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.second(torch.relu(self.first(self.norm(x))))
        x = x + nn.functional.linear(x, self.borrowed.weight, self.borrowed.bias).tanh()
        x = x + self.second(x)
        logits: Tensor = self.head(x)
        return logits


class When(IntEnum):
    """When an update runs."""

    AT_STEP = 0
    LATER = 1  # when the weight is read next
    EARLY = 2  # in the backward, before it is asked for


@dataclass
class Result:
    losses: list[Tensor] = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)
    counts: dict[str, float] = field(default_factory=dict)

    def assert_same(self, other: Result) -> None:
        assert_equal(self.losses, other.losses)
        assert_equal(self.notes, other.notes)
        assert_equal(self.grads, other.grads)
        assert_equal(self.weights, other.weights)
        assert_equal(self.state, other.state)


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Tensor):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for mine, theirs in zip(one, other):
            assert_equal(mine, theirs)
    else:
        assert one == other


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randint(0, 100, (2, 6, 9), generator=generator).to(WHERE["device"])
    return x, y


def make(net: Callable[[], nn.Module] = Net) -> nn.Module:
    torch.manual_seed(0)
    return net().to(WHERE["device"])


Loop = Callable[["Training"], None]


@dataclass
class Training:
    """What a loop has at hand. `block()` is the step's `with` block, of ours or of nobody."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    outcome: Result
    ooc: State | outcore.Limited | None = None

    def block(self) -> Any:
        return nullcontext() if self.ooc is None else self.ooc.step()

    def backward(self, step: int, scale: float = 1.0) -> None:
        x, y = batch(step)
        with self.block():
            loss = nn.functional.cross_entropy(self.model(x).flatten(0, 1), y.flatten())
            (loss * scale).backward()
        self.outcome.losses.append(loss.detach())


def train(
    loop: Loop,
    make_optimizer: MakeOptimizer,
    *,
    folder: Path | None = None,
    later: int = When.LATER,
    window_bytes: int = 600 * KIB,
    net: Callable[[], nn.Module] = Net,
    delay_s: float = 0.0,
    memory_bytes: int = 0,
    by_cpu: bool = False,
) -> Result:
    """Trains plainly, or with a `folder` beside the device; in `memory_bytes` of it, activations included, or in the
    least that is said to succeed where those are too few."""
    options: dict[str, Any] = {
        "folder": folder,
        "later": later,
        "window_bytes": window_bytes,
        "net": net,
        "by_cpu": by_cpu,
    }
    while True:
        try:
            return _train(loop, make_optimizer, delay_s=delay_s, memory_bytes=memory_bytes, **options)
        except BudgetTooSmall as error:
            memory_bytes = max(error.needed_bytes, memory_bytes + 1)


def _train(
    loop: Loop,
    make_optimizer: MakeOptimizer,
    *,
    folder: Path | None,
    later: int,
    window_bytes: int,
    net: Callable[[], nn.Module],
    delay_s: float,
    memory_bytes: int,
    by_cpu: bool,
) -> Result:
    model = make(net)
    optimizer = make_optimizer(model.parameters())
    training = Training(model, optimizer, Result())
    if folder is not None and memory_bytes:
        limited = training.ooc = outcore.limit(
            model, memory_bytes, optimizer=optimizer, disk=folder, update="cpu" if by_cpu else "device"
        )
        assert limited.state is not None
        limited.state.window.homes.delay_s = delay_s
    elif folder is not None:
        window_bytes *= 3 if later == When.EARLY else 1
        state = training.ooc = State(
            model,
            optimizer,
            window_bytes=window_bytes,
            home_bytes=GIB,
            folder=folder,
            later=bool(later),
            by_cpu=by_cpu,
        )
        state.update_early(range(len(state.sizes)) if later == When.EARLY else ())
        state.window.homes.delay_s = delay_s
    loop(training)
    outcome = training.outcome
    outcome.grads = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    outcome.weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcome.state = optimizer.state_dict()
    if isinstance(training.ooc, outcore.Limited) and training.ooc.state is not None:
        for kind in training.ooc.kinds:
            assert kind.measured is None or kind.measured.peak_bytes <= memory_bytes
        window = training.ooc.state.window
        assert window.peak_bytes <= window.limit_bytes or len(training.ooc.state.resident)
        outcome.counts = training.ooc.stats()
    if isinstance(training.ooc, State):
        outcome.counts["early"] = training.ooc.num_early
        if training.ooc.host_updates is not None:
            outcome.counts["state_by_cpu"] = training.ooc.host_updates.num_done
    if training.ooc is not None:
        training.ooc.close()
        assert_equal(outcome.weights, dict(model.state_dict()))
    return outcome


def plain_loop(num_steps: int = 4) -> Loop:
    def loop(training: Training) -> None:
        for step in range(num_steps):
            training.backward(step)
            training.optimizer.step()
            training.optimizer.zero_grad()

    return loop
