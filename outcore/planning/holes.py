"""Trace + Schedule -> bytes that a device's allocator will have mapped: what is allocated, and the holes between.

A plan's peak counts what is allocated; a cap counts what is mapped. PyTorch's allocator puts a block into the smallest
hole that is long enough, and maps pages behind the last block where there is none. Played through for a whole step that
gives a number which differs by gigabytes between plans of nearly the same size (ResNet-50 on an H200: 14.9 GiB lie in
15.5, 14.75 in 17.4), so it is worth asking before a plan is followed. In the steps recorded there 1,289 of 1,289 and
458 of 481 large blocks lay where this model puts them (docs/log.md).
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Iterator
from typing import Literal

from outcore.planning.crowd import bystanders, small_gradients, storage_ends
from outcore.planning.terrain import terrain_of
from outcore.units import MIB
from outcore.values import Action, Schedule, Trace

PAGE_BYTES = 20 * MIB  # large blocks are mapped in pieces of this size
SMALL_BYTES = MIB  # smaller ones have a pool of their own
ROUND_BYTES = 512
NUM_STEPS = 4
Event = tuple[Literal["take", "give"], object, int]  # who, bytes


def mapped_bytes(trace: Trace, schedule: Schedule, budget_bytes: int) -> int:
    """After a few steps that put aside what a crowded step puts aside. The first begins with empty memory; in the next
    ones the rest of the mapped pages is a hole like any other, and blocks come to lie elsewhere."""
    crowd = frozenset[int]().union(*bystanders(trace, schedule, budget_bytes).values())
    return mapped_without(trace, schedule, crowd or small_gradients(trace, budget_bytes))


def mapped_without(trace: Trace, schedule: Schedule, aside: Collection[int]) -> int:
    """The same, the storages in `aside` having pages of their own."""
    events = list(allocations(trace, schedule))
    here = [event for event in events if event[1] not in aside]
    there = [event for event in events if event[1] in aside]
    return _highest_bytes(here, trace.before_bytes) + _highest_bytes(there)


def _highest_bytes(events: list[Event], before_bytes: int = 0) -> int:
    heap = Heap()
    heap.take("before", before_bytes)
    for _ in range(NUM_STEPS):
        for kind, who, num_bytes in events:
            if kind == "take":
                heap.take(who, num_bytes)
            else:
                heap.give(who)
        heap.give_all(but="before")  # the gradients, after the optimizer
    return heap.end_bytes


class Heap:
    """Blocks in a row, best fit. Nothing is ever unmapped."""

    def __init__(self) -> None:
        self.end_bytes = 0
        self._holes: list[tuple[int, int]] = []  # bytes, address; sorted
        self._starts: dict[int, int] = {}  # a hole's address -> its bytes
        self._ends: dict[int, int] = {}  # where a hole ends -> its address
        self._owned: dict[object, tuple[int, int]] = {}

    def take(self, who: object, num_bytes: int) -> None:
        if num_bytes < SMALL_BYTES:
            return
        num_bytes = -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
        at = bisect.bisect_left(self._holes, (num_bytes, -1))
        if at < len(self._holes):
            hole_bytes, address = self._holes[at]
            self._close(address, hole_bytes)
            hole_end = address + hole_bytes
        else:
            address = self._ends.get(self.end_bytes, self.end_bytes)
            if address < self.end_bytes:
                self._close(address, self.end_bytes - address)
            hole_end = self.end_bytes = -(-(address + num_bytes) // PAGE_BYTES) * PAGE_BYTES
        if address + num_bytes < hole_end:
            self._open(address + num_bytes, hole_end - address - num_bytes)
        self._owned[who] = address, num_bytes

    def give(self, who: object) -> None:
        if who not in self._owned:
            return
        address, num_bytes = self._owned.pop(who)
        after = self._starts.get(address + num_bytes)
        if after is not None:
            self._close(address + num_bytes, after)
            num_bytes += after
        before = self._ends.get(address)
        if before is not None:
            num_bytes += address - before
            self._close(before, address - before)
            address = before
        self._open(address, num_bytes)

    def give_all(self, but: object) -> None:
        for who in [who for who in self._owned if who != but]:
            self.give(who)

    def _open(self, address: int, num_bytes: int) -> None:
        bisect.insort(self._holes, (num_bytes, address))
        self._starts[address], self._ends[address + num_bytes] = num_bytes, address

    def _close(self, address: int, num_bytes: int) -> None:
        del self._holes[bisect.bisect_left(self._holes, (num_bytes, address))]
        del self._starts[address], self._ends[address + num_bytes]


def allocations(trace: Trace, schedule: Schedule) -> Iterator[Event]:
    """A schedule as the allocator sees it: what is taken and given back, in the order of the program. Storages go by
    their number."""
    return _Walk(trace, schedule).events()


class _Walk:
    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self.trace, self.terrain = trace, terrain_of(trace)
        self.actions: dict[int, list[Action]] = {}
        for action in schedule.actions:
            self.actions.setdefault(action.tick, []).append(action)
        self.ends = storage_ends(trace, schedule)
        self.copies: dict[int, int] = {}  # value -> its copy
        self.late: dict[int, list[int]] = {}  # slot -> copies autograd holds until then
        self.num_copies = 0

    def events(self) -> Iterator[Event]:
        trace = self.trace
        workspaces = {op.slot: op.workspace_bytes for op in trace.ops}
        ticks = {slot: tick for tick, slot in enumerate(self.terrain.tick_slots)}
        born: dict[int, list[int]] = {}
        dies: dict[int, list[int]] = {}
        for number, end in self.ends.items():
            born.setdefault(trace.storages[number].born, []).append(number)
            dies.setdefault(end, []).append(number)
        for slot in range(trace.num_slots):
            for number in born.get(slot, ()):
                yield "take", number, trace.storages[number].bytes
            yield from self._passing(workspaces.get(slot, 0))
            if slot in ticks:
                for action in self.actions.get(ticks[slot], ()):
                    yield from self._act(action, slot)
            for number in dies.get(slot, ()):
                yield "give", number, 0
            for copy in self.late.pop(slot, ()):
                yield "give", ("copy", copy), 0

    def _passing(self, workspace_bytes: int) -> Iterator[Event]:
        """cuDNN asks for it when the output is there."""
        if workspace_bytes:
            yield "take", "workspace", workspace_bytes
            yield "give", "workspace", 0

    def _act(self, action: Action, slot: int) -> Iterator[Event]:
        if action.kind == "swap_in":
            yield self._copy(action.value)
        elif action.kind == "rerun":
            yield from self._rerun(action)
        elif action.kind == "free" and action.value in self.copies:
            copy = self.copies.pop(action.value)
            unpacks = [tick for tick in self.terrain.unpacks.get(action.value, ()) if tick <= action.tick]
            until = max((self.trace.ticks[tick].dies for tick in unpacks), default=-1)
            if until > slot:
                self.late.setdefault(until, []).append(copy)
            else:
                yield "give", ("copy", copy), 0

    def _rerun(self, action: Action) -> Iterator[Event]:
        op, terrain = self.trace.ops[action.op], self.terrain
        old = {terrain.storage[read]: read for read in op.reads if read in self.copies} if action.in_place else {}
        unwanted = []
        for value in op.writes:
            if terrain.storage[value] in old:
                self.copies[value] = self.copies.pop(old[terrain.storage[value]])
                continue
            yield self._copy(value)
            if value not in action.values:
                unwanted.append(self.copies.pop(value))
        yield from self._passing(0 if op.twin else op.workspace_bytes)
        for copy in unwanted:
            yield "give", ("copy", copy), 0

    def _copy(self, value: int) -> Event:
        self.num_copies += 1
        self.copies[value] = self.num_copies
        return "take", ("copy", self.num_copies), self.terrain.value_bytes[value]
