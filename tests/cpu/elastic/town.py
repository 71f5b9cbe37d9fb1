"""Workers as threads of one process: real stores, real gloo connections, the real centre, and no start-up time.

A worker's gradient is `curvature * (w - target(rank, step))`, so a NumPy reference can follow every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from outcore.elastic.center import Center, CenterConfig
from outcore.elastic.place import Place, open_place
from outcore.elastic.settings import Settings
from outcore.elastic.transport import TCPStore
from outcore.elastic.worker import Worker

Array = npt.NDArray[np.float64]
ETA = 0.05
SHAPES = ((3, 2), (4,))
NUM_WEIGHTS = 10
CURVATURE = np.linspace(0.5, 2.0, NUM_WEIGHTS)


def target(rank: int, step: int) -> Array:
    result: Array = np.sin(np.arange(NUM_WEIGHTS) + 1.7 * rank + 0.3 * step)
    return result


def first_weights() -> Array:
    return np.cos(np.arange(NUM_WEIGHTS)).astype(np.float32).astype(np.float64)


def gradient(weights: Array, rank: int, step: int) -> Array:
    result: Array = CURVATURE * (weights - target(rank, step))
    return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        start = torch.from_numpy(first_weights()).float()
        self.matrix = nn.Parameter(start[:6].view(3, 2).clone())
        self.bias = nn.Parameter(start[6:].clone())

    def vector(self) -> torch.Tensor:
        return torch.cat([self.matrix.reshape(-1), self.bias])

    def loss(self, rank: int, step: int) -> torch.Tensor:
        away = self.vector() - torch.from_numpy(target(rank, step)).float()
        return 0.5 * (torch.from_numpy(CURVATURE).float() * away * away).sum()


class Town:
    """A store, and as many seats as wanted; `center` is the live Center of the asynchronous methods."""

    def __init__(self, num_ranks: int, name: str = "town") -> None:
        self.num_ranks, self.name = num_ranks, name
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.centers: list[Center] = []

    def place(self, rank: int) -> Place:
        return open_place(rank, self.num_ranks, ("127.0.0.1", self.server.port), self.name, limit_s=10)

    def start_center(self, config: CenterConfig) -> None:
        self.centers.append(Center(config))
        threading.Thread(target=self.centers[-1].run, daemon=True).start()

    def worker(self, rank: int, net: nn.Module, settings: Settings, optimizer: Any = None) -> Worker:
        optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=ETA)
        return Worker(net, optimizer, settings, self.place(rank), self.start_center)

    def together(self, act: Callable[[int], Any]) -> list[Any]:
        """`act(rank)` for all ranks at once; the first error is raised here."""
        results: list[Any] = [None] * self.num_ranks
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = act(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "a worker hangs"
        return results


def train(worker: Worker, net: Net, rank: int, steps: range) -> list[Array]:
    """Weights after each step."""
    trail = []
    for step in steps:
        net.loss(rank, step).backward()
        worker.step()
        trail.append(weights_of(worker))
    return trail


def weights_of(worker: Worker) -> Array:
    return worker._local.weights.detach().double().numpy().copy()


def center_of(worker: Worker) -> Array:
    state = worker.center_state_dict()
    return np.concatenate([state[name].double().numpy().reshape(-1) for name in ("matrix", "bias")])
