"""What becomes of an advice after a search: real trainings, and studies whose runs were made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from outcore.tuning.advice import Advice
from outcore.tuning.data.samples import Samples
from outcore.tuning.options import Data, Effort, Goal, Memory, Request
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.throughput.prediction import Point
from outcore.tuning.trainings.search import SearchRun, search
from outcore.tuning.trainings.target import Target
from outcore.tuning.trainings.to_target import FreshTrainings, SearchFacts, _run_description
from outcore.tuning.trainings.trial import Trial
from tests.cpu.tuning.nets import CPU, mlp, stripes

pytestmark = pytest.mark.usefixtures("quick")

POINTS = tuple(Point(n, 100 * n, 0.001 * n**0.5, 1e3 * n**0.5, n, 0, 0, in_core=True, fits=True) for n in (16, 32, 64))
KNEE = replace(POINTS[-1], peak_bytes=9000)
GOOD, FAR_TOO_LOW = 3e-3, 1e-7
TWO_RUNS = Effort(trial_s=1.0, num_trials=2)
ADVICE = Advice(
    32,
    1,
    GOOD,
    5000.0,
    0.006,
    3200,
    Curve(POINTS, 10_000, 0.0, largest_in_core=64),
    ("a micro-batch of 32 gives most", "the winner is today's setting: train 329 steps"),
    rule="adascale",
    num_warm_up_steps=3,
    first_batch=32,
    target="val_accuracy >= 0.6",
    target_s=2.0,
    num_steps=329,
)


def two_groups(parameters: Any) -> torch.optim.Optimizer:
    first, *others = parameters
    return torch.optim.AdamW([{"params": [first], "lr": 0.05}, {"params": others, "lr": 0.005}], betas=(0.9, 0.99))


def make_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, betas=(0.9, 0.99))


def trainings_of(told: list[str], make_optimizer: Any = make_adamw, effort: Effort = TWO_RUNS) -> FreshTrainings:
    request = Request(
        mlp,
        F.cross_entropy,
        make_optimizer,
        Data(stripes()),
        Memory("1GiB"),
        goal=Goal(Target("val_accuracy", 0.6)),
        effort=effort,
    )
    facts = SearchFacts(beta2=0.99, accumulating=KNEE)
    return FreshTrainings(request, Samples(stripes(), CPU), None, lambda what, part: told.append(what), facts)


def study_that_liked(path: Path, batch: int, lr: float) -> Path:
    """One lucky run: the target at once, and a bad end; and one of a batch that is not here any more."""
    told = {(batch, lr): [(0.001, 0.7), (0.1, 0.5)], (4096, 0.1): [(0.0001, 0.9)]}
    search(
        lambda batch, lr: iter(told[batch, lr]),
        batches=[batch, 4096],
        lrs=(1e-9, 1.0),
        target=0.6,
        num_trials=2,
        start=list(told),
        storage=path,
    )
    return path


def test_one_lucky_run_does_not_replace_the_advice(tmp_path: Path) -> None:
    told: list[str] = []
    found = trainings_of(
        told, effort=replace(TWO_RUNS, study=study_that_liked(tmp_path / "study.log", 64, FAR_TOO_LOW))
    ).search(ADVICE)
    assert replace(found, why=()) == replace(ADVICE, why=())
    assert found.why[:-2] == ADVICE.why
    assert "of 2 runs of a search (1 with batches that are not looked at now) a batch of 64" in found.why[-2]
    assert "in the mean over 3 further starts: a batch of 64" in found.why[-1]
    assert "a batch of 32 at a rate of 0.003, advised before the search: 0." in found.why[-1]
    assert found.why[-1].endswith("and stays: nothing was clearly sooner")
    assert sum("start 3 of 3" in what for what in told) == 1


def test_what_a_search_found_brings_all_that_belongs_to_it(tmp_path: Path) -> None:
    slow = replace(ADVICE, learning_rate=FAR_TOO_LOW)
    found = trainings_of(
        [], effort=replace(TWO_RUNS, study=study_that_liked(tmp_path / "study.log", 128, GOOD))
    ).search(slow)
    assert (found.micro_batch, found.accumulation, found.learning_rate) == (64, 2, GOOD)
    assert (found.rule, found.num_steps) == ("fixed", 0)
    assert found.peak_bytes == KNEE.peak_bytes  # gradients wait meanwhile
    assert found.beta2 == pytest.approx(0.99**4)
    assert found.num_warm_up_steps == 0  # a tenth of an epoch of four steps
    assert found.target == "val_accuracy >= 0.6"
    assert found.target_s is not None
    why = " ".join(found.why)
    assert "today's setting" not in why
    assert "a micro-batch of 32" not in why
    assert "than 64" in found.why[0]
    assert "was the first to the target, after" in why
    assert "was the best in the end, with val_accuracy 0.5" in why
    assert why.count("of 2 runs of a search") == 1


def test_each_run_is_told_with_how_it_ended() -> None:
    told: list[str] = []
    trainings_of(told, torch.optim.SGD, Effort(trial_s=0.05, num_trials=3)).search(ADVICE)
    runs = [what for what in told if ": run " in what]
    assert len(runs) == 3
    assert runs[0].startswith("searching: run 1 of 3: batch 32, rate 0.003: 0.")
    given_up = SearchRun(4, 64, 0.02, "pruned", None, 0.91, 3.0, "")
    assert _run_description(given_up) == "batch 64, rate 0.02: 0.91, given up"
    failed = replace(given_up, state="failed", metric=None, error="MemoryError: no room")
    assert _run_description(failed) == "batch 64, rate 0.02: failed (MemoryError: no room)"


def test_every_group_keeps_its_part_of_the_rate() -> None:
    trials: list[Trial] = []
    for _ in trainings_of([], two_groups)._train(replace(ADVICE, num_warm_up_steps=0), trials):
        assert [group["lr"] for group in trials[0].optimizer.param_groups] == pytest.approx([GOOD, GOOD / 10])
        break
    assert trials
