"""Small compiled trainings that the tests of compiled steps share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch._inductor.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from outcore.limit import Limited


class Residual(nn.Module):
    """Products, an activation and dropout, as in a transformer."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(dropout)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return out


class Convolutions(nn.Module):
    """Batch normalisation with running statistics, and activations that are added to."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for convolution, norm in zip(self.convolutions, self.norms):
            x = F.relu(norm(convolution(x)) + x)
        out: Tensor = self.last(x.mean((2, 3)))
        return out


class Training:
    """A model with a batch: the same step from the same state, again and again."""

    def __init__(self, model: nn.Module, x: Tensor, y: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> None:
        self.model, self.x, self.y, self.run = model, x, y, run or model
        self._start = {name: value.clone() for name, value in model.state_dict().items()}

    def loss(self) -> Tensor:
        return F.cross_entropy(self.run(self.x).float(), self.y)

    def step(self, ooc: Limited | None = None) -> list[Tensor]:
        """The loss, all gradients and all buffers of one step."""
        self.model.load_state_dict(self._start)
        self.model.zero_grad(set_to_none=True)
        torch.manual_seed(1)
        if ooc is None:
            loss = self.loss()
            loss.backward()
        else:
            with ooc.step():
                loss = self.loss()
                loss.backward()
        gradients = [parameter.grad.clone() for parameter in self.model.parameters() if parameter.grad is not None]
        return [loss.detach().clone(), *gradients, *(buffer.clone() for buffer in self.model.buffers())]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def residuals(depth: int = 4, width: int = 64, batch: int = 256, dropout: float = 0.1) -> Training:
    torch.manual_seed(0)
    model = nn.Sequential(*[Residual(width, dropout) for _ in range(depth)])
    return Training(model, torch.randn(batch, width), torch.randint(0, width, (batch,)))


def convolutions(depth: int = 4) -> Training:
    torch.manual_seed(0)
    return Training(Convolutions(8, depth), torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,)))


@contextmanager
def quick_compilation() -> Iterator[None]:
    """One process, one thread, no vector instructions: half the time for the same program."""
    settings: dict[str, Any] = {"compile_threads": 1, "cpp.threads": 1, "cpp.simdlen": 0}
    torch._dynamo.reset()
    with torch._inductor.config.patch(settings):
        yield
    torch._dynamo.reset()


def peak_bytes(step: Callable[[], object]) -> int:
    """The most bytes above those at the start, by what the CPU's allocator itself tells."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    level = highest = 0
    assert found.profiler is not None
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            level += event.nbytes()
            highest = max(highest, level)
    return highest
