"""A cache of blocks in slots of device memory; evicts the least recently used slot that nobody reads.

This is the tile cache of BLASX (arXiv 1510.05041), for inputs only; results are never cached. It differs in how readers
are tracked. In BLASX a count falls when a batch of kernels is known to have ended. Here there is a count only while
work is being enqueued, and afterwards an event for which the slot's next writer waits on its own stream, so that
eviction never blocks the host. The planner's simulator and the executor use this same class and thus evict the same
blocks.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from outcore.errors import TilingError


@dataclass
class Entry:
    """One slot and its content. `ready` and `readers` are events, or simulated seconds."""

    slot: int
    key: Hashable = None
    ready: Any = None
    readers: list[Any] = field(default_factory=list)
    num_readers: int = 0
    num_lent: int = 0  # readers on other lanes, until their copies are enqueued


class SlotCache:
    """`num_slots` equal slots. Thread-safe, because peers read the cache."""

    def __init__(self, num_slots: int) -> None:
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._unused = [Entry(slot) for slot in reversed(range(num_slots))]
        self._lock = threading.Condition()
        self.num_hits = 0
        self.num_misses = 0

    def acquire(self, key: Hashable) -> tuple[Entry, bool]:
        """Returns the entry for `key` with one more reader, and whether it already holds the block."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                self.num_hits += 1
                self._entries.move_to_end(key)
            else:
                self.num_misses += 1
                entry = self._unused.pop() if self._unused else self._evict()
                entry.key, entry.ready = key, None
                self._entries[key] = entry
            entry.num_readers += 1
            return entry, entry.ready is not None

    def release(self, entry: Entry, last_use: Any) -> None:
        """Removes a reader; the slot's next writer must wait for `last_use`."""
        with self._lock:
            entry.num_readers -= 1
            if last_use is not None:
                entry.readers.append(last_use)

    def give_back(self, entry: Entry, last_use: Any) -> None:
        """Ends a loan after the peer's copy is enqueued, so that the slot may be reused."""
        with self._lock:
            entry.num_lent -= 1
            if last_use is not None:
                entry.readers.append(last_use)
            self._lock.notify_all()

    def claim_readers(self, entry: Entry) -> list[Any]:
        """Returns the uses of the previous block, for which the new block's writer has to wait."""
        with self._lock:
            readers, entry.readers = entry.readers, []
            return readers

    def lend(self, key: Hashable) -> Entry | None:
        """Returns an entry that a peer may copy from until it is given back; None unless the block has arrived."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None or entry.ready is None or not entry.ready.query():
                return None
            entry.num_lent += 1
            return entry

    def _evict(self) -> Entry:
        """Frees the oldest slot without readers. Waits for slots that are only lent, as they are returned soon."""
        while True:
            idle = [(key, entry) for key, entry in self._entries.items() if entry.num_readers == 0]
            for key, entry in idle:
                if entry.num_lent == 0:
                    del self._entries[key]
                    return entry
            if not idle:
                break
            self._lock.wait()
        raise TilingError("every tile slot is being read: the plan gave this operand too few slots; raise the memory")
