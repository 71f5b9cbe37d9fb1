"""What does the CUDA allocator make of a schedule? A model of its expandable segments, replayed without a GPU.

The runtime's peak of allocated bytes is exact, but a cap counts what the allocator has mapped, holes included. When a
request finds no mapped run long enough and mapping more would pass the cap, the allocator unmaps every free page and
starts over: a restart, which drains the device. This script counts restarts per step for plans of several sizes:

    python -m benchmarks.holes step.trace.json --memory-gib 16 --room-gib 15.2 --room-gib 14.1

three times each: with every value wherever the allocator puts it, with small gradients moved aside, and with
what lies around when the largest pieces are asked for aside instead, as `outcore.running.aside` does. Beside them what
would be mapped without any cap, the figure by which plans are chosen (`outcore.planning.holes`).

Measured on the H200 for comparison (docs/log.md): ResNet-50 restarted once or twice a step at 14.1 of 16 GiB, and not
at all with gradients aside; Llama twice at 24.6 of 28; ResNet-152 ran out at 11.8 of 12: all as here. But at 11.3 of 12
it did not restart at all, and this model counts four.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click

from benchmarks.recorded import h200
from outcore.planning import lower, plan
from outcore.planning.crowd import bystanders, small_gradients
from outcore.planning.holes import PAGE_BYTES, SMALL_BYTES, Event, allocations, mapped_without
from outcore.units import GIB
from outcore.values import Budget, Trace


class OutOfMemory(Exception):
    """Even after a restart the cap does not allow it."""


class Segment:
    """One expandable segment: blocks in address order, pages mapped on demand, best fit among mapped runs."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_pages = cap_bytes // PAGE_BYTES
        self.blocks: list[list[int]] = [[0, 1 << 50, 1]]  # address, bytes, free
        self.mapped: set[int] = set()
        self.owned: dict[object, list[int]] = {}
        self.num_restarts = 0
        self.peak_pages = 0

    def take(self, who: object, num_bytes: int) -> None:
        if num_bytes < SMALL_BYTES:
            return
        runs = [run for block in self.blocks if block[2] for run in self._runs(block) if run[1] >= num_bytes]
        block, address = self._map(num_bytes) if not runs else min(runs, key=lambda run: run[1])[2:]
        self.peak_pages = max(self.peak_pages, len(self.mapped))
        mine = [address, num_bytes, 0]
        before, after = address - block[0], block[0] + block[1] - address - num_bytes
        parts = [[block[0], before, 1]] * bool(before) + [mine] + [[address + num_bytes, after, 1]] * bool(after)
        at = self.blocks.index(block)
        self.blocks[at : at + 1] = parts
        self.owned[who] = mine

    def give(self, who: object) -> None:
        mine = self.owned.pop(who, None)
        if mine is None:
            return
        mine[2] = 1
        at = self.blocks.index(mine)
        if at + 1 < len(self.blocks) and self.blocks[at + 1][2]:
            mine[1] += self.blocks.pop(at + 1)[1]
        if at and self.blocks[at - 1][2]:
            self.blocks[at - 1][1] += mine[1]
            del self.blocks[at]

    def _runs(self, block: list[int]) -> Iterator[tuple[int, int, list[int], int]]:
        """Mapped stretches of a free block: address, bytes, block, address."""
        end = min(block[0] + block[1], (max(self.mapped, default=-1) + 1) * PAGE_BYTES)
        start = at = block[0]
        while at < end:
            page_end = min((at // PAGE_BYTES + 1) * PAGE_BYTES, end)
            if at // PAGE_BYTES not in self.mapped:
                if at > start:
                    yield start, at - start, block, start
                start = page_end
            at = page_end
        if at > start:
            yield start, at - start, block, start

    def _map(self, num_bytes: int) -> tuple[list[int], int]:
        for restarted in (False, True):
            block = next(block for block in self.blocks if block[2] and block[1] >= num_bytes)
            pages = set(_pages(block[0], num_bytes))
            if len(self.mapped | pages) <= self.cap_pages:
                self.mapped |= pages
                return block, block[0]
            if restarted:
                break
            self.num_restarts += 1
            self.mapped = {page for block in self.blocks if not block[2] for page in _pages(block[0], block[1])}
        raise OutOfMemory


def _pages(address: int, num_bytes: int) -> range:
    return range(address // PAGE_BYTES, (address + num_bytes - 1) // PAGE_BYTES + 1)


def replay(trace: Trace, events: list[Event], cap_bytes: int, num_steps: int) -> tuple[int, list[int]]:
    """Bytes mapped at the peak, and restarts in each of some steps."""
    segment = Segment(cap_bytes)
    segment.take("before", trace.before_bytes)
    restarts = []
    for _ in range(num_steps):
        before = segment.num_restarts
        for kind, who, num_bytes in events:
            if kind == "take":
                segment.take(who, num_bytes)
            else:
                segment.give(who)
        for who in [who for who in segment.owned if who != "before"]:
            segment.give(who)
        restarts.append(segment.num_restarts - before)
    return segment.peak_pages * PAGE_BYTES, restarts


@click.command()
@click.argument("trace_file", type=click.Path(path_type=Path))
@click.option("--memory-gib", type=float, required=True, help="The cap.")
@click.option("--room-gib", type=float, multiple=True, help="What plans may allocate; several.")
@click.option("--steps", default=3, show_default=True)
def main(trace_file: Path, memory_gib: float, room_gib: tuple[float, ...], steps: int) -> None:
    """Count the allocator's restarts for plans of several sizes under one cap."""
    trace = Trace.load(trace_file)
    memory_bytes = int(memory_gib * GIB)
    gradients = small_gradients(trace, memory_bytes)
    for room in room_gib or tuple(memory_gib * share for share in (0.98, 0.95, 0.92, 0.88)):
        made = plan(trace, h200(), Budget(int(room * GIB), 75 * GIB))
        schedule = lower(trace, made, h200())
        events = list(allocations(trace, schedule))
        crowd = frozenset[int]().union(*bystanders(trace, schedule, memory_bytes).values())
        over = 100 * (made.predicted_step_s / made.in_core_step_s - 1)
        print(f"room {room:6.2f} GiB: predicted +{over:.1f} %; restarts", end=" ")
        for title, aside in (
            ("", frozenset[int]()),
            ("; gradients aside ", gradients),
            ("; the crowd aside ", crowd),
        ):
            apart = [event for event in events if event[1] not in aside]
            own = [event for event in events if event[1] in aside]
            aside_bytes = most_bytes(own)
            counted = count(trace, apart, memory_bytes - aside_bytes, steps)
            unlimited = mapped_without(trace, schedule, aside) / GIB
            print(f"{title}{counted}, {unlimited:.2f} without a cap", end="", flush=True)
        print()


def most_bytes(events: list[Event]) -> int:
    """What these take at most, all together, with pages that are used in part."""
    segment = Segment(1 << 60)
    for kind, who, num_bytes in events:
        if kind == "take":
            segment.take(who, num_bytes)
        else:
            segment.give(who)
    return segment.peak_pages * PAGE_BYTES


def count(trace: Trace, events: list[Event], cap_bytes: int, num_steps: int) -> str:
    try:
        mapped, restarts = replay(trace, events, cap_bytes, num_steps)
    except OutOfMemory:
        return "runs out"
    return f"{restarts} ({mapped / GIB:.2f} GiB mapped)"


if __name__ == "__main__":
    main()
