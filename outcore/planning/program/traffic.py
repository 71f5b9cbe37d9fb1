"""Trace + Residency -> Traffic: the copies of the training state in one step, which share the lanes with activations.

The simulator follows what `outcore.state` does. A streamed weight comes before its first reader, together with its
gradient and the optimizer's state where its update waits until then; weight and state go home afterwards. It comes once
more for the backward, and its gradient goes home as soon as it is made; where its update runs then, the optimizer's
state comes for that, and everything goes home. Weights that are read next are fetched ahead as
long as the window has room; what is needed and finds none waits until something has gone home.

Left out: what was fetched ahead and given up again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from outcore.planning.program.lanes import IN, OUT, Lanes
from outcore.planning.trace_index import Int64s, TraceIndex, clock_seconds
from outcore.values import Machine, Residency, StateUnit


@dataclass(frozen=True)
class _Use:
    """A moment at which a streamed unit is needed, or at which its gradient is sent home."""

    key: int  # identifies its copies; negative, unlike those of activations
    slot: int
    in_bytes: int
    out_bytes: int
    stays_bytes: int  # of what came in, until the next weight is needed
    takes_weight: bool = False  # the weight that stayed goes home with it
    comes_bytes: int = 0  # of a gradient that is made next: nothing is fetched ahead into its place
    update_bytes: int = 0  # that an update reads and writes on the device
    tier: str = "host"  # where the unit is kept
    ready_s: float = 0.0  # when the CPU has updated it, in seconds of the step


class Traffic:
    """The copies of the training state during one simulated step."""

    def __init__(self, trace_index: TraceIndex, machine: Machine, residency: Residency) -> None:
        self._machine, self._residency = machine, residency
        rates = machine.op_rates
        self._update_s_per_byte = 1 / rates.memory_bytes_per_s if rates is not None else 0.0
        ops = trace_index.trace.ops
        self._op_slots = [op.slot for op in ops]
        self._clock_s = list(
            accumulate((seconds / machine.speed for seconds in clock_seconds(trace_index.trace)), initial=0.0)
        )
        self._uses = deque(_uses(trace_index, residency, machine))
        self.in_bytes = sum(use.in_bytes for use in self._uses)
        self.out_bytes = sum(use.out_bytes for use in self._uses)
        self._update_bytes = _update_bytes(trace_index, residency)
        written_bytes = sum(use.out_bytes for use in self._uses if use.tier == "disk")
        self.written_bytes = written_bytes + self._update_bytes.get("disk", 0) + _written_by_cpu(trace_index, residency)
        self._used_bytes = self._staying_bytes = 0
        self._ahead: deque[_Use] = deque()  # fetched, and not needed yet
        self._going: deque[tuple[int, int]] = deque()  # keys and bytes that are being sent home
        self._levels: list[tuple[int, int]] = [(0, 0)]  # slots, and the bytes that are used from each slot on

    @property
    def update_bytes(self) -> int:
        """Bytes that updates inside `optimizer.step()` move, each way."""
        return sum(self._update_bytes.values())

    def reach(self, lanes: Lanes, slot: int, delay_s: float) -> float:
        """Advances to `slot`, where compute is `delay_s` behind the seconds of its ops. Returns how long compute
        waits."""
        waited_s = 0.0
        while self._uses and self._uses[0].slot <= slot:
            use = self._uses[0]
            now_s = self._clock_s[bisect_left(self._op_slots, use.slot)] + delay_s + waited_s
            waited_s += self._use(lanes, use, now_s)
            begins = use.slot if use.stays_bytes else use.slot + 1  # a gradient is the step's own while it is made
            self._levels.append((begins, self._used_bytes))
        return waited_s

    def used_bytes(self, num_slots: int) -> Int64s:
        """Returns the device bytes of the state in each slot, at most the window."""
        level_bytes = np.zeros(num_slots, dtype=np.int64)
        ends = [*(slot for slot, _ in self._levels[1:]), num_slots]
        for (slot, used_bytes), end in zip(self._levels, ends):
            level_bytes[slot:end] = used_bytes
        return np.minimum(level_bytes, self._residency.window_bytes)

    def finish(self, lanes: Lanes, now_s: float) -> float:
        """Returns the seconds from the end of the step until everything is at home and updates have run."""
        ended_s = max((lanes.finish(OUT, key) for key, _ in self._going), default=now_s)
        update_s = sum(
            max(self._machine.in_s(num_bytes, tier), self._machine.out_s(num_bytes, tier))
            for tier, num_bytes in self._update_bytes.items()
        )
        return max(0.0, ended_s - now_s) + update_s / self._machine.duplex_share

    def _use(self, lanes: Lanes, use: _Use, now_s: float) -> float:
        began_s = now_s
        lanes.advance(now_s)
        self._settle(lanes)
        if use.in_bytes and not (self._ahead and self._ahead[0] is use):
            now_s = self._make_room(lanes, use.in_bytes, max(now_s, use.ready_s))
            self._fetch(lanes, use, now_s)
        self._uses.popleft()
        if use.in_bytes:
            self._ahead.popleft()
            now_s = max(now_s, lanes.finish(IN, use.key))
        if use.stays_bytes:
            self._used_bytes -= self._staying_bytes + use.in_bytes - use.stays_bytes
            self._staying_bytes = use.stays_bytes
        now_s += use.update_bytes * self._update_s_per_byte
        if use.out_bytes:
            here_bytes = 0 if use.stays_bytes else use.in_bytes
            if use.takes_weight:
                here_bytes, self._staying_bytes = here_bytes + self._staying_bytes, 0
            going_bytes = use.out_bytes - use.stays_bytes
            now_s = self._make_room(lanes, going_bytes - here_bytes, now_s)
            self._used_bytes += going_bytes - here_bytes
            lanes.issue(OUT, use.key, now_s, self._machine.out_s(use.out_bytes, use.tier))
            self._going.append((use.key, going_bytes))
        self._fetch_ahead(lanes, now_s, use.comes_bytes)
        return now_s - began_s

    def _make_room(self, lanes: Lanes, num_bytes: int, now_s: float) -> float:
        while self._going and self._used_bytes + num_bytes > self._residency.window_bytes:
            key, going_bytes = self._going.popleft()
            now_s = max(now_s, lanes.finish(OUT, key))
            self._used_bytes -= going_bytes
        return now_s

    def _settle(self, lanes: Lanes) -> None:
        while self._going and self._going[0][0] in lanes.end_s[OUT]:
            self._used_bytes -= self._going.popleft()[1]

    def _fetch(self, lanes: Lanes, use: _Use, now_s: float) -> None:
        lanes.issue(IN, use.key, now_s, self._machine.in_s(use.in_bytes, use.tier))
        self._used_bytes += use.in_bytes
        self._ahead.append(use)

    def _fetch_ahead(self, lanes: Lanes, now_s: float, comes_bytes: int) -> None:
        known = {use.key for use in self._ahead}
        for use in self._uses:
            if not use.in_bytes or use.key in known:
                continue
            if use.ready_s > now_s or (
                self._used_bytes + use.in_bytes + (use.comes_bytes if not use.stays_bytes else 0) + comes_bytes
                > self._residency.window_bytes
            ):
                return
            self._fetch(lanes, use, now_s)


def _uses(trace_index: TraceIndex, residency: Residency, machine: Machine) -> list[_Use]:
    """In order. A weight that the backward reads twice in a row stays in between; after the forward of its module it
    goes. Where the CPU updates, it begins when the step before has ended, in the order in which weights are read."""
    found: list[_Use] = []
    updated: set[int] = set(residency.early)
    backward = next((op.slot for op in trace_index.trace.ops if op.phase == "backward"), trace_index.trace.num_slots)
    last, ready_s = -1, 0.0
    for seen in trace_index.trace.state:
        if seen.unit in residency.resident:
            continue
        key, unit, tier = -1 - len(found), residency.units[seen.unit], residency.tier_of(seen.unit)
        if seen.kind == "gradient":
            found.append(_gradient(key, seen.slot, unit, tier, seen.unit in residency.early, seen.unit == last))
            last = -1 if seen.unit in residency.early else last
        elif seen.unit != last:
            updates = residency.is_late and unit.gradient_bytes > 0 and seen.unit not in updated
            updated.add(seen.unit)
            if updates and residency.by_cpu:
                ready_s += machine.update_s(unit.update_bytes)
                found.append(_Use(key, seen.slot, unit.weight_bytes, 0, unit.weight_bytes, tier=tier, ready_s=ready_s))
                last = -1
                continue
            found.append(_weight(key, seen.slot, unit, tier, updates=updates, in_backward=seen.slot >= backward))
            last = seen.unit if seen.slot >= backward else -1
    return found


def _weight(key: int, slot: int, unit: StateUnit, tier: str, *, updates: bool, in_backward: bool) -> _Use:
    if not updates:
        comes_bytes = unit.gradient_bytes if in_backward else 0
        return _Use(key, slot, unit.weight_bytes, 0, unit.weight_bytes, comes_bytes=comes_bytes, tier=tier)
    out_bytes = unit.weight_bytes + unit.kept_bytes
    return _Use(key, slot, unit.all_bytes, out_bytes, unit.weight_bytes, update_bytes=unit.update_bytes, tier=tier)


def _gradient(key: int, slot: int, unit: StateUnit, tier: str, is_early: bool, is_here: bool) -> _Use:
    if not is_early:
        return _Use(key, slot, 0, unit.gradient_bytes, 0, tier=tier)
    in_bytes = unit.kept_bytes + (0 if is_here else unit.weight_bytes)
    return _Use(
        key,
        slot,
        in_bytes,
        unit.all_bytes,
        0,
        takes_weight=is_here,
        comes_bytes=unit.gradient_bytes,
        update_bytes=unit.update_bytes,
        tier=tier,
    )


def _update_bytes(trace_index: TraceIndex, residency: Residency) -> dict[str, int]:
    """That updates inside `optimizer.step()` move, each way about the same, by tier."""
    found: dict[str, int] = {}
    if not residency.is_late and not residency.by_cpu:
        for number in _updated(trace_index, residency):
            unit, tier = residency.units[number], residency.tier_of(number)
            found[tier] = found.get(tier, 0) + unit.weight_bytes + unit.kept_bytes
    return found


def _written_by_cpu(trace_index: TraceIndex, residency: Residency) -> int:
    """Bytes of homes on the disk that the CPU writes when it updates them."""
    updated = _updated(trace_index, residency) if residency.by_cpu else ()
    on_disk = [residency.units[number] for number in updated if residency.tier_of(number) == "disk"]
    return sum(unit.weight_bytes + unit.kept_bytes for unit in on_disk)


def _updated(trace_index: TraceIndex, residency: Residency) -> set[int]:
    """Streamed units that are updated after the backward."""
    streamed = {seen.unit for seen in trace_index.trace.state} - residency.resident - residency.early
    return {number for number in streamed if residency.units[number].gradient_bytes}
