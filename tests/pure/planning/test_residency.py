"""Where the training state lies is decided together with the activations, and simulated in the same lanes."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import pytest

from outcore.errors import BudgetTooSmall
from outcore.planning import plan
from outcore.planning.preparing import prepare
from outcore.planning.residency import beside_state, budget_beside, choose_residency, spilled, spread, with_gradients
from outcore.units import MIB
from outcore.values import Budget, Machine, Plan, Residency, StateUnit, StateUse, Timeline, Trace
from tests.pure.test_reporting import small_trace

NUM = 6  # layers of the trace, each with a weight of 1 MiB, its gradient and two moments
UNITS = tuple(StateUnit(f"layer{number}", MIB, MIB, 2 * MIB) for number in range(NUM))
LEAST = Residency(UNITS, window_bytes=5 * MIB)


def machine(rate: float = 1e9) -> Machine:
    return Machine("test", 10**9, 10**9, 0, rate, rate, 1.0, 1.0, copy_latency_s=0.0)


def trace_with_state() -> Trace:
    """Each layer's weight is read in its forward and in its backward, which makes its gradient."""
    trace = small_trace(NUM)
    forward = [op.slot for op in trace.ops if op.phase == "forward"]
    backward = [op.slot for op in trace.ops if op.phase == "backward"]
    uses = [StateUse(slot, "weight", number) for number, slot in enumerate(forward)]
    for number, slot in zip(reversed(range(NUM)), backward):
        uses += [StateUse(slot, "weight", number), StateUse(slot, "gradient", number)]
    return replace(trace, state=tuple(uses))


def planned(step: Trace, on: Machine, budget: Budget) -> Plan:
    return plan(step, on, budget, planner="priced")


def chosen(
    memory_bytes: int, rate: float = 1e9, *, host_bytes: int = 64 * MIB, early: Collection[int] = ()
) -> Residency:
    budget = Budget(memory_bytes, host_bytes)
    return choose_residency(trace_with_state(), LEAST, machine(rate), budget, planned, early=early)


def simulated(residency: Residency, rate: float) -> Timeline:
    trace, budget = trace_with_state(), Budget(64 * MIB, 64 * MIB)
    return prepare(trace, planned(trace, machine(), budget), machine(rate), residency=residency).predicted


def in_budget(residency: Residency, memory_bytes: int, rate: float) -> Timeline:
    before_bytes = MIB + residency.device_bytes - residency.resident_gradient_bytes
    step = with_gradients(replace(trace_with_state(), before_bytes=before_bytes), residency)
    made = planned(step, machine(rate), Budget(memory_bytes, 64 * MIB))
    return prepare(step, made, machine(rate), residency=residency).predicted


def test_state_that_fits_stays_and_other_state_streams() -> None:
    everything = chosen(64 * MIB)
    assert everything.resident == frozenset(range(NUM))
    assert everything.window_bytes == 0
    assert everything.link_share == 1.0
    some = chosen(24 * MIB, rate=2e7)  # a link this slow is spared by every byte that stays
    assert 0 < len(some.resident) < NUM
    assert some.window_bytes >= LEAST.window_bytes
    assert chosen(9 * MIB).resident == frozenset()
    with pytest.raises(BudgetTooSmall) as caught:
        chosen(MIB)
    assert chosen(caught.value.needed_bytes).window_bytes == LEAST.window_bytes


def test_a_choice_is_never_slower_than_the_least() -> None:
    for memory_bytes in (10 * MIB, 16 * MIB, 24 * MIB):
        for rate in (5e7, 5e8):
            ours, least = (in_budget(one, memory_bytes, rate) for one in (chosen(memory_bytes, rate), LEAST))
            assert ours.step_s <= least.step_s
            assert ours.peak_bytes <= memory_bytes


def test_the_simulated_copies_are_those_of_an_update_that_waits() -> None:
    """A weight comes with what its update needs, goes home with it, and comes once more for the backward.
    Inside `optimizer.step()` everything comes once more instead, and in the backward what the weight has not."""
    late = simulated(replace(LEAST, window_bytes=64 * MIB), 1e9)
    assert late.state_in_bytes == NUM * 4 * MIB + NUM * MIB
    assert late.state_out_bytes == NUM * 3 * MIB + NUM * MIB
    at_step = simulated(replace(LEAST, is_late=False), 1e9)
    assert at_step.state_in_bytes == 2 * NUM * MIB + NUM * 3 * MIB
    early = simulated(replace(LEAST, window_bytes=64 * MIB, early=frozenset(range(NUM))), 1e9)
    assert early.state_in_bytes == NUM * MIB + NUM * 3 * MIB
    assert early.state_out_bytes == NUM * 4 * MIB
    assert simulated(replace(LEAST, resident=frozenset(range(NUM))), 1e9).state_in_bytes == 0


