"""What steps cost the host: measured with a chain of small ops, and read between the ops of steps."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

import outcore
from outcore.fitting.host_costs import host_path
from outcore.fitting.phases import Settled
from outcore.memory.clock import HostGaps, Looks


def test_every_cost_is_measured_and_small(tmp_path: Path) -> None:
    path = host_path(torch.device("cpu"), str(tmp_path))
    costs = path.costs
    assert 0 <= costs.tick_s < 1e-3
    assert 0 <= costs.seen_op_s < 1e-3
    assert 0 < costs.captured_op_s < 1e-3
    assert 0 < costs.rerun_s < 1e-3
    assert 0 < path.looks.op_s < 1e-3
    assert path.looks.in_line
    assert 0 <= costs.copy_s < 1e-2
    assert host_path(torch.device("cpu"), str(tmp_path)) is path
    assert host_path(torch.device("cpu"), None).costs.copy_s == 0  # there is nowhere to copy to


def test_the_way_to_us_and_back_is_not_the_programs() -> None:
    looks = Looks(op_s=2.0, tick_s=1.0, in_line=True)
    assert looks.apart((10.0, 3), 7.0) == (5.0, 7.0)
    assert looks.apart((1.0, 0), 7.0) == (0.0, 6.0)
    assert looks.apart((0.0, 0), 1.0)[1] > 0
    assert Looks(op_s=2.0).apart((1.0, 0), 7.0) == (0.0, 7.0)  # a device's own seconds are its own


def test_gaps_are_what_lies_between_us() -> None:
    gaps = HostGaps()
    time.sleep(0.01)
    gaps.arrive(1)
    time.sleep(0.05)
    gaps.leave()
    gaps.arrive()
    seconds, num_ticks = gaps.take()
    assert 0.01 <= seconds < 0.05
    assert num_ticks == 1
    assert gaps.take() == (0.0, 0)


class Slow(nn.Module):
    """A network with Python of its own between two ops."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        time.sleep(0.02)
        out: torch.Tensor = self.other(x)
        return out


def test_a_users_python_is_in_the_predicted_step() -> None:
    model, x = Slow(), torch.randn(128, 64)
    with outcore.limit(model, "1GiB", cache=False) as ooc:
        for _ in range(3):
            with ooc.step():
                model(x).square().mean().backward()
            model.zero_grad()
        assert ooc.trace is not None
        assert ooc.predicted is not None
        assert sum(op.host_s for op in ooc.trace.ops) >= 0.02
        assert ooc.predicted.step_s >= 0.02
        for _ in range(8):
            began_s = time.perf_counter()
            with ooc.step():
                model(x).square().mean().backward()
            took_s = time.perf_counter() - began_s
            model.zero_grad()
        (kind,) = (kind for kind in ooc.kinds if kind.num_steps > 2)
        assert isinstance(kind.phase, Settled)
        assert kind.phase.took is None  # the prediction was corrected by what steps took
        assert 0.5 < ooc.predicted.step_s / took_s < 2
