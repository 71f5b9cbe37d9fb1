"""DistributedDataParallel, a budget on each rank: the same numbers as without."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outcore.limit import limit


def _train(rank: int, budgeted: bool) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ooc = limit(model, "100%", planner="swap-all") if budgeted else None
    torch.manual_seed(10 + rank)
    for _ in range(4):
        x, y = torch.randn(64, 16), torch.randint(0, 4, (64,))
        optimizer.zero_grad()
        if ooc is None:
            F.cross_entropy(model(x), y).backward()
        else:
            with ooc.step():
                F.cross_entropy(model(x), y).backward()
        optimizer.step()
    if ooc is not None:
        assert ooc.predicted is not None
        assert ooc.predicted.swapped_bytes > 0
        ooc.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


class RowParallel(nn.Module):
    """A sum over ranks in the middle of the forward, in place, that no schema mentions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        with torch.no_grad():
            dist.all_reduce(h)
        out: torch.Tensor = self.last(torch.tanh(h) * h)
        return out


def _train_row_parallel(rank: int, budgeted: bool) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    model = RowParallel()
    ooc = limit(model, "100%", planner="recompute-all") if budgeted else None
    grads = []
    for step in range(4):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
        model.zero_grad()
        if ooc is None:
            model(x).square().sum().backward()
        else:
            with ooc.step():
                model(x).square().sum().backward()
        grads += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if ooc is not None:
        ooc.close()
    return grads


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    plain, ours = _train(rank, False), _train(rank, True)
    plain += _train_row_parallel(rank, False)
    ours += _train_row_parallel(rank, True)
    same = all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    Path(folder, f"rank{rank}").write_text("same" if same else "different")
    dist.destroy_process_group()


@pytest.mark.slow
def test_each_rank_under_its_budget() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        start_processes(_rank, args=(port, folder), nprocs=2, join=True, start_method="spawn")
        assert [Path(folder, f"rank{rank}").read_text() for rank in range(2)] == ["same", "same"]
