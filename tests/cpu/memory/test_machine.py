"""What is measured of this machine, and what measuring it costs."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from outcore.memory.machine import measure_machine
from outcore.memory.settings import MEMORY


def test_measuring_the_disk_takes_one_chunk_of_memory(tmp_path: Path) -> None:
    """`limit()` measures, and a budget may be a few MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        found = measure_machine.__wrapped__(torch.device("cpu"), str(tmp_path))
    taken_bytes = sum(max(0, event.self_cpu_memory_usage) for event in profiled.events())
    assert 0 < taken_bytes < 1.1 * MEMORY.chunk_bytes
    assert found.disk_write_bytes_per_s > 1
    assert found.disk_read_bytes_per_s > 1
    assert list(tmp_path.iterdir()) == []
