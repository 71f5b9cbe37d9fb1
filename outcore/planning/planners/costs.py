"""TraceIndex -> what evicting each value costs: seconds to remake it, seconds to copy it.

Remaking a value reruns its producer and, through inputs that nobody saved, the producers of those; it stops at saved
values, because each of them is obtained anyway. So an op runs again at most once, its seconds are shared by all values
that need it, and the cost of a set of values is the seconds of the union of their segments.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from outcore.planning.settings import HYBRID
from outcore.planning.trace_index import TraceIndex


def segments_of(trace_index: TraceIndex) -> dict[int, tuple[int, ...]]:
    """Evictable value that can be recomputed -> the ops its rerun needs when every saved value is there: none where
    nobody asks for it."""
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


def remake_density(trace_index: TraceIndex, segments: dict[int, tuple[int, ...]]) -> dict[int, float]:
    """Value -> seconds per byte to remake it, cheapest first, paying only for ops nobody before it pays for.

    Values that share ops are also offered together: alone, the first of them would have to pay for all.
    """
    ops, value_bytes = trace_index.trace.ops, trace_index.value_bytes
    paid: set[int] = set()
    found: dict[int, float] = {}

    def density(values: tuple[int, ...]) -> float:
        left = [value for value in values if value not in found]
        needed = {op for value in left for op in segments[value]} - paid
        return sum(ops[op].rerun_s for op in needed) / max(sum(value_bytes[value] for value in left), 1)

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
    """Every value alone, and all values that share an op together."""
    sharing: dict[int, list[int]] = {}
    for value, segment in segments.items():
        for op in segment:
            sharing.setdefault(op, []).append(value)
    bundles: set[tuple[int, ...]] = {(value,) for value in segments}
    bundles |= {tuple(values) for values in sharing.values() if 1 < len(values) <= HYBRID.max_bundle}
    return sorted(bundles)
