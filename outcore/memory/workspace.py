"""The allocator's own peak -> the bytes that an op allocates beyond every storage that is known.

Only a caching allocator can be asked for its peak. On the CPU no op is known to need a workspace.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class WorkspaceMeter(Protocol):
    """Reads the peak between two ops of a step that is being recorded."""

    def reset(self, live_bytes: int) -> None:
        """A new peak is counted from here on, at which `live_bytes` lie in known storages."""
        ...

    def made(self, live_bytes: int) -> None:
        """Known storages hold `live_bytes` now, and did so at the peak that is being counted."""
        ...

    def read(self, known_bytes: int, live_bytes: int) -> int:
        """Bytes at the peak since the last reset beyond `known_bytes`. Resets the peak."""
        ...

    def read_unseen(self, live_bytes: int) -> int:
        """The same beyond what known storages held at the last reset and hold now: what code without ops, a compiled
        function say, did in between. Resets the peak."""
        ...


class NoWorkspaces:
    """The CPU's: there is no peak to read."""

    def reset(self, live_bytes: int) -> None:
        pass

    def made(self, live_bytes: int) -> None:
        pass

    def read(self, known_bytes: int, live_bytes: int) -> int:
        return 0

    def read_unseen(self, live_bytes: int) -> int:
        return 0


class AllocatorWorkspaces:
    """CUDA's, from the statistics of its caching allocator."""

    def __init__(self, device: torch.device, before_bytes: int) -> None:
        self._index: Any = device.index
        self._before_bytes = before_bytes
        self._live_at_reset_bytes = 0

    def reset(self, live_bytes: int) -> None:
        self._live_at_reset_bytes = live_bytes
        torch._C._cuda_resetPeakMemoryStats(self._index)

    def made(self, live_bytes: int) -> None:
        self._live_at_reset_bytes = live_bytes

    def read(self, known_bytes: int, live_bytes: int) -> int:
        peak = torch._C._cuda_memoryStats(self._index)["allocated_bytes"]["all"]["peak"]
        self.reset(live_bytes)
        return max(0, int(peak) - self._before_bytes - known_bytes)

    def read_unseen(self, live_bytes: int) -> int:
        return self.read(max(self._live_at_reset_bytes, live_bytes), live_bytes)
