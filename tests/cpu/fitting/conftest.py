from __future__ import annotations

import pytest

from tests.cpu.fitting.pretended import Pretend


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    return Pretend(monkeypatch)
