"""Schedule + Machine -> Timeline (predicted).

There are two passes over the actions. *Memory* is simulated in program order, as the device's allocator works: what the
program itself holds in each slot, what handles hold beyond that, and the copies that swap-ins and reruns make, with the
peak inside every tick. *Time* is simulated as on the device: compute in slot order, two copy lanes, and stalls where
compute waits for a copy.

PoocH (arXiv 1907.05013) compares plans by such a timeline, too. Here the simulated actions are the same ones that the
runtime executes, for single ops and storages, so simulation and run can differ only in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np

from outcore.planning.program.lanes import IN, OUT, Lanes, host_lane
from outcore.planning.program.traffic import Traffic
from outcore.planning.trace_index import Int64s, TraceIndex, clock_seconds, index_of
from outcore.values import MADE_AGAIN, Machine, Residency, Schedule, Span, Timeline, Trace

# (tick, kind, value or op, tier, values held, in place): an Action as a tuple, for the planners' inner loops. A named
# tuple would be made several times slower than it is read.
Step = tuple[int, str, int, str, tuple[int, ...], bool]
TICK: Final = 0
KIND: Final = 1
SUBJECT: Final = 2
TIER: Final = 3
HELD: Final = 4


@dataclass
class Clocked:
    """The result of simulating time."""

    step_s: float = 0.0
    stall_s: float = 0.0
    recompute_s: float = 0.0
    out_stall_s: dict[int, float] = field(default_factory=dict)  # value -> seconds that compute waited for its swap-out
    in_stall_s: dict[int, float] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


def simulate(
    trace: Trace, schedule: Schedule, machine: Machine, *, detail: bool = False, residency: Residency | None = None
) -> Timeline:
    """Returns the predicted timeline. `detail` adds the spans and the memory curve. `residency` is that of the training
    state, whose copies share the lanes and whose window counts as in use before the step."""
    trace_index = index_of(trace)
    steps = steps_of(schedule)
    level_bytes = memory_of(trace_index, steps, schedule.decisions)
    traffic = Traffic(trace_index, machine, residency) if residency is not None else None
    clocked = clock_of(trace_index, steps, machine, detail=detail, traffic=traffic)
    if traffic is not None and residency is not None and len(level_bytes):
        level_bytes = level_bytes - residency.window_bytes + traffic.used_bytes(len(level_bytes))
    peak_slot = int(np.argmax(level_bytes)) if len(level_bytes) else 0
    bytes_by = _bytes_by_decision(trace_index, schedule.decisions)
    return Timeline(
        measured=False,
        step_s=clocked.step_s,
        peak_bytes=int(level_bytes.max(initial=0 if traffic is not None else trace.before_bytes)),
        peak_at=trace_index.op_at(peak_slot),
        stall_s=clocked.stall_s,
        recompute_s=clocked.recompute_s,
        swapped_bytes=bytes_by["swap"],
        recomputed_bytes=sum(bytes_by[decision] for decision in MADE_AGAIN),
        kept_bytes=bytes_by["keep"],
        host_peak_bytes=_tier_bytes(trace_index, steps, "host"),
        state_in_bytes=traffic.in_bytes + traffic.update_bytes if traffic is not None else 0,
        state_out_bytes=traffic.out_bytes + traffic.update_bytes if traffic is not None else 0,
        state_written_bytes=traffic.written_bytes if traffic is not None else 0,
        disk_peak_bytes=_tier_bytes(trace_index, steps, "disk"),
        actions=tuple(f"{step[TICK]} {step[KIND]} {step[SUBJECT]}" for step in steps),
        spans=tuple(clocked.spans),
        memory=_memory_curve(trace_index, level_bytes, machine) if detail else (),
    )


def steps_of(schedule: Schedule) -> list[Step]:
    return [
        (act.tick, act.kind, act.op if act.kind == "rerun" else act.value, act.tier, act.values, act.in_place)
        for act in schedule.actions
    ]


def _bytes_by_decision(trace_index: TraceIndex, decisions: Mapping[int, str]) -> dict[str, int]:
    found = {"keep": 0, "swap": 0, "recompute": 0, "remake": 0}
    for value in trace_index.packs:
        if not trace_index.trace.storages[trace_index.storage[value]].external:
            found[decisions.get(value, "keep")] += trace_index.value_bytes[value]
    return found


def _tier_bytes(trace_index: TraceIndex, steps: Sequence[Step], tier: str) -> int:
    values = {step[SUBJECT] for step in steps if step[KIND] == "swap_out" and step[TIER] == tier}
    return sum(trace_index.value_bytes[value] for value in values)


def _memory_curve(trace_index: TraceIndex, level_bytes: Int64s, machine: Machine) -> tuple[tuple[float, int], ...]:
    """Returns memory over the seconds of the recorded ops. Reruns and stalls do not stretch the curve."""
    curve, now_s = [], 0.0
    for op in trace_index.trace.ops:
        curve.append((now_s, int(level_bytes[op.slot])))
        now_s += op.seconds / machine.speed
    return tuple(curve)


# --- memory -----------------------------------------------------------------------------------------------------------


def memory_of(trace_index: TraceIndex, steps: Sequence[Step], decisions: Mapping[int, str]) -> Int64s:
    """Returns the device bytes per slot; at a tick, the highest inside it."""
    return _MemoryWalk(trace_index, decisions).run(steps)


def memory_with_ins(
    trace_index: TraceIndex, steps: Sequence[Step], decisions: Mapping[int, str]
) -> tuple[Int64s, dict[tuple[int, int], int]]:
    """Returns the device bytes per slot, and for each swap-in (value, tick) the highest memory in its tick before it
    starts."""
    walk = _MemoryWalk(trace_index, decisions)
    level_bytes = walk.run(steps)
    peaks = np.array(walk.tick_peak, dtype=np.int64)
    slots = trace_index.tick_slots
    return level_bytes, {
        key: int(level_bytes[slots[key[1]]] - peaks[slots[key[1]]]) + peak for key, peak in walk.before_in.items()
    }


def held_until(trace_index: TraceIndex, decisions: Mapping[int, str]) -> dict[int, int]:
    """Returns, for each value, the last slot in which a recipe refers to it. Recomputed values refer to the inputs of
    their producers, which may be unsaved values that refer to further inputs."""
    producer, ops, packs = trace_index.producer, trace_index.trace.ops, trace_index.packs
    until: dict[int, int] = {}
    pending: list[int] = []
    seen: set[int] = set()

    def reach(value: int, end: int) -> None:
        passes = producer[value] >= 0 and (value not in packs or decisions.get(value) in MADE_AGAIN)
        if passes:
            end = max(end, trace_index.version_end[value])
        if end > until.get(value, -1):
            until[value] = end
        if passes and producer[value] not in seen:
            seen.add(producer[value])
            heappush(pending, -producer[value])

    heapify(pending)
    for value, decision in decisions.items():
        if decision in MADE_AGAIN:
            reach(value, trace_index.handle_end[value])
    while pending:  # the newest op first, so that all readers of its outputs were visited before
        op = -heappop(pending)
        end = max(
            until[value]
            for value in ops[op].writes
            if value in until and (value not in packs or decisions.get(value) in MADE_AGAIN)
        )
        for read in trace_index.reads[op]:
            reach(read, end)
    return until


def recipe_ops(trace_index: TraceIndex, decisions: Mapping[int, str]) -> set[int]:
    """Returns the ops whose recipes are kept: the producers of all recomputed values, also of values that are not
    unpacked in the recorded step. A step that leaves its plan may unpack them."""
    reached, packs, producer = held_until(trace_index, decisions), trace_index.packs, trace_index.producer
    made = (value for value in reached if value not in packs or decisions.get(value) in MADE_AGAIN)
    return {producer[value] for value in made if producer[value] >= 0}


class _MemoryWalk:
    """Collects changes of memory, at the start of slots and inside ticks, beyond what the program itself holds."""

    def __init__(self, trace_index: TraceIndex, decisions: Mapping[int, str]) -> None:
        num_slots = trace_index.trace.num_slots
        self.trace_index = trace_index
        self.at_slot = [0] * (num_slots + 1)  # change when the slot begins
        self.in_tick = [0] * (num_slots + 1)  # change by the tick's actions, effective from the next slot on
        self.tick_peak = [0] * num_slots  # highest point inside the tick, above its beginning
        self.copies: dict[int, int] = {}  # value -> tick at which the copy that is held was made
        self.held_end = self._hold_kept(decisions)
        self.originals: set[int] = set()  # swapped values whose device storage is still held
        self.before_in: dict[tuple[int, int], int] = {}  # (value, tick) of a swap-in -> highest point before it
        self.level = 0  # inside the current tick, above its beginning
        self.peak = 0

    def _hold_kept(self, decisions: Mapping[int, str]) -> dict[int, int]:
        """Returns the last slot up to which kept values hold each storage, beyond the program's own use."""
        trace_index, storages = self.trace_index, self.trace_index.trace.storages
        reached = held_until(trace_index, decisions)
        held_end: dict[int, int] = {}
        for value, own_end in trace_index.handle_end.items():
            storage = trace_index.storage[value]
            if decisions.get(value, "keep") == "keep" and not storages[storage].external:
                held_end[storage] = max(own_end, reached.get(value, -1), held_end.get(storage, -1))
        for storage, end in held_end.items():
            if end > trace_index.dies[storage]:
                self.at_slot[trace_index.dies[storage] + 1] += storages[storage].bytes
                self.at_slot[end + 1] -= storages[storage].bytes
        return held_end

    def run(self, steps: Sequence[Step]) -> Int64s:
        slots, tick = self.trace_index.tick_slots, -1
        actions = {
            "swap_out": self._swap_out,
            "free": self._free,
            "swap_in": self._swap_in,
            "rerun": self._rerun,
        }
        for step in steps:
            if step[TICK] != tick:
                self._close(slots[tick] if tick >= 0 else -1)
                tick = step[TICK]
            act = actions.get(step[KIND])
            if act is not None:
                act(step)
        self._close(slots[tick] if tick >= 0 else -1)
        return self._levels()

    def _levels(self) -> Int64s:
        starts = np.cumsum(np.array(self.at_slot[:-1], dtype=np.int64))
        inside = np.cumsum(np.array(self.in_tick, dtype=np.int64))
        starts[1:] += inside[: len(starts) - 1]
        total: Int64s = self.trace_index.natural_bytes + starts + np.array(self.tick_peak, dtype=np.int64)
        return total

    def _close(self, slot: int) -> None:
        if slot >= 0:
            self.in_tick[slot] = self.level
            self.tick_peak[slot] = self.peak
        self.level = self.peak = 0

    def _grow(self, num_bytes: int) -> None:
        self.level += num_bytes
        if self.level > self.peak:
            self.peak = self.level

    def _swap_out(self, step: Step) -> None:
        value = step[SUBJECT]
        storage = self.trace_index.storage[value]
        alive_until = max(self.trace_index.dies[storage], self.held_end.get(storage, -1))
        self.at_slot[alive_until + 1] += self.trace_index.value_bytes[value]
        self.originals.add(value)

    def _free(self, step: Step) -> None:
        tick, value = step[TICK], step[SUBJECT]
        if value in self.originals:
            self._free_original(tick, value)
        elif value in self.copies:
            self._free_copy(tick, value)

    def _free_original(self, tick: int, value: int) -> None:
        self.originals.remove(value)
        storage, slot = self.trace_index.storage[value], self.trace_index.tick_slots[tick]
        alive_until = max(self.trace_index.dies[storage], self.held_end.get(storage, -1))
        if alive_until >= slot:  # the program or a kept version holds it longer
            self.at_slot[alive_until + 1] -= self.trace_index.value_bytes[value]
        else:
            self.level -= self.trace_index.value_bytes[value]

    def _free_copy(self, tick: int, value: int) -> None:
        made, given_until = self.copies.pop(value), self.trace_index.given_until
        given = [given_until[at] for at in self.trace_index.unpacks.get(value, ()) if made <= at <= tick]
        autograd_end = max(given, default=-1)
        if autograd_end >= self.trace_index.tick_slots[tick]:
            self.at_slot[autograd_end + 1] -= self.trace_index.value_bytes[value]
        else:
            self.level -= self.trace_index.value_bytes[value]

    def _swap_in(self, step: Step) -> None:
        self.before_in[step[SUBJECT], step[TICK]] = self.peak
        self.copies[step[SUBJECT]] = step[TICK]
        self._grow(self.trace_index.value_bytes[step[SUBJECT]])

    def _rerun(self, step: Step) -> None:
        tick, _, op_index, _, held, in_place = step
        op, value_bytes, storage = (
            self.trace_index.trace.ops[op_index],
            self.trace_index.value_bytes,
            self.trace_index.storage,
        )
        overwritten: dict[int, int] = {}
        if in_place:
            overwritten = {storage[read]: read for read in self.trace_index.overwrites[op_index] if read in self.copies}
        fresh = [value for value in op.writes if storage[value] not in overwritten]
        for value in op.writes:  # an in-place op: the block belongs to the new version from now on
            if storage[value] in overwritten:
                del self.copies[overwritten[storage[value]]]
        self._grow(sum(value_bytes[value] for value in fresh) + op.workspace_bytes)
        self.level -= op.workspace_bytes
        for value in op.writes:
            if value in held:
                self.copies[value] = tick
            else:
                self.level -= value_bytes[value]


