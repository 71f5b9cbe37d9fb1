"""Steps predicted from small batches against real ones: the same trace, the same peak, nearly the same seconds."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from outcore.planning import plan
from outcore.planning.families.scaling import Family, Recorded
from outcore.tuning.data import batches
from outcore.tuning.throughput import bench as bench_module
from outcore.tuning.throughput.bench import Bench, Measurement
from outcore.tuning.throughput.limited_steps import UNTIMED_S
from outcore.tuning.throughput.prediction import PredictedBatch
from outcore.tuning.throughput.probes import probe_batches
from outcore.units import MIB
from outcore.values import Budget, Machine, Plan, Trace
from tests.cpu.tuning.nets import NETS, bench_of
from tests.cpu.tuning.work_clock import work_clock

PEAK = 0.03  # the bar
BATCH = 192
PRETEND = Machine("pretend", 1 << 40, 0, 1 << 40, 1e9, 1e9, 1e9, 1e9)


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only bytes are looked at."""
    monkeypatch.setattr(bench_module, "TIMING", replace(bench_module.TIMING, timed_s=0.0))


def small_family(bench: Bench) -> Family:
    bench.warm_up(4)
    return Family(tuple(Recorded(batch, bench.record(batch).trace) for batch in (16, 32)))


@pytest.mark.usefixtures("_untimed")
@pytest.mark.parametrize("name", NETS)
def test_a_scaled_trace_is_the_one_that_is_recorded(name: str, folder: str) -> None:
    bench = bench_of(name, "1GiB", folder)
    family = small_family(bench)
    for batch in (20, 96):
        real = bench.record(batch).trace
        found = family.at(batch)
        assert found.fingerprint == real.fingerprint
        assert found.before_bytes == real.before_bytes
        assert in_core_peak_bytes(found) == in_core_peak_bytes(real)
    bench.close()


def in_core_peak_bytes(trace: Trace) -> int:
    return plan(trace, PRETEND, Budget(1 << 40, 0, 1 << 40), planner="keep-all").predicted_peak_bytes


