"""How true are predicted batches, how good is the batch that is chosen, and does a batch beyond in-core pay?

    python -m benchmarks.tuning                                       # curve (with the headline), choice
    python -m benchmarks.tuning --only accuracy,noise,workers         # see benchmarks/tuning_accuracy.py
    python -m benchmarks.tuning --only curve --networks resnet50 --limit-s 60

`curve`     peak and samples per second, predicted from small batches, against real steps at each batch: with nearly all
            the memory of the device, and under a tight budget, where it ends with the verdict of `headline`.
`choice`    the batch `tune` chooses against an exhaustive sweep of real runs, and what both cost. A run of the sweep is
            what benchmarks/slowdown.py takes to measure one batch: recorded, planned, settled, then ten steps timed.
            Of two dozen runs the best one had luck: so the best few and the batch chosen run again, a step in turn;
            half of the rounds say which is the best of them, and the other half what the choice is of that one.
`headline`  the best batch under a plan against the largest in-core one, as in the tight part of `curve`, alone.

On the CPU one thread computes, seconds are CPU seconds of this process with all its threads (a neighbour's load does
not count; a copy to the swap file does, though it could be hidden on an idle core), and the C library keeps the memory
it was given: left alone it gives large blocks back in the middle of a run and pays for their first touch again, in some
runs and not in others. A curve is predicted and measured `--num-rounds` times, each round with recordings of its own:
a shared machine differs from minute to minute, so both sides of a comparison come from the same one, and a batch counts
with its median round. Where it differs from second to second, `--in-turn` runs all batches of a curve a step in turn.
A GPU's short steps wait for the host: while they are timed nothing is planned beside them. Every section is guarded:
what fails is recorded, the next one runs; results are written row by row.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import math
import multiprocessing
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import date
from functools import partial
from operator import truediv
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.slowdown import about, hardware  # noqa: E402
from outcore.limit import limit  # noqa: E402
from outcore.tuning.data.batches import loss_of  # noqa: E402
from outcore.tuning.data.samples import Samples  # noqa: E402
from outcore.tuning.throughput.bench import Bench  # noqa: E402
from outcore.tuning.throughput.builder import CurveBuilder, free_batches, refined  # noqa: E402
from outcore.tuning.throughput.curve import Curve  # noqa: E402
from outcore.tuning.throughput.prediction import BatchPlanner, PredictedBatch  # noqa: E402
from outcore.tuning.throughput.probes import probe_batches  # noqa: E402
from outcore.units import format_bytes  # noqa: E402

Row = dict[str, Any]
Task = tuple[Callable[[], nn.Module], Callable[[int], tuple[Tensor, Tensor]]]
make_sgd = partial(torch.optim.SGD, lr=1e-3, momentum=0.9)
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
NETWORKS = ("resnet50", "vit_b") if ON_GPU else ("digits_resnet", "small_vit")
BATCHES = (32, 64, 256, 1024, 2048, 128, 512) if ON_GPU else (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
MEMORY = {"resnet50": "16GiB", "vit_b": "16GiB", "digits_resnet": "64MiB", "small_vit": "32MiB"}
NUM_WARM = 12 if ON_GPU else 5  # ours: recorded, timed again, planned, watched, fitted to the allocator
NUM_STEPS = 10
NUM_IN_TURN, QUICKEST_S = 8, 0.15  # turns of each batch, of a curve in turn; predictions, too, are of quickest steps
NUM_TOP, NUM_TURNS, NUM_AGAIN = 4, 160, 6  # the sweep's best; steps of each of them in turn, or whole runs on a GPU
NUM_TUNED_AGAIN = 2  # after the sweep: on a CPU, whose speed is another a minute later
_over = statistics.harmonic_mean  # of samples per second: over all of these steps together
WIDE = "90%" if ON_GPU else "4GiB"  # of memory: nearly every batch is in-core
NUM_PLANNERS = 5 if ON_GPU else 0  # processes; here a CPU's cores are what is measured
NUM_VISITS = 3 if ON_GPU else 0  # to a short step, before the one that is reported with its peak
SHORT_S = 0.06  # of a step: a shorter one is timed while nothing else goes on


# --- networks ---------------------------------------------------------------------------------------------------------


class SmallViT(nn.Module):
    """Patches of 8 x 8 of a 32 x 32 picture, four layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 8, 8)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.layers(self.patches(x).flatten(2).transpose(1, 2)).mean(1))
        return out


