"""Loops as people write them: every one must give plain PyTorch's numbers and leave nothing behind."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from outcore.fitting.hooks import ACTIVE
from outcore.limit import Limited, limit

Around = Callable[[], AbstractContextManager[Any]]
Loop = Callable[[nn.Module, Around], list[Tensor]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.norm = nn.BatchNorm1d(64)
        self.middle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 4)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor, *, twice: bool = False) -> Tensor:
        h = F.relu(self.norm(self.first(x)))
        h = self.drop(torch.tanh(self.middle(h)))
        if twice:
            h = self.drop(torch.tanh(self.middle(h)))
        out: Tensor = self.last(h)
        return out


def batch(step: int, size: int = 32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(size, 16, generator=generator), torch.randint(0, 4, (size,), generator=generator)


def plain_step(model: nn.Module, around: Around, step: int, size: int = 32, **kwargs: Any) -> Tensor:
    x, y = batch(step, size)
    with around():
        loss = F.cross_entropy(model(x, **kwargs), y)
        loss.backward()
    return loss.detach()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def accumulation(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(4):
        losses += [plain_step(model, around, 10 * step + micro) for micro in range(3)]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def accumulation_inside_one_step(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(4):
        with around():
            losses += [plain_step(model, nullcontext, 10 * step + micro) for micro in range(3)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses


def several_forwards(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(4):
        with around():
            outs = [model(batch(10 * step + part)[0]) for part in range(3)]
            loss = (outs[0] - outs[1]).square().mean() + outs[2].logsumexp(-1).mean()
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def evaluation_between(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(5):
        with around():
            with torch.no_grad():
                model.eval()
                losses.append(model(batch(99)[0]).sum())
                model.train()
            losses.append(plain_step(model, nullcontext, step))
        with torch.no_grad():
            losses.append(model.eval()(batch(98, 7)[0]).sum())
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def retained_graph(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(4):
        x, y = batch(step)
        with around():
            out = model(x)
            first = F.cross_entropy(out, y)
            first.backward(retain_graph=True)
            (out.square().mean() * 0.1).backward()
        losses.append(first.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def graph_beyond_the_step(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(4):
        x, y = batch(step)
        with around():
            loss = F.cross_entropy(model(x), y)
        loss.backward()  # outside: the handles must know what to do
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def smaller_last_batch(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(9):
        losses.append(plain_step(model, around, step, 32 if step % 3 < 2 else 11))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def changing_branches(model: nn.Module, around: Around) -> list[Tensor]:
    """The same call, other work inside: nothing can be told before it happens."""
    optimizer, losses = sgd(model), []
    for step in range(8):
        x, y = batch(step)
        with around():
            h = model(x)
            if step % 2:
                h = h * torch.sigmoid(h) + model(x)
            loss = F.cross_entropy(h, y)
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def keyword_branches(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(8):
        losses.append(plain_step(model, around, step, twice=bool(step % 2)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def mixed_precision(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(5):
        x, y = batch(step)
        with around():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y)
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
        optimizer.zero_grad()
    return losses


def adam_inside(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for step in range(5):
        x, y = batch(step)
        with around():
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def checkpoint_inside(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(4):
        x, y = batch(step)
        with around():
            h = model(x.requires_grad_())
            h = checkpoint(lambda h: torch.sin(h.exp()) * h, h, use_reentrant=False)
            loss = F.cross_entropy(h, y)
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def second_derivatives(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    model.norm.eval()  # type: ignore[union-attr]
    for step in range(4):
        x, y = batch(step)
        x.requires_grad_()
        with around():
            loss = F.cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            (loss + slope.square().sum()).backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def parts_called_directly(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(4):
        x, y = batch(step)
        with around():
            loss = F.cross_entropy(model.last(torch.tanh(model.middle(model.first(x)))), y)  # type: ignore[operator]
            loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def exception_in_the_middle(model: nn.Module, around: Around) -> list[Tensor]:
    optimizer, losses = sgd(model), []
    for step in range(7):
        x, y = batch(step)
        try:
            with around():
                loss = F.cross_entropy(model(x), y)
                if step in (0, 2, 4):
                    raise KeyError("the user's own")
                loss.backward()
        except KeyError:
            optimizer.zero_grad()
            continue
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


LOOPS: list[Loop] = [
    accumulation,
    accumulation_inside_one_step,
    several_forwards,
    evaluation_between,
    retained_graph,
    graph_beyond_the_step,
    smaller_last_batch,
    changing_branches,
    keyword_branches,
    mixed_precision,
    adam_inside,
    checkpoint_inside,
    second_derivatives,
    parts_called_directly,
    exception_in_the_middle,
]


@contextmanager
def _budgeted(model: nn.Module, planner: str) -> Iterator[Limited]:
    ooc = limit(model, "100%", planner=planner)
    yield ooc
    gc.collect()
    assert ooc.store.num_parcels == 0
    assert not ACTIVE
    ooc.close()


@pytest.mark.filterwarnings("ignore:outcore. steps called alike keep doing different work")
@pytest.mark.parametrize("planner", ["swap-all", "recompute-all", "hybrid"])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_loop_gives_the_same_numbers(loop: Loop, planner: str) -> None:
    torch.manual_seed(3)
    plain, ours = Net(), Net()
    ours.load_state_dict(plain.state_dict())
    torch.manual_seed(4)
    expected = loop(plain, nullcontext)
    rng = torch.get_rng_state()
    torch.manual_seed(4)
    with _budgeted(ours, planner) as ooc:
        got = loop(ours, ooc.step)
        assert torch.equal(rng, torch.get_rng_state())
        assert any(kind.num_steps for kind in ooc.kinds.values()) or loop is changing_branches
    assert len(expected) == len(got)
    assert all(torch.equal(a, b) for a, b in zip(expected, got))
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name
