"""Trace + Schedule -> AllocatorHints: what a step does to keep the device's memory from fragmenting.

PyTorch's caching allocator places a block in the best-fitting hole that is free at that moment. A block that outlives
its neighbours splits the free memory around it. When no hole is large enough, the allocator releases its cached blocks
and starts over, which synchronizes the device. Two hints avoid that: placeholders reserve the places of long-lived
blocks in advance (`planning.allocator.placeholders`), and small gradients, which outlive everything else that a
backward pass allocates, are stored in pages of their own (`outcore.memory.gradient_pool`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

from outcore.planning.program.simulate import held_until
from outcore.planning.settings import ALLOCATOR
from outcore.planning.trace_index import index_of
from outcore.values import Schedule, Trace

T = TypeVar("T")
SMALLEST_BYTES = ALLOCATOR.small_bytes  # PyTorch allocates smaller blocks from a pool of their own


@dataclass(frozen=True)
class Placeholder:
    """Unused memory of the size of a later block. It is allocated in the slot `since` (-1: before the step) and freed
    in `until`, the last slot before the block is allocated in which the program can do so. The hole it leaves has
    exactly the size of the block, so the allocator places the block there."""

    num_bytes: int
    since: int
    until: int


@dataclass(frozen=True)
class AllocatorHints:
    """What a step does against fragmentation: it allocates placeholders, or moves gradients to the gradient pool."""

    placeholders: tuple[Placeholder, ...] = ()
    pooled: frozenset[int] = frozenset()


def small_gradients(trace: Trace, budget_bytes: int) -> frozenset[int]:
    """Returns the storages of gradients that the backward pass leaves, the smallest first, as many as the pool
    holds."""
    first = min((op.slot for op in trace.ops if op.phase == "backward"), default=trace.num_slots)
    gradients = [
        (number, storage.bytes)
        for number, storage in enumerate(trace.storages)
        if not storage.external and storage.born >= first and storage.dies >= trace.num_slots - ALLOCATOR.last_slots
    ]
    return frozenset(smallest_in_pool(gradients, budget_bytes))


def smallest_in_pool(gradients: Iterable[tuple[T, int]], budget_bytes: int) -> list[T]:
    """Returns the gradients that the gradient pool holds: the smallest ones, up to its size. Each is given with its
    bytes. Blocks below `SMALLEST_BYTES` do not count."""
    left_bytes, found = min(int(ALLOCATOR.pool_share * budget_bytes), ALLOCATOR.pool_bytes), []
    for gradient, num_bytes in sorted(gradients, key=lambda item: item[1]):
        left_bytes -= num_bytes if num_bytes >= SMALLEST_BYTES else 0
        if left_bytes < 0:
            break
        found.append(gradient)
    return found


def storage_ends(trace: Trace, schedule: Schedule) -> dict[int, int]:
    """Returns, for each storage made in the step, the last slot in which the program or a handle holds it."""
    trace_index, decisions = index_of(trace), schedule.decisions
    reached = held_until(trace_index, decisions)
    ends = {number: storage.dies for number, storage in enumerate(trace.storages) if not storage.external}
    for value in trace_index.packs:
        if decisions.get(value, "keep") == "keep" and trace_index.storage[value] in ends:
            last = max(trace_index.handle_end[value], reached.get(value, -1))
            ends[trace_index.storage[value]] = max(ends[trace_index.storage[value]], last)
    leaving: set[int] = set()
    for action in schedule.actions:
        if action.kind == "swap_out":
            leaving.add(action.value)
        elif action.kind == "free" and action.value in leaving:
            leaving.remove(action.value)
            storage = trace_index.storage[action.value]
            ends[storage] = max(ends[storage], trace_index.tick_slots[action.tick])
    return ends
