"""tune() for several workers: two real processes, one of them slowed, and workers that are not here."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from outcore.errors import TuningError
from outcore.memory.machine import measure_machine
from outcore.tuning.advice import Advice
from outcore.tuning.throughput import bench as bench_module
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.throughput.prediction import Point
from outcore.tuning.trainings.to_target import FreshTrainings
from outcore.tuning.tune import _target_time_of_group
from outcore.tuning.workers.ranks import Ranks
from outcore.tuning.workers.shares import Shares, of_ideal
from tests.cpu.tuning.flat import tune as tune_flat
from tests.cpu.tuning.nets import CPU, convnet, make_sgd, mlp, stripes
from tests.cpu.tuning.test_tune_cli import EXAMPLE, call
from tests.cpu.tuning.work_clock import work_clock
from tests.cpu.tuning.workers import free_port, run_ranks

DATA = stripes()


def tune(model: Any, **options: Any) -> Advice:
    given: dict[str, Any] = {"memory": "32MiB", "optimizer": make_sgd} | options
    return tune_flat(model, F.cross_entropy, DATA, **given)


def refused(model: nn.Module, **options: Any) -> str:
    with pytest.raises(TuningError) as caught:
        tune(model, **options)
    return str(caught.value)


def facts(advice: Advice) -> dict[str, Any]:
    names = ("effective_batch", "shares", "workers", "accumulation", "communication_s", "step_s", "scaling")
    agreed = {
        name: getattr(advice, name) for name in (*names, "learning_rate", "noise", "samples_per_s", "num_warm_up_steps")
    }
    agreed |= {"unchecked": advice.unchecked, "raced": any(why.startswith("raced") for why in advice.why)}
    return {"agreed": agreed, "micro_batch": advice.micro_batch, "peak_bytes": advice.peak_bytes}


def tuned(rank: int, settings: dict[str, Any]) -> dict[str, Any]:
    """In one launch: starting two processes takes longer than what they do."""
    torch.set_num_threads(1)
    bench_module.TIMING = replace(bench_module.TIMING, timed_s=0.02, num_retiming_rounds=1)
    torch.manual_seed(rank)  # what ranks find by themselves differs; what they return does not
    options: dict[str, Any] = {"disk": f"{settings['folder']}/{rank}"}
    Path(options["disk"]).mkdir()
    model = mlp()
    return answers(rank, settings, model, options)


def answers(rank: int, settings: dict[str, Any], model: nn.Module, options: dict[str, Any]) -> dict[str, Any]:
    measure_machine(CPU, options["disk"])  # by a real clock
    refusals = {
        "different": refused(model, batch=64 + rank, **options),
        "too_little": refused(model, batch=64, memory="1KiB" if rank == 1 else "32MiB", **options),
        "wrapped": refused(DistributedDataParallel(mlp()), batch=64, **options),
        "speeds": refused(model, batch=64, workers=[1, 2], **options),
        "others": refused(model, batch=64, workers=3, **options),
    }
    with pytest.MonkeyPatch.context() as patched, work_clock(patched):
        free = tune(mlp, largest=16, communication_s=0.05, trial_s=20.0, **options)
        command = launched(rank, settings["ports"])
    with pytest.MonkeyPatch.context() as patched, work_clock(patched, lambda: 3.0 if rank == 1 else 1.0):
        kept = tune(convnet(), batch=64, **options)
    disturbed = Disturbed(rank)
    with pytest.MonkeyPatch.context() as patched, work_clock(patched, disturbed.now):
        earlier = tune(convnet(), batch=64, progress=disturbed.see, **options)
    with pytest.MonkeyPatch.context() as patched, work_clock(patched, Noise(rank).now):
        noisy = tune(convnet(), batch=64, **options)
    return refusals | {
        "kept": facts(kept) | {"gradient_error": gradient_error(kept)},
        "free": facts(free),
        "earlier": facts(earlier),
        "noisy": facts(noisy),
        "command": command,
    }


class Disturbed:
    """Something else runs beside rank 1 while it measures by itself, and has ended when all choose together."""

    def __init__(self, rank: int) -> None:
        self._slower = 6.0 if rank == 1 else 1.0

    def see(self, what: str, part: float) -> None:
        if what.startswith("choosing a batch for all"):
            self._slower = 1.0

    def now(self) -> float:
        return self._slower


class Noise:
    """Something else runs now and then, for a few steps at a time, beside each rank in other moments."""

    def __init__(self, rank: int) -> None:
        self._drawn, self._num, self._slower = random.Random(rank), 0, 1.0

    def now(self) -> float:
        if self._num % 3 == 0:
            self._slower = 1 + 7 * self._drawn.random() ** 2
        self._num += 1
        return self._slower


def gradient_error(advice: Advice) -> float:
    """A step as advised, against one process that has the whole batch."""
    torch.manual_seed(0)
    model, whole = mlp().double(), [part[: advice.effective_batch] for part in DATA.tensors]
    parameters = list(model.parameters())
    wanted = torch.autograd.grad(F.cross_entropy(model(whole[0].double()), whole[1]), parameters)
    shares = Shares(advice.effective_batch)
    shares.counts = list(advice.shares)
    x, y = (shares.take(part).split(advice.micro_batch) for part in whole)
    for micro_x, micro_y in zip(x, y, strict=True):
        (F.cross_entropy(model(micro_x.double()), micro_y) / advice.accumulation).backward()
    shares.average(parameters)
    return max(float((mine.grad - all_).abs().max()) for mine, all_ in zip(parameters, wanted) if mine.grad is not None)


def launched(rank: int, ports: list[int]) -> tuple[int, str, str]:
    """The command as a launcher starts it: it finds its place in the environment and makes a group of its own."""
    dist.barrier()
    dist.destroy_process_group()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(ports[0])}
    result = call(EXAMPLE, "--memory", "12MiB", "--batch", "4", "--json")
    os.environ["MASTER_PORT"] = str(ports[1])
    dist.init_process_group("gloo")
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture(scope="module")
def by_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(tuned, {"folder": str(tmp_path_factory.mktemp("ranks")), "ports": [free_port(), free_port()]})


def test_ranks_agree_and_the_slow_one_gets_less(by_ranks: list[dict[str, Any]]) -> None:
    fast, slow = (found["kept"] for found in by_ranks)
    agreed = fast["agreed"]
    assert agreed == slow["agreed"]
    assert agreed["effective_batch"] == 64
    assert agreed["learning_rate"] == 0.05
    assert of_ideal(agreed["shares"], [3.0, 1.0]) > 0.9  # half each would be 0.5
    assert [found["micro_batch"] * agreed["accumulation"] for found in (fast, slow)] == agreed["shares"]
    assert max(fast["gradient_error"], slow["gradient_error"]) < 1e-12
    assert agreed["communication_s"] > 0
    assert agreed["step_s"] > agreed["communication_s"]
    assert agreed["scaling"] > 0


@pytest.mark.parametrize("name", ["earlier", "noisy"])
def test_what_is_slower_by_noise_alone_gets_as_much(by_ranks: list[dict[str, Any]], name: str) -> None:
    for found in by_ranks:
        assert found[name]["agreed"]["shares"] == [32, 32]
        assert found[name]["agreed"]["effective_batch"] == 64


def test_a_free_batch_is_one_for_all(by_ranks: list[dict[str, Any]]) -> None:
    one, two = (found["free"]["agreed"] for found in by_ranks)
    assert one == two
    assert one["communication_s"] == 0.05
    assert one["noise"] > 0
    assert one["raced"]  # by rank 0, in the seconds of both
    assert not one["unchecked"]
    assert sum(one["shares"]) == one["effective_batch"] > 16  # so much communication is not paid for small steps


def test_ranks_that_cannot_agree_all_stop(by_ranks: list[dict[str, Any]]) -> None:
    one, two = by_ranks
    for found in by_ranks:
        assert found["different"] == "the ranks were given different values of batch, 64, 65; give all one"
        assert found["wrapped"].startswith("DistributedDataParallel waits for other ranks in every step")
        assert "the speeds of ranks are measured" in found["speeds"]
        assert "the process group has 2 ranks" in found["others"]
    assert two["too_little"].startswith("even one sample needs")
    assert one["too_little"] == f"rank 1 cannot go on, so the others do not either: {two['too_little']}"


@pytest.mark.usefixtures("quick")
def test_workers_that_are_not_here(folder: str) -> None:
    options: dict[str, Any] = {"batch": 60, "disk": folder, "workers": [1, 1, 0.5], "communication_s": 0.003}
    advice = tune(convnet(), **options)
    assert (advice.workers, advice.effective_batch, advice.communication_s) == (3, 60, 0.003)
    assert abs(advice.shares[0] - advice.shares[1]) <= advice.accumulation
    assert advice.shares[2] < 0.7 * advice.shares[0]  # less than half: it also starts and ends slower
    assert advice.micro_batch * advice.accumulation == advice.shares[0]
    assert advice.samples_per_s == pytest.approx(60 / advice.step_s)
    assert advice.samples_per_s > 1.5 * advice.curve.rate(advice.micro_batch, advice.accumulation)
    assert Advice.from_json(advice.to_json()) == advice
    assert any("not equally fast" in sentence for sentence in advice.why)


@pytest.mark.usefixtures("quick")
def test_time_to_a_target_is_the_groups(folder: str) -> None:
    advice = tune(mlp(), batch=64, disk=folder, workers=4, communication_s=0.0, target=("val_accuracy", 0.4), trial_s=1)
    assert advice.shares == (16,) * 4
    assert "that was one device, and 4 workers take the same steps" in advice.why[-1]
    assert advice.target_s is None or advice.target_s > 0


def test_the_group_takes_the_steps_that_one_device_took() -> None:
    points = tuple(Point(n, n, 0.001 * n, 1e3, n, 0, 0, in_core=True, fits=True) for n in (16, 64))
    advice = Advice(16, 1, 0.1, 3200.0, 0.02, 16, Curve(points, 64, 0.0), ("so",), workers=4, shares=(16,) * 4)

    class Trained(FreshTrainings):
        def with_target_time(self, advice: Advice) -> Advice:
            assert (advice.workers, advice.effective_batch) == (1, 64)
            return replace(advice, target="val_loss <= 1", target_s=8.0, why=(*advice.why, "trained"))

    found = _target_time_of_group(Trained.__new__(Trained), advice, Ranks(0, 4, (1.0,) * 4, 0.004))
    assert found.target_s == pytest.approx(8.0 * 0.02 / 0.064)
    assert found.why == ("so", "trained; that was one device, and 4 workers take the same steps in 2.50 s")
    assert (found.workers, found.effective_batch) == (4, 64)


def test_bad_input_ends_in_one_sentence() -> None:
    model = mlp()
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"workers": 0}, "workers=0 cannot train"),
        ({"workers": True}, "workers=True cannot train"),
        ({"workers": [1, -1], "communication_s": 0.1}, "give numbers above zero such as [1, 1, 0.5]"),
        ({"workers": [], "communication_s": 0.1}, "are no speeds"),
        ({"workers": ["fast"], "communication_s": 0.1}, "are no speeds"),
        ({"workers": 4}, "give communication_s=..."),
        ({"communication_s": 0.1}, "say how many with workers=..."),
        ({"workers": 4, "communication_s": -1.0}, "give zero or more"),
        ({"workers": 4, "communication_s": float("nan")}, "give zero or more"),
        ({"workers": 1000, "communication_s": 0.1, "largest": 8}, "take fewer workers or give more data"),
        ({"workers": 64, "communication_s": 0.1, "largest": 8, "batch": 32}, "cannot be cut into equal steps"),
        (
            {"workers": 2, "communication_s": 0.1, "target": ("val_loss", 0.1), "num_trials": 3},
            "search without workers",
        ),
    ]
    for options, says in wrong:
        said = refused(model, **options)
        assert says in said, said
        assert "\n" not in said


@pytest.mark.usefixtures("quick")
def test_the_command_plans_for_workers(folder: str) -> None:
    arguments = ["--memory", "12MiB", "--batch", "16", "--folder", folder]
    result = call(EXAMPLE, *arguments, "--workers", "1,0.5", "--communication-s", "0.02")
    assert result.exit_code == 0, result.output
    assert "2, in each step" in result.stdout
    assert "20.0 ms" in result.stdout
    result = call(EXAMPLE, *arguments, "--workers", "many", "--communication-s", "0.02")
    assert "'many' is no number; give --workers one" in result.stderr


def test_under_a_launcher_rank_0_prints(by_ranks: list[dict[str, Any]]) -> None:
    (status, first, progress), (other_status, second, other_progress) = (found["command"] for found in by_ranks)
    assert (status, other_status) == (0, 0), progress + other_progress
    assert json.loads(first)["workers"] == 2
    assert "outcore: recording" in progress
    assert second + other_progress == ""
