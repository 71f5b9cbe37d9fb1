"""Global batches for several workers: who takes how much, what a step takes, and which batch is chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import TuningError
from outcore.tuning.advice import Advice, on_one_device
from outcore.tuning.gradients.goodput import goodput
from outcore.tuning.reasons import why_split
from outcore.tuning.report import curve_table
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.throughput.prediction import Point
from outcore.tuning.workers.split import Split, Worker, WorkerGroup
from outcore.units import MIB

SIZES = (1, 2, 4, 8, 16, 32, 64)


def curve(start_s: float = 0.004, sample_s: float = 0.001, optimizer_s: float = 0.002) -> Curve:
    """A step is a start, so much per sample, and the optimizer."""
    steps_s = [start_s + size * sample_s + optimizer_s for size in SIZES]
    points = [Point(n, n * MIB, s, n / s, n, 0, 0, in_core=True, fits=True) for n, s in zip(SIZES, steps_s)]
    return Curve(tuple(points), 100 * MIB, optimizer_s, 64, device="cpu")


def worker(speed: float = 1.0, *, most_accumulating: int = 64, start_s: float = 0.004) -> Worker:
    return Worker.of(curve(start_s), most_accumulating, speed)


def test_a_step_is_the_slowest_compute_and_the_communication() -> None:
    team = WorkerGroup((worker(), worker(0.5)), communication_s=0.01)
    way = Split((20, 10), accumulation=3)
    assert way.batch == 90
    assert way.shares == (60, 30)
    # 3 x (4 + 20) + 2 = 74 ms; at half the speed 2 x (3 x (4 + 10) + 2) = 88 ms.
    assert team.step_s(way) == pytest.approx(0.088 + 0.01)
    assert team.rate(way) == pytest.approx(90 / 0.098)


@given(
    speeds=st.lists(st.floats(0.2, 5), min_size=1, max_size=5),
    part=st.floats(0, 1),
    accumulation=st.sampled_from([1, 2, 8]),
)
def test_no_other_share_ends_earlier(speeds: list[float], part: float, accumulation: int) -> None:
    team = WorkerGroup(tuple(worker(speed) for speed in speeds), 0.01)
    total = round(len(speeds) + part * 63 * len(speeds))
    way = team.share_out(total, accumulation)
    assert way is not None
    assert sum(way.sizes) == total
    assert all(1 <= size <= 64 for size in way.sizes)
    if len(set(way.sizes)) == 1:  # equal parts may be 2 % slower
        return
    slowest_s = team.step_s(way) - 0.01
    busy = [w for w, size in zip(team.workers, way.sizes) if w.seconds(size, accumulation) >= slowest_s * (1 - 1e-9)]
    # Whoever ends last could only hand a sample to somebody who would then end no earlier.
    if any(size > 1 for w, size in zip(team.workers, way.sizes) if w in busy):
        for other, size in zip(team.workers, way.sizes):
            if size < 64:
                assert other.seconds(size + 1, accumulation) >= slowest_s * (1 - 1e-9)


def test_shares_follow_the_speed() -> None:
    way = WorkerGroup((worker(3, start_s=0.0), worker(1, start_s=0.0)), 0.0).share_out(80)
    assert way is not None
    assert abs(way.sizes[0] - 60) <= 2  # the optimizer's part does not shrink with the share
    equal = WorkerGroup((worker(),) * 8, 0.02).share_out(256)
    assert equal is not None
    assert equal.sizes == (32,) * 8


def test_nearly_equal_workers_get_equal_parts() -> None:
    team = WorkerGroup((worker(), worker(1.01), worker(0.99), worker()), 0.0)
    for way in (team.share_out(128), team.share_out(64, 2), team.fastest(1 << 20), team.furthest(1 << 20, 32, 200.0)):
        assert way is not None
        assert len(set(way.sizes)) == 1
    way = WorkerGroup((worker(), worker(0.9)), 0.0).share_out(128 - 30)
    assert way is not None
    assert way.sizes[0] > way.sizes[1]


def test_memory_is_kept() -> None:
    fast = worker(4, most_accumulating=10)
    team = WorkerGroup((fast, worker()), 0.0)
    assert team.share_out(129) is None
    assert team.share_out(1) is None  # somebody would have nothing to train
    whole, accumulated = team.share_out(70), team.share_out(70, 2)
    assert whole is not None
    assert accumulated is not None
    assert whole.sizes[0] > 10
    assert accumulated.sizes == (10, 60)
    assert WorkerGroup((worker(most_accumulating=0), worker()), 0.0).share_out(10, 2) is None


def test_a_kept_batch_is_trained_exactly() -> None:
    team = WorkerGroup((worker(), worker(), worker(0.5)), 0.01)
    for batch in (3, 96, 97, 160, 1024):
        way = team.keep(batch)
        assert way.batch == batch
    assert team.keep(1024).accumulation >= 1024 / (3 * 64)
    with pytest.raises(TuningError, match="has more divisors"):
        team.keep(1009)  # a prime, and too many samples for one go
    with pytest.raises(TuningError, match="cannot be cut"):
        team.keep(2)


def test_free_batches_are_chosen_by_goodput_and_communication_makes_them_larger() -> None:
    quick, slow = (WorkerGroup((worker(),) * 4, communication_s) for communication_s in (0.0, 0.2))
    chosen = [team.furthest(1 << 20, 32, 500.0) for team in (quick, slow)]
    assert chosen[1].batch > chosen[0].batch
    for team, way in zip((quick, slow), chosen):
        worth = goodput(team.rate(way), way.batch, 32, 500.0)
        for other in (team.share_out(4 * 64), team.share_out(4 * 16), team.share_out(4 * 64, 2)):
            assert other is not None
            assert goodput(team.rate(other), other.batch, 32, 500.0) <= worth
    assert slow.furthest(300, 32, 500.0).batch <= 300
    assert slow.fastest(1 << 20).batch == 256
    assert slow.fastest(1 << 20).accumulation == 1
    with pytest.raises(TuningError, match="take fewer workers or give more data"):
        slow.fastest(3)


def test_scaling_is_against_what_each_would_do_alone() -> None:
    free = WorkerGroup((worker(start_s=0.0), worker(0.5, start_s=0.0)), 0.0)
    way = Split((64, 32), 1)
    assert 0.95 < free.scaling(way) <= 1.0
    assert WorkerGroup((worker(),), 0.0).scaling(Split((64,), 1)) == pytest.approx(1.0)
    step_s = free.step_s(way)
    assert replace(free, communication_s=step_s).scaling(way) == pytest.approx(free.scaling(way) / 2)


def test_a_step_that_was_held_up_does_not_move_samples() -> None:
    held_up = curve().measured(16, 0.9, 0).measured(32, curve().seconds(32), 0)
    assert Worker.of(held_up, 64).seconds(16) == pytest.approx(curve().seconds(32))
    with pytest.raises(TuningError, match="no batch size fits"):
        Worker.of(replace(curve(), points=()), 0)


def advice(shares: tuple[int, ...]) -> Advice:
    share = 64 if not shares else shares[0]
    several = {"workers": len(shares), "shares": shares, "communication_s": 0.02, "scaling": 0.87} if shares else {}
    return Advice(32, share // 32, 0.1, 900.0, 0.1, 32 * MIB, curve(), (), noise=80.0, first_batch=32, **several)  # type: ignore[arg-type]


def test_advice_says_who_takes_what() -> None:
    several = advice((64, 64, 32))
    assert several.effective_batch == 160
    assert Advice.from_json(several.to_json()) == several
    said = str(several)
    assert "64 samples on 2 of them, 32 samples on 1 of them" in said
    assert "20.0 ms, 20 % of a step" in said
    assert "87 % of what 3 workers would do" in said
    assert "goodput" not in said
    assert "8 to 64 samples" in str(advice((64, 8, 16, 24, 32)))
    one = on_one_device(several)
    assert (one.workers, one.effective_batch, one.accumulation) == (1, 160, 5)
    assert one.step_s == curve().seconds(32, 5)


def test_advice_for_one_says_nothing_of_workers() -> None:
    single = advice(())
    assert "workers" not in single.to_json() + str(single)
    assert single.to_json().endswith('"spent_s":0.0,"unchecked":"","proposal":null}')
    assert Advice.from_json(single.to_json()) == single
    assert "goodput" in [column.header for column in curve_table(single).columns]


@pytest.mark.parametrize(("num", "said"), [(1, "over 1 step of warm-up"), (12, "over 12 steps of warm-up")])
def test_one_step_of_warm_up_is_one(num: int, said: str) -> None:
    assert said in str(replace(advice(()), num_warm_up_steps=num))


def test_what_does_not_fit_has_no_samples_per_second() -> None:
    single = advice(())
    outside = replace(single.curve.point(64), fits=False, in_core=False)
    table = curve_table(replace(single, curve=single.curve.with_points([outside])))
    cells = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    last = {heading: found[-1] for heading, found in cells.items()}
    assert (last["batch"], last[""]) == ("64", "does not fit")
    assert (last["samples/s"], last["goodput"]) == ("", "")
    assert all(cells["samples/s"][:-1] + cells["goodput"][:-1])
    assert cells[""][-2].startswith("█" * 20)  # the fastest of those that fit


def test_why_communication_decides() -> None:
    team = WorkerGroup((worker(), worker(0.5)), 0.1)
    way, silent = team.furthest(1 << 20, 32, 300.0), team.silent().furthest(1 << 20, 32, 300.0)
    said = " ".join(why_split(team, way, silent, kept=False, noise=300.0))
    assert f"communication decides: without it a batch of {silent.batch} would do" in said
    assert "all finish at the same time" in said
    kept = team.keep(32)
    said = " ".join(why_split(team, kept, kept, kept=True, noise=None))
    assert "stays 32" in said
    assert "a larger batch, or fewer workers, would waste less" in said
    equal = WorkerGroup((worker(),) * 2, 0.0)
    assert why_split(equal, equal.keep(64), equal.keep(64), kept=False, noise=None) == []