# --- time -------------------------------------------------------------------------------------------------------------


def clock_of(
    trace_index: TraceIndex,
    steps: Sequence[Step],
    machine: Machine,
    *,
    detail: bool = False,
    traffic: Traffic | None = None,
) -> Clocked:
    """Simulates time: compute in slot order, two copy lanes, stalls, and the host where it is slower. `traffic` adds
    copies of the training state."""
    found, lanes = Clocked(), Lanes(machine.duplex_share)
    host = host_lane(trace_index, machine, (step[SUBJECT] for step in steps if step[KIND] == "rerun"))
    ops, value_bytes, clock_s, speed = (
        trace_index.trace.ops,
        trace_index.value_bytes,
        trace_index.clock_s,
        machine.speed,
    )
    delay_s, spans = 0.0, found.spans if detail else None
    for tick, kind, subject, tier, _, _ in steps:
        if traffic is not None:
            delay_s += _waits_for_state(traffic.reach(lanes, trace_index.tick_slots[tick], delay_s), found)
        if host is not None:
            delay_s = _waits_for_host(host.act(kind, host.reach(tick, delay_s)), delay_s, clock_s[tick] / speed, spans)
        now_s = clock_s[tick] / speed + delay_s
        if kind == "swap_out":
            lanes.issue(OUT, subject, now_s, machine.out_s(value_bytes[subject], tier))
        elif kind == "swap_in":
            lanes.issue(IN, subject, now_s, machine.in_s(value_bytes[subject], tier))
        elif kind in ("wait_out", "wait_in"):
            lane, stalls = (OUT, found.out_stall_s) if kind == "wait_out" else (IN, found.in_stall_s)
            stall_s = lanes.finish(lane, subject) - now_s
            if stall_s > 0:
                delay_s += stall_s
                found.stall_s += stall_s
                stalls[subject] = stalls.get(subject, 0.0) + stall_s
                if detail:
                    found.spans.append(Span("compute", now_s, now_s + stall_s, "stall"))
            if detail:
                start_s, end_s = lanes.start_s[lane][subject], lanes.end_s[lane][subject]
                found.spans.append(Span(f"swap_{kind[5:]}", start_s, end_s, f"swap_{kind[5:]} {subject}"))
        elif kind == "rerun":
            seconds = ops[subject].rerun_s / speed
            delay_s += seconds
            found.recompute_s += seconds
            if detail:
                found.spans.append(Span("compute", now_s, now_s + seconds, f"rerun {ops[subject].name}"))
    if host is not None:
        delay_s = _waits_for_host(host.finish(delay_s), delay_s, trace_index.total_s / speed, spans)
    if traffic is not None:
        delay_s += _waits_for_state(traffic.reach(lanes, trace_index.trace.num_slots, delay_s), found)
        delay_s += _waits_for_state(traffic.finish(lanes, trace_index.total_s / speed + delay_s), found)
    found.step_s = trace_index.total_s / speed + delay_s
    if detail:
        found.spans = sorted(found.spans + _op_spans(trace_index, found.spans, speed), key=lambda span: span.start_s)
    return found


def _waits_for_state(seconds: float, found: Clocked) -> float:
    found.stall_s += seconds
    return seconds


def _waits_for_host(delay_s: float, before_s: float, clock_s: float, spans: list[Span] | None) -> float:
    """Compute has nothing to do until the host is there: `delay_s` behind its ops, instead of `before_s`."""
    if spans is not None and delay_s > before_s:
        spans.append(Span("compute", clock_s + before_s, clock_s + delay_s, "host"))
    return delay_s


def _op_spans(trace_index: TraceIndex, extra: Sequence[Span], speed: float) -> list[Span]:
    """Returns the spans of the recorded ops, each delayed by the stalls and reruns before it."""
    delays = sorted((span.start_s, span.end_s - span.start_s) for span in extra if span.stream == "compute")
    spans, now_s, at = [], 0.0, 0
    for op, clock_s in zip(trace_index.trace.ops, clock_seconds(trace_index.trace)):
        while at < len(delays) and delays[at][0] <= now_s + 1e-12:
            now_s += delays[at][1]
            at += 1
        spans.append(Span("compute", now_s, now_s + clock_s / speed, op.name))
        now_s += clock_s / speed
    return spans
