"""Python's garbage collector rests during a step, and is as it was after it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

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
