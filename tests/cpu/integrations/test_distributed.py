"""Data-parallel training in two processes, a budget on each rank: DistributedDataParallel, FSDP2, Accelerate."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from outcore.limit import Limited, limit


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


def _blocks() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(32, 4))


def _train_sharded(rank: int, budgeted: bool) -> list[torch.Tensor]:
    """FSDP2: weights are gathered and freed by resizing storages, in hooks of its own."""
    model = _blocks()
    for block in list(model)[:-1]:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    memory = ("780KiB", "820KiB")[rank]
    ooc = limit(model, memory) if budgeted else None
    torch.manual_seed(10 + rank)
    for _ in range(4):
        x, y = torch.randn(256, 32), torch.randint(0, 4, (256,))
        with ooc.step() if ooc is not None else nullcontext():
            F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    if ooc is not None:
        _assert_within(ooc)
    return [parameter.to_local().detach().clone() for parameter in model.parameters()]  # type: ignore[attr-defined]


def _train_accelerated(rank: int, budgeted: bool) -> list[torch.Tensor]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    assert accelerator.num_processes == 2
    torch.manual_seed(1)
    data = TensorDataset(torch.randn(2048, 32), torch.randint(0, 4, (2048,)))
    loader: Any = DataLoader(data, batch_size=256)
    plain = _blocks()
    model, optimizer, loader = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1), loader)
    assert isinstance(model, DistributedDataParallel)
    ooc = limit(accelerator.unwrap_model(model), ("700KiB", "740KiB")[rank]) if budgeted else None
    torch.manual_seed(10 + rank)
    for x, y in loader:
        with accelerator.accumulate(model):
            with ooc.step() if ooc is not None else nullcontext():
                accelerator.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    if ooc is not None:
        _assert_within(ooc)
    return [parameter.detach().clone() for parameter in plain.parameters()]


def _assert_within(ooc: Limited) -> None:
    """The rank keeps its own budget, which is less than a step takes in-core."""
    assert ooc.plan is not None
    assert ooc.timeline is not None
    found = ooc.timeline.peak_bytes, ooc.budget.device_bytes, ooc.plan.in_core_peak_bytes
    assert list(found) == sorted(found), found
    assert ooc.stats()["left"] == ooc.stats()["unplanned"] == 0
    ooc.close()


TRAININGS = (_train, _train_row_parallel, _train_sharded, _train_accelerated)


def _rank(rank: int, port: int, folder: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for train in TRAININGS:
        plain, ours = train(rank, False), train(rank, True)
        same = all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
        Path(folder, f"{train.__name__}{rank}").write_text("same" if same else "different")
    dist.destroy_process_group()


@pytest.mark.slow
def test_each_rank_under_its_budget(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    start_processes(_rank, args=(port, str(tmp_path)), nprocs=2, join=True, start_method="spawn")
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert told == {f"{train.__name__}{rank}": "same" for train in TRAININGS for rank in range(2)}
