"""What an allocator does with a schedule, played through."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.planning import lower, plan, simulate, verify
from outcore.planning.allocator import fragmentation
from outcore.planning.allocator.fragmentation import search_placement
from outcore.planning.allocator.hints import AllocatorHints
from outcore.planning.allocator.model import (
    PAGE_BYTES,
    Device,
    Mapped,
    _workspaces,
    allocations,
    asked_by_ops,
    mapped,
    wanted_bytes,
)
from outcore.planning.planners.scoring import Scored
from outcore.planning.settings import FRAGMENTATION
from outcore.planning.trace_index import index_of
from outcore.units import GIB, MIB
from outcore.values import Budget, Machine, Plan, Trace
from tests.pure.planning.random_steps import chain

MACHINE = Machine("pretend", 10**9, 10**9, 0, 1e9, 1e9, 1.0, 1.0, 1.0, 0.0)


def filled(cap_bytes: int, **blocks_mib: int) -> Device:
    device = Device(cap_bytes)
    for who, num_mib in blocks_mib.items():
        device.take(who, num_mib * MIB)
    return device


def test_a_block_goes_into_the_smallest_hole_that_is_long_enough() -> None:
    device = filled(GIB, a=60, wall=20, b=40, wall2=20)
    device.give("a")
    device.give("b")
    device.take("c", 40 * MIB)  # where b was
    device.take("d", 60 * MIB)  # where a was
    assert device.mapped_bytes == 140 * MIB


def test_a_wall_between_two_holes_costs_new_pages() -> None:
    device = filled(GIB, a=40, wall=40, b=40)
    device.give("a")
    device.give("b")
    device.take("long", 80 * MIB)
    assert device.mapped_bytes == 160 * MIB  # b's hole lies at the end and is continued
    device.give("wall")
    device.take("long too", 80 * MIB)
    assert device.mapped_bytes == 160 * MIB


def test_where_the_cap_forbids_new_pages_the_free_ones_are_given_back_first() -> None:
    device = filled(160 * MIB, a=40, wall=40, b=40, wall2=40)
    device.give("a")
    device.give("b")
    device.take("long", 80 * MIB)
    assert device.num_restarts == 1
    assert device.mapped_bytes == 160 * MIB
    with pytest.raises(MemoryError):
        device.take("more", 20 * MIB)


def test_the_cap_is_asked_for_the_whole_block_even_where_half_of_it_is_mapped() -> None:
    """As on an H200: in 1 GiB, 100 and 500 MiB, the 500 given back, and then 560 starts over for 60 new ones."""
    device = filled(GIB, a=100, b=500)
    device.give("b")
    device.take("c", 560 * MIB)
    assert device.num_restarts == 1
    device = filled(1160 * MIB, a=100, b=500)
    device.give("b")
    device.take("c", 560 * MIB)
    assert device.num_restarts == 0
    assert device.asked_bytes == 1160 * MIB


def test_a_pooled_gradient_is_made_among_the_others_first() -> None:
    device = filled(GIB, a=60, wall=20)
    device.give("a")
    device.take("gradient", 20 * MIB)
    device.move_to_pool("gradient")
    device.move_to_pool("nobody")
    assert device.mapped_bytes == 100 * MIB  # a page of its own, and the hole is whole again
    device.take("b", 60 * MIB)
    assert device.mapped_bytes == 100 * MIB
    device.give("gradient")
    device.take("c", 20 * MIB)
    assert device.mapped_bytes == 120 * MIB  # pages of the pool serve nobody else


def test_what_every_op_seems_to_want_is_no_workspace() -> None:
    trace = chain()
    ops = tuple(replace(op, slot=slot, workspace_bytes=MIB) for slot, op in enumerate(trace.ops * 5))
    ops = (*ops[:8], replace(ops[8], workspace_bytes=30 * MIB), *ops[9:])
    found = _workspaces(replace(trace, ops=ops))
    assert [slot for slot, num_bytes in found.items() if num_bytes] == [8]
    assert found[8] == 29 * MIB
    assert _workspaces(replace(trace, ops=ops[:3])) == {0: MIB, 1: MIB, 2: MIB}  # too few to tell


def test_pages_on_which_something_lies_are_not_given_back() -> None:
    device = filled(80 * MIB, a=30, wall=10, b=30, wall2=10)
    device.give("a")
    device.give("b")
    device.take("long", 20 * MIB)
    assert device.num_restarts == 0
    with pytest.raises(MemoryError):
        device.take("longer", 35 * MIB)  # 10 MiB and 30 MiB are free, two pages of them whole


def test_a_hole_that_could_grow_is_spared_for_a_larger_one_that_could_not() -> None:
    device = filled(GIB, a=60, wall=20, b=40)
    device.give("a")
    device.give("b")  # the last pages: what follows could be mapped any time
    device.take("c", 30 * MIB)
    assert device._owned["c"][1] == 0
    device.take("d", 40 * MIB)
    assert device.mapped_bytes == 120 * MIB


def test_blocks_are_laid_where_they_were() -> None:
    """Two with a hole of 30 MiB between them on pages of their own, one far away."""
    device = Device(GIB, [(0, 15 * MIB), (45 * MIB, 5 * MIB), (205 * MIB, 10 * MIB)])
    assert device.mapped_bytes == device.most_bytes == 3 * PAGE_BYTES
    device.take("between", 30 * MIB)
    assert device._owned["between"][1] == 15 * MIB
    device.take("after", 130 * MIB)
    assert device._owned["after"][1] == 50 * MIB
    device.take("behind", 30 * MIB)
    assert device._owned["behind"][1] == 215 * MIB
    device.give_all(but=None)
    assert device.mapped_bytes - device._rows[0].unmap() == 3 * PAGE_BYTES


def recorded(name: str) -> list[tuple[str, int, int, int]]:
    """What the allocator of an H200 did in one step, its own words: what, address, bytes, aside."""
    path = Path(__file__).parents[2] / "golden" / f"{name}.memory.json.gz"
    return [tuple(event) for event in json.loads(gzip.decompress(path.read_bytes()))]


def replay(device: Device, events: list[tuple[str, int, int, int]], num_steps: int) -> list[int]:
    restarts = []
    for step in range(num_steps):
        before, owners = device.num_restarts, dict[tuple[int, int], object]()
        for at, (what, address, num_bytes, aside) in enumerate(events):
            if what == "alloc":
                owners[address, aside] = step, at
                device.take((step, at), num_bytes, pooled=bool(aside))
            elif what == "free_completed":
                device.give(owners.pop((address, aside), None))
        device.give_all(but=None)
        restarts.append(device.num_restarts - before)
    return restarts


def test_a_recorded_step_starts_over_in_the_model_as_it_did_on_the_device() -> None:
    """Small blocks took 0.05 GiB of the cap. VGG-16 in 12 GiB: 20 times in 20 steps and then no more; ResNet-50 in 16
    GiB: 94 times in 41, the recorded one three times, and it did not stop."""
    for name, cap_bytes, per_step, comes_to_rest in (
        ("vgg16_nhwc_12", int(11.95 * GIB), 1.0, True),
        ("resnet50_16", int(15.95 * GIB), 94 / 41, False),
    ):
        events = recorded(name)
        there = [(address, num_bytes) for what, address, num_bytes, aside in events if what == "there" and not aside]
        restarts = replay(Device(cap_bytes, there), events, 20)
        assert sum(restarts) / 20 == pytest.approx(per_step, abs=0.6)
        assert (sum(restarts[-5:]) == 0) == comes_to_rest


def test_blocks_of_a_recorded_step_go_where_they_went_on_the_device() -> None:
    """ResNet-50 in 16 GiB, from the first time it starts over on: then what is mapped is known."""
    events = recorded("resnet50_16")
    first = next(at for at, event in enumerate(events) if event[0] == "segment_unmap")
    live: dict[tuple[int, int], int] = {}
    for what, address, num_bytes, aside in events[:first]:
        if what in ("there", "alloc"):
            live[address, aside] = num_bytes
        elif what == "free_completed":
            live.pop((address, aside), None)
    device = Device(16 * GIB, sorted((address, num_bytes) for (address, aside), num_bytes in live.items() if not aside))
    row = device._rows[0]
    sizes = {address: -(-num_bytes // 512) * 512 for (address, aside), num_bytes in live.items() if not aside}
    num_asked = 0
    for what, address, num_bytes, aside in events[first:]:
        if aside:
            continue
        if what == "alloc":
            device.take(address, num_bytes)
            assert device._owned[address][1] == address
            num_asked += 1
        elif what == "free_completed" and address in device._owned:
            device.give(address)
        elif what == "free_completed":
            row.open(address, sizes[address])
        elif what == "segment_unmap" and address in row._starts | row._ends:
            device.mapped_bytes -= sum(one.unmap() for one in device._rows)
    assert num_asked > 140


@given(st.lists(st.integers(1, 90), min_size=1, max_size=60), st.booleans(), st.randoms(use_true_random=False))
def test_blocks_never_overlap_and_everything_comes_back(sizes: list[int], tight: bool, chance: random.Random) -> None:
    device, live = Device(400 * MIB if tight else 8 * GIB), set[int]()
    for who, num_mib in enumerate(sizes):
        try:
            device.take(who, num_mib * MIB)
            live.add(who)
        except MemoryError:
            assert tight
        spans = sorted(device._owned[who][1:] for who in live)
        assert all(at + length <= after for (at, length), (after, _) in itertools.pairwise(spans))
        assert sum(length for _, length in spans) <= device.mapped_bytes <= device.cap_bytes
        if live and chance.random() < 0.5:
            gone = chance.choice(sorted(live))
            device.give(gone)
            live.discard(gone)
    device.give_all(but=None)
    row = device._rows[0]
    assert sum(length for length, _ in row._holes) == device.mapped_bytes
    assert device.mapped_bytes % PAGE_BYTES == 0
    assert device.mapped_bytes == row.unmap()
    assert row._gaps == {0: 1 << 60}
    assert not row._holes


def large_chain() -> Trace:
    small = chain()
    storages = tuple(replace(storage, bytes=storage.bytes * 5 * MIB) for storage in small.storages)
    return replace(small, storages=storages, before_bytes=small.before_bytes * 5 * MIB)


def planned(trace: Trace, device_bytes: int) -> Plan:
    return plan(trace, MACHINE, Budget(device_bytes, 10**9, 0))


def test_a_schedule_gives_back_what_it_takes_and_maps_at_least_its_peak() -> None:
    trace = large_chain()
    for device_bytes in (10**9, 200 * MIB):
        schedule = lower(trace, planned(trace, device_bytes), MACHINE)
        assert (device_bytes == 10**9) == (set(schedule.decisions.values()) <= {"keep"})
        taken: dict[object, int] = {}
        for kind, who, num_bytes in allocations(trace, schedule):
            if kind == "take":
                assert who not in taken
                taken[who] = num_bytes
            else:
                taken.pop(who, None)
        assert not [who for who in taken if isinstance(who, tuple)]  # every copy goes
        events = list(allocations(trace, schedule))
        found = mapped(trace, events, 10**9)
        assert found is not None
        assert found.num_restarts == 0
        assert found.num_bytes >= simulate(trace, schedule, MACHINE).peak_bytes
        assert mapped(trace, events, 100 * MIB) is None


def test_a_placed_plan_wants_less_and_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)

    def only_others(search: fragmentation._Search, scored: Scored) -> int:
        """The plan as it was made wants more than there is; no other does."""
        return int(1.03 * search.memory_bytes) if scored.decisions == made.decisions else 0

    monkeypatch.setattr(fragmentation._Search, "wanted_bytes", only_others)
    monkeypatch.setattr(fragmentation, "FRAGMENTATION", replace(FRAGMENTATION, far_share=100.0))
    found = search_placement(trace, MACHINE, made, 210 * MIB)
    assert found.plan.decisions != made.decisions
    assert not found.restarts
    assert found.plan.predicted_peak_bytes <= made.budget.device_bytes
    schedule = lower(trace, found.plan, MACHINE)
    verify(trace, schedule)
    assert simulate(trace, schedule, MACHINE).step_s == pytest.approx(found.plan.predicted_step_s)


def wants(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every plan wants this much of the memory there is."""
    monkeypatch.setattr(fragmentation._Search, "wanted_bytes", lambda search, scored: int(share * search.memory_bytes))


