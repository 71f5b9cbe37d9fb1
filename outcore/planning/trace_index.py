"""Trace -> TraceIndex: what planners, lowering and simulator need to know of a trace, computed once.

It holds the memory per slot without any plan, the clock at every tick, and which saved values may be evicted and which
can be recomputed. These rules are the same at run time:

- A saved value is *evictable* if all of this holds: its storage was made in the step (by an op or, for example, by a
  compiled function) and may be moved; it is not overwritten after its first pack; it is not packed again after an
  unpack; the program itself does not keep it alive until it is first unpacked, so that evicting it frees memory; and it
  is not tiny.
- A value is *recomputable* if its producer may run again and each of its inputs is available: an external tensor that
  is not overwritten later, a saved value, or another recomputable value. A value that is not unpacked in the step and
  whose graph outlives the step is not recomputable, because parameters may have changed when it is unpacked.
- A value that autograd unpacks after the step is always swapped. That backward has no plan, so the device should be as
  empty as possible; values are fetched one after the other.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from outcore.planning.settings import INDEX
from outcore.values import Decision, Trace

Int64s = NDArray[np.int64]
T = TypeVar("T")
THERE, SWAPPED, RECOMPUTED, UNSAVED = range(4)  # where a rerun finds an input


@dataclass(frozen=True)
class TraceIndex:
    """Derived arrays of one trace. Indices are those of the trace: values, ops, ticks, slots."""

    trace: Trace
    natural_bytes: Int64s  # per slot: in use before the step + storages alive + workspace
    tick_slots: list[int]
    clock_s: list[float]  # per tick: seconds before it on the machine that recorded, of ops and, in line, of the host
    total_s: float  # of all ops, likewise
    value_bytes: list[int]
    producer: list[int]
    storage: list[int]
    packs: dict[int, list[int]]  # saved value -> its pack ticks
    unpacks: dict[int, list[int]]  # saved value -> its unpack ticks
    dies: list[int]  # per storage: the last slot in which the program holds it, at most the step's last slot
    version_end: list[int]  # per value: the last slot in which the program holds its storage with this content
    given_until: list[int]  # per tick: the last slot in which autograd holds what it got, at most the step's last slot
    handle_end: dict[int, int]  # saved value -> the last slot in which a handle or what it gave is alive
    evictable: tuple[int, ...]  # in order of first pack
    # evictable value -> (first, end) of the slots in which it exists only if it is kept
    spans: dict[int, tuple[int, int]]
    recomputable: list[bool]  # per value
    left_behind: frozenset[int]  # evictable values that are not unpacked in the step and whose graph outlives it
    always_swapped: frozenset[int]  # evictable values that are swapped whatever a planner decides
    kept_for: dict[int, str]  # saved value that is not evictable -> why
    reads: list[tuple[int, ...]]  # per op: the inputs of a rerun that were made in the step, each once
    overwrites: list[tuple[int, ...]]  # per op: those inputs whose storage it writes
    state: list[int]  # per value: THERE (external or saved, kept unless decided otherwise) or UNSAVED

    def binding(self, decisions: Mapping[int, Decision]) -> Mapping[int, Decision]:
        """Returns the decisions, with those replaced that a planner may not make."""
        return {**decisions, **dict.fromkeys(self.always_swapped, "swap")} if self.always_swapped else decisions

    def op_at(self, slot: int) -> str:
        """Returns a description of the op at or next to a slot."""
        trace = self.trace
        if not trace.ops:
            return "the start of the step"
        at = min(bisect_left([op.slot for op in trace.ops], slot), len(trace.ops) - 1)
        op = trace.ops[at]
        where = f" in {op.module}" if op.module else ""
        before = "" if op.slot == slot else "just before " if op.slot > slot else "just after "
        return f"{before}op {at} ({op.name}{where})"


def remembered(trace: Trace, make: Callable[[Trace], T]) -> T:
    """Returns `make(trace)`, which is computed at the first call and stored with the trace."""
    held = vars(trace)
    name = f"_made by {make.__qualname__}"
    if name not in held:
        held[name] = make(trace)
    made: T = held[name]
    return made


def index_of(trace: Trace) -> TraceIndex:
    return remembered(trace, _survey)


def segments_of(trace_index: TraceIndex) -> dict[int, tuple[int, ...]]:
    """Returns the segment of each recomputable evictable value: the ops that run again if every saved value is
    available. These are its producer and, for inputs that were not saved, their producers. It is empty for a value that
    is never unpacked.

    Each op runs again at most once, so that a set of values costs the seconds of the union of their segments.
    """
    reads, producer, packs = trace_index.reads, trace_index.producer, trace_index.packs
    segments = {}
    for value in trace_index.evictable:
        if not trace_index.recomputable[value]:
            continue
        segment_ops = {producer[value]} if trace_index.unpacks[value] else set()
        pending = list(segment_ops)
        while pending:
            for read in reads[pending.pop()]:
                maker = producer[read]
                if read not in packs and maker not in segment_ops:
                    segment_ops.add(maker)
                    pending.append(maker)
        segments[value] = tuple(sorted(segment_ops))
    return segments


def _survey(trace: Trace) -> TraceIndex:
    value_bytes = [trace.storages[value.storage].bytes for value in trace.values]
    packs, unpacks = _ticks_by_value(trace)
    last_slot = trace.num_slots - 1
    dies = [min(storage.dies, last_slot) for storage in trace.storages]
    given_until = [min(tick.dies, last_slot) for tick in trace.ticks]
    handle_end = {value: _handle_end(given_until, packs[value], unpacks[value], last_slot) for value in packs}
    kept_for = _reasons_to_keep(trace, packs, unpacks, handle_end, value_bytes)
    evictable = tuple(value for value in packs if value not in kept_for)
    left_behind = frozenset(
        value
        for value in evictable
        if not unpacks[value] and any(trace.ticks[tick].dies >= last_slot for tick in packs[value])
    )
    clock_s, total_s = _clock(trace)
    return TraceIndex(
        trace=trace,
        natural_bytes=_natural_bytes(trace),
        tick_slots=[tick.slot for tick in trace.ticks],
        clock_s=clock_s,
        total_s=total_s,
        value_bytes=value_bytes,
        producer=[value.producer for value in trace.values],
        storage=[value.storage for value in trace.values],
        packs=packs,
        unpacks=unpacks,
        dies=dies,
        version_end=_version_ends(trace, dies),
        given_until=given_until,
        handle_end=handle_end,
        evictable=evictable,
        spans={
            value: (
                dies[trace.values[value].storage] + 1,
                trace.ticks[unpacks[value][0]].slot if unpacks[value] else trace.num_slots,
            )
            for value in evictable
        },
        recomputable=[can and value not in left_behind for value, can in enumerate(_recomputable(trace, packs))],
        left_behind=left_behind,
        always_swapped=frozenset(evictable).intersection(trace.asked_late),
        kept_for=kept_for,
        reads=[_own_reads(trace, index) for index in range(len(trace.ops))],
        overwrites=[_overwritten_reads(trace, index) for index in range(len(trace.ops))],
        state=[
            THERE if value in packs or trace.storages[version.storage].external else UNSAVED
            for value, version in enumerate(trace.values)
        ],
    )


def _version_ends(trace: Trace, dies: list[int]) -> list[int]:
    ends = [dies[value.storage] for value in trace.values]
    newest: dict[int, int] = {}  # storage -> value
    for value, version in enumerate(trace.values):
        if version.storage in newest and version.producer >= 0:
            ends[newest[version.storage]] = min(ends[newest[version.storage]], trace.ops[version.producer].slot)
        newest[version.storage] = value
    return ends


def _handle_end(given_until: list[int], packs: list[int], unpacks: list[int], last_slot: int) -> int:
    """Returns the last slot in which autograd holds a handle of the value, or the tensor that it got for one."""
    given = max((given_until[tick] for tick in unpacks), default=-1)
    handles = [given_until[tick] for tick in packs]
    if min(handles, default=-1) < 0:  # the handles were not watched
        return given if unpacks else last_slot
    return max(given, *handles)


def _own_reads(trace: Trace, op: int) -> tuple[int, ...]:
    reads = trace.rerun_reads[op]
    return tuple(read for read in reads if not trace.storages[trace.values[read].storage].external)


def _overwritten_reads(trace: Trace, op: int) -> tuple[int, ...]:
    written = {trace.values[value].storage for value in trace.ops[op].writes}
    return tuple(read for read in trace.rerun_reads[op] if trace.values[read].storage in written)


def _ticks_by_value(trace: Trace) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    packs: dict[int, list[int]] = {}
    unpacks: dict[int, list[int]] = {}
    for index, tick in enumerate(trace.ticks):
        if tick.kind == "pack":
            packs.setdefault(tick.value, []).append(index)
            unpacks.setdefault(tick.value, [])
        else:
            # it may have been packed before the step, by a graph that was retained
            unpacks.setdefault(tick.value, []).append(index)
    return packs, unpacks


def _natural_bytes(trace: Trace) -> Int64s:
    change = np.zeros(trace.num_slots + 1, dtype=np.int64)
    for storage in trace.storages:
        if not storage.external and storage.dies >= storage.born:
            change[storage.born] += storage.bytes
            change[min(storage.dies, trace.num_slots - 1) + 1] -= storage.bytes
    level: Int64s = np.cumsum(change)[:-1] + trace.before_bytes
    for op in trace.ops:
        level[op.slot] += op.workspace_bytes
    return level


def _clock(trace: Trace) -> tuple[list[float], float]:
    clock_s, now_s, ops, at = [], 0.0, trace.ops, 0
    seconds = clock_seconds(trace)
    for tick in trace.ticks:
        while at < len(ops) and ops[at].slot < tick.slot:
            now_s += seconds[at]
            at += 1
        clock_s.append(now_s)
    return clock_s, now_s + sum(seconds[at:])


def clock_seconds(trace: Trace) -> list[float]:
    """Per op, how far it moves the clock of a step in which nothing is waited for."""
    if trace.is_in_line:
        return [op.seconds + op.host_s for op in trace.ops]
    return [op.seconds for op in trace.ops]


def _last_write_slots(trace: Trace) -> list[int]:
    """Per storage, the slot of the op that made its newest version (-1: nothing in the step wrote it)."""
    last = [-1] * len(trace.storages)
    for op in trace.ops:
        for value in op.writes:
            last[trace.values[value].storage] = op.slot
    return last


def _overwritten_after_pack(trace: Trace, packs: dict[int, list[int]]) -> set[int]:
    """Returns the saved values whose storage is written after their first pack. A version without a producer, for
    example of running statistics, may have been written at any time."""
    last_write = _last_write_slots(trace)
    for value in trace.values:
        if value.producer < 0 and value.version > 0:
            last_write[value.storage] = trace.num_slots
    return {
        value for value, ticks in packs.items() if last_write[trace.values[value].storage] > trace.ticks[ticks[0]].slot
    }


def _reasons_to_keep(
    trace: Trace,
    packs: dict[int, list[int]],
    unpacks: dict[int, list[int]],
    handle_end: dict[int, int],
    value_bytes: list[int],
) -> dict[int, str]:
    own = [value for value in packs if not trace.storages[trace.values[value].storage].external]
    floor_bytes = min(INDEX.floor_bytes, sum(value_bytes[value] for value in own) // INDEX.floor_parts)
    overwritten = _overwritten_after_pack(trace, packs)
    of_passes = {value for op in trace.ops for inner in op.fused for value in trace.ops[inner].writes}
    reasons: dict[int, str] = {}
    for value, ticks in packs.items():
        storage = trace.storages[trace.values[value].storage]
        first_unpack = unpacks[value][0] if unpacks[value] else len(trace.ticks)
        if storage.external:
            reasons[value] = "was there before the step"
        elif not storage.movable:
            reasons[value] = "cannot be moved"
        elif value in overwritten:
            reasons[value] = "is overwritten after it was saved"
        # statistics of a norm: without them a fused rerun is impossible, and single ops need more memory
        elif value in of_passes:
            reasons[value] = "is what a rerun starts from"
        elif ticks[-1] > first_unpack:
            reasons[value] = "is saved again after it was asked for"
        elif unpacks[value] and storage.dies >= trace.ticks[first_unpack].slot:
            reasons[value] = "is alive anyway when it is asked for"
        elif not unpacks[value] and storage.dies >= handle_end[value]:
            reasons[value] = "is alive anyway as long as autograd holds it"
        elif value_bytes[value] < floor_bytes or value_bytes[value] == 0:
            reasons[value] = "is small"
    return reasons


def _recomputable(trace: Trace, packs: dict[int, list[int]]) -> list[bool]:
    sources = _stable_sources(trace, packs)
    last_write = _last_write_slots(trace)
    can = [False] * len(trace.values)
    for op in trace.ops:
        if op.replay == "no":
            continue
        possible = True
        for read in op.reads:
            storage = trace.values[read].storage
            if trace.storages[storage].external:
                # nor written by the op itself, as fake quantization does with its statistics
                possible = last_write[storage] < op.slot
            elif read in packs:
                possible = read in sources and op.slot > sources[read]
            else:
                possible = can[read]
            if not possible:
                break
        if possible:
            for value in op.writes:
                can[value] = True
    return can


def _stable_sources(trace: Trace, packs: dict[int, list[int]]) -> dict[int, int]:
    """Returns, for each saved value, the slot after which ops that read it may be run again from it.

    An op before the last unpack that precedes the value's pack might have to run again before the value is held. An
    overwritten value cannot be a source at all.
    """
    overwritten = _overwritten_after_pack(trace, packs)
    unpack_slots = [tick.slot for tick in trace.ticks if tick.kind == "unpack"]
    sources = {}
    for value, ticks in packs.items():
        if value not in overwritten:
            at = bisect_left(unpack_slots, trace.ticks[ticks[0]].slot)
            sources[value] = unpack_slots[at - 1] if at else -1
    return sources
