"""Trace + Schedule -> what lies around when a step asks for its largest pieces of memory.

A language model's loss wants a fifth of the budget in one piece, three times. The bytes are there, but not in one
piece: between the holes lies what was allocated on the way and stays, weights cast for the whole forward, values kept
for the backward, copies not yet out. A device's allocator that finds no hole gives everything back and starts over. The
runtime can put such bystanders somewhere else as soon as they are made (`outcore.running.aside`).
"""

from __future__ import annotations

from outcore.planning.simulate import held_until
from outcore.planning.terrain import terrain_of
from outcore.units import MIB
from outcore.values import Schedule, Trace

GIANT_SHARE = 0.15  # of the budget: what wants a piece as large as this makes a crowd
LARGEST_SHARE = 0.05  # a bystander is no larger
MOST_SHARE = 0.3  # all of them together: memory for them is memory that nothing else gets
SMALLEST_BYTES = MIB  # PyTorch itself keeps smaller blocks apart
GRADIENTS_SHARE = (
    0.02  # of the budget, for gradients aside: pages of one stream lie idle while nothing on it needs them
)
GRADIENTS_BYTES = 512 * MIB  # and no more than this
OURS_TO_MOVE = ("aten.", "prims.")  # another op may still be writing when it returns, as functional collectives do


def bystanders(trace: Trace, schedule: Schedule, budget_bytes: int) -> dict[int, frozenset[int]]:
    """Op of the forward -> storages it makes that should lie aside: there when a giant is asked for, and no giant
    themselves. In a backward nobody looks at ops."""
    giants = [
        storage.born
        for storage in trace.storages
        if not storage.external and storage.bytes >= GIANT_SHARE * budget_bytes
    ]
    if not giants:
        return {}
    ends = storage_ends(trace, schedule)
    left_bytes = MOST_SHARE * budget_bytes
    forward = [(index, op) for index, op in enumerate(trace.ops) if op.phase == "forward"]
    makers = {op.slot: index for index, op in forward if op.name.startswith(OURS_TO_MOVE)}
    found: dict[int, set[int]] = {}
    for number, end in ends.items():
        storage = trace.storages[number]
        in_the_way = any(storage.born < born <= end for born in giants)
        if not in_the_way or not SMALLEST_BYTES <= storage.bytes <= LARGEST_SHARE * budget_bytes:
            continue
        if storage.born in makers and storage.bytes <= left_bytes:
            left_bytes -= storage.bytes
            found.setdefault(makers[storage.born], set()).add(number)
    return {op: frozenset(storages) for op, storages in found.items()}


def small_gradients(trace: Trace, budget_bytes: int) -> frozenset[int]:
    """Storages that the backward makes and leaves: gradients, the smallest first, as many as may go aside."""
    first = min((op.slot for op in trace.ops if op.phase == "backward"), default=trace.num_slots)
    left_bytes = min(int(GRADIENTS_SHARE * budget_bytes), GRADIENTS_BYTES)
    found = set()
    for number, storage in sorted(enumerate(trace.storages), key=lambda item: item[1].bytes):
        if storage.external or storage.born < first or storage.dies < trace.num_slots - 5:
            continue
        left_bytes -= storage.bytes if storage.bytes >= SMALLEST_BYTES else 0
        if left_bytes < 0:
            break
        found.add(number)
    return frozenset(found)


def storage_ends(trace: Trace, schedule: Schedule) -> dict[int, int]:
    """Storage made in the step -> the last slot in which the program or one of our holds keeps it where it was made."""
    terrain, decisions = terrain_of(trace), schedule.decisions
    reached = held_until(terrain, decisions)
    ends = {number: storage.dies for number, storage in enumerate(trace.storages) if not storage.external}
    for value in terrain.packs:
        if decisions.get(value, "keep") == "keep" and terrain.storage[value] in ends:
            last = max(terrain.handle_end[value], reached.get(value, -1))
            ends[terrain.storage[value]] = max(ends[terrain.storage[value]], last)
    leaving: set[int] = set()
    for action in schedule.actions:
        if action.kind == "swap_out":
            leaving.add(action.value)
        elif action.kind == "free" and action.value in leaving:
            leaving.remove(action.value)
            storage = terrain.storage[action.value]
            ends[storage] = max(ends[storage], terrain.tick_slots[action.tick])
    return ends
