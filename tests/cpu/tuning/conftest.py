from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from outcore.memory.machine import measure_machine
from outcore.tuning.throughput import bench
from tests.cpu.tuning.nets import CPU
from tests.cpu.tuning.work_clock import work_clock


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """For swap files; its disk is measured here, by a real clock, and once for all tests."""
    folder = str(tmp_path_factory.mktemp("swap"))
    measure_machine(CPU, folder)
    return folder


@pytest.fixture
def quick(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seconds are those of the work that is done, so that no test depends on what else the machine does."""
    monkeypatch.setattr(bench, "TIMING", replace(bench.TIMING, timed_s=0.02, num_retiming_rounds=1))
    with work_clock(monkeypatch):
        yield
