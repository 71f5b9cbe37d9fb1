"""Measures the accuracy of the measured noise, and shares of unequal workers. Two sections of tuning_accuracy.py.

python -m benchmarks.tuning_accuracy --only noise,workers
"""

from __future__ import annotations

import statistics
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.tuning_cases import Row
from outcore.elastic.digits import lenet
from outcore.tuning.adaptive import Adaptive
from outcore.tuning.gradients.noise import measure_noise
from outcore.tuning.workers.shares import Shares, gather, of_ideal


def asked(settings: Any, name: str, default: Any) -> Any:
    """Settings of benchmarks/tuning.py may not have all of ours."""
    found = getattr(settings, name, None)
    return default if found is None else found


def noise(settings: Any) -> list[Row]:
    """The measured noise scale against per-sample gradients, and what watching it costs a training step."""
    from tests.cpu.tuning.digits import digits, draws, exact_moments, small_net
    from tests.cpu.tuning.digits import train as train_small

    rows: list[Row] = []
    data = digits()
    for num_steps in (0, 50, 100, 200, 300):
        net = small_net()
        train_small(net, data, num_steps)
        sqr, var = exact_moments(net, data)
        for num_micro in (256, 1024, 4096):
            began_s = time.process_time()
            errors = [
                measure_noise(net, F.cross_entropy, draws(data, 32, num_micro, seed), num_micro=num_micro).scale
                * sqr
                / var
                - 1
                for seed in range(3)
            ]
            row: Row = {"num_steps": num_steps, "exact": var / sqr, "num_micro": num_micro, "micro_batch": 32}
            row |= {"errors": errors, "took_s": (time.process_time() - began_s) / 3}
            rows.append(row)
            told = f"exact {var / sqr:6.1f}, worst of 3 {100 * max(map(abs, errors)):5.1f} %"
            print(f"    after {num_steps:3d} steps, {num_micro:4d} x 32: {told}", flush=True)
    try:
        rows += _watching_costs(settings)
    except Exception as error:
        traceback.print_exc()
        rows.append({"error": f"{type(error).__name__}: {error}"})
    return rows


def _watching_costs(settings: Any) -> list[Row]:
    """A step of four micro-batches with and without Adaptive around it, in turns."""
    device = asked(settings, "device", "cuda" if torch.cuda.is_available() else "cpu")
    cases: list[tuple[str, Callable[[], nn.Module], tuple[int, ...], int]] = [
        ("lenet", partial(lenet, 28), (1, 28, 28), 32)
    ]
    if device == "cuda":
        import torchvision

        cases.append(("resnet50", torchvision.models.resnet50, (3, 224, 224), 64))
    rows = []
    for name, make, shape, micro in cases:
        x, y = torch.randn(4 * micro, *shape, device=device), torch.randint(0, 10, (4 * micro,), device=device)
        plain, watched = (_four_parts(make().to(device), x, y, micro, watch) for watch in (False, True))
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(15):
            for is_watched, step in ((False, plain), (True, watched)):
                began_s = _wall_s(device)
                step()
                if number >= 3:
                    times[is_watched].append(_wall_s(device) - began_s)
        plain_s, watched_s = statistics.median(times[False]), statistics.median(times[True])
        rows.append({"net": name, "device": device, "step_s": plain_s, "watched_step_s": watched_s})
        print(f"    watching costs a step of {name} on {device} {100 * (watched_s / plain_s - 1):+.1f} %", flush=True)
    return rows


def _four_parts(net: nn.Module, x: Tensor, y: Tensor, micro: int, watch: bool) -> Callable[[], None]:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-4)
    adaptive = Adaptive(net, optimizer, batch=4 * micro, micro_batch=micro) if watch else None

    def step() -> None:
        if adaptive is not None:
            for part_x, part_y in adaptive.batches([(x, y)]):
                F.cross_entropy(net(part_x), part_y).backward()
                adaptive.step()
            return
        for part_x, part_y in zip(x.split(micro), y.split(micro)):
            (F.cross_entropy(net(part_x), part_y) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wall_s(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def workers(settings: Any) -> list[Row]:
    """Two processes over gloo, one of which computes everything three times: samples per second against the sum of
    what both do alone, and gradients against one process."""
    from tests.cpu.tuning.workers import run_ranks, unequal

    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        slept = {"folder": folder, "num_steps": 16, "sample_s": 5e-4, "slowed": 3.0}
        found = run_ranks(unequal, slept)[0]
        rows.append({"how": "slept", "slowed": 3.0, **found})
        _tell_shares(rows[-1])
        computed = {"folder": folder, "num_steps": 30, "slowed": 3, "batch": asked(settings, "workers_batch", 256)}
        ranks = run_ranks(computing, computed)
        row = {"how": "computed", **ranks[0], "ranks": ranks}
        row["ideal_samples_per_s"] = sum(rank["alone_samples_per_s"] for rank in ranks)
        row["of_ideal"] = row["samples_per_s"] / row["ideal_samples_per_s"]
        row["equal_of_ideal"] = row["equal_samples_per_s"] / row["ideal_samples_per_s"]
        rows.append(row)
        _tell_shares(row)
    return rows


def _tell_shares(row: Row) -> None:
    shares, error = f"{row['counts'][0]} -> {row['counts'][-1]}", row["largest_gradient_error"]
    ideal = f"{100 * row['of_ideal']:.1f} % of ideal (equal shares: {100 * row['equal_of_ideal']:.1f} %)"
    print(f"    {row['how']}: shares {shares}, {ideal}, gradients within {error:.1e}", flush=True)


def computing(rank: int, settings: Row) -> Row:
    """Real work on one thread: rank 1 does every forward and backward three times. Seconds are those of each process,
    a step's those of the slower one: two cores that others use too cannot show it by the clock on the wall."""
    import torch.distributed as dist

    torch.manual_seed(0)
    net, batch = lenet(28), settings["batch"]
    x, y = torch.randn(batch, 1, 28, 28), torch.randint(0, 10, (batch,))
    times = settings["slowed"] if rank == 1 else 1

    def work(my_x: Tensor, my_y: Tensor) -> float:
        began_s = time.process_time()
        for _ in range(times):
            net.zero_grad()
            F.cross_entropy(net(my_x), my_y).backward()
        return time.process_time() - began_s

    shares = Shares(batch, clock=time.process_time)
    alone, counts, steps_s = [], [], []
    for number in range(settings["num_steps"]):
        dist.barrier()
        alone.append(batch // 2 / work(x[: batch // 2], y[: batch // 2]))  # in turns with the shared steps
        counts.append(list(shares.counts))
        dist.barrier()
        with shares.timed():
            took_s = work(shares.take(x), shares.take(y))
        steps_s.append(max(row[0] for row in gather([took_s])))
        shares.average(net.parameters())
        if number >= 4 and number % 3 == 2:
            shares.rebalance()
    exact = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    found = [parameter.grad for parameter in net.parameters() if parameter.grad is not None]
    return {
        "alone_samples_per_s": statistics.median(alone[-12:]),
        "counts": counts,
        "equal_samples_per_s": batch / statistics.median(steps_s[1:5]),
        "samples_per_s": batch / statistics.median(steps_s[-12:]),
        "of_speeds": of_ideal(shares.counts, shares.speeds),
        "largest_gradient_error": max(float((a - b).abs().max()) for a, b in zip(found, exact)),
        "communication_s": shares.communication_s,
        "predicted_step_s": shares.step_s(),
    }
