"""The search: two objectives, runs given up, a study that goes on after it was stopped."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from outcore.elastic.digits import accuracy
from outcore.errors import TuningError
from outcore.tuning.trainings.search import SearchResult, SearchRun, open_study, search
from tests.cpu.tuning.digits import digits, draws, small_net

pytest.importorskip("optuna")


def train_digits(batch: int, lr: float) -> Iterator[tuple[float, float]]:
    """Seconds are samples here, so that the outcome does not depend on the machine."""
    data, net = digits(), small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for number, (x, y) in enumerate(draws(data, batch, 6000 // batch)):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
        if number % (600 // batch) == 0:
            yield (number + 1) * batch / 6000, accuracy(net, data.test_images, data.test_labels)


def test_it_finds_a_good_rate_and_gives_hopeless_runs_up(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    found = search(
        train_digits,
        batches=(16, 64),
        lrs=(1e-4, 10.0),
        target=0.9,
        num_trials=16,
        storage=tmp_path / "study.log",
        on_run=lambda run, num_done, num_trials: told.append((num_done, num_trials)),
    )
    assert told == [(number, 16) for number in range(1, 17)]
    assert found.fastest is not None
    assert found.best is not None
    assert 0.03 < found.fastest.lr < 2
    assert found.best.metric is not None
    assert found.best.metric > 0.9
    states = [run.state for run in found.runs]
    assert states.count("pruned") >= 1
    pruned = [run for run in found.runs if run.state == "pruned"]
    assert all(run.to_target_s is None and run.trained_s < 1 for run in pruned)
    assert SearchResult.from_json(found.to_json()) == found
    again = search(
        train_digits, batches=(16, 64), lrs=(1e-4, 10.0), target=0.9, num_trials=17, storage=tmp_path / "study.log"
    )
    assert again.runs[:16] == found.runs
    assert len(again.runs) == 17
    with pytest.raises(TuningError, match="other objectives"):
        search(train_digits, batches=(1,), lrs=(1e-3, 1), target=0, maximise=False, storage=tmp_path / "study.log")


def test_an_advice_is_tried_first() -> None:
    seen: list[tuple[int, float]] = []

    def train(batch: int, lr: float) -> Iterator[tuple[float, float]]:
        seen.append((batch, lr))
        yield 1.0, -abs(math.log(lr / 0.2))

    found = search(train, batches=(32, 64), lrs=(1e-3, 1.0), target=-0.1, num_trials=3, start=[(60, 0.2), (64, 50.0)])
    assert seen[:2] == [(64, 0.2), (64, 1.0)]
    assert found.fastest is not None
    assert found.fastest.lr == 0.2


def test_a_loss_is_minimised_and_a_run_that_fails_is_told_not_fatal() -> None:
    def train(batch: int, lr: float) -> Iterator[tuple[float, float]]:
        if batch == 2:
            raise MemoryError("no room for two")
        yield 1.0, math.nan if lr > 1 else abs(math.log(lr / 0.01))

    found = search(train, batches=(1, 2), lrs=(1e-4, 10.0), target=0.5, maximise=False, num_trials=15)
    failed = [run for run in found.runs if run.state == "failed"]
    assert failed
    assert all(run.error == "MemoryError: no room for two" for run in failed)
    assert found.best is not None
    assert found.best.metric == min(run.metric for run in found.runs if run.metric is not None)
    assert all(run.state == "pruned" for run in found.runs if run.lr > 1 and run.batch == 1)


ENDLESS = """
import signal, sys, time
from outcore.tuning.trainings.search import search
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background of a shell
def train(batch, lr):
    yield 0.1, lr
    if lr_count.append(1) or len(lr_count) > 3:
        print("third", flush=True)
        time.sleep(60)
    yield 0.2, lr
