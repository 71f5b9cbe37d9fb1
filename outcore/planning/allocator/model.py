"""Trace + Schedule -> how a device's allocator fares with it: pages mapped, and times it has to start over.

A plan's peak counts what is allocated; a cap counts what is mapped. PyTorch's allocator (expandable segments) puts a
block into the smallest hole that is long enough, a hole that could grow counting as long as it could become; where
there is none it maps pages, at the lowest address with room for all of it. Whether the cap allows that it asks before
it looks, as if every page of the block were new; and where it does not, it unmaps every free page and starts over,
which drains the device. That is played through here for a few steps, from where the weights lie on. Fed with the
requests of a step recorded on an H200 it puts every block where it was put there, and starts over as often; see
docs/log/2026-11.md.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from outcore.planning.allocator.hints import AllocatorHints, storage_ends
from outcore.planning.settings import ALLOCATOR
from outcore.planning.trace_index import index_of, remembered
from outcore.units import ENDLESS_BYTES
from outcore.values import Action, Schedule, Trace

# Named here because the model's inner loops ask for them.
PAGE_BYTES, SMALL_BYTES, ROUND_BYTES = ALLOCATOR.page_bytes, ALLOCATOR.small_bytes, ALLOCATOR.round_bytes
STEP_BYTES, NUM_STEPS, NUM_NEIGHBOURS = ALLOCATOR.step_bytes, ALLOCATOR.num_steps, ALLOCATOR.num_neighbours
Event = tuple[Literal["take", "give", "end", "pool"], object, int]  # who, bytes; "end" is a slot's
Places = Sequence[tuple[int, int]]  # address and bytes of blocks that exist before the step
NO_HINTS = AllocatorHints()


@dataclass(frozen=True)
class Mapped:
    """The result of simulating the allocator for some steps."""

    num_restarts: int  # per step, once the blocks keep their places
    num_bytes: int  # most


def mapped(
    trace: Trace, events: Sequence[Event], budget_bytes: int, hints: AllocatorHints = NO_HINTS, there: Places = ()
) -> Mapped | None:
    """Simulates a few steps under a cap of `budget_bytes`. Returns None if memory runs out."""
    device = Device(int(ALLOCATOR.used_share * budget_bytes), there)
    try:
        restarts = _play(device, trace, events, hints)
    except MemoryError:
        return None
    return Mapped(restarts[-1] - restarts[-2], device.most_bytes)


def wanted_bytes(trace: Trace, events: Sequence[Event], hints: AllocatorHints, there: Places = ()) -> int:
    """Returns the cap with which these steps need no restart. A larger cap changes nothing. With a smaller one, any
    small change leads to another result, in the model as on the device."""
    device = Device(ENDLESS_BYTES, there)
    _play(device, trace, events, hints)
    return device.asked_bytes


def safe_bytes(trace: Trace, hints: AllocatorHints, budget_bytes: int) -> int:
    """A step that wants no more pages than this does not make the allocator start over. With pooled gradients it is
    less: a loop that never synchronizes frees them long before the device is done with them, and blocks of another
    stream are not reused until then. The next step's gradients lie beside them, and how far the host is ahead is not
    known to the model."""
    lagging_bytes = sum(trace.storages[number].bytes for number in hints.pooled)
    lagging_bytes = -(-lagging_bytes // PAGE_BYTES) * PAGE_BYTES
    return min(int(ALLOCATOR.safe_share * budget_bytes), int(ALLOCATOR.full_share * budget_bytes) - lagging_bytes)


def _play(device: Device, trace: Trace, events: Sequence[Event], hints: AllocatorHints) -> list[int]:
    """Simulates some steps. Returns the number of restarts before each one and after the last."""
    played, restarts = _large(with_placeholders(events, hints), hints.pooled), [0]
    if trace.before_bytes > SMALL_BYTES and not device.mapped_bytes:
        device.take("before", trace.before_bytes)
    before: object = None
    for _ in range(NUM_STEPS):
        for kind, who, num_bytes in played:
            if kind == "take":
                device.take(who, num_bytes)
            elif kind == "give":
                device.give(who)
            else:
                device.move_to_pool(who)
        device.give_all(but="before")  # the gradients, after the optimizer
        restarts.append(device.num_restarts)
        after = device.state()
        if after == before:
            break  # further steps would do the same
        before = after
    return restarts


def with_placeholders(events: Iterable[Event], hints: AllocatorHints) -> Iterator[Event]:
    """Yields the events with placeholders: at the start of a slot these are freed first, then allocated."""
    if not hints.placeholders:
        yield from events
        return
    taken: dict[int, list[Event]] = {}
    given: dict[int, list[Event]] = {}
    for number, one in enumerate(hints.placeholders):
        taken.setdefault(one.since, []).append(("take", ("place", number), one.num_bytes))
        given.setdefault(one.until, []).append(("give", ("place", number), 0))
    yield from taken.get(-1, ())
    slot, begins = 0, True
    for event in events:
        if begins:
            yield from given.get(slot, ())
            yield from taken.get(slot, ())
        yield event
        begins = event[0] == "end"
        slot += begins


def _large(events: Iterable[Event], pooled: Collection[int]) -> list[Event]:
    """Returns the events of large blocks. Gradients move to their pool at the end of the slot in which they are
    made."""
    found, there, new = list[Event](), set[object](), list[object]()
    for kind, who, num_bytes in events:
        if kind == "take" and num_bytes > SMALL_BYTES:
            found.append((kind, who, num_bytes))
            there.add(who)
            new += [who] if who in pooled else []
        elif kind == "give" and who in there:
            found.append((kind, who, 0))
            there.remove(who)
        elif kind == "end" and new:
            found += [("pool", moved, 0) for moved in new]
            new.clear()
    return found


class Device:
    """A device with a cap on mapped pages, which two rows share: pooled gradients have pages of their own."""

    def __init__(self, cap_bytes: int, there: Places = ()) -> None:
        self.cap_bytes = cap_bytes
        self.num_restarts = 0
        self.asked_bytes = 0  # the most that was mapped or requested, as the allocator counts
        row, self.mapped_bytes = _laid(tuple(there))
        self.most_bytes = self.mapped_bytes
        self._rows = (row.copy(), Row())
        self._owned: dict[object, tuple[Row, int, int]] = {}

    def take(self, who: object, num_bytes: int, *, pooled: bool = False) -> None:
        row, num_bytes = self._rows[pooled], -(-num_bytes // ROUND_BYTES) * ROUND_BYTES
        address = row.best_fit(num_bytes)
        if address is None:
            address = self._map(row, num_bytes)
        row.cut(address, num_bytes)
        self._owned[who] = row, address, num_bytes

    def give(self, who: object) -> None:
        if who in self._owned:
            row, address, num_bytes = self._owned.pop(who)
            row.open(address, num_bytes)

    def move_to_pool(self, who: object) -> None:
        """Moves a gradient: it is made among the other blocks and copied to the pool."""
        if who in self._owned:
            row, address, num_bytes = self._owned.pop(who)
            self.take(who, num_bytes, pooled=True)
            row.open(address, num_bytes)

    def state(self) -> object:
        """Returns the free blocks, to compare states."""
        return [(list(row._holes), dict(row._gaps)) for row in self._rows]

    def give_all(self, but: object) -> None:
        for who in [who for who in self._owned if who != but]:
            self.give(who)

    def _map(self, row: Row, num_bytes: int) -> int:
        for _ in range(2):
            asked_bytes = self.mapped_bytes + _asked(num_bytes)
            if asked_bytes <= self.cap_bytes:
                self.asked_bytes = max(self.asked_bytes, asked_bytes)
                address, missing = row.lowest_room(num_bytes)
                for gap, length in missing:
                    row.map(gap, length)
                self.mapped_bytes += sum(length for _, length in missing)
                self.most_bytes = max(self.most_bytes, self.mapped_bytes)
                return address
            self.num_restarts += 1
            self.mapped_bytes -= sum(row.unmap() for row in self._rows)
        raise MemoryError


@functools.lru_cache(maxsize=2)
def _laid(there: tuple[tuple[int, int], ...]) -> tuple[Row, int]:
    """Returns the row before a step and its mapped bytes; cached, because hundreds of plans start from it."""
    row = Row()
    return row, sum(row.lay(*place) for place in there)


def _asked(num_bytes: int) -> int:
    """Returns what the allocator counts for a block against the cap: its size rounded up, at least a page."""
    return PAGE_BYTES if num_bytes < PAGE_BYTES // 2 else -(-num_bytes // STEP_BYTES) * STEP_BYTES


class Row:
    """The address range of one segment: blocks, holes (mapped and free) and gaps (not mapped)."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []  # bytes, address; sorted
        self._starts: dict[int, int] = {}  # a hole's address -> its bytes
        self._ends: dict[int, int] = {}  # the end of a hole -> its address
        self._gaps: dict[int, int] = {0: ENDLESS_BYTES}  # address -> bytes

    def copy(self) -> Row:
        row = Row()
        row._holes, row._starts, row._ends = list(self._holes), dict(self._starts), dict(self._ends)
        row._gaps = dict(self._gaps)
        return row

    def best_fit(self, num_bytes: int) -> int | None:
        """Returns the smallest sufficient hole. A hole before a gap counts as large as it could grow, because the
        allocator prefers to split a larger hole to one that it can still extend."""
        holes, at = self._holes, bisect.bisect_left(self._holes, (num_bytes, -1))
        if at == len(holes):
            return None
        while at + 1 < len(holes) and self._room_after(at) and self._could_be(at + 1) < self._could_be(at):
            at += 1
        return holes[at][1]

    def _room_after(self, at: int) -> int:
        num_bytes, address = self._holes[at]
        return self._gaps.get(address + num_bytes, 0)

    def _could_be(self, at: int) -> int:
        return self._holes[at][0] + self._room_after(at)

    def cut(self, address: int, num_bytes: int) -> None:
        """Allocates a block at the start of a hole."""
        hole_bytes = self._starts[address]
        self._close(address, hole_bytes)
        if hole_bytes > num_bytes:
            self._open(address + num_bytes, hole_bytes - num_bytes)

    def lay(self, address: int, num_bytes: int) -> int:
        """Allocates a block that existed before the step. Returns the bytes of pages that had to be mapped."""
        end, new_bytes = address + num_bytes, 0
        for page in range(address // PAGE_BYTES * PAGE_BYTES, end, PAGE_BYTES):
            gap = next((gap for gap, gap_bytes in self._gaps.items() if gap <= page < gap + gap_bytes), None)
            if gap is not None:
                gap_bytes = self._gaps.pop(gap)
                self._gaps |= {gap: page - gap} if gap < page else {}
                self._gaps[page] = gap + gap_bytes - page
                self.map(page, PAGE_BYTES)
                new_bytes += PAGE_BYTES
        hole = max(hole for hole in self._starts if hole <= address)
        hole_bytes = self._starts[hole]
        self._close(hole, hole_bytes)
        if hole < address:
            self._open(hole, address - hole)
        if end < hole + hole_bytes:
            self._open(end, hole + hole_bytes - end)
        return new_bytes

    def open(self, address: int, num_bytes: int) -> None:
        """Adds a hole, and merges it with its neighbours."""
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

    def lowest_room(self, num_bytes: int) -> tuple[int, list[tuple[int, int]]]:
        """Returns the lowest address for `num_bytes` if pages were mapped, and the gaps that must be mapped."""
        for gap in sorted(self._gaps):
            start = at = self._ends.get(gap, gap)
            missing, left_bytes = [], num_bytes
            while left_bytes > 0 and (at in self._starts or at in self._gaps):
                length = self._starts.get(at) or self._gaps[at]
                if at in self._gaps:
                    length = min(length, -(-left_bytes // PAGE_BYTES) * PAGE_BYTES)
                    missing.append((at, length))
                at, left_bytes = at + length, left_bytes - length
            if left_bytes <= 0:
                return start, missing
        raise AssertionError("the last gap has no end")

    def map(self, gap: int, num_bytes: int) -> None:
        gap_bytes = self._gaps.pop(gap)
        if gap_bytes > num_bytes:
            self._gaps[gap + num_bytes] = gap_bytes - num_bytes
        self.open(gap, num_bytes)

    def unmap(self) -> int:
        """Unmaps every page without a block. Returns their bytes."""
        num_bytes = 0
        for hole_bytes, address in list(self._holes):
            first, end = -(-address // PAGE_BYTES) * PAGE_BYTES, (address + hole_bytes) // PAGE_BYTES * PAGE_BYTES
            if first < end:
                self._close(address, hole_bytes)
                if address < first:
                    self._open(address, first - address)
                if end < address + hole_bytes:
                    self._open(end, address + hole_bytes - end)
                self._gaps[first] = end - first
                num_bytes += end - first
        for gap in sorted(self._gaps):
            while gap in self._gaps and gap + self._gaps[gap] in self._gaps:
                self._gaps[gap] += self._gaps.pop(gap + self._gaps[gap])
        return num_bytes

    def _open(self, address: int, num_bytes: int) -> None:
        bisect.insort(self._holes, (num_bytes, address))
        self._starts[address], self._ends[address + num_bytes] = num_bytes, address

    def _close(self, address: int, num_bytes: int) -> None:
        del self._holes[bisect.bisect_left(self._holes, (num_bytes, address))]
        del self._starts[address], self._ends[address + num_bytes]


def allocations(trace: Trace, schedule: Schedule) -> Iterator[Event]:
    """Yields what a schedule allocates and frees, in program order. Storages are identified by their numbers."""
    return _Walk(trace, schedule).events()


def asked_by_ops(trace: Trace) -> dict[int, tuple[int, ...]]:
    """Returns, for each op, the sizes of the large blocks that it allocates, its workspace last."""
    slots: dict[int, list[int]] = {}
    for storage in trace.storages:
        if not storage.external:
            slots.setdefault(storage.born, []).append(storage.bytes)
    workspaces = remembered(trace, _workspaces)
    taken = ((index, (*slots.get(op.slot, ()), workspaces[op.slot])) for index, op in enumerate(trace.ops))
    large = {index: tuple(size for size in sizes if size > SMALL_BYTES) for index, sizes in taken}
    return {index: sizes for index, sizes in large.items() if sizes}


def _workspaces(trace: Trace) -> dict[int, int]:
    """Returns the workspace of each slot. Memory that a recorder cannot attribute (a library's buffer, rounding) stays
    allocated and appears in the workspace of every later op. So the smallest workspace among an op's neighbours is
    subtracted from its own."""
    found = [op.workspace_bytes for op in trace.ops]
    around = [found[max(0, at - NUM_NEIGHBOURS) : at + NUM_NEIGHBOURS + 1] for at in range(len(found))]
    unnamed = [min(near) if len(near) > NUM_NEIGHBOURS else 0 for near in around]
    return {op.slot: op.workspace_bytes - other for op, other in zip(trace.ops, unnamed)}


class _Walk:
    def __init__(self, trace: Trace, schedule: Schedule) -> None:
        self.trace = trace
        self.trace_index = index_of(trace)
        self.actions: dict[int, list[Action]] = {}
        for action in schedule.actions:
            self.actions.setdefault(action.tick, []).append(action)
        self.ends = storage_ends(trace, schedule)
        self.copies: dict[int, int] = {}  # value -> its copy
        self.late: dict[int, list[int]] = {}  # slot -> copies that autograd holds until then
        self.num_copies = 0
        self.workspaces = remembered(trace, _workspaces)

    def events(self) -> Iterator[Event]:
        trace = self.trace
        ticks = {slot: tick for tick, slot in enumerate(self.trace_index.tick_slots)}
        born: dict[int, list[int]] = {}
        dies: dict[int, list[int]] = {}
        for number, end in self.ends.items():
            born.setdefault(trace.storages[number].born, []).append(number)
            dies.setdefault(end, []).append(number)
        for slot in range(trace.num_slots):
            for number in born.get(slot, ()):
                yield "take", number, trace.storages[number].bytes
            yield from self._passing(self.workspaces.get(slot, 0))
            if slot in ticks:
                for action in self.actions.get(ticks[slot], ()):
                    yield from self._act(action, slot)
            for number in dies.get(slot, ()):
                yield "give", number, 0
            for copy in self.late.pop(slot, ()):
                yield "give", ("copy", copy), 0
            yield "end", None, 0

    def _passing(self, workspace_bytes: int) -> Iterator[Event]:
        """Allocates and frees a workspace. cuDNN asks for it after the output was allocated."""
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
            unpacks = [tick for tick in self.trace_index.unpacks.get(action.value, ()) if tick <= action.tick]
            until = max((self.trace.ticks[tick].dies for tick in unpacks), default=-1)
            if until > slot:
                self.late.setdefault(until, []).append(copy)
            else:
                yield "give", ("copy", copy), 0

    def _rerun(self, action: Action) -> Iterator[Event]:
        op, trace_index = self.trace.ops[action.op], self.trace_index
        read_over = trace_index.overwrites[action.op] if action.in_place else ()
        old = {trace_index.storage[read]: read for read in read_over if read in self.copies}
        unwanted = []
        for value in op.writes:
            if trace_index.storage[value] in old:
                self.copies[value] = self.copies.pop(old[trace_index.storage[value]])
                continue
            yield self._copy(value)
            if value not in action.values:
                unwanted.append(self.copies.pop(value))
        yield from self._passing(0 if op.norm_replay else self.workspaces[op.slot])
        for copy in unwanted:
            yield "give", ("copy", copy), 0

    def _copy(self, value: int) -> Event:
        self.num_copies += 1
        self.copies[value] = self.num_copies
        return "take", ("copy", self.num_copies), self.trace_index.value_bytes[value]
