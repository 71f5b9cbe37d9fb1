"""Seconds of each op of a step.

On CUDA, ops are timed by event pairs that are queued behind a short spin of the device: the host is then ahead and does
not show up in the times. A step that is recorded takes the host so long that spins are counted by ops; in the step that
is timed again, another spin begins before the host could have used up the last one, however slow it is. An event pair
with nothing in between takes a few microseconds, which are taken off every op.

An op that made the allocator ask the driver for memory still looks slow; a step is timed twice, and an event pair only
ever overstates, so the smaller time is the op's own. In tight memory the same op may have to wait for its memory both
times: the second time, what it will ask for is known, and asked for before its clock starts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from outcore.memory.cuda_allocator import count_restarts
from outcore.memory.settings import MEMORY


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
        self._spun_at_s = -math.inf
        self._stream = (
            torch.cuda.current_stream(device) if device.type == "cuda" else None
        )  # also where an op leaves it

    def start(self) -> Any:
        if self._stream is None:
            return time.perf_counter()
        number = len(self._pairs)
        drained = number in self._asks and self._make_room(self._asks[number])
        if self.spin and (drained or self._is_used_up(number)):
            _spin(self._stream)
            self._spun_at_s = time.perf_counter()
        return self._stream.record_event(torch.cuda.Event(enable_timing=True))

    def _is_used_up(self, number: int) -> bool:
        if not self._asks:  # recorded: what an op asks for is not known yet
            return number % MEMORY.num_ops_per_spin == 0
        return time.perf_counter() - self._spun_at_s > MEMORY.ahead_s

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

    def spans(self, began: Any) -> list[tuple[float, float]]:
        """Start and end of each, in seconds since `began`, which another clock's `start` returned."""
        if self.device.type != "cuda":
            return [(start - began, end - began) for start, end in self._pairs]
        torch.cuda.synchronize(self.device)
        return [(began.elapsed_time(start) / 1e3, began.elapsed_time(end) / 1e3) for start, end in self._pairs]

    def seconds(self) -> list[float]:
        if self.device.type != "cuda":
            return [end - start for start, end in self._pairs]
        empty_s = _empty_pair_s(self.device) if self.spin else 0.0
        torch.cuda.synchronize(self.device)
        return [max(0.0, start.elapsed_time(end) / 1e3 - empty_s) for start, end in self._pairs]


def _spin(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(MEMORY.spin_cycles)


@cache
def _empty_pair_s(device: torch.device) -> float:
    """Seconds between two events with nothing in between, of which every timed op has a pair."""
    stream = torch.cuda.current_stream(device)
    _spin(stream)
    pairs = [
        [stream.record_event(torch.cuda.Event(enable_timing=True)) for _ in range(2)]
        for _ in range(MEMORY.num_empty_pairs)
    ]
    stream.synchronize()
    return float(statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs))


class OpTimes:
    """Seconds of each op of a step, beside the names of the ops."""

    def __init__(self, clock: Clock) -> None:
        self.names: list[str] = []
        self._clock = clock

    def start(self, name: str) -> Any:
        self.names.append(name)
        return self._clock.start()

    def stop(self, started: Any) -> None:
        self._clock.stop(started)

    def seconds(self) -> list[float]:
        return self._clock.seconds()
