"""Decides which worker may exchange: the strict round robin of Algorithm 1, and bounded staleness.

A worker that exceeds the limit loses its turn (or no longer counts for the staleness bound) until it sends again, so
that the others wait for it only once.
"""

from __future__ import annotations

import math
import threading
import time


class Turns:
    """A thread-safe order of ranks, and clocks of workers."""

    def __init__(self, num_ranks: int, limit_s: float, staleness: int | None) -> None:
        self._order = list(range(num_ranks))
        self._next = 0  # the rank whose turn it is (or the first live one after it)
        self._limit_s, self._staleness = limit_s, staleness
        self._clocks: dict[str, int] = {}
        self._ticked_s: dict[str, float] = {}
        self._noted_holder, self._held_since_s = -1, 0.0
        self._changed = threading.Condition()

    def attach(self, rank: int, uid: str) -> None:
        with self._changed:
            self._enter(rank)
            self._clocks[uid], self._ticked_s[uid] = max(self._clocks.values(), default=0), time.monotonic()
            self._changed.notify_all()

    def detach(self, rank: int, uid: str) -> None:
        with self._changed:
            self._clocks.pop(uid, None)
            if rank in self._order and not any(other.startswith(f"{rank}.") for other in self._clocks):
                self._order.remove(rank)
            self._changed.notify_all()

    def take(self, rank: int, within_s: float = math.inf) -> bool:
        """Waits for `rank`'s turn, at most `within_s`; a holder that exceeds the limit is skipped."""
        until_s = time.monotonic() + within_s
        with self._changed:
            self._enter(rank)
            while (holder := self._note_holder()) != rank:
                now_s = time.monotonic()
                late_s = self._held_since_s + self._limit_s
                if now_s >= late_s:
                    self._order.remove(holder)
                elif now_s >= until_s:
                    return False
                else:
                    self._changed.wait(min(late_s, until_s) - now_s)
            return True

    def pass_on(self, rank: int) -> None:
        with self._changed:
            self._next = rank + 1
            self._noted_holder = -1
            self._changed.notify_all()

    def keep_pace(self, uid: str, clock: int, within_s: float = math.inf) -> bool:
        """Records `uid`'s clock, then waits, at most `within_s`, while it is over `staleness` ahead of the slowest."""
        until_s = time.monotonic() + within_s
        with self._changed:
            if self._clocks.get(uid) != clock:
                self._clocks[uid], self._ticked_s[uid] = clock, time.monotonic()
                self._changed.notify_all()
            while behind := self._behind(clock):
                now_s = time.monotonic()
                late_s = self._ticked_s[uid] + self._limit_s
                if now_s >= late_s:
                    for laggard in behind:  # silent for too long; it counts again when it sends
                        self._clocks.pop(laggard, None)
                elif now_s >= until_s:
                    return False
                else:
                    self._changed.wait(min(late_s, until_s) - now_s)
            return True

    def _behind(self, clock: int) -> list[str]:
        if self._staleness is None:
            return []
        return [uid for uid, other in self._clocks.items() if clock - other > self._staleness]

    def _enter(self, rank: int) -> None:
        if rank not in self._order:
            self._order = sorted([*self._order, rank])

    def _note_holder(self) -> int:
        """Returns the rank whose turn it is, and records when its turn began."""
        later = [rank for rank in self._order if rank >= self._next]
        holder = later[0] if later else self._order[0]
        if holder != self._noted_holder:
            self._noted_holder, self._held_since_s = holder, time.monotonic()
        return holder
