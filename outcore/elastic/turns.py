"""Who may exchange now: the strict round robin of Algorithm 1, and bounded staleness.

A worker that is late past the limit loses its turn (or stops holding the clock back) until it speaks again; nobody
waits for it twice.
"""

from __future__ import annotations

import threading
import time


class Turns:
    """Thread-safe order over ranks, and clocks over workers."""

    def __init__(self, num_ranks: int, limit_s: float, staleness: int | None) -> None:
        self._order = list(range(num_ranks))
        self._next = 0  # the rank whose turn it is (or the first live one after it)
        self._limit_s, self._staleness = limit_s, staleness
        self._clocks: dict[str, int] = {}
        self._changed = threading.Condition()

    def attach(self, rank: int, uid: str) -> None:
        with self._changed:
            self._enter(rank)
            self._clocks[uid] = max(self._clocks.values(), default=0)
            self._changed.notify_all()

    def detach(self, rank: int, uid: str) -> None:
        with self._changed:
            self._clocks.pop(uid, None)
            if rank in self._order and not any(other.startswith(f"{rank}.") for other in self._clocks):
                self._order.remove(rank)
            self._changed.notify_all()

    def take(self, rank: int) -> None:
        """Waits until it is `rank`'s turn; whoever lets the limit pass is skipped."""
        with self._changed:
            self._enter(rank)
            since_s, holder = time.monotonic(), self._holder()
            while self._holder() != rank:
                if holder != self._holder():
                    since_s, holder = time.monotonic(), self._holder()
                left_s = self._limit_s - (time.monotonic() - since_s)
                if left_s <= 0:
                    self._order.remove(holder)
                else:
                    self._changed.wait(left_s)

    def pass_on(self, rank: int) -> None:
        with self._changed:
            self._next = rank + 1
            self._changed.notify_all()

    def tick(self, uid: str, clock: int) -> None:
        """Records `uid`'s clock, then holds it back while it is more than `staleness` ahead of the slowest."""
        with self._changed:
            self._clocks[uid] = clock
            self._changed.notify_all()
            if self._staleness is None:
                return
            until_s = time.monotonic() + self._limit_s
            while (behind := self._behind(clock)) and (left_s := until_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
            for laggard in behind:  # silent past the limit: it rejoins the count when it speaks
                self._clocks.pop(laggard, None)

    def _behind(self, clock: int) -> list[str]:
        assert self._staleness is not None
        return [uid for uid, other in self._clocks.items() if clock - other > self._staleness]

    def _enter(self, rank: int) -> None:
        if rank not in self._order:
            self._order = sorted([*self._order, rank])

    def _holder(self) -> int:
        later = [rank for rank in self._order if rank >= self._next]
        return later[0] if later else self._order[0]
