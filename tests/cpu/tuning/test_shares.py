"""Shares of a batch: whole samples close to the ideal; with two real processes, gradients as from one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outcore.errors import TuningError
from outcore.tuning import Adaptive
from outcore.tuning.gradients.noise import measure_noise
from outcore.tuning.workers.shares import Shares, gather, mean_over_ranks, of_ideal, split, step_s
from tests.cpu.tuning.digits import digits, draws, exact_moments, small_net
from tests.cpu.tuning.workers import BATCH, global_batch, net, run_ranks, unequal, whole_gradient

speeds_of_workers = st.lists(st.floats(0.1, 10), min_size=1, max_size=8)


@given(batch=st.integers(1, 2000), speeds=speeds_of_workers)
def test_no_split_in_whole_samples_ends_earlier(batch: int, speeds: list[float]) -> None:
    counts = split(batch, speeds)
    assert sum(counts) == batch
    assert min(counts) >= 0
    slowest_s = max(count / speed for count, speed in zip(counts, speeds))
    # One that ends earlier would give everybody fewer than `slowest_s` allows: together fewer than the batch.
    assert sum(_fewer(slowest_s, speed) for speed in speeds) < batch


def _fewer(slowest_s: float, speed: float) -> int:
    """The most samples that take strictly less than `slowest_s`."""
    count = round(slowest_s * speed)
    while count and count / speed >= slowest_s:
        count -= 1
    return count


@given(batch=st.integers(100, 2000), speeds=st.lists(st.floats(1, 4), min_size=1, max_size=4))
def test_large_batches_come_close_to_the_ideal(batch: int, speeds: list[float]) -> None:
    assert of_ideal(split(batch, speeds), speeds) > 1 - 4 * len(speeds) / batch


def test_limits_of_memory_are_kept() -> None:
    assert split(100, [3.0, 1.0]) == [75, 25]
    assert split(100, [3.0, 1.0], most=[60, 100]) == [60, 40]
    assert split(3, [1.0, 0.0, 1.0]) in ([2, 0, 1], [1, 0, 2])
    with pytest.raises(TuningError, match="take a smaller batch"):
        split(100, [1.0, 1.0], most=[40, 40])
    with pytest.raises(TuningError, match="above zero"):
        split(10, [0.0, 0.0])
    with pytest.raises(TuningError, match="above zero"):
        split(0, [1.0])


def test_a_step_is_the_slowest_compute_and_the_communication() -> None:
    found = step_s([75, 25, 0], [lambda n: 0.1 + n / 300, lambda n: n / 100, lambda n: 9.0], 0.02)
    assert found == pytest.approx(0.37)


def test_alone_there_is_nothing_to_agree_on() -> None:
    assert gather([1.0, 2.0]) == [[1.0, 2.0]]
    assert mean_over_ranks([3.0]) == [3.0]


def test_one_of_two_slowed_three_times(tmp_path: Path) -> None:
    settings = {"folder": str(tmp_path), "num_steps": 10, "sample_s": 3e-4, "slowed": 3.0, "counted": True}
    fast, slow = run_ranks(unequal, settings)
    assert fast["counts"] == slow["counts"]
    assert fast["counts"][0] == [60, 60]
    assert fast["counts"][-1] == [90, 30]
    assert fast["of_ideal"] == pytest.approx(1.0)
    assert fast["of_ideal"] > fast["equal_of_ideal"] + 0.3
    assert max(fast["largest_gradient_error"], slow["largest_gradient_error"]) < 1e-6
    assert fast["communication_s"] == slow["communication_s"] > 0


def agreeing(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        Shares(100 + rank)
    except TuningError as error:
        found["refused"] = str(error)
    # A rank that memory leaves few samples, and one layer that no loss reaches.
    model = nn.ModuleDict({"net": net(), "idle": nn.Linear(2, 2).double()})
    shares = Shares(BATCH, most=BATCH if rank == 0 else 7)
    found["counts"] = shares.counts
    x, y = (shares.take(part) for part in global_batch(3))
    F.cross_entropy(model["net"](x), y).backward()
    shares.average(model.parameters())
    pairs = zip(whole_gradient(net(), 3), model["net"].parameters())
    found["error"] = max(float((a - b.grad).abs().max()) for a, b in pairs if b.grad is not None)
    # DistributedDataParallel's mean over ranks, by weighting the loss.
    parallel = DistributedDataParallel(net())
    (F.cross_entropy(parallel(x), y) * shares.weight).backward()
    pairs = zip(whole_gradient(net(), 3), parallel.parameters())
    found["ddp_error"] = max(float((a - b.grad).abs().max()) for a, b in pairs if b.grad is not None)
    return found


def adapting(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Adaptive under DistributedDataParallel: noise from one micro-batch per rank, decisions alike everywhere."""
    data, model = digits(), DistributedDataParallel(small_net())
    noise = measure_noise(model, F.cross_entropy, draws(data, 32, 512, seed=rank), num_micro=512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    first = Adaptive(model, optimizer, batch=64, micro_batch=32)
    first.running.decay = 0.999
    for x, y in first.batches(draws(data, 32, 900, seed=10 + rank)):
        F.cross_entropy(model(x), y).backward()
        first.step()
    assert first.noise is not None
    optimizer.param_groups[0]["lr"] = 0.05
    adaptive = Adaptive(model, optimizer, batch=64, micro_batch=64, largest_batch=256, interval_steps=10)
    for x, y in adaptive.batches(draws(data, 32, 400, seed=20 + rank)):
        F.cross_entropy(model(x), y).backward()
        adaptive.step()
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return {
        "measured": noise.scale,
        "while_training": first.noise.scale,
        "exact": exact_moments(small_net(), data),
        "batches": [change.batch for change in adaptive.changes],
        "noise": adaptive.noise.scale if adaptive.noise else None,
        "weights": float(weights.double().square().sum()),
        "num_ranks": dist.get_world_size(),
    }


def both(rank: int, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """In one launch: starting two processes takes longer than what they do."""
    return [agreeing(rank, settings), adapting(rank, settings)]


@pytest.fixture(scope="module")
def found_by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return run_ranks(both, {"folder": str(tmp_path_factory.mktemp("ranks"))})


def test_unequal_limits_unused_layers_and_ddp(found_by_ranks: list[list[dict[str, Any]]]) -> None:
    for found, _ in found_by_ranks:
        assert "give all one" in found["refused"]
        assert found["counts"] == [113, 7]
        assert max(found["error"], found["ddp_error"]) < 1e-12


def test_ranks_see_the_same_noise_and_decide_alike(found_by_ranks: list[list[dict[str, Any]]]) -> None:
    one, two = (found for _, found in found_by_ranks)
    assert one == two
    sqr, var = one["exact"]
    assert one["measured"] == pytest.approx(var / sqr, rel=0.1)
    assert one["while_training"] == pytest.approx(var / sqr, rel=0.15)
    assert one["batches"]
