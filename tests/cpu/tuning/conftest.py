from __future__ import annotations

from collections.abc import Iterator

import pytest

from outcore.tuning import probing
from tests.cpu.tuning.nets import quiet


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seconds need not be right; what is done with them must be."""
    monkeypatch.setattr(probing, "TIMED_S", 0.02)
    monkeypatch.setattr(probing, "NUM_ROUNDS", 1)
    with quiet():
        yield
