"""Batches that take turns before one is chosen: real steps on a CPU, and a bench whose answers are known."""

from __future__ import annotations

import itertools
import statistics
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outcore.planning.families.scaling import Family, Recorded
from outcore.tuning.data.samples import Samples
from outcore.tuning.throughput.bench import TIMING, Bench, Timing
from outcore.tuning.throughput.builder import CurveBuilder
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.throughput.prediction import BatchPlanner, Point, PredictedBatch
from outcore.tuning.throughput.timing import in_proportion
from tests.cpu.tuning.nets import CPU
from tests.cpu.tuning.work_clock import work_clock


class Branching(nn.Module):
    """Does other work from 40 samples on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 12, 3, padding=1)
        self.last = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x))
        y = F.gelu(y) if len(x) > 40 else y
        out: Tensor = self.last(F.relu(self.second(y)).mean((2, 3)))
        return out


def batch_of(num: int) -> tuple[Tensor, Tensor]:
    return torch.randn(num, 1, 16, 16), torch.zeros(num, dtype=torch.long)


@pytest.fixture
def bench(folder: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    torch.manual_seed(0)
    model = Branching()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bench = Bench(model, F.cross_entropy, Samples(batch_of, CPU), optimizer, "1GiB", disk=folder)
    with work_clock(monkeypatch):
        bench.warm_up(4)
        yield bench
        bench.close()


def predicted(bench: Bench, batches: tuple[int, ...]) -> list[PredictedBatch]:
    planner = bench.planner(Family(tuple(Recorded(batch, bench.record(batch).trace) for batch in (16, 32))))
    return [planner.predict(batch) for batch in batches]


def test_each_batch_has_its_own_seconds_and_peak_also_where_one_does_other_work(bench: Bench) -> None:
    found = predicted(bench, (8, 32, 64))
    alone = [bench.run_planned(one) for one in found]
    before = [parameter.clone() for parameter in bench.model.parameters()]
    turns = bench.run_interleaved(found)
    assert [turn.peak_bytes for turn in turns] == [one.peak_bytes for one in alone]
    assert not alone[2].followed  # it is not what small batches promised
    for turn, one in zip(turns, alone):
        assert turn.step_s < 5 * one.step_s  # recording such a step takes thirty times as long
    assert turns[0].step_s < turns[2].step_s
    assert all(torch.equal(old, new) for old, new in zip(before, bench.model.parameters()))


def test_one_batch_lies_in_memory_at_a_time_and_of_short_steps_several_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, made, steps = predicted(bench, (8, 16)), list[weakref.ref[Tensor]](), list[int]()
    make, step = bench.samples.any_batch, bench.run_step

    def any_batch(num: int) -> Any:
        assert all(old() is None for old in made)
        data = make(num)
        made.append(weakref.ref(data[0]))
        return data

    def counted(ooc: Any, data: Any) -> None:
        steps.append(len(data[0]))
        step(ooc, data)

    monkeypatch.setattr(bench.samples, "any_batch", any_batch)
    monkeypatch.setattr(bench, "run_step", counted)
    bench.run_interleaved(found)
    turns = [(batch, len(list(same))) for batch, same in itertools.groupby(steps)]
    least = TIMING.min_rounds
    assert [batch for batch, _ in turns[-2 * least :]] == [8, 16] * least
    assert all(num >= 2 for _, num in turns[-2 * least :])  # the first does not count


def test_what_all_of_a_round_were_slowed_down_by_is_nobodys() -> None:
    """The machine is 1, 2 and 5 times as slow, and one step is disturbed besides."""
    true_s, slower = [0.01, 0.04, 0.09], [1.0, 2.0, 5.0, 1.5, 1.0]
    times = [[one * much for much in slower] for one in true_s]
    times[1][2] *= 3
    assert in_proportion(times, true_s) == pytest.approx(true_s)
    assert in_proportion(times, [2 * one for one in true_s]) == pytest.approx([2 * one for one in true_s])
    assert in_proportion(times, [0.09, 0.04, 0.01]) == pytest.approx(true_s)  # each ran in another moment


def test_a_batch_that_was_measured_in_a_slow_moment_is_measured_again_beside_the_others(bench: Bench) -> None:
    found = [bench.record(batch) for batch in (16, 128)]
    slow = [found[0].with_seconds(50 * found[0].step_s, bench.optimizer_s), found[1]]
    retimed = bench.retime_interleaved(slow)
    assert [one.batch for one in retimed] == [16, 128]
    assert retimed[0].step_s < retimed[1].step_s
    assert sum(op.seconds for op in retimed[0].trace.ops) < retimed[0].step_s
    (alone,) = bench.retime_interleaved([slow[0]])
    assert alone.step_s < slow[0].step_s / 2
    bench.device = torch.device("cuda")  # a device of its own has one speed
    assert bench.retime_interleaved(slow) == slow
    bench.device = CPU


def test_a_batch_beyond_is_measured_in_the_same_moments_as_the_one_it_is_compared_with(bench: Bench) -> None:
    """Whatever the other is said to take, the batch takes as many times that as its steps do."""
    small, large = predicted(bench, (4, 36))
    for other_s in (small.point.step_s, 100 * small.point.step_s):
        shares = [bench.run_planned(large, (small, other_s)).step_s / other_s for _ in range(3)]
        assert 1.2 < statistics.median(shares) < 12


def test_steps_in_a_loop_are_those_of_a_training_and_change_nothing(bench: Bench) -> None:
    before = [parameter.clone() for parameter in bench.model.parameters()]
    found = {batch: bench.loop_step_s(batch) for batch in (4, 32)}
    assert found[4] < found[32]
    assert found[32] < bench.record(32).step_s * 2
    assert all(torch.equal(old, new) for old, new in zip(before, bench.model.parameters()))
    assert all(parameter.grad is None for parameter in bench.model.parameters())


def chosen(
    said: dict[int, float],
    true: dict[int, float],
    edge: int,
    fast: dict[int, float] | None = None,
    slows_down: float = 1.0,
) -> tuple[int, list[Any], Curve]:
    """What is taken where the curve promises `said` samples per second and real steps have `true`; `fast` alone. The
    machine slows down each time that batches take turns."""
    alone = true | (fast or {})
    ran: list[Any] = []

    def run_interleaved(found: list[PredictedBatch]) -> list[Timing]:
        slower = slows_down ** sum(isinstance(those, list) for those in ran)
        ran.append([one.point.micro_batch for one in found])
        return [Timing(slower * one.point.micro_batch / true[one.point.micro_batch], 1) for one in found]

    def run_planned(one: PredictedBatch, beside: tuple[PredictedBatch, float] | None) -> Any:
        batch = one.point.micro_batch
        assert (beside[0].point.micro_batch if beside else None) == (edge if batch > edge else None)
        ran.append(batch)
        return SimpleNamespace(step_s=batch / alone[batch], peak_bytes=1)

    points = [
        Point(batch, batch, batch / rate, rate, 0, 0 if batch <= edge else 10, 0, batch <= edge, True)
        for batch, rate in said.items()
    ]
    bench = cast(Bench, SimpleNamespace(device=CPU, run_interleaved=run_interleaved, run_planned=run_planned))
    curve = Curve(tuple(points), 1 << 30, 0.0, largest_in_core=edge)
    builder = CurveBuilder(bench, cast(BatchPlanner, None), curve)
    builder.predicted = {point.micro_batch: PredictedBatch(point, cast(Any, None), None) for point in points}
    knee: Callable[[Curve], int] = lambda curve: curve.knee.micro_batch  # noqa: E731
    return builder.measure_contenders(knee, lambda what, part: None), ran, builder.curve


def test_a_batch_that_ran_in_a_fast_moment_meets_the_largest_in_core() -> None:
    taken, ran, _ = chosen({16: 844, 32: 943, 48: 904, 79: 875}, {16: 800, 32: 880, 48: 920, 79: 950}, 79)
    assert ran == [[32, 48, 79]]
    assert taken == 79


def test_what_comes_out_beyond_in_core_ran_too() -> None:
    taken, ran, curve = chosen({16: 800, 32: 1000, 64: 930, 128: 960}, {16: 800, 32: 850, 64: 930, 128: 500}, 64)
    assert taken == 64
    assert 128 in ran
    assert curve.point(taken).measured_step_s is not None


def test_who_comes_later_counts_in_proportion_to_the_best_of_those_before() -> None:
    said = {16: 500.0, 32: 895.0, 48: 900.0, 64: 905.0, 79: 907.0}
    true = {16: 400.0, 32: 940.0, 48: 930.0, 64: 880.0, 79: 870.0}
    taken, ran, curve = chosen(said, true, 79, slows_down=2.0)
    assert ran == [[48, 64, 79], [32, 48]]
    assert taken == 32
    assert {batch: curve.rate(batch) for batch in (32, 48, 64, 79)} == {
        batch: pytest.approx(true[batch]) for batch in (32, 48, 64, 79)
    }


def test_one_batch_alone_runs_once() -> None:
    taken, ran, _ = chosen({32: 900}, {32: 900}, 32)
    assert (taken, ran) == (32, [[32]])


def test_one_beyond_that_ran_in_a_fast_moment_meets_those_in_core() -> None:
    taken, ran, _ = chosen({32: 700, 64: 900, 96: 980}, {32: 700, 64: 900, 96: 840}, 64, fast={96: 980})
    assert ran == [96, [32, 64, 96]]
    assert taken == 64


def test_once_swapping_was_seen_a_slower_neighbour_beyond_is_not_run() -> None:
    taken, ran, _ = chosen({64: 900, 96: 800, 128: 990}, {64: 900, 96: 800, 128: 500}, 64)
    assert ran == [128, [64]]
    assert taken == 64
