"""Ops are looked at as long as the plan needs it, and no longer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from outcore.limit import NUM_MEASURED, limit
from outcore.recording.intercept import OpMode, in_backward
from outcore.units import MIB
from tests.cpu.training import build, train


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For every op that came to Python: was it in a backward?"""
    found: list[bool] = []
    really = OpMode.__torch_dispatch__

    def dispatch(self: OpMode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found.append(in_backward())
        return really(self, func, types, args, kwargs)

    monkeypatch.setattr(OpMode, "__torch_dispatch__", dispatch)
    return found


@pytest.fixture
def alone_in_a_group(tmp_path: Any) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def seen_in_the_last_step(seen: list[bool]) -> tuple[int, int]:
    """Ops of the forward and of the backward that Python saw in a step that nobody measures any more."""
    torch.set_num_threads(1)
    model, loss_of = build("resnet")
    ooc = limit(model, 1 * MIB, planner="recompute-all")
    train(model, loss_of, ooc, 2 + NUM_MEASURED)
    seen.clear()
    train(model, loss_of, ooc, 1)
    assert ooc.predicted is not None
    assert ooc.predicted.recomputed_bytes > 0
    ooc.close()
    return seen.count(False), seen.count(True)


def test_no_op_of_a_backward_is_looked_at(seen: list[bool]) -> None:
    num_forward, num_backward = seen_in_the_last_step(seen)
    assert num_forward > 10
    assert num_backward == 0


@pytest.mark.usefixtures("alone_in_a_group")
def test_all_are_where_a_collective_may_write_unsaid(seen: list[bool]) -> None:
    _, num_backward = seen_in_the_last_step(seen)
    assert num_backward > 10
