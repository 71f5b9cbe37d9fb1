"""Capacity -> ranges of bytes, allocated first-fit. Used for pinned slabs and for the swap file."""

from __future__ import annotations

import bisect


class Extents:
    """Free ranges of [0, capacity_bytes), kept sorted and merged."""

    def __init__(self, capacity_bytes: int, align_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.align_bytes = align_bytes
        self.used_bytes = 0
        self._starts = [0] if capacity_bytes else []
        self._sizes = [capacity_bytes] if capacity_bytes else []

    def round_up(self, num_bytes: int) -> int:
        return -(-max(num_bytes, 1) // self.align_bytes) * self.align_bytes

    def take(self, num_bytes: int) -> int | None:
        """Allocates a range of at least `num_bytes` and returns its offset, or None if no free range is large
        enough."""
        size = self.round_up(num_bytes)
        for index, free_bytes in enumerate(self._sizes):
            if free_bytes >= size:
                offset = self._starts[index]
                if free_bytes == size:
                    del self._starts[index], self._sizes[index]
                else:
                    self._starts[index] += size
                    self._sizes[index] -= size
                self.used_bytes += size
                return offset
        return None

    def give(self, offset: int, num_bytes: int) -> None:
        """Frees a range that was taken before, and merges it with free neighbours."""
        size = self.round_up(num_bytes)
        self.used_bytes -= size
        index = bisect.bisect(self._starts, offset)
        self._starts.insert(index, offset)
        self._sizes.insert(index, size)
        if index + 1 < len(self._starts) and offset + size == self._starts[index + 1]:
            self._sizes[index] += self._sizes[index + 1]
            del self._starts[index + 1], self._sizes[index + 1]
        if index and self._starts[index - 1] + self._sizes[index - 1] == offset:
            self._sizes[index - 1] += self._sizes[index]
            del self._starts[index], self._sizes[index]

    def grow(self, num_bytes: int) -> None:
        """Adds `num_bytes` of capacity at the end."""
        offset, self.capacity_bytes = self.capacity_bytes, self.capacity_bytes + num_bytes
        self.used_bytes += self.round_up(num_bytes)
        self.give(offset, num_bytes)
