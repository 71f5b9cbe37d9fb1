"""What an allocator maps for a schedule: best fit, played through."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from outcore.planning import lower, plan, simulate
from outcore.planning.holes import PAGE_BYTES, Heap, allocations, mapped_without
from outcore.units import MIB
from outcore.values import Budget, Machine
from tests.pure.planning.random_steps import chain

MACHINE = Machine("pretend", 10**9, 10**9, 0, 1e9, 1e9, 1.0, 1.0, 1.0, 0.0)


def test_a_block_goes_into_the_smallest_hole_that_is_long_enough() -> None:
    heap = Heap()
    for who, num_mib in (("a", 60), ("wall", 20), ("b", 40), ("wall2", 20)):
        heap.take(who, num_mib * MIB)
    heap.give("a")
    heap.give("b")
    heap.take("c", 40 * MIB)  # where b was
    heap.take("d", 60 * MIB)  # where a was
    assert heap.end_bytes == 140 * MIB


def test_a_wall_between_two_holes_costs_new_pages() -> None:
    heap = Heap()
    for who in ("a", "wall", "b"):
        heap.take(who, 40 * MIB)
    heap.give("a")
    heap.give("b")
    heap.take("long", 80 * MIB)
    assert heap.end_bytes == 160 * MIB  # b's hole lies at the end and is continued
    heap.give("wall")
    heap.take("long too", 80 * MIB)
    assert heap.end_bytes == 160 * MIB


def test_small_blocks_are_not_its_business() -> None:
    heap = Heap()
    heap.take("small", MIB - 1)
    heap.give("small")
    assert heap.end_bytes == 0


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_blocks_never_overlap_and_everything_comes_back(sizes: list[int], chance: random.Random) -> None:
    heap, live = Heap(), {}
    for who, num_mib in enumerate(sizes):
        heap.take(who, num_mib * MIB)
        live[who] = heap._owned[who]
        spans = sorted(live.values())
        assert all(at + length <= after for (at, length), (after, _) in itertools.pairwise(spans))
        assert sum(length for _, length in spans) <= heap.end_bytes
        if chance.random() < 0.5:
            gone = chance.choice(list(live))
            heap.give(gone)
            del live[gone]
    for who in live:
        heap.give(who)
    assert heap._holes == [(heap.end_bytes, 0)]
    assert heap.end_bytes % PAGE_BYTES == 0


def test_a_schedule_gives_back_what_it_takes_and_maps_at_least_its_peak() -> None:
    small = chain()
    storages = tuple(replace(storage, bytes=storage.bytes * MIB) for storage in small.storages)
    trace = replace(small, storages=storages, before_bytes=small.before_bytes * MIB)
    for device_bytes in (10**9, 40 * MIB):
        schedule = lower(trace, plan(trace, MACHINE, Budget(device_bytes, 10**9, 0)), MACHINE)
        assert (device_bytes == 10**9) == (set(schedule.decisions.values()) <= {"keep"})
        taken: dict[object, int] = {}
        for kind, who, num_bytes in allocations(trace, schedule):
            if kind == "take":
                assert who not in taken
                taken[who] = num_bytes
            else:
                taken.pop(who, None)
        assert not [who for who in taken if isinstance(who, tuple)]  # every copy goes
        mapped = mapped_without(trace, schedule, ())
        assert mapped >= simulate(trace, schedule, MACHINE).peak_bytes
        assert mapped_without(trace, schedule, range(len(storages))) >= mapped - PAGE_BYTES
