"""Hundreds of steps with arguments that change, limits dropped and made again, and interrupts: nothing grows.

OUTCORE_EXPLORE=N runs N steps.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import tempfile
import threading
import weakref
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from outcore.errors import BudgetTooSmall
from outcore.fitting.hooks import ACTIVE
from outcore.limit import Limited
from tests.cpu.fitting.test_interrupts import FILES, dispatch_keys, leaves_with

pytestmark = pytest.mark.usefixtures("both_ways")

NUM_STEPS = max(300, int(os.environ.get("OUTCORE_EXPLORE") or 0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor, number: int, name: str) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x * (number % 7)


class InterruptAfter:
    """Raises before the n-th line of ours that is executed."""

    def __init__(self, num_lines: int) -> None:
        self._left = num_lines

    def __call__(self, frame: Any, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        self._left -= event == "line" and not leaves_with(frame)
        if not self._left:
            self._left = -1
            raise KeyboardInterrupt
        return self


def live(draw: random.Random, first: int, num_steps: int) -> None:
    """Some of a training's life."""
    x, ooc, model = torch.randn(128, 32), None, Net()
    for number in range(first, first + num_steps):
        if ooc is None or draw.random() < 0.04:
            ooc = None  # dropped, not closed
            ooc = Limited(model, "100%", planner=draw.choice(["swap-all", "recompute-all"]))
        if draw.random() < 0.1:
            sys.settrace(InterruptAfter(draw.randrange(1, 400)))
        try:
            with ooc.step():
                model(x[: draw.choice([64, 128])], number, f"step {number}").sum().backward()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        model.zero_grad()
        assert len(ooc.kinds) <= 2
        assert len(model._forward_pre_hooks) == 1
    del ooc
    assert not model._forward_pre_hooks


def test_nothing_grows() -> None:
    draw, process, keys = random.Random(0), psutil.Process(), dispatch_keys()
    live(draw, 0, 100)
    gc.collect()
    before = process.num_fds(), threading.active_count(), len(gc.get_objects()), process.memory_info().rss
    swap_files = set(Path(tempfile.gettempdir()).glob("outcore-*"))
    live(draw, 100, NUM_STEPS - 100)
    gc.collect()
    after = process.num_fds(), threading.active_count(), len(gc.get_objects()), process.memory_info().rss
    print(f"after {NUM_STEPS} steps (descriptors, threads, objects, resident bytes): {after}, after 100: {before}")
    assert set(Path(tempfile.gettempdir()).glob("outcore-*")) <= swap_files
    assert after[:2] == before[:2]
    assert after[2] <= before[2] + 200
    assert after[3] < before[3] + 30 * 1024**2
    assert not ACTIVE
    assert dispatch_keys() == keys
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert gc.isenabled()


def test_a_refused_step_lets_go_of_the_tensors_of_the_program() -> None:
    """No reference cycle may hold them until the garbage collector comes by: on a GPU they are needed memory."""
    model, x = Net(), torch.randn(256, 32)
    gc.collect()
    gc.disable()
    try:
        with Limited(model, 40_000) as ooc:
            while True:
                h = torch.tanh(x)
                made = weakref.ref(h)
                try:
                    with ooc.step():
                        model(h, 1, "a").sum().backward()
                except BudgetTooSmall:
                    break
            del h
            assert made() is None
    finally:
        gc.enable()