def test_weights_that_the_cpu_updates_come_when_it_has() -> None:
    """Only weights come and only gradients go. The first layer waits for its own update, the last one for all."""
    wide = replace(LEAST, window_bytes=64 * MIB, by_cpu=True)
    at_once = simulated(wide, 1e9)
    assert at_once.state_in_bytes == 2 * NUM * MIB
    assert at_once.state_out_bytes == NUM * MIB
    trace, budget = trace_with_state(), Budget(64 * MIB, 64 * MIB)
    slow = replace(machine(), update_bytes_per_s=1e6)
    step_s = prepare(trace, planned(trace, slow, budget), slow, residency=wide).predicted.step_s
    all_updates_s = NUM * UNITS[0].update_bytes / 1e6
    assert all_updates_s <= step_s <= all_updates_s + at_once.step_s
    resident = replace(wide, resident=frozenset(range(NUM - 1)))
    assert resident.num_by_cpu == 1
    one_s = prepare(trace, planned(trace, slow, budget), slow, residency=resident).predicted.step_s
    assert one_s < step_s / (NUM - 1)


def test_what_the_host_has_no_room_for_lies_on_the_disk() -> None:
    """Frozen units first, which are never written back, and no more units than it takes."""
    frozen = (StateUnit("frozen", 3 * MIB), StateUnit("other", 3 * MIB))
    both = replace(LEAST, units=(*UNITS, *frozen), spills=True)
    assert not spilled(both, Budget(0, 30 * MIB, 64 * MIB)).on_disk
    assert spilled(both, Budget(0, 29 * MIB, 64 * MIB)).on_disk in ({6}, {7})
    assert spilled(both, Budget(0, 24 * MIB, 64 * MIB)).on_disk == {6, 7}
    some = spilled(both, Budget(0, 10 * MIB, 64 * MIB))
    assert {6, 7} < some.on_disk
    assert 10 * MIB >= some.home_bytes_on("host") > 6 * MIB
    assert some.home_bytes_on("host") + some.home_bytes_on("disk") == some.home_bytes == both.streamed_bytes
    assert some.fits_home(Budget(0, 10 * MIB, 22 * MIB))
    assert not some.fits_home(Budget(0, 10 * MIB, 21 * MIB))
    resident = replace(some, resident=frozenset(range(NUM)))
    assert spilled(resident, Budget(0, 10 * MIB, 64 * MIB)).on_disk == frozenset()
    assert not spilled(replace(both, spills=False), Budget(0, MIB, 64 * MIB)).on_disk
    left = budget_beside(Budget(9, 12 * MIB, 64 * MIB), some, machine())
    assert (left.host_bytes, left.disk_bytes) == (4 * MIB, 42 * MIB)
    assert budget_beside(Budget(9, 12 * MIB, 64 * MIB), some, replace(machine(), host_bytes=0)).host_bytes == 0


def test_the_disk_takes_its_seconds_and_its_wear_is_predicted() -> None:
    trace, budget = trace_with_state(), Budget(64 * MIB, 64 * MIB)
    slow_disk = replace(machine(), disk_write_bytes_per_s=1e7, disk_read_bytes_per_s=2e7)

    def timeline(residency: Residency) -> Timeline:
        return prepare(trace, planned(trace, slow_disk, budget), slow_disk, residency=residency).predicted

    wide = replace(LEAST, window_bytes=64 * MIB)
    on_disk = timeline(replace(wide, on_disk=frozenset({2})))
    assert timeline(wide).state_written_bytes == 0
    assert on_disk.state_written_bytes == 4 * MIB  # weight and two moments after the update, and the gradient
    assert on_disk.state_out_bytes == timeline(wide).state_out_bytes
    assert on_disk.step_s >= 4 * MIB / 1e7 + 5 * MIB / 2e7 - timeline(wide).step_s
    assert timeline(replace(wide, on_disk=frozenset({2}), by_cpu=True)).state_written_bytes == 4 * MIB
    at_step = replace(wide, on_disk=frozenset({2}), is_late=False)
    assert timeline(at_step).state_written_bytes == 4 * MIB
    assert timeline(replace(wide, tier="disk")).state_written_bytes == NUM * 4 * MIB


