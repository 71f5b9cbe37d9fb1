"""How many files one activation passes through: what a reader has to open who follows it.

The network saves exactly one tensor of its own, the output of `exp`. A file of `memory`, `eager`, `state` or `compiled`
counts if one of its functions gets hold of that tensor, of its bytes, or of what autograd holds in its place, as an
argument, a local or a result. A file of `planning` or `values` counts if it runs at all while the step is planned,
because nothing else is planned there. `fitting` handles steps and no tensors.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
from outcore.eager.cells import Cell, Handle, Kept
from outcore.limit import Limited, limit
from outcore.memory.tensors import data_ptr

PACKAGE = Path(outcore.__file__).parent
SHAPE, NUM_BYTES = (512, 511), 512 * 511 * 4  # which no other tensor of the step has, but what it is made from
MOST_RECORDED, MOST_PLANNED, MOST_LATER = 12, 20, 10


class OneActivation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (x * self.weight).exp().sum()
        with torch.no_grad():
            x.repeat(4, 1)  # the peak of the step, after the activation was saved
        return loss


class Follower:
    """Notes which files run, and which of them get hold of the activation, while it is a profile function."""

    def __init__(self, given: Tensor) -> None:
        self.ran: set[str] = set()
        self.held: set[str] = set()
        self._given_at = data_ptr(given)
        self._known: dict[int, object] = {}  # cells and handles of it, also when they hold no tensor any more

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event in ("call", "return") and PACKAGE in path.parents:
            sys.setprofile(None)  # what is asked here must not be noted
            try:
                name = str(path.relative_to(PACKAGE))
                self.ran.add(name)
                if name not in self.held and any(map(self._has, (*frame.f_locals.values(), arg))):
                    self.held.add(name)
            finally:
                sys.setprofile(self)

    def _has(self, item: object) -> bool:
        return any(map(self._is_it, item)) if isinstance(item, tuple | list) else self._is_it(item)

    def _is_it(self, item: object) -> bool:
        if id(item) in self._known:
            return True
        if isinstance(item, Tensor):
            return item.numel() * item.element_size() == NUM_BYTES and data_ptr(item) != self._given_at
        names = {Cell: "data", Handle: "cell", Kept: "tensor"}
        part = next((getattr(item, name, None) for kind, name in names.items() if isinstance(item, kind)), None)
        if part is None or not self._is_it(part):
            return False
        self._known[id(item)] = item
        return True

    def files(self, *, planned: bool) -> set[str]:
        rooms = ("memory", "eager", "state", "compiled")
        held = {name for name in self.held if name.startswith(rooms)}
        return held | {name for name in self.ran if planned and name.startswith(("planning", "values"))}


def followed(ooc: Limited, model: nn.Module, x: Tensor, *, planned: bool) -> set[str]:
    follower = Follower(x)
    sys.setprofile(follower)
    try:
        with ooc.step():
            model(x).backward()
    finally:
        sys.setprofile(None)
    model.zero_grad()
    return follower.files(planned=planned)


@pytest.mark.parametrize(
    ("planner", "decision"), [("swap-all", "swap"), ("recompute-all", "recompute"), ("hybrid", "keep")]
)
def test_a_reader_who_follows_one_activation_opens_few_files(planner: str, decision: str) -> None:
    model, x = OneActivation(), torch.randn(SHAPE)
    with limit(model, "7MiB", planner=planner) as ooc:
        files = [followed(ooc, model, x, planned=number == 1) for number in range(5)]
        assert ooc.plan is not None
        assert list(ooc.plan.decisions.values()) == [decision]
    recorded, planned, later = files[0], files[1], files[4]
    assert {"eager/cells.py", "eager/recorder.py"} <= recorded  # what counts is found
    assert {"eager/cells.py", "planning/program/lower.py"} <= planned
    assert {"eager/cells.py", "eager/execution.py"} <= later
    assert len(recorded) <= MOST_RECORDED, sorted(recorded)
    assert len(planned) <= MOST_PLANNED, sorted(planned)
    assert len(later) <= MOST_LATER, sorted(later)
