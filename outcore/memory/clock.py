"""Device -> Clock: the seconds of each op of a step.

On CUDA, an op is timed by a pair of events around it. The events are queued while the device spins for a few
milliseconds, so the host is ahead of the device and its own time does not count. While a step is recorded the host is
slow, and the device spins again after a fixed number of ops. When the step is timed once more, the device spins again
before the host can have used up the previous spin. Two events with no op in between are a few microseconds apart; this
offset is subtracted from every op.

An op that made the allocator ask the driver for memory looks slow. A step is therefore timed twice and the smaller time
counts, because a pair of events can only overstate. In tight memory the same op may wait for memory both times. The
second time, the sizes of its blocks are known, and the clock allocates and frees such blocks before the op starts.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from outcore.memory.cuda_allocator import count_restarts
from outcore.memory.settings import MEMORY


class Clock:
    """Measures the seconds of each op; read them when the step is over.

    `spin` says whether the device spins while events are queued. `asks` maps the number of an op to the sizes of the
    blocks that it will allocate. `on_refused` is called when such blocks do not fit.
    """

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
        # Events are recorded on this stream even if an op changes the current one.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

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
        if not self._asks:  # the step is being recorded, so the sizes of its blocks are not known yet
            return number % MEMORY.num_ops_per_spin == 0
        return time.perf_counter() - self._spun_at_s > MEMORY.ahead_s

    def _make_room(self, sizes: Sequence[int]) -> bool:
        """Allocates and frees the blocks of an op, which then reuses them. Returns whether the allocator restarted."""
        num_before = count_restarts(self.device)
        try:
            blocks = [
                torch.UntypedStorage(size, device=self.device) for size in sizes
            ]  # all alive at once, as in the op
            del blocks
        except torch.OutOfMemoryError:  # the op's library may use a smaller workspace
            self._on_refused()
        return count_restarts(self.device) != num_before

    def stop(self, started: Any) -> None:
        if self._stream is None:
            self._pairs.append((started, time.perf_counter()))
        else:
            self._pairs.append((started, self._stream.record_event(torch.cuda.Event(enable_timing=True))))

    def spans(self, began: Any) -> list[tuple[float, float]]:
        """Returns the start and the end of each op in seconds since `began`, a value that `start` of a clock
        returned."""
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


def delay_stream(seconds: float) -> None:
    """Makes the current CUDA stream wait for about that long. Tests slow copies down in this way to show races."""
    if seconds:
        torch.cuda._sleep(int(seconds * MEMORY.cycles_per_s))


def _spin(stream: torch.cuda.Stream) -> None:
    with torch.cuda.stream(stream):
        torch.cuda._sleep(MEMORY.spin_cycles)


@cache
def _empty_pair_s(device: torch.device) -> float:
    """Returns the seconds between two events with nothing in between, the offset of every timed op."""
    stream = torch.cuda.current_stream(device)
    _spin(stream)
    pairs = [
        [stream.record_event(torch.cuda.Event(enable_timing=True)) for _ in range(2)]
        for _ in range(MEMORY.num_empty_pairs)
    ]
    stream.synchronize()
    return float(statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs))


class Looks(NamedTuple):
    """Seconds that the way to us and back adds to an op and to a saved tensor."""

    op_s: float = 0.0
    tick_s: float = 0.0
    in_line: bool = False  # the host computes: an op's own seconds have a part of the way, too

    def apart(self, gap: tuple[float, int], op_s: float) -> tuple[float, float]:
        """Seconds of the host before an op, and of the op, without them: what the gap has not, the op has."""
        gap_s, num_ticks = gap
        left_s = gap_s - self.op_s - num_ticks * self.tick_s
        if left_s < 0 and self.in_line:
            op_s = max(MEMORY.least_op_share * op_s, op_s + left_s)
        return max(0.0, left_s), op_s


class HostGaps:
    """Seconds of the host between the ops of a step in which nobody of ours was at work, with the saved tensors that
    were looked at on the way: each costs a way there and back that is no part of the program."""

    def __init__(self) -> None:
        self._gap_s, self._num_ticks, self._gone_s = 0.0, 0, time.perf_counter()

    def arrive(self, num_ticks: int = 0) -> None:
        """The program came to us, with a saved tensor or an op."""
        self._gap_s += time.perf_counter() - self._gone_s
        self._num_ticks += num_ticks

    def leave(self) -> None:
        """It goes on."""
        self._gone_s = time.perf_counter()

    def take(self) -> tuple[float, int]:
        """Of the gap before an op."""
        gap = self._gap_s, self._num_ticks
        self._gap_s, self._num_ticks = 0.0, 0
        return gap


class OpTimes:
    """The names of the ops of a step, and the seconds of each."""

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
