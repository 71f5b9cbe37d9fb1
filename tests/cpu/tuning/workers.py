"""Two real processes over gloo, one of them slowed: what each rank of tests and benchmark does."""

from __future__ import annotations

import gc
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F

from outcore.tuning.workers.shares import Shares, measure_communication_s, of_ideal
from tests.cpu.tuning.digits import digits

BATCH = 120


def run_ranks(work: Callable[[int, dict[str, Any]], Any], settings: dict[str, Any], num_ranks: int = 2) -> list[Any]:
    """What `work(rank, settings)` returned on every rank, each a process of its own."""
    port = free_port()
    folder = Path(settings["folder"])
    start_processes(_rank, (port, num_ranks, work, settings), nprocs=num_ranks, start_method="spawn")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(num_ranks)]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank(rank: int, port: int, num_ranks: int, work: Callable[..., Any], settings: dict[str, Any]) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCH_CPP_LOG_LEVEL": "ERROR"}
    gc.freeze()  # what is there now need not be walked over at every recording
    dist.init_process_group("gloo", rank=rank, world_size=num_ranks)
    found = work(rank, settings)
    (Path(settings["folder"]) / f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


class CountedClock:
    """Advances by what is waited for, at once."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).double()


def global_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    data = digits()
    rows = torch.randint(len(data.train_labels), (BATCH,), generator=torch.Generator().manual_seed(number))
    return data.train_images[rows].double(), data.train_labels[rows]


def whole_gradient(model: nn.Module, number: int) -> list[torch.Tensor]:
    x, y = global_batch(number)
    return list(torch.autograd.grad(F.cross_entropy(model(x), y), list(model.parameters())))


def unequal(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """A sample takes `sample_s`, three times that on rank 1: slept, or only counted (`counted`), so that the busy cores
    of a test machine decide nothing. Shares are balanced on it; gradients are compared with one process."""
    model, clock = net().to(getattr(torch, settings.get("dtype", "float32"))), CountedClock()
    shares = Shares(BATCH, clock=clock if settings.get("counted") else time.perf_counter)
    wait = clock.wait if settings.get("counted") else time.sleep
    sample_s = settings["sample_s"] * (settings["slowed"] if rank == 1 else 1)
    worst, splits, steps_s = 0.0, [list(shares.counts)], []
    for number in range(settings["num_steps"]):
        x, y = (shares.take(part) for part in global_batch(number))
        x = x.to(next(model.parameters()).dtype)
        dist.barrier()
        began_s = time.perf_counter()
        with shares.timed():
            F.cross_entropy(model(x), y).backward()
            wait(sample_s * shares.mine)
        shares.average(model.parameters())
        steps_s.append(time.perf_counter() - began_s)
        exact = whole_gradient(net(), number)
        found = [p.grad.double() for p in model.parameters() if p.grad is not None]
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(found, exact)))
        model.zero_grad()
        if number % 2 == 1:
            shares.rebalance()
            splits.append(list(shares.counts))
    true_speeds = [1.0, 1.0 / settings["slowed"]]
    return {
        "counts": splits,
        "speeds": shares.speeds,
        "of_ideal": of_ideal(shares.counts, true_speeds),
        "equal_of_ideal": of_ideal(splits[0], true_speeds),
        "largest_gradient_error": worst,
        "step_s": steps_s,
        "predicted_step_s": shares.step_s(),
        "communication_s": measure_communication_s(4 << 20),
    }


if __name__ == "__main__":
    sys.exit("this file is imported by the tests and by benchmarks/tuning_accuracy.py")