def test_homes_choose_the_disk_while_the_budget_is_searched() -> None:
    budget = Budget(24 * MIB, 8 * MIB, 64 * MIB)
    fast_disk = replace(machine(), disk_write_bytes_per_s=1e9, disk_read_bytes_per_s=1e9)
    with pytest.raises(BudgetTooSmall, match="training state"):
        choose_residency(trace_with_state(), LEAST, fast_disk, replace(budget, device_bytes=12 * MIB), planned)
    found = choose_residency(
        trace_with_state(), replace(LEAST, spills=True), fast_disk, replace(budget, device_bytes=12 * MIB), planned
    )
    assert found.on_disk
    assert found.home_bytes_on("host") <= 8 * MIB


def test_the_step_takes_no_less_than_its_lanes_and_a_wider_window_hides_more() -> None:
    in_core_s = simulated(replace(LEAST, resident=frozenset(range(NUM))), 1e9).step_s
    for rate in (2e7, 1e8, 1e9):
        tight, wide = simulated(LEAST, rate), simulated(replace(LEAST, window_bytes=64 * MIB), rate)
        for one in (tight, wide):
            assert one.step_s >= max(in_core_s, one.state_in_bytes / rate, one.state_out_bytes / rate)
            assert one.step_s == pytest.approx(in_core_s + one.stall_s)
        assert wide.step_s <= tight.step_s
    assert simulated(LEAST, 1e12).step_s == pytest.approx(in_core_s, rel=1e-3)


def test_residents_are_spread_and_their_gradients_stay() -> None:
    assert spread(UNITS, 12 * MIB) in ({0, 2, 4}, {1, 3, 5})
    assert spread(UNITS, 3 * MIB) == frozenset()
    assert spread(UNITS, 100 * MIB) == set(range(NUM))
    trace = trace_with_state()
    uses = (*trace.state, StateUse(trace.num_slots - 1, "gradient", 0, 3))
    placed = with_gradients(replace(trace, state=uses), replace(LEAST, resident=frozenset({0})))
    assert placed.storages[3].dies == trace.num_slots - 1
    assert placed.storages[2] == trace.storages[2]
    assert beside_state(machine(), replace(LEAST, link_share=0.5)).swap_in_bytes_per_s == 0.5e9


def test_updates_run_in_the_backward_where_they_may_and_pay() -> None:
    """They move less in all. A second home for what they make must find room."""
    everything = range(NUM)
    late, early = chosen(24 * MIB, rate=6e7), chosen(24 * MIB, rate=6e7, early=everything)
    assert not late.early
    assert early.early
    assert not early.early & early.resident
    assert in_budget(early, 24 * MIB, 6e7).step_s < in_budget(late, 24 * MIB, 6e7).step_s
    assert early.home_bytes == early.streamed_bytes + 3 * MIB * len(early.early)
    tight = chosen(24 * MIB, rate=6e7, host_bytes=early.home_bytes - MIB, early=everything)
    assert tight.home_bytes < early.home_bytes
    assert not chosen(64 * MIB, early=everything).early  # nothing is streamed


def test_homes_that_do_not_fit_the_host_stay_on_the_device() -> None:
    """Six units of 4 MiB; of 24 MiB of device memory some are taken by the window and activations."""
    some = chosen(24 * MIB, host_bytes=16 * MIB)
    assert 0 < some.home_bytes <= 16 * MIB
    with pytest.raises(BudgetTooSmall, match="training state"):
        chosen(12 * MIB, host_bytes=16 * MIB)


def test_the_predicted_peak_counts_what_the_window_holds() -> None:
    """And not the whole window."""
    wide = replace(LEAST, window_bytes=64 * MIB)
    trace = replace(trace_with_state(), before_bytes=MIB + wide.device_bytes)
    made = planned(trace, machine(), Budget(100 * MIB, 64 * MIB))
    predicted = prepare(trace, made, machine(), residency=wide).predicted
    alone = prepare(trace_with_state(), made, machine()).predicted.peak_bytes - trace_with_state().before_bytes
    assert made.predicted_peak_bytes > 64 * MIB
    assert MIB + alone < predicted.peak_bytes <= MIB + alone + 24 * MIB  # six units of four
