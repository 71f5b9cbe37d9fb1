"""What the benchmark of time to accuracy keeps when a finder hangs, a run fails or the time is over; and its sums."""

from __future__ import annotations

import time
from argparse import Namespace
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import tuning_accuracy, tuning_cases
from benchmarks.tuning import errors_of
from benchmarks.tuning_accuracy import Contest
from benchmarks.tuning_cases import Case, Look, Row, Setting, train
from benchmarks.tuning_grid import of_grid, of_pairs
from outcore.elastic.digits import lenet

pytestmark = pytest.mark.usefixtures("quick")


def small_case() -> Case:
    x, y = torch.randn(96, 1, 8, 8), torch.randint(0, 10, (96,))
    return Case("noise", x, y, x[:20], y[:20], partial(lenet, 8), "sgd", 0.0, 0.5)


def contest_of(case: Case, kept: list[Any], limit_s: float) -> Contest:
    return Contest(case, Namespace(limit_s=limit_s, num_seeds=2), lambda rows: kept.append(rows))


def test_a_finder_that_hangs_is_stopped_and_what_came_before_is_kept() -> None:
    kept: list[list[Row]] = []
    contest = contest_of(small_case(), kept, limit_s=20.0)

    def hang() -> Setting:
        time.sleep(60)
        return Setting(32, 0.01)

    contest.decide("quick", lambda: Setting(32, 0.01))
    contest.decide("hangs", hang)
    contest.train(("quick", "hangs"))
    quick, hangs = kept[-1]
    assert [len(rows) for rows in kept] == [1, 2, 2, 2]
    assert [run["seed"] for run in quick["runs"]] == [0, 1]
    assert quick["num_reached"] == 2
    assert hangs["error"].startswith("TimeoutError: stopped after")
    assert hangs["runs"] == []


def test_a_length_is_looked_at_when_it_is_over_and_its_rounds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning_cases, "NUM_LOOKS", 1)
    case = small_case()
    case.num_epochs, case.same = 4.0, "epochs"  # 12 steps of 32, looked at after 3, 6, 9 and 12
    assert len(list(train(case, Setting(32, 0.01), 0))) == 4
    assert len(list(train(case, Setting(32, 0.01, num_steps=5), 0))) == 7  # and after 5, 7, 11 (and 9)


def test_a_run_that_fails_ends_nothing_but_itself() -> None:
    kept: list[list[Row]] = []
    contest = contest_of(small_case(), kept, limit_s=60.0)
    contest.decide("bad", lambda: Setting(32, -1.0))  # the optimizer refuses it
    contest.decide("good", lambda: Setting(32, 0.01))
    contest.train(("bad", "good"))
    bad, good = contest.summed()
    assert "ValueError" in bad["error"]
    assert len(good["runs"]) == 2


def test_one_run_of_each_comes_before_what_is_kept_for_later() -> None:
    contest = contest_of(small_case(), [], limit_s=60.0)
    contest.decide("a", lambda: Setting(32, 0.01))
    contest.decide("b", lambda: Setting(48, 0.01))
    contest.train(("a", "b"), later_s=1e6)
    assert [len(row["runs"]) for row in contest.summed()] == [1, 1]


