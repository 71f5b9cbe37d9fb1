"""Python's garbage collector rests during a step, and is as it was after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from outcore.limit import limit
from tests.cpu.training import build


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    was = gc.isenabled()
    yield
    (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_it_is_left_as_it_was_found(enabled: bool, fails: bool) -> None:
    model, loss_of = build("resnet")
    ooc = limit(model, "20GiB")
    (gc.enable if enabled else gc.disable)()
    for step in range(3):
        try:
            with ooc.step():
                assert not gc.isenabled()
                loss_of(model, step).backward()
                if fails:
                    raise KeyError
        except KeyError:
            pass
        assert gc.isenabled() == enabled
    ooc.close()


def test_what_the_collector_does_not_look_at_is_still_known_to_be_there() -> None:
    """`gc.freeze()` hides tensors from those who look for all; to swap a model's weights would free nothing."""
    seen = []
    for freezes in (False, True):
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 32)), torch.randn(128, 64)
        model(x).sum().backward()
        if freezes:
            gc.collect()
            gc.freeze()
        ooc = limit(model, "1GiB", measure=True)
        for _ in range(3):
            with ooc.step():
                model(x).sum().backward()
        trace, timeline = ooc.trace, ooc.timeline
        assert trace is not None
        assert timeline is not None
        outside = sorted(storage.bytes for storage in trace.storages if storage.external)
        there = {tensor.nbytes for tensor in (x, *model.parameters())}
        assert there <= set(outside)
        seen.append((outside, trace.has_unseen, timeline.peak_bytes))
        ooc.close()
    assert seen[0] == seen[1]


def test_layers_whose_size_the_first_batch_tells() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(8))
    ooc = limit(model, "1GiB")
    for _ in range(3):
        with ooc.step():
            model(torch.ones(32, 16)).sum().backward()
    assert ooc.plan is not None
    ooc.close()
