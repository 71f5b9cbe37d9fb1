"""Steps predicted from small batches against real ones: the same trace, the same peak, nearly the same seconds."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from outcore.planning import plan
from outcore.tuning import batches, probing
from outcore.tuning.climbing import climb
from outcore.tuning.curve import Predicted
from outcore.tuning.probing import Bench, Measured
from outcore.tuning.scaling import Family, Recorded
from outcore.units import MIB
from outcore.values import Budget, Machine, Plan, Trace
from tests.cpu.tuning.nets import NETS, bench_of

PEAK = 0.03  # the bar
BATCH = 192
PRETEND = Machine("pretend", 1 << 40, 0, 1 << 40, 1e9, 1e9, 1e9, 1e9)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One for all: the disk of every new folder would be measured anew."""
    return str(tmp_path_factory.mktemp("swap"))


@pytest.fixture
def _untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only bytes are looked at."""
    monkeypatch.setattr(probing, "TIMED_S", 0.0)


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
    in_core_bytes = bench.planned(family).in_core_bytes(BATCH)
    bench.close()
    resident = family.at(BATCH).before_bytes
    for memory_bytes in (2 * in_core_bytes, resident + 8 * (in_core_bytes - resident) // 10):
        tight = bench_of(name, memory_bytes, folder)
        tight.warm_up(4)
        predicted = tight.planned(family).at(BATCH)
        assert predicted.plan is not None
        assert predicted.point.in_core == (memory_bytes > in_core_bytes)
        measured = tight.confirm(predicted)
        assert measured.followed
        assert measured.peak_bytes <= memory_bytes
        assert abs(predicted.point.peak_bytes / measured.peak_bytes - 1) < PEAK
        tight.close()


@pytest.mark.usefixtures("_untimed")
def test_a_step_that_is_not_as_expected_is_recorded_instead(folder: str) -> None:
    """A trace of another network is expected; the steps leave its plan safely and are planned anew."""
    other = bench_of("attention", "1GiB", folder)
    wrong = other.planned(small_family(other)).at(16)
    other.close()
    bench = bench_of("convnet", 64 * MIB, folder)
    measured = bench.confirm(wrong)
    assert not measured.followed
    assert measured.peak_bytes < 64 * MIB
    bench.close()


class Work(TorchDispatchMode):
    """A clock that goes on with the work that is done, and with nothing else: every op takes a while to begin and then
    as long as its tensors are large, convolutions and products longer."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        num_bytes = sum(found.nbytes for found in tree_leaves([args, kwargs, out]) if isinstance(found, torch.Tensor))
        slow = any(name in func.name() for name in ("convolution", "mm"))
        self.now_s += 5e-6 + num_bytes * (2e-8 if slow else 1e-9)
        return out

    def __call__(self) -> float:
        return self.now_s


def test_seconds_of_larger_batches_follow_from_small_ones(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of work: real seconds of a shared machine differ by a third from one moment to the next.
    benchmarks/tuning.py holds the bar by a real one."""
    bench_of("convnet", "1GiB", folder).close()  # the disk is measured once in a process: by a real clock
    with Work() as clock:
        monkeypatch.setattr(time, "perf_counter", clock)
        monkeypatch.setattr(Bench, "clock", staticmethod(clock))
        bench = bench_of("convnet", "1GiB", folder)
        found = climb(bench, 512, lambda what, part: None)
        assert found.family is not None
        assert len(bench.ooc.kinds) < 8  # it stopped when there was nothing more to learn
        for batch in (48, 96, 160):
            predicted = bench.planned(found.family).at(batch)
            step_s = bench.confirm(predicted).step_s
            assert predicted.point.step_s == pytest.approx(step_s, rel=1e-3), batch
        bench.close()
        monkeypatch.undo()


@pytest.mark.usefixtures("_untimed")
def test_where_the_allocator_starts_over_the_settled_plan_counts(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has no such allocator: a counter that goes up stands for it. Then `limit` plans for itself."""
    bench = bench_of("convnet", "1GiB", folder)
    family = small_family(bench)
    edge_bytes = bench.planned(family).in_core_bytes(BATCH)
    bench.close()
    tight = bench_of("convnet", 9 * edge_bytes // 10, folder)
    tight.warm_up(4)
    plans: list[Plan | None] = []
    confirmed = Bench._confirmed

    def noted(self: Bench, predicted: Predicted, given: Plan | None, *beside: Any, **options: Any) -> Measured:
        plans.append(given)
        return confirmed(self, predicted, given, *beside, **options)

    monkeypatch.setattr(Bench, "_confirmed", noted)
    beyond = tight.planned(family).at(BATCH)
    assert not beyond.point.in_core
    assert tight.confirm(beyond).followed
    assert plans == [beyond.plan]
    counts = iter(range(100))
    monkeypatch.setattr(probing, "count_restarts", lambda device: next(counts))
    found = tight.confirm(beyond)
    assert plans == [beyond.plan, beyond.plan, None]
    assert found.followed
    assert found.peak_bytes <= tight.budget.device_bytes
    tight.close()


@pytest.mark.usefixtures("_untimed")
def test_ops_that_were_not_timed_keep_the_seconds_expected_of_them(folder: str) -> None:
    """Nothing but a CUDA device times ops again: here the trace has to come back as it was."""
    bench = bench_of("convnet", "1GiB", folder)
    predicted = bench.planned(small_family(bench)).at(48)
    ooc = bench._limited(plan=predicted.plan)
    ooc.expect(predicted.trace)
    found = bench._watched(ooc, 48, bench.samples.any_batch(48), times_ops=True)
    assert found.followed
    factor = (found.step_s - bench.optimizer_s) / sum(op.seconds for op in predicted.trace.ops)
    expected_s = [factor * op.seconds for op in predicted.trace.ops]
    assert [op.seconds for op in found.trace.ops] == pytest.approx(expected_s)
    ooc.close()
    bench.close()


def test_a_second_look_that_runs_out_of_memory_leaves_the_first(monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """What the failed step swapped is held by its traceback: closing must not stumble over it."""
    roomy = bench_of("convnet", "1GiB", folder)
    family = small_family(roomy)
    in_core_bytes = roomy.planned(family).in_core_bytes(BATCH)
    roomy.close()
    tight = bench_of("convnet", int(0.75 * in_core_bytes), folder)
    tight.warm_up(4)
    restarts, really, looks_again = itertools.count(), Bench._confirmed, [False]
    monkeypatch.setattr(probing, "count_restarts", lambda device: next(restarts))

    def confirmed(self: Bench, predicted: Predicted, plan: Plan | None, *beside: Any, **options: Any) -> Measured:
        looks_again[0] = plan is None
        return really(self, predicted, plan, *beside, **options)

    def loss_of(*args: Any) -> torch.Tensor:
        loss = batches.loss_of(*args)
        if looks_again[0]:
            raise torch.OutOfMemoryError("pretend: the device is full")
        return loss

    monkeypatch.setattr(Bench, "_confirmed", confirmed)
    monkeypatch.setattr(probing, "loss_of", loss_of)
    beyond = tight.planned(family).at(BATCH)
    assert not beyond.point.in_core
    assert tight.confirm(beyond).step_s > 0
    assert looks_again[0]
    tight.close()
