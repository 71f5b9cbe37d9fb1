"""On CUDA: the outer state of DiLoCo in host memory, whole and in fragments, and exchanges in 8 bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outcore.elastic.place import open_place
from outcore.elastic.settings import Settings
from outcore.elastic.transport import TCPStore
from outcore.elastic.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a GPU machine by hand"),
]
NUM_STEPS = 9


def train(**chosen: Any) -> tuple[dict[str, Tensor], dict[str, Tensor], int, Any]:
    """Weights, centre, device bytes that the worker added, and the averager, after some steps of a lone worker."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 1024), nn.BatchNorm1d(1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = open_place(0, 1, ("127.0.0.1", server.port), "outer", limit_s=20)
    settings = Settings(**{"method": "diloco", "period": 4, "limit_s": 20, **chosen})
    before = torch.cuda.memory_allocated()
    with Worker(net, optimizer, settings, place) as worker:
        added = torch.cuda.memory_allocated() - before
        for step in range(NUM_STEPS):
            chance = torch.Generator("cuda").manual_seed(step)
            x = torch.randn(32, 256, device="cuda", generator=chance)
            y = torch.randint(0, 10, (32,), device="cuda", generator=chance)
            nn.functional.cross_entropy(net(x), y).backward()
            worker.step()
        return net.state_dict(), worker.center_state_dict(), added, worker._averager


@pytest.mark.parametrize("chosen", [{}, {"method": "streaming-diloco", "delay": 1}, {"wire_dtype": torch.int8}])
def test_the_outer_state_on_the_host_gives_the_same_numbers_in_less_memory(chosen: dict[str, Any]) -> None:
    weights, center, added, _ = train(**chosen)
    host_weights, host_center, host_added, averager = train(outer_state="host", **chosen)
    assert averager.center.device.type == "cpu"
    assert averager.center.is_pinned()
    assert averager.velocity.device.type == "cpu"
    for name, tensor in weights.items():
        torch.testing.assert_close(host_weights[name], tensor)
        torch.testing.assert_close(host_center[name], center[name])
        assert host_center[name].device == tensor.device
    assert added - host_added >= 2 * averager.velocity.nbytes * 0.9  # the centre and the momentum
