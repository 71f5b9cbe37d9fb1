"""The allocator's peak -> the workspace of an op: the bytes that it allocates beyond its storages.

Only a caching allocator reports a peak. On the CPU no op is known to need a workspace.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch


class WorkspaceMeter(Protocol):
    """Reads the peak between two ops of a step that is being recorded."""

    def reset(self, live_bytes: int) -> None:
        """Resets the peak. Known storages hold `live_bytes` at this moment."""
        ...

    def made(self, live_bytes: int) -> None:
        """Sets what known storages hold to `live_bytes`, without resetting the peak."""
        ...

    def read(self, known_bytes: int, live_bytes: int) -> int:
        """Returns the bytes beyond `known_bytes` at the peak since the last reset, and resets the peak."""
        ...

    def read_unseen(self, live_bytes: int) -> int:
        """Returns the bytes beyond what known storages held at the last reset or hold now, and resets the peak. These
        were allocated by code without ops, for example a compiled function."""
        ...


class NoWorkspaces:
    """The meter of the CPU, which has no peak to read."""

    def reset(self, live_bytes: int) -> None:
        pass

    def made(self, live_bytes: int) -> None:
        pass

    def read(self, known_bytes: int, live_bytes: int) -> int:
        return 0

    def read_unseen(self, live_bytes: int) -> int:
        return 0


class AllocatorWorkspaces:
    """The meter of CUDA, from the statistics of its caching allocator."""

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
