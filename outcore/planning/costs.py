"""Terrain -> what evicting each value costs: seconds to remake it, seconds to copy it.

Remaking a value reruns its producer and, through inputs that nobody saved, the producers of those; it stops at saved
values, because each of them is obtained anyway. So an op runs again at most once, its seconds are shared by all values
that need it, and the cost of a set of values is the seconds of the union of their segments.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from outcore.planning.terrain import Terrain


def segments_of(terrain: Terrain) -> dict[int, tuple[int, ...]]:
    """Evictable value that can be recomputed -> the ops its rerun needs when every saved value is there."""
    ops, producer, packs = terrain.trace.ops, terrain.producer, terrain.packs
    storages, segments = terrain.trace.storages, {}
    for value in terrain.evictable:
        if not terrain.recomputable[value]:
            continue
        found = {producer[value]}
        pending = [producer[value]]
        while pending:
            for read in ops[pending.pop()].reads:
                maker = producer[read]
                if read not in packs and maker not in found and not storages[terrain.storage[read]].external:
                    found.add(maker)
                    pending.append(maker)
        segments[value] = tuple(sorted(found))
    return segments


def remake_density(terrain: Terrain, segments: dict[int, tuple[int, ...]]) -> dict[int, float]:
    """Value -> seconds per byte to remake it, cheapest first, each paying only for ops nobody before it pays for."""
    ops = terrain.trace.ops
    paid: set[int] = set()

    def density(value: int) -> float:
        return sum(ops[op].seconds for op in segments[value] if op not in paid) / terrain.value_bytes[value]

    heap = [(density(value), value) for value in segments]
    heapify(heap)
    found: dict[int, float] = {}
    while heap:
        before, value = heappop(heap)
        now = density(value)
        if now < before and heap and now > heap[0][0]:
            heappush(heap, (now, value))
            continue
        found[value] = now
        paid.update(segments[value])
    return found
