"""On CUDA: elastic averaging over NCCL. One GPU allows one member: the calls and the numbers, not the speed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from outcore.elastic.place import open_place, poll
from outcore.elastic.settings import Settings
from outcore.elastic.sync import SyncExchange
from outcore.elastic.transport import TCPStore
from outcore.elastic.wire import NcclGroup
from outcore.elastic.worker import Worker
from outcore.errors import ElasticError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="this torch was built without NCCL"),
]
NUM_STEPS = 5


def train(**chosen: Any) -> tuple[dict[str, Tensor], int]:
    """The centre after some steps of a lone worker on the GPU, and how many exchanges there were."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = open_place(0, 1, ("127.0.0.1", server.port), "nccl", limit_s=20)
    settings = Settings(method="sync-easgd", period=1, limit_s=20, **chosen)
    with Worker(net, optimizer, settings, place) as worker:
        for step in range(NUM_STEPS):
            chance = torch.Generator("cuda").manual_seed(step)
            x = torch.randn(32, 64, device="cuda", generator=chance)
            y = torch.randint(0, 10, (32,), device="cuda", generator=chance)
            nn.functional.cross_entropy(net(x), y).backward()
            worker.step()
        return worker.center_state_dict(), worker.stats().num_exchanges


@pytest.fixture(scope="module")
def by_gloo() -> dict[str, Tensor]:
    return train(backend="gloo", level=1)[0]


@pytest.mark.parametrize(("backend", "level"), [("gloo", 2), ("gloo", 3), ("nccl", 2), ("nccl", 3)])
def test_every_level_ends_at_the_same_centre(backend: str, level: int, by_gloo: dict[str, Tensor]) -> None:
    center, num_exchanges = train(backend=backend, level=level)
    assert num_exchanges == NUM_STEPS
    for name, tensor in by_gloo.items():
        if level < 3 or "running" not in name:  # level 3 begins before the forward that moves the statistics
            assert torch.equal(center[name], tensor), name


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_steps_ahead_do_not_reach_into_what_was_sent(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange is held while two more steps change the weights on the device; the pull is of the older ones."""
    moved, center = run_held("cuda", backend, monkeypatch)
    expected, expected_center = by_hand("cuda")
    torch.testing.assert_close(moved, expected)
    torch.testing.assert_close(center, expected_center)


def run_held(device: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    """A lone worker's weights and centre: a step, an exchange begun, two steps ahead, and the step that ends it."""
    held, exchange = threading.Event(), SyncExchange.run_exchange

    def late(self: SyncExchange, *args: Any) -> None:
        assert held.wait(20)
        exchange(self, *args)

    monkeypatch.setattr(SyncExchange, "run_exchange", late)
    net = make_net(device)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = open_place(0, 1, ("127.0.0.1", server.port), "ahead", limit_s=20)
    settings = Settings(period=2, ahead=4, alpha=0.5, limit_s=20, backend=backend)  # type: ignore[arg-type]
    with Worker(net, torch.optim.SGD(net.parameters(), lr=0.05), settings, place) as worker:
        for step in range(4):
            if step == 3:
                held.set()
                assert poll(worker._averager.is_over, 20)
            learn(net, step, device)
            worker.step()
        assert (worker.stats().num_ahead, worker.stats().num_exchanges) == (2, 1)
        return flat(net.state_dict()), flat(worker.center_state_dict())


def by_hand(device: str) -> tuple[Tensor, Tensor]:
    net = make_net(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    trail = [flat(net.state_dict())]
    for step in range(4):
        optimizer.zero_grad()
        learn(net, step, device)
        optimizer.step()
        trail.append(flat(net.state_dict()))
    pull = 0.5 * (trail[1] - trail[0])
    return trail[-1] - pull, trail[0] + pull


def make_net(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)


def learn(net: nn.Module, step: int, device: str) -> None:
    chance = torch.Generator().manual_seed(step)
    net(torch.randn(32, 64, generator=chance).to(device)).square().mean().backward()


def flat(state: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in state.values()])


def test_level_1_is_refused_over_nccl() -> None:
    with pytest.raises(ElasticError, match="level 1 and reduction='ring' run over gloo"):
        train(backend="nccl", level=1)


def test_a_sum_of_one_stays_on_the_device_and_rounds_where_asked() -> None:
    """The worker alone skips its sums, so NCCL itself is called here."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    group = NcclGroup(store, 0, [0], 20.0)
    vector = torch.arange(1000.0, device="cuda")
    group.tree_sum(vector)
    assert torch.equal(vector.cpu(), torch.arange(1000.0))
    group.tree_sum(vector, dtype=torch.bfloat16)
    assert torch.equal(vector.cpu(), torch.arange(1000.0).bfloat16().float())
    group.close()
