"""Schedule -> Placeholders: memory that is reserved so that the largest blocks find space.

A language model's loss wants a fifth of the budget in one piece, three times. The bytes are there, but not in one
piece: between the holes lies what was allocated on the way and stays, weights cast for the whole forward, values kept
for the backward, copies not yet out. The allocator puts each into the best hole of its moment, wherever that is. So
their places are taken at once, side by side, when the step begins, by placeholders as long as they will be; each is
given back right before its block is asked for, and what the allocator takes for a block is the hole that fits exactly.
By the time a giant is asked for everything else lies together. The step's peak stays what it is: a placeholder is
there only where the memory that it takes is free until its block comes.

Giants get in each other's way too: a smaller one takes the place where the next, larger one would have fitted. So the
larger one's place is kept while the smaller one finds another.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from outcore.planning.allocator.hints import SMALLEST_BYTES, AllocatorHints, Placeholder, small_gradients
from outcore.planning.allocator.model import Event, Places, allocations, safe_bytes, wanted_bytes
from outcore.planning.settings import ALLOCATOR
from outcore.planning.trace_index import remembered
from outcore.values import Schedule, Trace


def arrange(
    trace: Trace,
    schedule: Schedule,
    memory_bytes: int,
    peak_bytes: int,
    there: Places = (),
    *,
    keeps_places: bool = True,
) -> AllocatorHints:
    """Returns the hints with which a step maps the fewest pages: placeholders for blocks that would split the space of
    the largest ones (*giants*), or a pool for small gradients. Placeholders do not raise the peak above
    `peak_bytes`."""
    events = list(allocations(trace, schedule))
    share = best_share(trace, events, memory_bytes, peak_bytes, there) if keeps_places else None
    return arranged(trace, events, memory_bytes, peak_bytes, share)


def best_share(
    trace: Trace, events: Sequence[Event], memory_bytes: int, peak_bytes: int, there: Places = ()
) -> float | None:
    """Returns the share of `memory_bytes` from which on a block counts as a giant, or None if pooling is as good."""

    def too_much(share: float | None) -> tuple[int, bool, int]:
        hints = arranged(trace, events, memory_bytes, peak_bytes, share)
        wanted = wanted_bytes(trace, events, hints, there)
        return max(wanted - safe_bytes(trace, hints, memory_bytes), 0), share is not None, wanted

    return min((None, *ALLOCATOR.giant_shares), key=too_much)


def arranged(
    trace: Trace, events: Sequence[Event], memory_bytes: int, peak_bytes: int, share: float | None
) -> AllocatorHints:
    kept = placeholders(trace, events, int(share * memory_bytes), peak_bytes) if share is not None else ()
    return AllocatorHints(kept) if kept else AllocatorHints(pooled=small_gradients(trace, memory_bytes))


def placeholders(trace: Trace, events: Sequence[Event], giant_bytes: int, peak_bytes: int) -> tuple[Placeholder, ...]:
    """Returns the placeholders for a step with these `allocations`, which needs at most `peak_bytes` with them."""
    if remembered(trace, _is_left_alone):
        return ()
    return _Keeping(trace, events, giant_bytes, peak_bytes).found()


def _is_left_alone(trace: Trace) -> bool:
    """Whether a step gets no placeholders. They might take the memory of a convolution's workspace, and cuDNN would
    choose another algorithm with other rounding. And tensors that compiled code makes are allocated before their
    placeholders could be freed."""
    unseen = {value.storage for value in trace.values if value.producer < 0}
    made = (storage for number, storage in enumerate(trace.storages) if number in unseen and not storage.external)
    if any(storage.bytes > SMALLEST_BYTES for storage in made):
        return True
    return any(op.workspace_bytes and "convolution" in op.name for op in trace.ops)


@dataclass(frozen=True)
class _Block:
    """`at` and `end` are numbers of events. `gate` is the slot in which its placeholder can be freed, or -1."""

    num_bytes: int
    at: int
    end: int
    gate: int


class _Keeping:
    def __init__(self, trace: Trace, events: Sequence[Event], giant_bytes: int, peak_bytes: int) -> None:
        self.live: list[int] = []  # bytes after each event
        self.begins: list[int] = []  # slot -> its first event
        blocks = self._walk(events, remembered(trace, _gates))
        self.giants = [block for block in blocks if block.num_bytes >= giant_bytes]
        self.others = [block for block in blocks if SMALLEST_BYTES < block.num_bytes < giant_bytes]
        self.most_bytes = min(max(self.live, default=0), peak_bytes - trace.before_bytes)

    def _walk(self, events: Sequence[Event], gates: Sequence[int]) -> list[_Block]:
        found, there, live_bytes, slot = list[_Block](), dict[object, tuple[int, int, int]](), 0, 0
        self.begins.append(0)
        for at, (kind, who, num_bytes) in enumerate(events):
            if kind == "take":
                there[who] = num_bytes, at, slot if isinstance(who, tuple) else gates[slot]  # copies are made in a tick
                live_bytes += num_bytes
            elif kind == "give" and who in there:
                block_bytes, since, gate = there.pop(who)
                live_bytes -= block_bytes
                if who != "workspace":
                    found.append(_Block(block_bytes, since, at, gate))
            elif kind == "end":
                slot += 1
                self.begins.append(at + 1)
            self.live.append(live_bytes)
        found += [_Block(num_bytes, since, len(self.live), gate) for num_bytes, since, gate in there.values()]
        return sorted(found, key=lambda block: block.at)

    def found(self) -> tuple[Placeholder, ...]:
        kept = self._in_the_way()
        side_by_side = sorted(kept, key=self._order(kept))
        return (*(Placeholder(block.num_bytes, -1, block.gate) for block in side_by_side), *self._for_larger(kept))

    def _order(self, kept: Sequence[_Block]) -> Callable[[_Block], tuple[bool, int, int]]:
        """Returns the order of placeholders in memory. Two that are freed together must not be neighbours, because the
        merged hole would fit neither block. Those that are freed before the last giant should not lie among those that
        stay."""
        last = max(giant.at for giant in self.giants) if self.giants else 0
        ranks, seen = dict[int, int](), dict[int, int]()
        for block in kept:
            ranks[block.at] = seen[block.gate] = seen.get(block.gate, -1) + 1
        return lambda block: (block.end < last, ranks[block.at], block.at)

    def _in_the_way(self) -> list[_Block]:
        """Returns the blocks that exist when a giant is allocated and for which memory can be reserved from the start
        of the step on without raising its peak."""
        asked, kept, at, held_bytes = [giant.at for giant in self.giants], list[_Block](), 0, 0
        for block in sorted(self.others, key=lambda block: block.gate):
            num_giants = bisect.bisect_left(asked, block.end) - bisect.bisect_right(asked, block.at)
            if block.gate < 0 or num_giants == 0:
                continue
            until = self.begins[block.gate]
            held_bytes = max(held_bytes, *self.live[at:until], 0)  # the most so far, with the placeholders before
            at = max(at, until)
            if held_bytes + block.num_bytes <= self.most_bytes:
                held_bytes += block.num_bytes
                kept.append(block)
        return kept

    def _for_larger(self, kept: Sequence[_Block]) -> Iterator[Placeholder]:
        """`kept` by gate."""
        until = [self.begins[block.gate] for block in kept]
        held = [0, *itertools.accumulate(block.num_bytes for block in reversed(kept))][::-1]  # suffix sums
        for one, other in itertools.pairwise(self.giants):
            if one.end < other.at or one.num_bytes >= other.num_bytes or not 0 <= one.gate < other.gate:
                continue
            first, last = self.begins[one.gate], self.begins[other.gate]
            most_bytes = max(self.live[at] + held[bisect.bisect_right(until, at)] for at in range(first, last))
            before_bytes = (self.live[first - 1] if first else 0) + held[bisect.bisect_right(until, first)]
            if max(most_bytes, before_bytes) + other.num_bytes <= self.most_bytes:
                yield Placeholder(other.num_bytes, one.gate, other.gate)


def _gates(trace: Trace) -> list[int]:
    """Returns, for each slot, the last slot in which placeholders can be freed before an op there allocates. In the
    forward that is the op itself, because ops are watched up to the last save; otherwise it is the last tick."""
    backward = next((op.slot for op in trace.ops if op.phase == "backward"), trace.num_slots)
    watched = max((tick.slot for tick in trace.ticks if tick.kind == "pack" and tick.slot < backward), default=-1)
    ops, ticks = {op.slot for op in trace.ops}, {tick.slot for tick in trace.ticks}
    found, last = [], -1
    for slot in range(trace.num_slots):
        found.append(slot if slot in ops and slot < watched else last)
        last = slot if slot in ticks else last
    return found
