"""What a crowded step does so that its blocks find places between the holes, and how long each of them stays.

A device's allocator puts a block into the best hole at that moment. What outlives the blocks around it stays behind and
cuts their room in two; when no hole is long enough any more the allocator gives everything back and starts over, which
drains the device. Two things help (`Crowd`): the places of blocks that will be in somebody's way are kept for them
(`outcore.planning.placeholders`), and small gradients, which outlive everything else that a backward allocates, go to
pages of their own (`outcore.running.aside`).
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.planning.echoes import step_of
from outcore.planning.simulate import held_until
from outcore.planning.terrain import terrain_of
from outcore.units import MIB
from outcore.values import Schedule, Trace

SMALLEST_BYTES = MIB  # PyTorch itself keeps smaller blocks apart
GRADIENTS_SHARE = (
    0.02  # of the budget, for gradients aside: pages of one stream lie idle while nothing on it needs them
)
GRADIENTS_BYTES = 512 * MIB  # and no more than this


@dataclass(frozen=True)
class Placeholder:
    """Memory that nobody uses, as much as a block will need: taken in the slot `since` (-1: before the step) and given
    back in `until`, the last slot before the block is asked for in which the program can do so. The hole is exactly as
    long as the block, so that is where the block goes."""

    num_bytes: int
    since: int
    until: int


@dataclass(frozen=True)
class Crowd:
    """What is done for the allocator in a step: places kept, or gradients (by storage) put aside."""

    placeholders: tuple[Placeholder, ...] = ()
    aside: frozenset[int] = frozenset()


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
    terrain, decisions = terrain_of(step_of(trace, schedule)), schedule.decisions
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