class Autocast(nn.Module):
    """bfloat16 where PyTorch thinks it safe."""

    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            out: Tensor = self.inside(x)
        return out.float()


def task_of(name: str) -> Task:
    """A model's factory, and batches made on the device: loading is no part of the question."""

    def make_batch(channels: int, side: int, num_classes: int, size: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(size, channels, side, side, device=DEVICE)
        return x, torch.randint(0, num_classes, (size,), device=DEVICE)

    def make_model() -> nn.Module:
        torch.manual_seed(0)
        with torch.device(DEVICE):
            return _build(name).train()

    small = name in ("digits_resnet", "small_vit")
    return make_model, partial(make_batch, *((1, 32, 10) if small else (3, 224, 1000)))


def _build(name: str) -> nn.Module:
    if name == "digits_resnet":
        from outcore.demo import DigitsResNet

        return DigitsResNet()
    if name == "small_vit":
        return SmallViT()
    import torchvision

    model: nn.Module = torchvision.models.vit_b_16() if name == "vit_b" else getattr(torchvision.models, name)()
    return Autocast(model) if name == "vit_b" else model


def bench_of(name: str, memory: int | str) -> Bench:
    make_model, make_batch = task_of(name)
    model = make_model()
    return Bench(model, F.cross_entropy, Samples(make_batch, DEVICE), make_sgd(model.parameters()), memory)


def clean() -> None:
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


# --- curve ------------------------------------------------------------------------------------------------------------


def curve(settings: argparse.Namespace) -> Iterator[Row]:
    """With nearly all the memory of the device and under a tight budget, for each network."""
    names = settings.networks.split(",")
    cases = [(name, memory) for name in names for memory in (WIDE, MEMORY[name])]
    if settings.memory:
        cases = [(name, settings.memory) for name in names]
    yield from _curves(cases * settings.num_rounds, settings)


def headline(settings: argparse.Namespace) -> Iterator[Row]:
    name = settings.networks.split(",")[0]
    yield from _curves([(name, settings.memory or MEMORY[name])], settings)


def _curves(cases: Sequence[tuple[str, str]], settings: argparse.Namespace) -> Iterator[Row]:
    deadline_s = time.perf_counter() + settings.limit_s
    with planners(cases[0][0]) as pool:
        for name, memory in cases:
            try:
                if settings.run_interleaved and time.perf_counter() < deadline_s:
                    yield from _curve_in_turn(name, memory, settings)
                else:
                    yield from _curve_of(name, memory, settings, deadline_s, pool)
            except Exception as error:
                traceback.print_exc(limit=-4)
                yield {"network": name, "memory": memory, "error": f"{type(error).__name__}: {error}"[:300]}
            clean()


@contextmanager
def planners(network: str) -> Iterator[Executor | None]:
    """Processes that plan while the device is at work: a plan takes seconds of one core, and a GPU has many by it."""
    if NUM_PLANNERS == 0:
        yield None
        return
    with ProcessPoolExecutor(NUM_PLANNERS, mp_context=multiprocessing.get_context("spawn")) as pool:
        started = [pool.submit(time.sleep, 0.2) for _ in range(NUM_PLANNERS)]
        with suppress(Exception):  # they start while the device does
            _one_step(network)
            clean()
        wait(started, timeout=20)
        try:
            yield pool
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _one_step(network: str) -> None:
    make_model, make_batch = task_of(network)
    loss_of(make_model(), F.cross_entropy, make_batch(8)).backward()


class Plans:
    """Predictions of batches: those in-core made here, at once; those beyond by the pool, and not before they are
    wanted: what goes to and from a pool is packed by a thread of this process, which a short step would wait for."""

    def __init__(self, planned: BatchPlanner, pool: Executor | None, edge: int) -> None:
        self.planned, self.pool, self.edge = planned, pool, edge
        self._asked: dict[int, Future[tuple[PredictedBatch, float]]] = {}

    def ask(self, batches: Iterable[int]) -> None:
        for batch in batches:
            if self.pool is not None and batch > self.edge and batch not in self._asked:
                self._asked[batch] = self.pool.submit(planned_at, self.planned, batch)

    def at(self, batch: int) -> tuple[PredictedBatch, float]:
        try:
            return self._asked[batch].result() if batch in self._asked else planned_at(self.planned, batch)
        except BrokenProcessPool:
            return planned_at(self.planned, batch)


def planned_at(planned: BatchPlanner, batch: int) -> tuple[PredictedBatch, float]:
    began_s = time.perf_counter()
    return planned.predict(batch), time.perf_counter() - began_s


def _curve_of(
    name: str, memory: str, settings: argparse.Namespace, deadline_s: float, pool: Executor | None
) -> Iterator[Row]:
    if time.perf_counter() > deadline_s:
        yield {"network": name, "memory": memory, "error": "not reached in time"}
        return
    bench, began_s = bench_of(name, memory), time.perf_counter()
    try:
        found = probe_batches(bench, max(settings.batches), lambda what, part: None)
        if found.family is None:
            raise RuntimeError("the recorded batches do different work")
        probed = [recorded.batch for recorded in found.family.recorded]
        row = {"network": name, "memory_bytes": bench.budget.device_bytes, "probed": probed}
        probes_ms = [round(1e3 * measured.step_s, 2) for measured in found.measured]
        yield {**row, "what": "probes", "seconds": time.perf_counter() - began_s, "probes_ms": probes_ms}
        builder = CurveBuilder.start(bench, found.family)
        edge = builder.planner.largest_in_core(max(settings.batches))
        builder.curve = replace(builder.curve, largest_in_core=edge)
        batches = settings.batches if memory == WIDE else around(edge, max(settings.batches))
        plans = Plans(builder.planner, pool, edge)
        short = [batch for batch in batches if batch <= edge and found.family.step_s(batch) < SHORT_S]
        todo = [*short, *(batch for batch in batches if batch not in short)]
        visited_s = _visit(bench, plans, short)
        for at, batch in enumerate(todo):
            if time.perf_counter() > deadline_s:
                yield {**row, "batch": batch, "error": "not reached in time"}
                continue
            if at == len(short):
                plans.ask(todo)
            yield row | _compared(builder, *plans.at(batch), visited_s.get(batch, math.inf))
        if memory != WIDE:
            yield _verdict(name, memory, builder.curve)
    finally:
        bench.close()


def _curve_in_turn(name: str, memory: str, settings: argparse.Namespace) -> Iterator[Row]:
    """As predicted, then all batches a step in turn, in training loops of their own. By how much those in-core
    are off together (`level`) is how much faster or slower the machine was by then; what is left of a batch's error is
    of its place on the curve. The first batch beyond in-core, which shows what swapping costs, runs before the others
    are predicted."""
    bench = bench_of(name, memory)
    try:
        found = probe_batches(bench, max(settings.batches), lambda what, part: None)
        if found.family is None:
            raise RuntimeError("the recorded batches do different work")
        builder = CurveBuilder.start(bench, found.family)
        edge = builder.planner.largest_in_core(max(settings.batches))
        if edge < 1:
            raise RuntimeError("no batch is in-core, so there is nothing to compare the others with")
        batches = list(settings.batches) if memory == WIDE else around(edge, max(settings.batches))
        builder.curve = replace(builder.curve, largest_in_core=edge)
        beyond = [batch for batch in batches if batch > edge][:1]
        points = {batch: builder.predict_fully(batch) for batch in (edge, *beyond)}
        for batch in beyond:
            builder.measure(batch)
        points |= {batch: builder.predict_fully(batch) for batch in batches if batch not in points}
        row: Row = {"network": name, "memory_bytes": bench.budget.device_bytes, "probed": list(builder.curve.probed)}
    finally:
        bench.close()
    with _loops(*task_of(name), batches, memory) as loops:
        rates = _turns(loops, NUM_IN_TURN, QUICKEST_S)
        peaks = {loop.batch: loop.ooc.timeline.peak_bytes for loop in loops if loop.ooc.timeline is not None}
    speeds = [statistics.geometric_mean(turn) for turn in zip(*rates.values())]  # the machine's, turn by turn
    usual = statistics.median(speeds)
    middle = {batch: usual * statistics.median(map(truediv, took, speeds)) for batch, took in rates.items()}
    off = {batch: points[batch].samples_per_s / middle[batch] for batch in batches}
    level = statistics.median(off[batch] for batch in batches if points[batch].in_core)
    for batch in batches:
        yield {
            **row,
            "batch": batch,
            "was_probed": batch in row["probed"],
            "in_core": points[batch].in_core,
            "calibrates": batch in beyond,
            "predicted_samples_per_s": points[batch].samples_per_s,
            "measured_samples_per_s": middle[batch],
            "level": level,
            "throughput_error": off[batch] / level - 1,
            "predicted_peak_bytes": points[batch].peak_bytes,
            "peak_error": points[batch].peak_bytes / peaks[batch] - 1,
        }


def _visit(bench: Bench, plans: Plans, batches: Sequence[int]) -> dict[int, float]:
    """The least seconds of short steps, timed in turn. As often as those they are predicted from: where steps wait for
    their host these are timed twice too, and what disturbs a host goes on for longer than one look."""
    found_s: dict[int, float] = {}
    for _ in range(NUM_VISITS):
        for batch in batches:
            found_s[batch] = min(found_s.get(batch, math.inf), bench.run_planned(plans.at(batch)[0]).step_s)
    return found_s


def around(edge: int, largest: int) -> list[int]:
    """The largest in-core batch and some beyond, as far as Guo et al. went, which comes first after the one that shows
    what swapping costs."""
    beyond = [int(edge * times) // 8 * 8 for times in (1.5, 4.2, 2.0, 3.0)]
    return list(dict.fromkeys([edge, *(batch for batch in beyond if edge < batch <= largest)]))


def _compared(builder: CurveBuilder, predicted: PredictedBatch, plan_s: float, visited_s: float) -> Row:
    """Predicted before the batch ran; the first one that evicts shows what swapping costs and is no prediction. The
    least counts of these steps and of those that ran before (`visited_s`)."""
    before, began_s = builder.add(predicted), time.perf_counter()
    row: Row = {
        "batch": before.micro_batch,
        "was_probed": before.micro_batch in builder.curve.probed,
        "in_core": before.in_core,
        "fits": before.fits,
        "plan_s": plan_s,
    }
    rate = before.samples_per_s  # not corrected by batches measured before this one
    row |= {"predicted_peak_bytes": before.peak_bytes, "predicted_samples_per_s": rate}
    if not before.fits:
        return row
    calibrates = not before.in_core and not builder.swapping_s
    after = builder.measure(before.micro_batch)
    if after.measured_step_s is None or after.measured_peak_bytes is None:
        return row | {"error": "ran out of memory"}
    step_s = min(after.measured_step_s, visited_s)
    return row | {
        "measured_peak_bytes": after.measured_peak_bytes,
        "measured_samples_per_s": before.micro_batch / step_s,
        "peak_error": before.peak_bytes / after.measured_peak_bytes - 1,
        "throughput_error": rate * step_s / before.micro_batch - 1,
        "last_visit_s": after.measured_step_s,
        "calibrates": calibrates,
        "swap_s_per_gib": builder.swap_s_per_byte * 2**30,
        "swapped_bytes": before.swapped_bytes,
        "recomputed_bytes": before.recomputed_bytes,
        "confirm_s": time.perf_counter() - began_s,
    }


def _verdict(name: str, memory: str, found: Curve) -> Row:
    """Does a batch beyond in-core pay?"""
    rates = {p.micro_batch: p.micro_batch / p.measured_step_s for p in found.points if p.measured_step_s is not None}
    edge = found.largest_in_core
    if edge not in rates:
        return {"network": name, "memory": memory, "what": "verdict", "error": "not reached in time"}
    beyond = [batch for batch in rates if batch > edge]
    best = max(beyond, key=lambda batch: rates[batch], default=edge)
    return {
        "network": name,
        "memory": memory,
        "what": "verdict",
        "largest_in_core": edge,
        "in_core_samples_per_s": rates[edge],
        "best_beyond": best,
        "batch_ratio": best / edge,
        "throughput_ratio": rates[best] / rates[edge],
        "largest_that_ran": max(rates),
        "largest_ratio": max(rates) / edge,
        "pays": rates[best] > rates[edge],
    }


# --- choice -----------------------------------------------------------------------------------------------------------


def choice(settings: argparse.Namespace) -> Iterator[Row]:
    name = settings.networks.split(",")[0]
    memory = settings.memory or MEMORY[name]
    make_model, make_batch = task_of(name)
    _set_up(make_model(), make_batch, memory)
    row, tuned = {"network": name, "memory": memory}, list[Row]()

    def tune() -> Row:
        began_s = _now_s()
        micro, found = _chosen(name, memory, settings.largest)
        tuned.append({"micro_batch": micro, "seconds": _now_s() - began_s})
        clean()
        return {**row, "what": "tune", **tuned[-1], "curve": json.loads(found.to_json())}

    yield tune()
    first = tuned[0]["micro_batch"]
    grid = sorted({first, *range(settings.sweep_step, settings.largest + 1, settings.sweep_step)})
    swept: dict[int, tuple[float, float]] = {}
    deadline_s = time.perf_counter() + settings.limit_s
    for batch in sorted(grid, key=lambda batch: (batch != first, batch)):
        if time.perf_counter() > deadline_s:
            yield {**row, "what": "sweep", "batch": batch, "error": "not reached in time"}
            continue
        try:
            swept[batch] = _real_run(make_model, make_batch, batch, memory)
        except Exception as error:
            yield {**row, "what": "sweep", "batch": batch, "error": f"{type(error).__name__}: {error}"[:200]}
            clean()
            continue
        yield {**row, "what": "sweep", "batch": batch, "samples_per_s": swept[batch][0], "seconds": swept[batch][1]}
    for _ in range(0 if ON_GPU else NUM_TUNED_AGAIN):
        yield tune()
    best = max(swept, key=lambda batch: swept[batch][0])
    sweep_s = sum(seconds for _, seconds in swept.values())
    top = sorted(swept, key=lambda batch: -swept[batch][0])[:NUM_TOP]
    chosen = {found["micro_batch"] for found in tuned}
    again = _in_turn(make_model, make_batch, sorted({*chosen, *top}), memory)
    rival = max(again, key=lambda batch: _over(again[batch][1::2]))
    micro = min(chosen, key=lambda batch: _over(again[batch][1::2]))  # the worst of our choices
    ours, theirs = (again[batch][::2] for batch in (micro, rival))
    tune_s = statistics.median(found["seconds"] for found in tuned)
    yield {
        **row,
        "what": "verdict",
        "micro_batch": micro,
        "best_batch": best,
        "rival": rival,
        "of_best_throughput": _over(ours) / _over(theirs),
        "standard_error": _error_of(ours, theirs),
        "first_in_the_sweep": swept[first][0] / swept[best][0] if first in swept else None,
        "over_all_rounds": {str(batch): _over(rates) for batch, rates in again.items()},
        "again": {str(batch): rates for batch, rates in again.items()},
        "tuned": tuned,
        "tune_s": tune_s,
        "sweep_s": sweep_s,
        "num_swept": len(swept),
        "cost_share": tune_s / sweep_s,
    }


def _set_up(model: Any, make_batch: Any, memory: str) -> None:
    """What is imported or measured once (a first optimizer takes a second) is nobody's cost: whoever ran first paid."""
    loss_of(model, F.cross_entropy, make_batch(2)).backward()
    make_sgd(model.parameters())
    limit(model, memory).close()


def _chosen(name: str, memory: str, largest: int) -> tuple[int, Curve]:
    """As `tune` chooses a micro-batch; noise and learning rate, which no sweep looks for either, are left out."""
    bench = bench_of(name, memory)
    try:
        found = probe_batches(bench, largest, lambda what, part: None)
        assert found.family is not None
        builder = CurveBuilder.start(bench, found.family, found.measured)
        builder.predict(free_batches(builder, largest, 2), lambda what, part: None)
        builder.predict(refined(builder.curve), lambda what, part: None)
        return builder.measure_contenders(lambda curve: curve.knee.micro_batch, lambda what, part: None), builder.curve
    finally:
        bench.close()


class _Loop:
    """A training loop under `limit`, as benchmarks/slowdown.py runs it."""

    def __init__(self, make_model: Any, make_batch: Any, batch: int, memory: str) -> None:
        self.model, self.data, self.batch = make_model(), make_batch(batch), batch
        self.optimizer, self.ooc = make_sgd(self.model.parameters()), limit(self.model, memory)

    def step(self) -> float:
        """What one took."""
        start_s = _now_s()
        with self.ooc.step():
            loss_of(self.model, F.cross_entropy, self.data).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return _now_s() - start_s


def _real_run(make_model: Any, make_batch: Any, batch: int, memory: str) -> tuple[float, float]:
    """Samples per second and what finding out took."""
    began_s = _now_s()
    loop = _Loop(make_model, make_batch, batch, memory)
    try:
        times = [loop.step() for _ in range(NUM_WARM + NUM_STEPS)][NUM_WARM:]
    finally:
        loop.ooc.close()
    took_s = _now_s() - began_s
    del loop
    clean()
    return batch / (statistics.median(times) if ON_GPU else min(times)), took_s


def _error_of(ours: list[float], theirs: list[float]) -> float:
    """The standard error of their ratio, by leaving out one round after the other."""
    left = [_over(ours[:at] + ours[at + 1 :]) / _over(theirs[:at] + theirs[at + 1 :]) for at in range(len(ours))]
    return math.sqrt(len(ours) - 1) * statistics.pstdev(left)


def _in_turn(make_model: Any, make_batch: Any, batches: list[int], memory: str) -> dict[int, list[float]]:
    """Samples per second of each, a step at a time, round after round: what differs between two of a round differs
    between the batches. On a GPU whole runs take turns: loops side by side would have to share the budget."""
    if not ON_GPU:
        with _loops(make_model, make_batch, batches, memory) as loops:
            return _turns(loops, NUM_TURNS)
    rates: dict[int, list[float]] = {batch: [] for batch in batches}
    for batch in NUM_AGAIN * batches:
        rates[batch].append(_real_run(make_model, make_batch, batch, memory)[0])
    return rates


@contextmanager
def _loops(make_model: Any, make_batch: Any, batches: list[int], memory: str) -> Iterator[list[_Loop]]:
    """Side by side, each settled."""
    loops = [_Loop(make_model, make_batch, batch, memory) for batch in batches]
    try:
        for loop in NUM_WARM * loops:
            loop.step()
        yield loops
    finally:
        for loop in loops:
            loop.ooc.close()


def _turns(loops: list[_Loop], num_turns: int, for_s: float = 0.0) -> dict[int, list[float]]:
    """Samples per second, turn by turn: of a step, or of the quickest within `for_s` seconds. A turn's first step does
    not count: it finds the caches full of another batch."""
    rates: dict[int, list[float]] = {loop.batch: [] for loop in loops}
    for at in range(num_turns):
        for loop in loops if at // 2 % 2 else reversed(loops):
            loop.step()
            times = [loop.step()]
            while sum(times) < for_s:
                times.append(loop.step())
            rates[loop.batch].append(loop.batch / min(times))
    return rates


def _now_s() -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    return Bench.clock()


# --- running ----------------------------------------------------------------------------------------------------------

OURS: dict[str, Callable[[Any], Iterable[Row]]] = {"curve": curve, "choice": choice, "headline": headline}
USUAL = "curve,choice"
ELSEWHERE = ("accuracy", "noise", "workers")


def section_of(name: str) -> Callable[[Any], Iterable[Row]]:
    if name in OURS:
        return OURS[name]
    found: Callable[[Any], Iterable[Row]] = getattr(importlib.import_module("benchmarks.tuning_accuracy"), name)
    return found


def run_section(name: str, settings: argparse.Namespace, found: Row, save: Callable[[], None]) -> None:
    """Fills `found`, and saves after every row: who is stopped has what came before."""
    began_s, found["rows"] = time.perf_counter(), []
    print(f"--- {name}", flush=True)
    try:
        for row in section_of(name)(settings):
            found["rows"].append(row)
            found["took_s"] = round(time.perf_counter() - began_s, 1)
            if name == "curve":
                found["bars"] = errors_of(found["rows"])
            print("   ", summary(row), flush=True)
            save()
    except Exception as caught:
        traceback.print_exc(limit=-6)
        found["error"] = f"{type(caught).__name__}: {caught}"
    clean()


def summary(row: Row) -> str:
    """A row in a line: sizes and shares readable, tables within it left out."""
    parts = []
    for key, part in row.items():
        if isinstance(part, float):
            text = f"{100 * part:+.2f} %" if key.endswith("_error") else f"{part:.4g}"
        else:
            text = format_bytes(part) if key.endswith("_bytes") else str(part)
        if not isinstance(part, dict | list) or key in ("probed", "probes_ms"):
            parts.append(f"{key} {text}")
    return ", ".join(parts)


def errors_of(rows: list[Row]) -> Row:
    """The bars of `curve`: of what was a prediction, the largest error of a batch in its median round."""
    told = [row for row in rows if "throughput_error" in row]
    predicted = [row for row in told if not row["calibrates"]]
    found: Row = {"num_batches": len(batches_of(told))}
    for name, chosen in (("in_core", True), ("planned", False)):
        kind = [row for row in predicted if row["in_core"] == chosen]
        errors = [abs(statistics.median(batch)) for batch in batches_of(kind)]
        if errors:
            found[f"{name}_throughput_error"] = max(errors)
            found[f"{name}_throughput_median_error"] = statistics.median(errors)
            found[f"{name}_worst_round_error"] = max(abs(row["throughput_error"]) for row in kind)
    first = [statistics.median(batch) for batch in batches_of([row for row in told if row["calibrates"]])]
    if first:  # also predicted, but what swapping costs was not known yet
        found["first_planned_throughput_error"] = max(first, key=abs)
    again = [row for row in told if row["was_probed"]]
    if again:  # the same step timed twice, seconds apart: what the machine itself is good for
        found["repeat_throughput_error"] = max(abs(row["throughput_error"]) for row in again)
    if told:
        found["peak_error"] = max(abs(row["peak_error"]) for row in told)
    return found


def batches_of(rows: list[Row]) -> list[list[float]]:
    """The throughput's errors, round by round, of each batch of each network under each budget."""
    found: dict[tuple[str, int, int], list[float]] = {}
    for row in rows:
        found.setdefault((row["network"], row["memory_bytes"], row["batch"]), []).append(row["throughput_error"])
    return list(found.values())


def hold_memory() -> None:
    """The C library keeps freed memory (mallopt: trim and mmap thresholds)."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, 2**31 - 1)
        libc.mallopt(-3, 2**30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=USUAL, help=f"sections of {', '.join((*OURS, *ELSEWHERE))}")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--memory", help="budget instead of the ones of the networks")
    parser.add_argument("--batches", default=",".join(map(str, BATCHES)), help="of `curve`")
    parser.add_argument("--largest", type=int, default=1024 if ON_GPU else 192, help="batch of `choice`")
    parser.add_argument("--sweep-step", type=int, default=128 if ON_GPU else 8, help="between batches of `choice`")
    parser.add_argument("--num-rounds", type=int, default=1 if ON_GPU else 3, help="of `curve`, each with recordings")
    parser.add_argument("--in-turn", action="store_true", help="`curve` on a shared CPU: batches a step in turn")
    parser.add_argument("--limit-s", type=float, default=150.0, help="no batch is begun after this, per section")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--data", default="digits", help="of `accuracy`: digits, or a folder")
    parser.add_argument("--num-seeds", type=int, default=3, help="of `accuracy`")
    settings = parser.parse_args()
    if settings.run_interleaved and (ON_GPU or settings.only != "curve"):
        parser.error("--in-turn is for --only curve, on CPUs: loops side by side would have to share a GPU's budget")
    settings.batches = list(dict.fromkeys(int(batch) for batch in settings.batches.split(",")))
    if not ON_GPU:
        torch.set_num_threads(1)
        hold_memory()
        Bench.clock = staticmethod(time.process_time)
    out = settings.out or ROOT / f"benchmarks/results/tuning_{hardware()}_{date.today():%Y%m%d}.json"
    results: Row = {"question": "tuning", **about(), "device": str(DEVICE), "sections": {}}
    out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        out.write_text(json.dumps(results, indent=1))

    for name in settings.only.split(","):
        found: Row = {}
        results["sections"][name] = found
        run_section(name, settings, found, save)
        print("   ", summary(found.get("bars", {})))
        save()
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
