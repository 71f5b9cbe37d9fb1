"""What an allocator does with a schedule, played through."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.planning import lower, plan, simulate, verify
from outcore.planning import tidy as tidying
from outcore.planning.holes import PAGE_BYTES, Device, Mapped, allocations, mapped, wanted_bytes
from outcore.planning.terrain import terrain_of
from outcore.planning.tidy import RESTART_S, tidy
from outcore.units import GIB, MIB
from outcore.values import Budget, Machine, Plan, Schedule, Trace
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


def test_pages_on_which_something_lies_are_not_given_back() -> None:
    device = filled(80 * MIB, a=30, wall=10, b=30, wall2=10)
    device.give("a")
    device.give("b")
    device.take("long", 20 * MIB)
    assert device.num_restarts == 0
    with pytest.raises(MemoryError):
        device.take("longer", 35 * MIB)  # 10 MiB and 30 MiB are free, two pages of them whole


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
        found = mapped(trace, schedule, 10**9, aside=())
        assert found is not None
        assert found.num_restarts == 0
        assert found.num_bytes >= simulate(trace, schedule, MACHINE).peak_bytes
        assert mapped(trace, schedule, 100 * MIB) is None


def test_a_tidied_plan_wants_less_and_still_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)

    def only_others(trace: Trace, schedule: Schedule, memory_bytes: int) -> int:
        """The plan as it was made wants more than there is; no other does."""
        return int(1.03 * memory_bytes) if schedule.decisions == made.decisions else 0

    monkeypatch.setattr(tidying, "wanted_bytes", only_others)
    monkeypatch.setattr(tidying, "FAR", 100.0)
    found = tidy(trace, MACHINE, made, 210 * MIB)
    assert found.plan.decisions != made.decisions
    assert not found.restarts
    assert found.plan.predicted_peak_bytes <= made.budget.device_bytes
    schedule = lower(trace, found.plan, MACHINE)
    verify(trace, schedule)
    assert simulate(trace, schedule, MACHINE).step_s == pytest.approx(found.plan.predicted_step_s)


def test_a_neighbour_that_is_far_slower_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    monkeypatch.setattr(tidying, "wanted_bytes", lambda trace, schedule, memory_bytes: int(1.03 * memory_bytes))
    monkeypatch.setattr(tidying, "mapped", lambda trace, schedule, memory_bytes: Mapped(1, memory_bytes))
    assert tidy(trace, MACHINE, made, 210 * MIB).plan.predicted_step_s <= made.predicted_step_s * (1 + tidying.FAR)


@pytest.mark.parametrize(("wanted_share", "most_s"), [(1.03, -1.0), (1.2, 60.0)], ids=["slow host", "a giant"])
def test_nothing_is_drawn_on_a_slow_host_nor_where_a_giant_is_in_the_way(
    wanted_share: float, most_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    asked = []

    def too_much(trace: Trace, schedule: Schedule, memory_bytes: int) -> int:
        asked.append(schedule)
        return int(wanted_share * memory_bytes)

    monkeypatch.setattr(tidying, "wanted_bytes", too_much)
    monkeypatch.setattr(tidying, "mapped", lambda trace, schedule, memory_bytes: Mapped(1, memory_bytes))
    monkeypatch.setattr(tidying, "MOST_S", most_s)
    found = tidy(trace, MACHINE, made, 210 * MIB)
    assert found.plan.decisions == made.decisions
    assert found.restarts
    assert len(asked) == 1


def test_where_every_plan_wants_too_much_the_fastest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    monkeypatch.setattr(tidying, "wanted_bytes", lambda trace, schedule, memory_bytes: int(0.97 * memory_bytes))
    monkeypatch.setattr(tidying, "mapped", lambda trace, schedule, memory_bytes: Mapped(1, memory_bytes))
    found = tidy(trace, MACHINE, made, 210 * MIB)
    assert found.restarts
    assert found.step_s == pytest.approx(found.plan.predicted_step_s + 2 * RESTART_S)
    assert found.plan.predicted_step_s <= made.predicted_step_s


def test_a_plan_that_runs_out_whatever_is_drawn_takes_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = large_chain()
    made = planned(trace, 200 * MIB)
    monkeypatch.setattr(tidying, "wanted_bytes", lambda trace, schedule, memory_bytes: int(1.03 * memory_bytes))
    monkeypatch.setattr(tidying, "mapped", lambda trace, schedule, memory_bytes: None)
    assert tidy(trace, MACHINE, made, 210 * MIB).step_s == float("inf")


def test_what_is_wanted_is_what_is_mapped_where_nothing_forbids_it() -> None:
    trace = large_chain()
    schedule = lower(trace, planned(trace, 200 * MIB), MACHINE)
    found = mapped(trace, schedule, 10**9)
    assert found is not None
    assert wanted_bytes(trace, schedule, 10**9) == found.num_bytes


def test_a_plan_that_leaves_nothing_to_decide_is_left_as_it_is() -> None:
    large = large_chain()
    storages = tuple(replace(storage, movable=False) for storage in large.storages)
    trace = replace(large, storages=storages, before_bytes=0)
    made = planned(trace, 10**9)
    assert not terrain_of(trace).evictable
    found = tidy(trace, MACHINE, made, 100 * MIB)
    assert found.plan.decisions == made.decisions
    assert found.step_s > made.predicted_step_s
