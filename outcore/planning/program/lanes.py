"""Copies -> the seconds at which they end: the two copy lanes.

Copies of one direction run in the order in which they are issued. While both lanes run, each keeps the machine's
`duplex_share` of its rate. The model advances from event to event. With a share of one the lanes are independent.
"""

from __future__ import annotations

from collections import deque

from outcore.planning.settings import LOWERING

OUT, IN = 0, 1


class Lanes:
    """Simulates both lanes. Copies are issued in order of time; `finish` returns when one ends."""

    def __init__(self, duplex_share: float) -> None:
        self._share = min(max(duplex_share, LOWERING.least_duplex_share), 1.0)
        self._now_s = 0.0
        self._queues: tuple[deque[list[float]], deque[list[float]]] = (deque(), deque())  # [key, ready_s, work_s]
        self.start_s: tuple[dict[int, float], dict[int, float]] = ({}, {})
        self.end_s: tuple[dict[int, float], dict[int, float]] = ({}, {})  # the newest copy of each key that has ended

    def issue(self, lane: int, key: int, ready_s: float, work_s: float) -> None:
        self.end_s[lane].pop(key, None)
        self.start_s[lane].pop(key, None)
        self._queues[lane].append([key, ready_s, work_s])

    def advance(self, until_s: float) -> None:
        """Runs both lanes up to `until_s`."""
        while self._now_s < until_s:
            if not self._step(until_s):
                self._now_s = until_s

    def finish(self, lane: int, key: int) -> float:
        """Runs both lanes until the copy has ended, and returns the time at which it ended."""
        while key not in self.end_s[lane]:
            if not self._step(float("inf")):
                raise KeyError(key)
        return self.end_s[lane][key]

    def _step(self, until_s: float) -> bool:
        """Advances to the next event: a copy becomes ready or ends, or `until_s` is reached. Returns False if both
        lanes are empty."""
        now_s, heads = self._now_s, [queue[0] if queue else None for queue in self._queues]
        active = [head is not None and head[1] <= now_s for head in heads]
        rate = self._share if all(active) else 1.0
        next_s = until_s
        for head, runs in zip(heads, active):
            if head is not None:
                next_s = min(next_s, now_s + head[2] / rate if runs else head[1])
        if next_s == float("inf"):
            return False
        for lane, (head, runs) in enumerate(zip(heads, active)):
            if head is not None and runs:
                self._progress(lane, head, next_s, rate)
        self._now_s = next_s
        return True

    def _progress(self, lane: int, head: list[float], next_s: float, rate: float) -> None:
        key = int(head[0])
        self.start_s[lane].setdefault(key, self._now_s)
        left_s = head[2] - (next_s - self._now_s) * rate
        if self._now_s + head[2] / rate <= next_s:
            self.end_s[lane][key] = next_s
            self._queues[lane].popleft()
        else:
            head[2] = left_s