def test_a_neighbour_that_is_far_slower_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    wants(1.03, monkeypatch)
    monkeypatch.setattr(fragmentation, "mapped", lambda *asked: Mapped(1, GIB))
    assert search_placement(trace, MACHINE, made, 210 * MIB).plan.predicted_step_s <= made.predicted_step_s * (
        1 + FRAGMENTATION.far_share
    )


@pytest.mark.parametrize(("wanted_share", "most_s"), [(1.03, -1.0), (1.5, 60.0)], ids=["slow host", "a giant"])
def test_nothing_is_drawn_on_a_slow_host_nor_where_a_giant_is_in_the_way(
    wanted_share: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    asked = []

    def too_much(search: fragmentation._Search, scored: Scored) -> int:
        asked.append(scored)
        return int(wanted_share * search.memory_bytes)

    monkeypatch.setattr(fragmentation._Search, "wanted_bytes", too_much)
    monkeypatch.setattr(fragmentation, "mapped", lambda *asked: Mapped(1, GIB))
    monkeypatch.setattr(fragmentation, "FRAGMENTATION", replace(FRAGMENTATION, most_s=most_s))
    found = search_placement(trace, MACHINE, made, 210 * MIB)
    assert found.plan.decisions == made.decisions
    assert found.restarts
    assert len(asked) == 1


def test_where_every_plan_wants_too_much_the_fastest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    wants(0.995, monkeypatch)
    monkeypatch.setattr(fragmentation, "mapped", lambda *asked: Mapped(1, GIB))
    found = search_placement(trace, MACHINE, made, 210 * MIB)
    assert found.restarts
    assert found.step_s == pytest.approx(found.plan.predicted_step_s + 1.5 * FRAGMENTATION.restart_s)
    assert found.plan.predicted_step_s <= made.predicted_step_s


def test_a_plan_that_runs_out_whatever_is_drawn_takes_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    wants(1.03, monkeypatch)
    monkeypatch.setattr(fragmentation, "mapped", lambda *asked: None)
    assert search_placement(trace, MACHINE, made, 210 * MIB).step_s == float("inf")


def test_what_is_wanted_is_what_is_mapped_where_nothing_forbids_it() -> None:
    trace = large_chain()
    schedule = lower(trace, planned(trace, 200 * MIB), MACHINE)
    events = list(allocations(trace, schedule))
    found = mapped(trace, events, 10**9)
    assert found is not None
    assert wanted_bytes(trace, events, AllocatorHints()) == found.num_bytes


def test_a_plan_that_leaves_nothing_to_decide_is_left_as_it_is() -> None:
    large = large_chain()
    storages = tuple(replace(storage, movable=False) for storage in large.storages)
    trace = replace(large, storages=storages, before_bytes=0)
    made = planned(trace, 10**9)
    assert not index_of(trace).evictable
    found = search_placement(trace, MACHINE, made, 100 * MIB)
    assert found.plan.decisions == made.decisions
    assert found.step_s > made.predicted_step_s


def test_what_an_op_asks_for_are_its_large_outputs_and_then_its_workspace() -> None:
    trace = chain()
    (born,) = {storage.born for storage in trace.storages if not storage.external and storage.born == trace.ops[1].slot}
    storages = tuple(
        replace(storage, bytes=8 * MIB if storage.born == born else 100, external=storage.external)
        for storage in trace.storages
    )
    ops = tuple(replace(op, workspace_bytes=3 * MIB if index == 1 else 0) for index, op in enumerate(trace.ops))
    trace = replace(trace, storages=storages, ops=ops)
    assert asked_by_ops(trace) == {1: (8 * MIB, 3 * MIB)}
    outside = tuple(replace(storage, external=True) for storage in storages)
    assert asked_by_ops(replace(trace, storages=outside)) == {1: (3 * MIB,)}
