from __future__ import annotations

import pytest

from outcore.tuning import probing


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds need not be right; what is done with them must be."""
    monkeypatch.setattr(probing, "TIMED_S", 0.02)
    monkeypatch.setattr(probing, "NUM_ROUNDS", 1)