@pytest.mark.usefixtures("_untimed")
@pytest.mark.parametrize("name", NETS)
def test_the_peak_is_known_before_the_step_runs(name: str, folder: str) -> None:
    """In-core, and beyond, where the plan made for a batch that never ran is followed by its first step."""
    bench = bench_of(name, "1GiB", folder)
    family = small_family(bench)
    in_core_bytes = bench.planner(family).in_core_bytes(BATCH)
    bench.close()
    resident = family.at(BATCH).before_bytes
    for memory_bytes in (2 * in_core_bytes, resident + 8 * (in_core_bytes - resident) // 10):
        tight = bench_of(name, memory_bytes, folder)
        tight.warm_up(4)
        predicted = tight.planner(family).predict(BATCH)
        assert predicted.plan is not None
        assert predicted.point.in_core == (memory_bytes > in_core_bytes)
        measured = tight.run_planned(predicted)
        assert measured.followed
        assert measured.peak_bytes <= memory_bytes
        assert abs(predicted.point.peak_bytes / measured.peak_bytes - 1) < PEAK
        tight.close()


@pytest.mark.usefixtures("_untimed")
def test_a_step_that_is_not_as_expected_is_recorded_instead(folder: str) -> None:
    """A trace of another network is expected; the steps leave its plan safely and are planned anew."""
    other = bench_of("attention", "1GiB", folder)
    wrong = other.planner(small_family(other)).predict(16)
    other.close()
    bench = bench_of("convnet", 64 * MIB, folder)
    measured = bench.run_planned(wrong)
    assert not measured.followed
    assert measured.peak_bytes < 64 * MIB
    bench.close()


def test_seconds_of_larger_batches_follow_from_small_ones(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of work: real seconds of a shared machine differ by a third from one moment to the next.
    benchmarks/tuning.py holds the bar by a real one."""
    bench_of("convnet", "1GiB", folder).close()  # the disk is measured once in a process: by a real clock
    with work_clock(monkeypatch):
        bench = bench_of("convnet", "1GiB", folder)
        found = probe_batches(bench, 512, lambda what, part: None)
        assert found.family is not None
        assert bench.steps.num_kinds < 8  # it stopped when there was nothing more to learn
        for batch in (48, 96, 160):
            predicted = bench.planner(found.family).predict(batch)
            step_s = bench.run_planned(predicted).step_s
            assert predicted.point.step_s == pytest.approx(step_s, rel=1e-3), batch
        bench.close()


@pytest.mark.usefixtures("_untimed")
def test_where_the_allocator_starts_over_the_settled_plan_counts(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no such allocator: a counter that goes up stands for it. Then `limit` plans for itself."""
    bench = bench_of("convnet", "1GiB", folder)
    family = small_family(bench)
    edge_bytes = bench.planner(family).in_core_bytes(BATCH)
    bench.close()
    tight = bench_of("convnet", 9 * edge_bytes // 10, folder)
    tight.warm_up(4)
    plans: list[Plan | None] = []
    confirmed = Bench.run_under

    def noted(self: Bench, predicted: PredictedBatch, given: Plan | None, *beside: Any, **options: Any) -> Measurement:
        plans.append(given)
        return confirmed(self, predicted, given, *beside, **options)

    monkeypatch.setattr(Bench, "run_under", noted)
    beyond = tight.planner(family).predict(BATCH)
    assert not beyond.point.in_core
    assert tight.run_planned(beyond).followed
    assert plans == [beyond.plan]
    counts = iter(range(100))
    monkeypatch.setattr(bench_module, "count_restarts", lambda device: next(counts))
    found = tight.run_planned(beyond)
    assert plans == [beyond.plan, beyond.plan, None]
    assert found.followed
    assert found.peak_bytes <= tight.budget.device_bytes
    tight.close()


@pytest.mark.usefixtures("_untimed")
def test_ops_are_timed_in_a_batch_that_was_never_recorded(folder: str) -> None:
    """And where the step runs other ops than expected, they keep the seconds expected of them."""
    bench = bench_of("convnet", "1GiB", folder)
    predicted = bench.planner(small_family(bench)).predict(48)
    steps = bench._limited_steps(plan=predicted.plan)
    steps.expect(predicted.trace)
    data = bench.samples.any_batch(48)
    measured = bench._measure_and_time(steps, 48, data, times_ops=True)
    assert measured.followed
    assert all(0 <= op.seconds < UNTIMED_S for op in measured.trace.ops)
    assert sum(op.seconds for op in measured.trace.ops) == pytest.approx(measured.step_s - bench.optimizer_s)
    unchanged = steps.time_ops(lambda: None)
    assert all(op.seconds < UNTIMED_S for op in unchanged.ops)
    steps.close()
    bench.close()


def test_a_second_look_that_runs_out_of_memory_leaves_the_first(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """What the failed step swapped is held by its traceback: closing must not stumble over it."""
    roomy = bench_of("convnet", "1GiB", folder)
    family = small_family(roomy)
    in_core_bytes = roomy.planner(family).in_core_bytes(BATCH)
    roomy.close()
    tight = bench_of("convnet", int(0.75 * in_core_bytes), folder)
    tight.warm_up(4)
    restarts, really, looks_again = itertools.count(), Bench.run_under, [False]
    monkeypatch.setattr(bench_module, "count_restarts", lambda device: next(restarts))

    def confirmed(
        self: Bench, predicted: PredictedBatch, plan: Plan | None, *beside: Any, **options: Any
    ) -> Measurement:
        looks_again[0] = plan is None
        return really(self, predicted, plan, *beside, **options)

    def loss_of(*args: Any) -> torch.Tensor:
        loss = batches.loss_of(*args)
        if looks_again[0]:
            raise torch.OutOfMemoryError("pretend: the device is full")
        return loss

    monkeypatch.setattr(Bench, "run_under", confirmed)
    monkeypatch.setattr(bench_module, "loss_of", loss_of)
    beyond = tight.planner(family).predict(BATCH)
    assert not beyond.point.in_core
    assert tight.run_planned(beyond).step_s > 0
    assert looks_again[0]
    tight.close()