lr_count = []
search(train, batches=[1, 2], lrs=(0.1, 1.0), target=0.5, num_trials=10, storage=sys.argv[1])
"""


@pytest.mark.timeout(90)  # a lock that the killed process left must not be waited for
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_killed_study_goes_on(tmp_path: Path, number: signal.Signals) -> None:
    storage = tmp_path / "study.log"
    command = [sys.executable, "-c", ENDLESS, str(storage)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, cwd=Path.cwd(), text=True)
    assert process.stdout is not None
    assert process.stdout.readline().strip() == "third"
    os.kill(process.pid, number)
    process.wait(20)
    runs: list[SearchRun] = []
    found = search(
        lambda batch, lr: iter([(0.1, lr), (0.2, lr)]),
        batches=[1, 2],
        lrs=(0.1, 1.0),
        target=0.5,
        num_trials=5,
        storage=storage,
        on_run=lambda run, num_done, num_trials: runs.append(run),
    )
    assert (len(runs), len(found.runs)) == (2, 5)


def test_bad_input_is_told_in_a_sentence() -> None:
    with pytest.raises(TuningError, match="name a batch"):
        search(train_digits, batches=[], lrs=(0.1, 1.0), target=0.9)
    with pytest.raises(TuningError, match="a lower and a higher rate"):
        search(train_digits, batches=[1], lrs=(1.0, 1.0), target=0.9)
    found = search(lambda batch, lr: iter(()), batches=[1], lrs=(0.1, 1.0), target=0.9, num_trials=1)
    assert "yielded nothing" in found.runs[0].error
    assert found.fastest is None
    assert found.best is None


def slower_with_a_batch(batch: int, lr: float) -> Iterator[tuple[float, float]]:
    """The larger the batch the later; nothing comes beyond 0.8."""
    return iter([(batch * look / 8, look / 10) for look in range(1, 9)])


def test_another_target_is_read_from_the_curves_that_were_kept(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"batches": (8, 16), "lrs": (0.1, 1.0), "storage": tmp_path / "study.log"}
    easy = search(slower_with_a_batch, target=0.5, num_trials=4, **asked)
    assert easy.fastest is not None
    assert easy.fastest.to_target_s == easy.fastest.batch * 5 / 8
    hard = search(slower_with_a_batch, target=0.99, num_trials=5, **asked)
    assert hard.fastest is None
    assert all(run.to_target_s is None for run in hard.runs)
    assert [(run.batch, run.lr) for run in hard.runs[:4]] == [(run.batch, run.lr) for run in easy.runs]
    lower = search(slower_with_a_batch, target=0.2, num_trials=5, **asked)
    assert lower.fastest is not None
    assert lower.fastest.to_target_s == lower.fastest.batch * 2 / 8


def test_a_run_keeps_its_batch_when_other_batches_are_looked_at(tmp_path: Path) -> None:
    asked: dict[str, Any] = {"lrs": (0.1, 1.0), "target": 0.5, "storage": tmp_path / "study.log"}
    first = search(slower_with_a_batch, batches=(8, 16), num_trials=6, **asked)
    seen: list[int] = []

    def train(batch: int, lr: float) -> Iterator[tuple[float, float]]:
        seen.append(batch)
        return slower_with_a_batch(batch, lr)

    then = search(train, batches=(2, 4, 16), num_trials=14, **asked)
    assert then.runs[:6] == first.runs
    assert [run.batch for run in then.runs[6:]] == seen
    assert set(seen) <= {2, 4, 16}
    kept = open_study(tmp_path / "study.log", True).trials
    assert [(trial.params["batch"], trial.params["lr"]) for trial in kept] == [(run.batch, run.lr) for run in then.runs]


def test_a_study_that_cannot_be_is_refused_in_a_sentence(tmp_path: Path) -> None:
    text, saved, two, folder = tmp_path / "text", tmp_path / "saved.json", tmp_path / "two", tmp_path / "folder"
    text.write_text("not a study")
    saved.write_text('{"kind": "advice"}\n')
    two.write_text('{"op_code": 0}\nnot a study\n\n')
    folder.mkdir()
    asked: dict[str, Any] = {"batches": [8], "lrs": (0.1, 1.0), "target": 0.5, "num_trials": 1}
    for storage, says in (
        (text, "is no study of a search; name another file"),
        (saved, "is no study of a search; name another file"),
        (two, "is no study of a search; name another file"),
        (folder, "name a file in a folder that is there"),
        (tmp_path / "none" / "study.log", "(No such file or directory); name a file in a folder that is there"),
    ):
        with pytest.raises(TuningError) as caught:
            search(slower_with_a_batch, storage=storage, **asked)
        assert says in str(caught.value)
    assert text.read_text() == "not a study"
    assert saved.read_text() == '{"kind": "advice"}\n'
    search(slower_with_a_batch, storage=tmp_path / "study.log", about={"samples": 512}, **asked)
    with pytest.raises(TuningError, match=r"another training \(samples: 512 there, 256 now\); name another file"):
        search(slower_with_a_batch, storage=tmp_path / "study.log", about={"samples": 256}, **asked)
