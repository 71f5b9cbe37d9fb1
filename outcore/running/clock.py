"""Seconds of each op of a step.

On CUDA, ops are timed by event pairs, in batches that are queued behind a short spin of the device: the host is then
ahead and does not show up in the times. Still, an op that made the allocator ask the driver for memory looks slow; a
step is timed twice, and an event pair only ever overstates, so the smaller time is the op's own. In tight memory the
same op may have to wait for its memory both times: the second time, what it will ask for is known, and asked for before
its clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from outcore.running.allocator import count_restarts

_BATCH = 48  # ops queued behind one spin
_SPIN_CYCLES = 14_000_000  # about 8 ms: longer than the host takes to queue a batch


class Clock:
    """Seconds of each op, read when the step is over. `asks`: by op, the bytes of the blocks it will ask for."""

    def __init__(
        self,
        device: torch.device,
        *,
        spin: bool = True,
        asks: Mapping[int, Sequence[int]] | None = None,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self.device = device
        self.spin = spin
        self._asks, self._on_refused = asks or {}, on_refused
        self._pairs: list[tuple[Any, Any]] = []
        self._stream = (
            torch.cuda.current_stream(device) if device.type == "cuda" else None
        )  # also where an op leaves it

    def start(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        number = len(self._pairs)
        drained = number in self._asks and self._make_room(self._asks[number])
        if self.spin and (drained or number % _BATCH == 0):
            with torch.cuda.stream(self._stream):
                torch.cuda._sleep(_SPIN_CYCLES)
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def _make_room(self, sizes: Sequence[int]) -> bool:
        """Blocks that are there and free are what the op gets. Did the allocator have to start over for them?"""
        num_before = count_restarts(self.device)
        try:
            held = [torch.UntypedStorage(size, device=self.device) for size in sizes]  # all at once, as the op will
            del held
        except torch.OutOfMemoryError:  # a library may do with a smaller workspace
            self._on_refused()
        return count_restarts(self.device) != num_before

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
