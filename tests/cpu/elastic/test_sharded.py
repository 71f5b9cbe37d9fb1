"""Two replicas, each sharded by FSDP2 over two processes: the numbers of two whole replicas."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from outcore.elastic.methods import find_method
from outcore.elastic.place import host_store
from outcore.elastic.settings import Settings
from outcore.elastic.sharded import find_shard
from outcore.elastic.worker import Worker, join
from outcore.errors import ElasticError

from . import forked
from .town import Town

pytestmark = pytest.mark.timeout(120)
NUM_STEPS = 6
CASES: dict[str, dict[str, Any]] = {
    "sync-easgd": {"method": "sync-easgd", "period": 2, "level": 3},
    "diloco": {"method": "diloco", "period": 3},
    # Fragments are parts of what a rank holds, not of the whole: one fragment has the numbers of a whole replica.
    "streaming": {"method": "streaming-diloco", "period": 3, "fragments": 1, "delay": 1},
    "int8": {"method": "diloco", "period": 3, "wire_dtype": torch.int8},
}


def make_net() -> nn.Sequential:
    torch.manual_seed(0)
    frozen = nn.Linear(3, 7).requires_grad_(False)
    return nn.Sequential(frozen, nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


def learn(worker: Worker, net: nn.Module, replica: int) -> None:
    for step in range(NUM_STEPS):
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step + replica))
        (net(x) - x.sum(1, keepdim=True)).square().mean().backward()
        worker.step()


def work(rank: int, port: int, folder: str) -> None:
    """One of four processes: every case in turn, as a user's script does it."""
    told = {"RANK": rank, "WORLD_SIZE": 4, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in told.items()} | {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    found = {}
    for name, chosen in CASES.items():
        net = make_net()
        with torch.no_grad():
            for tensor in net.parameters():
                tensor.add_(rank // 2)  # the second replica begins elsewhere, and is put right
        for layer in (net[2], net[4], net):
            fully_shard(layer, mesh=mesh["shard"])
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        with join(net, optimizer, name=name, limit_s=20, join_limit_s=40, **chosen) as worker:
            learn(worker, net, rank // 2)
            center = {key: full(value) for key, value in worker.center_state_dict().items()}
            found[name] = {"members": worker.members(), "center": center, "weights": weights_of(net)}
    with pytest.raises(ElasticError, match="sync-sgd moves weights or gradients in every step"):
        join(net, optimizer, "sync-sgd", period=1)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: full(value) for name, value in net.state_dict().items()}


def expected(chosen: dict[str, Any]) -> list[dict[str, Any]]:
    """The same over two whole replicas."""
    town, settings = Town(2), Settings(limit_s=10, join_limit_s=20, **chosen)
    nets = [make_net(), make_net()]

    def act(replica: int) -> dict[str, Any]:
        net = nets[replica]
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        with town.worker(replica, net, settings, optimizer) as worker:
            learn(worker, net, replica)
            return {"center": worker.center_state_dict(), "weights": weights_of(net)}

    return town.together(act)


def test_sharded_replicas_have_the_numbers_of_whole_ones(tmp_path: Path) -> None:
    store = host_store(("127.0.0.1", 0), 30)
    processes = [forked.context().Process(target=work, args=(rank, store.port, str(tmp_path))) for rank in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(100)
        assert process.exitcode == 0
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(4)]
    for name, chosen in CASES.items():
        whole = expected(chosen)
        tolerance = 0.02 if name == "int8" else 1e-6
        for rank in range(4):
            mine = found[rank][name]
            assert mine["members"] == [0, 1]
            for part in ("center", "weights"):
                for key, value in whole[rank // 2][part].items():
                    torch.testing.assert_close(
                        mine[part][key], value, rtol=tolerance, atol=tolerance, msg=f"{name} {key}"
                    )


class FakeMesh:
    """As much of a DeviceMesh as is looked at."""

    def __init__(self, ranks: list[int], ndim: int = 1) -> None:
        self.mesh, self.ndim = torch.tensor(ranks), ndim


@pytest.mark.parametrize(
    ("ranks", "rank", "place"),
    [
        ([0, 1, 2], 1, (1, 3, 0, 2)),
        ([3, 4, 5], 5, (2, 3, 1, 2)),
        ([0, 2, 4], 4, (2, 3, 0, 2)),
        ([1, 3, 5], 1, (0, 3, 1, 2)),
    ],
)
def test_a_rank_finds_its_replica(ranks: list[int], rank: int, place: tuple[int, ...]) -> None:
    shard = find_shard(fake_model(FakeMesh(ranks)), find_method("diloco"), rank, 6)
    assert shard is not None
    assert (shard.index, shard.count, shard.replica, shard.num_replicas) == place


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        (FakeMesh([0, 1, 3]), "must follow each other"),
        (FakeMesh([0, 1, 2, 3]), "shard each replica with one mesh"),
        (FakeMesh([0, 1, 2], 2), "in 2 dimension"),
    ],
)
def test_meshes_that_are_no_replicas_are_refused(mesh: FakeMesh, words: str) -> None:
    with pytest.raises(ElasticError, match=words):
        find_shard(fake_model(mesh), find_method("diloco"), 0, 6)


def fake_model(mesh: FakeMesh) -> nn.Module:
    net = nn.Linear(1, 1)
    for parameter in net.parameters():
        parameter.device_mesh = mesh  # type: ignore[attr-defined]
        parameter.to_local = None  # type: ignore[attr-defined]
    return net
