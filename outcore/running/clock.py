"""Seconds of each op of a step.

On CUDA, ops are timed by event pairs, in batches that are queued behind a short spin of the device: the host is then
ahead and does not show up in the times. Still, an op that made the allocator ask the driver for memory looks slow; a
step is timed twice, and an event pair only ever overstates, so the smaller time is the op's own.
"""

from __future__ import annotations

import time
from typing import Any

import torch

_BATCH = 48  # ops queued behind one spin
_SPIN_CYCLES = 14_000_000  # about 8 ms: longer than the host takes to queue a batch


class Clock:
    """Seconds of each op, read when the step is over."""

    def __init__(self, device: torch.device, *, spin: bool = True) -> None:
        self.device = device
        self.spin = spin
        self._pairs: list[tuple[Any, Any]] = []
        self._stream = (
            torch.cuda.current_stream(device) if device.type == "cuda" else None
        )  # also where an op leaves it

    def start(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        if self.spin and len(self._pairs) % _BATCH == 0:
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(_SPIN_CYCLES)
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def stop(self, started: Any) -> None:
        if self._stream is None:
            self._pairs.append((started, time.perf_counter()))
        else:
            self._pairs.append((started, self._stream.record_event(torch.cuda.Event(enable_timing=True))))

    def seconds(self) -> list[float]:
        if self.device.type != "cuda":
            return [end - start for start, end in self._pairs]
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in self._pairs]
