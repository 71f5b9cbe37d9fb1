"""Workers that are out-of-core themselves: elastic averaging and a memory budget together, in real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import start_processes

from outcore.elastic.place import open_place
from outcore.elastic.settings import Settings
from outcore.elastic.transport import TCPStore
from outcore.elastic.worker import Worker
from outcore.limit import limit

pytestmark = pytest.mark.timeout(120)
NUM_STEPS = 6
LEVELS: tuple[Literal[1, 2, 3], ...] = (1, 3)
MEMORY_BYTES = 2 * 1024**2


def deep_net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True)) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), *layers, nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * 256, 4))


def train(rank: int, port: int, out: str) -> None:
    """One process: per level a few steps, plain and then under a budget, each with workers of its own name."""
    torch.save({level: train_twice(rank, port, level) for level in LEVELS}, f"{out}/{rank}.pt")


def train_twice(rank: int, port: int, level: Literal[1, 2, 3]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, budget in (("plain", 0), ("limited", MEMORY_BYTES)):
        net = deep_net()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
        settings = Settings(method="sync-easgd", period=2, level=level, limit_s=20)
        place = open_place(rank, 2, ("127.0.0.1", port), f"{name} {level}", limit_s=20)
        with Worker(net, optimizer, settings, place, lambda config: None) as worker:
            ooc = limit(net, budget) if budget else None
            for step in range(NUM_STEPS):
                torch.manual_seed(100 * rank + step)
                x, y = torch.randn(32, 1, 16, 16), torch.randint(0, 4, (32,))
                if ooc is None:
                    nn.functional.cross_entropy(net(x), y).backward()
                else:
                    with ooc.step():
                        nn.functional.cross_entropy(net(x), y).backward()
                worker.step()
            found[name] = {"weights": net.state_dict(), "center": worker.center_state_dict()}
        if ooc is not None:
            assert ooc.plan is not None
            assert ooc.timeline is not None
            found["in_core_bytes"], found["peak_bytes"] = ooc.plan.in_core_peak_bytes, ooc.timeline.peak_bytes
            ooc.close()
    return found


def test_a_limited_worker_averages_the_same_numbers(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start_processes(train, args=(server.port, str(tmp_path)), nprocs=2, join=True, start_method="spawn")
    for rank in range(2):
        for found in torch.load(tmp_path / f"{rank}.pt").values():
            assert found["peak_bytes"] <= MEMORY_BYTES < found["in_core_bytes"]
            for part in ("weights", "center"):
                for name, tensor in found["plain"][part].items():
                    assert torch.equal(tensor, found["limited"][part][name]), (part, name)
