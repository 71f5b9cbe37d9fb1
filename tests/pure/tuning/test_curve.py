"""The curve: planned beyond in-core, read through what was measured, and its knee."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from outcore.errors import TuningError
from outcore.planning import lower, simulate, verify
from outcore.tuning.reasons import why_batch_kept, why_last_batch, why_loading, why_micro_batch
from outcore.tuning.throughput.curve import CURVE, Curve
from outcore.tuning.throughput.prediction import BatchPlanner, Point, swap_s_per_byte
from outcore.units import MIB
from outcore.values import Budget
from tests.pure.test_reporting import MACHINE
from tests.pure.tuning.test_scaling import family_of

FAMILY = family_of(8, 16, 32)


def planner(memory_bytes: int = 3 * MIB) -> BatchPlanner:
    machine = replace(MACHINE, swap_out_bytes_per_s=20.0 * MIB, swap_in_bytes_per_s=20.0 * MIB)
    return BatchPlanner(FAMILY, machine, Budget(memory_bytes, 64 * MIB), optimizer_s=0.004)


def point(batch: int, rate: float, *, in_core: bool = True, fits: bool = True) -> Point:
    evicted = 0 if in_core else batch * MIB
    return Point(batch, batch * MIB, batch / rate, rate, batch, evicted, 0, in_core, fits)


def curve_of(*points: Point, largest_in_core: int = 64) -> Curve:
    return Curve(points, 100 * MIB, 0.0, largest_in_core)


def test_every_point_is_what_its_plan_does() -> None:
    plans = planner()
    edge = plans.largest_in_core(4096)
    assert plans.in_core_bytes(edge) <= 3 * MIB < plans.in_core_bytes(edge + 1)
    for batch in (8, edge, edge + 1, 2 * edge):
        found = plans.predict(batch)
        assert found.plan is not None
        schedule = lower(found.trace, found.plan, plans.machine)
        verify(found.trace, schedule)
        timeline = simulate(found.trace, schedule, plans.machine)
        made = found.point
        assert (made.peak_bytes, made.swapped_bytes) == (timeline.peak_bytes, timeline.swapped_bytes)
        assert made.step_s == pytest.approx(timeline.step_s + 0.004)
        assert made.samples_per_s == pytest.approx(batch / made.step_s)
        assert made.fits
        assert made.peak_bytes <= 3 * MIB
        assert made.in_core == (batch <= edge)


@dataclass(frozen=True)
class Bent(BatchPlanner):
    """Bytes by any law."""

    law: Callable[[int], float] = float
    asked: list[int] = field(default_factory=list)

    def in_core_bytes(self, batch: int) -> int:
        self.asked.append(batch)
        return int(self.law(batch))


@pytest.mark.parametrize(
    ("law", "most_asked"),
    [
        (lambda batch: 1000 + 37 * batch, 5),
        (lambda batch: 512 * math.ceil((900_000 + 37 * batch) / 512), 8),
        (lambda batch: batch**3, 22),
        (lambda batch: 0 if batch < 4000 else 1e9, 22),
        (lambda batch: 1e9 if batch > 1 else 0, 22),
    ],
)
def test_the_edge_of_memory_is_found_by_few_looks(law: Callable[[int], float], most_asked: int) -> None:
    for room_bytes in (0, 1, 1036, 1037, 50_000, 910_000, 1_000_000, 999_999_999):
        for at_most in (1, 2, 9, 4096):
            plans = Bent(FAMILY, MACHINE, Budget(room_bytes, 0), 0.0, law=law)
            edge = plans.largest_in_core(at_most)
            expected = max((batch for batch in range(1, at_most + 1) if int(law(batch)) <= room_bytes), default=0)
            assert edge == expected
            assert len(plans.asked) <= most_asked


def test_a_batch_that_no_plan_fits_says_how_much_it_needs() -> None:
    plans = planner()
    found = plans.predict(4096)
    assert found.plan is None
    assert not found.point.fits
    assert found.point.peak_bytes > 3 * MIB
    enough = replace(plans, budget=Budget(found.point.peak_bytes, 64 * MIB))
    assert enough.predict(4096).plan is not None


def test_gradients_that_stay_take_their_room() -> None:
    plain = planner()
    accumulating = replace(plain, resident_bytes=MIB)
    assert accumulating.largest_in_core(4096) < plain.largest_in_core(4096)
    assert accumulating.predict(8).point.peak_bytes == plain.predict(8).point.peak_bytes + MIB


def test_the_knee_is_the_smallest_that_is_as_good_as_the_best() -> None:
    rates = {8: 500.0, 16: 985.0, 32: 992.0, 64: 1000.0, 128: 900.0}
    curve = curve_of(*(point(batch, rate) for batch, rate in rates.items()))
    assert (curve.best.micro_batch, curve.knee.micro_batch) == (64, 32)
    assert rates[32] >= CURVE.knee_share * rates[64] > rates[16]
    outside = curve.with_points([point(256, 2000.0, fits=False)])
    assert outside.best.micro_batch == 64
    with pytest.raises(TuningError, match="no batch size fits"):
        _ = curve_of(point(8, 1.0, fits=False)).best
    with pytest.raises(TuningError, match="not on the curve"):
        curve.point(9)


def test_what_real_steps_show_is_read_into_the_batches_between() -> None:
    curve = curve_of(*(point(batch, 1000.0) for batch in (8, 16, 32, 64)), point(128, 1000.0, in_core=False))
    one = curve.measured(16, 16 / 500, 16 * MIB)
    assert one.rate(16) == pytest.approx(500)
    assert one.rate(64) == pytest.approx(500)  # all are twice as slow, as far as is known
    two = one.measured(64, 64 / 1000, 64 * MIB)
    assert two.rate(8) == pytest.approx(500)
    assert 500 < two.rate(32) < 1000
    assert two.rate(64) == pytest.approx(1000)
    beyond = two.measured(128, 128 / 250, 128 * MIB)
    assert beyond.rate(64) == pytest.approx(1000)  # swapping says nothing about what is in-core
    assert beyond.rate(128) == pytest.approx(250)


def test_what_a_swapped_byte_costs_is_measured_and_bounded() -> None:
    swaps = point(128, 1000.0, in_core=False)
    assert swap_s_per_byte([swaps], [0.13], 1.0) == 0.0  # the line itself is not better known
    assert swap_s_per_byte([swaps], [0.12], 1.0) == 0.0
    assert swap_s_per_byte([swaps], [0.192], 1.0) == pytest.approx(0.064 / (128 * MIB))
    assert swap_s_per_byte([swaps], [99.0], 1.0) == pytest.approx(0.128 / (128 * MIB))
    assert swap_s_per_byte([swaps], [0.192], 1.5) == 0.0  # in-core steps were off by as much
    recomputes = replace(swaps, swapped_bytes=0, recomputed_bytes=MIB)
    assert swap_s_per_byte([recomputes], [0.2], 1.0) == 0.0  # what runs again is simulated, not guessed from bytes


def test_batches_that_swap_more_say_more_about_it() -> None:
    few, many = point(128, 1000.0, in_core=False), replace(point(256, 1000.0, in_core=False), swapped_bytes=384 * MIB)
    both = swap_s_per_byte([few, many], [0.228, 0.416], 1.0)
    assert both == pytest.approx((0.1 + 0.16) / (512 * MIB))
    with_swap_cost = many.with_swap_cost(both)
    assert with_swap_cost.step_s == pytest.approx(0.256 + 0.75 * 0.26)
    assert with_swap_cost.samples_per_s == pytest.approx(256 / with_swap_cost.step_s)
    assert point(64, 1000.0).with_swap_cost(both) == point(64, 1000.0)


def test_many_small_values_cost_more_than_a_large_one() -> None:
    one = replace(point(128, 1000.0, in_core=False), num_swapped=1)
    many = replace(one, num_swapped=129)  # a quarter of a MiB each, besides
    per_byte = swap_s_per_byte([many], [0.228], 1.0)
    assert per_byte == pytest.approx(0.1 / (160.25 * MIB))
    assert many.with_swap_cost(per_byte).step_s == pytest.approx(0.228)
    assert one.with_swap_cost(per_byte).step_s == pytest.approx(0.128 + 0.1 * 128.25 / 160.25)


def test_only_real_steps_count_as_known() -> None:
    curve = curve_of(point(32, 1000.0), point(64, 1000.0), point(128, 1000.0, in_core=False))
    assert curve.in_core_error == 1.0
    known = curve.measured(32, 0.048, 1).measured(64, 0.08, 1).measured(128, 0.2, 1)
    assert known.in_core_error == pytest.approx(0.08 / 0.064)


def test_accumulation_pays_for_one_optimizer_step() -> None:
    curve = replace(curve_of(point(10, 100.0)), optimizer_s=0.02)
    assert curve.seconds(10) == pytest.approx(0.1)
    assert curve.seconds(10, 5) == pytest.approx(0.42)
    assert curve.rate(10, 5) == pytest.approx(50 / 0.42)


def test_a_curve_comes_back_from_its_file() -> None:
    curve = curve_of(point(8, 10.0), point(16, 12.0, in_core=False)).measured(8, 0.9, 7)
    assert Curve.from_json(curve.to_json()) == curve


def test_reasons_say_what_pays_and_what_does_not() -> None:
    slower = curve_of(point(32, 990.0), point(64, 1000.0), point(128, 900.0, in_core=False))
    said = " ".join(why_micro_batch(slower, 32, 4))
    assert "99.0 % of the most samples per second, which 64 gives" in said
    assert "does not pay for them: at best 10.0 % slower" in said
    assert "4 micro-batches are accumulated" in said
    faster = curve_of(point(64, 1000.0), point(128, 1200.0, in_core=False))
    assert "pays for them: 128 is 20.0 % faster" in " ".join(why_micro_batch(faster, 128, 1))
    assert "a batch of 96 could be cut into 32s" in " ".join(
        why_batch_kept(curve_of(point(1, 90.0), point(32, 990.0)), 1, 97)
    )
    assert why_loading(slower, 64, 1e-5) == []
    assert "5 workers" in why_loading(slower, 64, 4e-3)[0]
    assert "1 worker or more" in why_loading(slower, 64, 6e-4)[0]
    assert why_last_batch(65, 32, normalises=True)
    assert not why_last_batch(65, 32, normalises=False)
    assert not why_last_batch(64, 32, normalises=True)


def test_a_busy_machine_is_said_instead_of_numbers_that_nobody_can_trust() -> None:
    curve = curve_of(point(32, 990.0), point(64, 1000.0), point(128, 900.0, in_core=False))
    calm = " ".join(why_micro_batch(curve.measured(32, 0.034, 1), 32, 1))
    assert "checked with real steps of 32 samples: predictions were within 4.9 %" in calm
    assert "% slower" in calm
    busy = curve.measured(32, 0.0115, 1)
    said = " ".join(why_micro_batch(busy, 32, 1))
    assert "real steps of 32 samples were up to 180 % off what was predicted: the machine was too busy" in said
    assert "run this again" in said
    assert "within" not in said
    assert "slower" not in said
    assert "faster" not in " ".join(
        why_batch_kept(curve_of(point(1, 90.0), point(32, 990.0)).measured(32, 0.01, 1), 1, 97)
    )


def test_a_loop_that_never_waits_is_no_busy_machine() -> None:
    """What is waited for step by step takes longer: that says nothing of the prediction."""
    curve = curve_of(point(32, 990.0), point(64, 1000.0)).measured(64, 0.065, 1).measured(32, 0.02, 1)
    assert "too busy" in " ".join(why_micro_batch(curve, 32, 1))
    said = " ".join(why_micro_batch(replace(curve, looped=(32,)), 32, 1))
    assert "checked with real steps of 64 samples: predictions were within 1.5 %" in said
    assert "short steps (32 samples) were timed in a loop" in said


def test_an_optimizer_that_was_timed_in_a_slow_moment_does_not_make_micro_batches_free() -> None:
    point = Point(8, 1, 0.1, 80.0, 0, 0, 0, in_core=True, fits=True)
    curve = Curve((point,), 1 << 30, optimizer_s=0.15, largest_in_core=8)
    assert curve.seconds(8) == pytest.approx(0.1)
    assert curve.seconds(8, 64) == pytest.approx(64 * 0.02 + 0.08)