def test_one_advice_makes_two_rows_and_a_peer_that_never_comes_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is best in the end trains for the time of all, what is soonest for the length it was given."""
    advice = Setting(32, 0.01, soonest=Setting(48, 0.02, num_steps=3))
    monkeypatch.setattr(tuning_accuracy, "by_advice", lambda case: advice)
    monkeypatch.setattr(tuning_accuracy, "by_accelerate", lambda case: Setting(48, 0.01))
    monkeypatch.setattr(tuning_accuracy, "by_lightning", lambda case: Setting(96, 0.01))
    case = small_case()
    case.target = 1.1  # nobody comes there
    contest = Contest(case, Namespace(limit_s=60.0, num_seeds=2, num_trials=2, num_pairs=3, brief=True), lambda _: None)
    contest.hold()
    runs = {name: len(row["runs"]) for name, row in contest.rows.items()}
    assert runs["outcore, to target"] == runs["default"] == 2
    assert runs["lightning"] == runs["accelerate, our length"] == 1
    assert runs["outcore"] == runs["search, best"] == 3
    assert contest.rows["outcore"]["setting"].num_steps == 0
    assert contest.rows["outcore, to target"]["setting"].num_steps == 3


def test_all_train_for_the_same_time() -> None:
    case = small_case()
    case.rates = {32: 100.0, 96: 300.0}
    assert (case.num_samples(32), case.num_samples(96)) == (48, 144)
    case.same = "epochs"
    assert case.num_samples(96) == 48


def told_s(steps: list[float], step_s: float, looks: list[Look]) -> float:
    """A clock on which steps take their time and looks an age."""
    return len(steps) * step_s + 7.0 * len(looks)


def test_a_clock_says_how_far_a_training_is() -> None:
    """Whatever steps of its batch seemed to take beforehand."""
    case = small_case()
    case.rates = {32: 48 / 0.4, 8: 1e9, 96: 1.0}  # today's batch takes 0.4 s for half an epoch
    for batch, step_s in ((8, 0.003), (96, 0.01)):
        rates: list[float] = []
        made = case.make_optimizer

        def make(parameters: Any, lr: float | None = None, made: Any = made, rates: Any = rates) -> Any:
            optimizer = made(parameters, lr)
            optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
            return optimizer

        case.make_optimizer = make  # type: ignore[method-assign]
        looks: list[Look] = []
        case.now_s = partial(told_s, rates, step_s, looks)  # type: ignore[method-assign]
        for look in train(case, Setting(batch, 0.01), 0):
            looks += [look]
        assert looks[-1].second == pytest.approx(0.4, abs=step_s)
        assert len(looks) == 8
        assert looks[-1].num_samples == batch * len(rates)
        assert rates[0] == rates[len(rates) // 2] == 0.01
        assert rates[-1] < 0.005
        case.make_optimizer = made  # type: ignore[method-assign]


def test_pairs_are_seeds_that_both_have() -> None:
    ends = {"outcore": [0.98, 0.97, 0.99, 0.5], "other": [0.97, 0.97, 0.97]}
    rows = [
        {"optimizer": "sgd", "method": name, "seed": seed, "final_accuracy": end}
        for name, found in ends.items()
        for seed, end in enumerate(found)
    ]
    (found,) = of_pairs(rows)
    assert (found["against"], found["num_pairs"]) == ("other", 3)
    assert found["mean_points"] == pytest.approx(1.0)
    assert found["standard_error_points"] == pytest.approx(1 / 3**0.5)


def test_a_grid_counts_a_target_never_reached_as_the_last() -> None:
    row: Row = {"batch": 32, "lr": 0.1, "warm_up_epochs": 0.0, "final_accuracy": 0.9, "epoch_s": 2.0}
    rows = [row | {"to_target_epochs": {"0.9": epochs}} for epochs in (1.0, None, None)]
    rows += [row | {"lr": 0.2, "epoch_s": 3.0, "to_target_epochs": {"0.9": epochs}} for epochs in (1.0, 2.0, None)]
    first, last = of_grid(rows)
    assert (first["lr"], first["to_0.9_s"], first["num_at_0.9"]) == (0.2, 4.0, 2)
    assert (last["lr"], last["to_0.9_s"], last["num_at_0.9"]) == (0.1, None, 1)


def test_a_batch_counts_with_its_median_round() -> None:
    row = {"network": "n", "memory_bytes": 1, "in_core": True, "was_probed": False, "calibrates": False}
    rounds = {8: (0.01, -0.3, 0.02), 16: (-0.05, -0.06, 0.2)}
    rows = [
        row | {"batch": b, "throughput_error": e, "peak_error": 0.0} for b, errors in rounds.items() for e in errors
    ]
    found = errors_of(rows)
    assert found["num_batches"] == 2
    assert found["in_core_throughput_error"] == pytest.approx(0.05)
    assert found["in_core_worst_round_error"] == pytest.approx(0.3)
