"""Plans of several sizes tried one after the other, as on a GPU whose allocator starts over (a counter plays it)."""

from __future__ import annotations

import pytest
import torch

from outcore.limit import Limited, limit
from tests.cpu.training import build, train


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def roomy_bytes() -> int:
    model, loss_of = build("resnet")
    ooc = limit(model, "20GiB")
    train(model, loss_of, ooc, 3)
    assert ooc.predicted is not None
    ooc.close()
    return ooc.predicted.peak_bytes


def test_the_numbers_stay_while_rooms_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_bytes = int(0.8 * roomy_bytes())
    num_restarts = [0]

    def count_restarts(self: Limited) -> int:
        """In every step of a plan for more than 0.85 of the budget the allocator starts over."""
        kind = self._kind or self._last
        if kind is not None and kind.room is not None and kind.room.room_bytes > 0.85 * memory_bytes:
            num_restarts[0] += 1
        return num_restarts[0]

    monkeypatch.setattr(Limited, "_count_restarts", count_restarts)
    model, loss_of = build("resnet")
    plain = train(model, loss_of, None, 26)
    model, loss_of = build("resnet")
    ooc = limit(model, memory_bytes)
    ooc._tries_rooms = True
    train(model, loss_of, ooc, 26).assert_same(plain)
    assert ooc.settled
    room = next(iter(ooc.kinds.values())).room
    assert room is not None
    assert len({attempt.room_bytes for attempt in room.attempts}) >= 2
    assert room.attempts[0].num_restarts > 0
    assert ooc.plan is not None
    assert ooc.plan.decisions == room.best.made[0].decisions
    assert ooc.predicted is not None
    assert ooc.predicted.peak_bytes <= room.room_bytes
    ooc.close()
