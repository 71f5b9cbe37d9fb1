"""TraceIndex -> what evicting each value costs: the seconds to recompute it.

Recomputing a value runs its producer again and, for inputs that were not saved, their producers. It stops at saved
values, because these are available anyway. The ops that run form the value's *segment*. Each op runs again at most
once, so its seconds are shared by all values that need it, and a set of values costs the seconds of the union of their
segments.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from outcore.planning.settings import HYBRID
from outcore.planning.trace_index import TraceIndex
from outcore.values import Machine


def segments_of(trace_index: TraceIndex) -> dict[int, tuple[int, ...]]:
    """Returns the segment of each recomputable evictable value: the ops that run again if every saved value is
    available. It is empty for a value that is never unpacked."""
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


def rerun_seconds(trace_index: TraceIndex, machine: Machine) -> list[float]:
    """Returns the seconds by which a rerun of each op makes the step longer. On the CPU the host's part counts, too."""
    ops, host = trace_index.trace.ops, machine.host
    if host is None or not trace_index.trace.is_in_line:
        return [op.rerun_s for op in ops]
    return [op.rerun_s + host.captured_op_s + host.rerun_s for op in ops]


def remake_density(trace_index: TraceIndex, machine: Machine, segments: dict[int, tuple[int, ...]]) -> dict[int, float]:
    """Returns the seconds per byte of recomputing each value. Starting with the cheapest value, each one is charged
    only for ops that no value before it was charged for.

    Values that share ops are also considered as a group; otherwise the first of them would be charged for all ops.
    """
    seconds, value_bytes = rerun_seconds(trace_index, machine), trace_index.value_bytes
    paid: set[int] = set()
    found: dict[int, float] = {}

    def density(values: tuple[int, ...]) -> float:
        left = [value for value in values if value not in found]
        needed = {op for value in left for op in segments[value]} - paid
        return sum(seconds[op] for op in needed) / max(sum(value_bytes[value] for value in left), 1)

    heap = [(density(bundle), bundle) for bundle in _bundles(segments)]
    heapify(heap)
    while heap:
        before, bundle = heappop(heap)
        left = tuple(value for value in bundle if value not in found)
        if not left:
            continue
        now = density(left)
        if now != before and heap and now > heap[0][0]:
            heappush(heap, (now, left))
            continue
        found.update(dict.fromkeys(left, now))
        for value in left:
            paid.update(segments[value])
    return found


def _bundles(segments: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns each value alone, and each group of values that share an op."""
    sharing: dict[int, list[int]] = {}
    for value, segment in segments.items():
        for op in segment:
            sharing.setdefault(op, []).append(value)
    bundles: set[tuple[int, ...]] = {(value,) for value in segments}
    bundles |= {tuple(values) for values in sharing.values() if 1 < len(values) <= HYBRID.max_bundle}
    return sorted(bundles)
