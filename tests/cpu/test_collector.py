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


def test_a_model_that_the_collector_does_not_look_at_is_still_known_to_be_there() -> None:
    """`gc.freeze()` hides its tensors from those who look for all; swapping its weights would free nothing."""
    in_core = []
    for freezes in (False, True):
        model, loss_of = build("resnet")
        if freezes:
            gc.freeze()
        ooc = limit(model, "20GiB")
        with ooc.step():
            loss_of(model, 0).backward()
        assert ooc.trace is not None
        weights = {tensor.untyped_storage().nbytes() for tensor in model.parameters()}
        external = [storage.bytes for storage in ooc.trace.storages if storage.external]
        assert weights <= set(external)
        in_core.append(external)
        ooc.close()
    assert in_core[0] == in_core[1]
