"""The fast path in C++ for the tests that ask for it: compiled once, and kept for the next run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from outcore.eager import native
from tests.cpu.fitting.pretended import Pretend

KEPT_IN = Path(__file__).parents[2] / "build" / "native"


@pytest.fixture(scope="session")
def compiled() -> native.Library:
    path = native.chosen_path(str(KEPT_IN))
    if path is None:
        pytest.skip("there is no C++ compiler on this machine")
    found = native.Library(path)
    assert found.find(wait=True) is not None, "the fast path does not compile"
    return found


@pytest.fixture
def in_cpp(compiled: native.Library, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Steps of the test are followed in C++ from their first plan on: those that are measured are not."""
    monkeypatch.setattr(native, "chosen_library", compiled)
    Pretend(monkeypatch).settings(num_measured=0)
    return compiled.find()


@pytest.fixture(params=["python", "cpp"])
def both_ways(request: pytest.FixtureRequest) -> None:
    """Every test twice: with the fast path in C++ and without."""
    if request.param == "cpp":
        request.getfixturevalue("in_cpp")
