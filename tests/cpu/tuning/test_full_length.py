"""What is best at the end of a training as long as the user's. Seconds are given, so that no clock decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.data.samples import Samples
from outcore.tuning.trainings.comparison import Comparison
from outcore.tuning.trainings.full_length import FULL_LENGTH, FullLengthComparison
from outcore.tuning.trainings.runs import Candidate, Run
from outcore.tuning.trainings.target import NO_TARGET, PROBABILITY, Target
from outcore.tuning.trainings.trial import Trial, TrialSetting
from tests.cpu.tuning.flat import tune
from tests.cpu.tuning.nets import CPU, make_sgd, mlp, stripes
from tests.cpu.tuning.scripted import Evaluations, comparison_of, scripted
from tests.cpu.tuning.test_comparison import LONG_S
from tests.cpu.tuning.test_runs import run_with
from tests.cpu.tuning.test_tune import generators

pytestmark = pytest.mark.usefixtures("quick")

DATA = stripes()
ACCURACY = Target("val_accuracy", 0.9)
SOONEST, OTHER = Candidate("soonest", 64, 0.01, 0.01), Candidate("other", 32, 0.01, 0.01)


def ends_of(
    end: Callable[[Candidate, int], float], length_s: float = 1.0, limit_s: float = 6.0
) -> FullLengthComparison:
    """Trainings whose ends are given: what remains of the probability; above one, they give up."""

    def script(candidate: Candidate, start: int, run_s: float) -> Evaluations:
        remaining = end(candidate, start)
        return ((run_s, math.nan if remaining > 1 else 1 - remaining),)

    return FullLengthComparison.after(scripted(script, ACCURACY), length_s, limit_s)


@pytest.mark.parametrize(
    ("best_lr", "rates"),
    [(0.02, [1, 2, 4]), (0.08, [1, 2, 4, 8, 16]), (0.0025, [1, 2, 1 / 2, 1 / 4, 1 / 8])],
    ids=["between", "beyond", "below"],
)
def test_rates_above_the_soonest_run_and_then_whatever_lies_beyond_the_best(best_lr: float, rates: list[float]) -> None:
    ends = ends_of(lambda candidate, start: 0.1 + abs(torch.tensor(candidate.lr / best_lr).log2().item()) / 10)
    best = ends.best(SOONEST, [])
    assert best is not None
    assert best.candidate.lr == pytest.approx(best_lr)
    assert [candidate.lr / 0.01 for candidate in ends.ended] == pytest.approx(rates)
    assert len(ends.history.runs) <= FULL_LENGTH.max_trainings
    assert f"best in the end is {best.candidate.description}" in ends.description(best)


@pytest.mark.parametrize(
    ("steepness", "length_s", "make", "warms_up"),
    [
        (0.01, 1.0, torch.optim.SGD, False),
        (1.0, 1.0, torch.optim.SGD, True),  # twice the rate is far behind
        (0.01, 9.0, torch.optim.SGD, True),  # the trainings were shorter than the user's
        (0.01, 1.0, torch.optim.Adam, True),
    ],
)
def test_a_rate_far_from_the_edge_needs_no_warm_up(
    steepness: float, length_s: float, make: Any, warms_up: bool
) -> None:
    ends = ends_of(lambda candidate, start: 0.1 + steepness * abs(candidate.lr - 0.02) / 0.02, length_s)
    trainer = ends.history.trainer
    trainer.optimizer = make(trainer.model.parameters(), lr=0.01)
    best = ends.best(replace(SOONEST, batch=8), [])
    assert best is not None
    assert best.candidate.lr == pytest.approx(0.02)
    assert best.num_warm_up_steps == (trainer.num_warm_up_steps(best.candidate, ends.run_s) if warms_up else 0)
    assert trainer.num_warm_up_steps(best.candidate, ends.run_s) > 0
    assert ("without a warm-up" in ends.description(best)) == (not warms_up)


@pytest.mark.parametrize(("length_s", "limit_s", "taken"), [(1.0, 18.0, 0.04), (1.0, 6.0, 0.04), (3.0, 6.0, 0.02)])
def test_a_rate_below_one_that_failed_needs_whole_trainings(length_s: float, limit_s: float, taken: float) -> None:
    """In a longer training it may fail as well: on MNIST 16 at 0.0185 did, from four starts of four."""
    ends = ends_of(lambda candidate, start: 2.0 if candidate.lr > 0.05 else 0.5 - candidate.lr, length_s, limit_s)
    best = ends.best(replace(SOONEST, lr=0.02), [])
    assert best is not None
    assert {round(candidate.lr, 3) for candidate in ends.ended} >= {0.02, 0.04, 0.08}
    assert best.candidate.lr == pytest.approx(taken)
    assert ("of those whose next higher rate did not fail" in ends.description(best)) == (taken == 0.02)


def test_a_rate_that_gives_up_is_no_reason_to_go_higher_nor_the_end_of_another_batch() -> None:
    """And another batch that does not bear it runs once more below."""
    ends = ends_of(
        lambda candidate, start: 2.0 if candidate.lr > 0.015 or candidate == OTHER else 0.2 - candidate.batch / 1000
    )
    best = ends.best(SOONEST, [OTHER])
    assert best is not None
    assert best.candidate == SOONEST
    tried = [(candidate.batch, candidate.lr) for candidate in ends.ended]
    assert tried == [(64, 0.01), (64, 0.02), (32, 0.01), (64, 0.005), (32, 0.005), (32, 0.0025)]
    assert ends.description(best).count("gave up") == 2
    assert ends_of(lambda candidate, start: 2.0).best(SOONEST, [OTHER]) is None


def test_another_batch_may_be_the_best_in_the_end_and_then_rates_beside_it_run() -> None:
    ends = ends_of(lambda candidate, start: (0.1 if candidate.batch == 32 else 0.2) + abs(candidate.lr - 0.02))
    best = ends.best(SOONEST, [OTHER])
    assert best is not None
    assert (best.candidate.batch, best.candidate.lr) == (32, 0.02)  # moved as much as the soonest was
    assert [candidate.lr for candidate in ends.ended if candidate.batch == 32] == pytest.approx([0.02, 0.04, 0.01])


@pytest.mark.parametrize(("raced_at", "first"), [(0.0035, 0.01 * 0.5**0.5), (0.009, 0.009)], ids=["low", "high"])
def test_another_batch_begins_no_lower_than_the_best_rate_says(raced_at: float, first: float) -> None:
    """On CIFAR-10 half the batch raced at a third of the rate that was best for it, ended there, and was given up."""
    ends = ends_of(lambda candidate, start: (0.1 if candidate.batch == 32 else 0.2) + 10 * abs(candidate.lr - 0.01))
    best = ends.best(SOONEST, [replace(OTHER, lr=raced_at)])
    assert best is not None
    assert [candidate.lr for candidate in ends.ended if candidate.batch == 64][:2] == pytest.approx([0.01, 0.02])
    assert next(candidate.lr for candidate in ends.ended if candidate.batch == 32) == pytest.approx(first)
    assert best.candidate.batch == 32
    assert len(ends.history.runs) <= FULL_LENGTH.max_trainings


@pytest.mark.parametrize("factor", [1 / 9, 9.0])
def test_a_batch_that_leads_says_nothing_of_how_far_the_soonest_rate_was_moved(factor: float) -> None:
    """The first other batch leads by then, and its factor is of another rate than the soonest one's."""
    ends = ends_of(
        lambda candidate, start: (0.1 if candidate.batch == 32 else 0.2) + abs(candidate.lr - 0.02), limit_s=9.0
    )
    last = Candidate("last", 16, 0.01, 0.01)
    best = ends.best(SOONEST, [replace(OTHER, factor=factor), last])
    assert best is not None
    assert [candidate.lr for candidate in ends.ended if candidate.batch == 64][:3] == pytest.approx([0.01, 0.02, 0.04])
    assert next(candidate.lr for candidate in ends.ended if candidate.batch == 32) == pytest.approx(0.02)
    assert next(candidate.lr for candidate in ends.ended if candidate.batch == 16) == pytest.approx(0.02)


LARGER = [replace(SOONEST, name=f"{times} times", batch=64 * times) for times in (2, 4)]


@pytest.mark.parametrize(
    ("best_batch", "tried"),
    [(256, [64, 128, 256]), (128, [64, 128, 256]), (64, [64, 128, 32]), (32, [64, 128, 32])],
)
def test_batches_grow_as_long_as_the_larger_one_is_better_and_shrink_only_where_it_is_not(
    best_batch: int, tried: list[int]
) -> None:
    def end(candidate: Candidate, start: int) -> float:
        best_lr = 0.01 * (candidate.batch / 64) ** 0.5
        sizes = abs(torch.tensor(candidate.batch / best_batch).log2().item())
        return 0.1 + 0.05 * sizes + abs(torch.tensor(candidate.lr / best_lr).log2().item()) / 100

    ends = ends_of(end)
    best = ends.best(SOONEST, [*LARGER, OTHER, replace(OTHER, batch=16)])
    assert best is not None
    assert list(dict.fromkeys(candidate.batch for candidate in ends.ended)) == tried
    assert best.candidate.batch == best_batch


def test_where_none_learnt_yet_all_others_may() -> None:
    ends = ends_of(lambda candidate, start: 0.1 if candidate.batch == 16 else 2.0)
    best = ends.best(SOONEST, [OTHER, replace(OTHER, batch=16)])
    assert best is not None
    assert best.candidate.batch == 16


def test_where_the_soonest_failed_other_batches_run_as_they_raced() -> None:
    """But not below what one of them, which did not fail, says."""
    ends = ends_of(lambda candidate, start: 2.0 if candidate.batch == 64 else 0.2 + abs(candidate.lr - 0.01))
    assert ends.best(SOONEST, [replace(OTHER, lr=0.005, factor=9.0), Candidate("last", 16, 0.001, 0.01)]) is not None
    firsts = {candidate.batch: candidate.lr for candidate in reversed(ends.ended)}
    assert firsts == pytest.approx({64: 0.01, 32: 0.005, 16: 0.005 * 0.5**0.5})


def test_short_trainings_run_in_several_orders_and_long_ones_are_shortened() -> None:
    quick = ends_of(lambda candidate, start: 0.1 + 0.01 * start + candidate.lr, length_s=0.2)
    best = quick.best(SOONEST, [OTHER])
    assert best is not None
    assert {found.start for found in quick.history.runs} >= set(
        range(FULL_LENGTH.first_start, FULL_LENGTH.first_start + FULL_LENGTH.num_starts)
    )
    assert len(quick.history.runs) <= FULL_LENGTH.max_trainings * FULL_LENGTH.num_starts
    assert "as long as you train" in quick.description(best)
    slow = ends_of(lambda candidate, start: 0.1 + candidate.lr, length_s=100.0)
    best = slow.best(SOONEST, [OTHER])
    assert best is not None
    assert slow.history.spent_s <= 6.0
    assert "1.00 s each instead of your 100 s, for which trial_s has to be 100 times as long" in slow.description(best)
    assert ends_of(lambda candidate, start: 0.1, limit_s=0.1).best(SOONEST, []) is None


def test_luck_in_one_order_decides_nothing() -> None:
    lucky = {FULL_LENGTH.first_start: 0.05}
    ends = ends_of(lambda r, start: lucky.get(start, 0.3) if r.lr > 0.01 else 0.2, length_s=0.2)
    best = ends.best(SOONEST, [])
    assert best is not None
    assert best.candidate == SOONEST


def test_real_trainings_hold_out_other_samples_from_every_start_and_leave_nothing_behind() -> None:
    comparison = comparison_of(mlp(), target=ACCURACY)
    trainer = comparison.history.trainer
    before = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    ends = FullLengthComparison.after(comparison, 0.3, 3.0)
    assert ends.history.trainer is trainer  # the same weights for the same start
    best = ends.best(Candidate("soonest", 32, 0.003, 0.01), [])
    assert best is not None
    assert best.candidate.lr > 0.003
    assert 0 < best.metric < 1
    perfect = Run(best.candidate, 0.6, ends.history.target, tuple((at / 8, 1 - 1e-9) for at in range(1, 9)))
    run = partial(ends.history.run, run_s=0.6, limit_s=60.0, leader=perfect, start=FULL_LENGTH.first_start)
    assert not run(Candidate("near", 32, 0.02, 0.01)).gave_up  # a hundredth remains, however much less the leader has
    assert run(Candidate("far", 32, 1e-6, 0.01)).gave_up
    assert len(trainer.samples._kept) > 1
    assert all(torch.equal(one, other) for one, other in zip(before, trainer.model.parameters()))


def test_no_end_is_good_enough_to_stop_at() -> None:
    assert NO_TARGET.at_the_end.metric == "val_loss"
    assert run_with(0.5, 0.25, target=NO_TARGET.at_the_end).target_s is None
    assert run_with(0.5, 1.0, target=ACCURACY.at_the_end).target_s is None


def test_the_probability_is_that_of_the_right_class() -> None:
    model = torch.nn.Linear(2, 3)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([0.5, 0.3, 0.2]).log())
    data = [(torch.zeros(2), label) for label in (0, 1, 2, -100)]
    optimizer, setting = make_sgd(model.parameters()), TrialSetting(2, 1)
    samples, validation = Samples(data * 4, CPU), Samples(data, CPU)
    trial = Trial(model, F.cross_entropy, samples, optimizer, setting, Target(PROBABILITY, 1.0), validation=validation)
    assert trial.evaluate() == pytest.approx(1.0 / 4)  # who is to be ignored counts as wrong, as in an accuracy


def tuned(**options: Any) -> Advice:
    make = partial(torch.optim.SGD, lr=1e-4, momentum=0.9)
    given: dict[str, Any] = {"dataset": DATA, "optimizer": make, "memory": "16MiB", "largest": 64} | options
    return tune(mlp, F.cross_entropy, **given)


def test_tune_says_what_is_best_in_the_end_and_what_is_soonest(folder: str) -> None:
    numbers = generators()
    advice = tuned(disk=folder, target=("val_accuracy", 0.8), num_epochs=4, trial_s=20.0)
    assert generators() == numbers
    soonest = advice.soonest
    assert soonest is not None
    assert advice.target_s is not None
    epoch = len(DATA) / soonest.effective_batch
    if advice.effective_batch == soonest.effective_batch:
        assert advice.num_steps == pytest.approx(4 * epoch, abs=1)
    assert soonest.num_steps > 0
    assert Advice.from_json(advice.to_json()) == advice
    said = " ".join(str(advice).split())
    assert f"{advice.num_steps} steps, the rate falling to zero" in said
    assert f"with a batch of {soonest.effective_batch} at a rate of {soonest.learning_rate:.3g}" in said
    told = [why for why in advice.why if "; best in the end" in why]
    assert len(told) == 1  # it may name an edge between "end" and "is": the clock decides which rates failed
    best = told[0].rpartition("; best in the end")[2]
    assert f" (batch {advice.effective_batch}, rate {advice.learning_rate:.3g})" in best
    assert ("without a warm-up" not in best) or advice.num_warm_up_steps == 0


@pytest.mark.parametrize(("kept", "largest_wins"), [(None, True), (None, False), (32, True)])
def test_a_larger_batch_ends_too_where_none_raced(
    kept: int | None, largest_wins: bool, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Noise grows: the batch that gets furthest at first may be too small in the end. Not where users keep theirs."""
    raced: list[int] = []
    asked: list[tuple[int, list[int]]] = []

    def win(self: Comparison, today: Candidate, advised: Sequence[Candidate], limit_s: float) -> Run | None:
        history = self.history
        history.runs = [Run(candidate, 1.0, history.target, ((1.0, 0.5),)) for candidate in (today, *advised)]
        raced[:] = sorted({run.candidate.batch for run in history.runs})
        return max(history.runs, key=lambda run: run.candidate.batch * (1 if largest_wins else -1))

    def see(self: FullLengthComparison, soonest: Candidate, others: Sequence[Candidate]) -> Run | None:
        asked.append((soonest.batch, [other.batch for other in others]))
        return None

    monkeypatch.setattr(Comparison, "winner", win)
    monkeypatch.setattr(FullLengthComparison, "best", see)
    # Enough data that four times any batch is at most a quarter of it: the clock decides which batch is advised.
    tuned(dataset=stripes(2048), disk=folder, batch=kept, learning_rate="find", train_s=0.4, trial_s=4.0)
    ((soonest, others),) = asked
    is_larger = kept is None and soonest == raced[-1]
    larger = [2 * soonest, 4 * soonest] if is_larger else []
    assert [other for other in others if other > raced[-1]] == larger
    assert is_larger == (kept is None and largest_wins)
    assert others[: len(larger)] == larger  # before all others


def test_without_a_target_ends_are_compared_by_the_loss(folder: str) -> None:
    advice = tuned(disk=folder, train_s=0.4, batch=32, learning_rate="find", trial_s=4.0)
    assert advice.soonest is None
    assert advice.effective_batch == 32
    assert advice.num_steps == pytest.approx(0.4 / advice.step_s, abs=1)
    assert any("the loss on held-out samples in the end" in why for why in advice.why)
    stays = [why for why in advice.why if "as you train today" in why]
    assert stays == ["the effective batch stays 32, as you train today"]  # and not that the rate need not change


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "both": ({"num_epochs": 3, "train_s": 1.0}, "a training has one length"),
    "none": ({"num_epochs": 0}, "a training cannot be 0 long"),
    "no race": ({"num_epochs": 3, "race": False}, "leave race on"),
    "workers": ({"train_s": 3.0, "workers": 2, "communication_s": 0.01}, "leave race on and workers out"),
    "no optimizer": ({"num_epochs": 3, "optimizer": None}, "what is best in the end is found by training"),
    "search": (
        {"num_epochs": 3, "target": ("val_accuracy", 0.9), "num_trials": 3},
        "leave out num_trials, or the length",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_length_that_cannot_be_asked_about_is_refused(name: str) -> None:
    changed, says = WRONG[name]
    with pytest.raises(TuningError, match=says):
        tuned(**changed)


def test_a_function_has_no_epochs(folder: str) -> None:
    def draw(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(0, len(DATA), (size,))
        return DATA.tensors[0][rows], DATA.tensors[1][rows]

    with pytest.raises(TuningError, match="a function's samples have no epochs; give train_s"):
        tuned(dataset=draw, validation=DATA, num_epochs=3, disk=folder, trial_s=LONG_S)


def test_a_batch_whose_steps_are_too_long_is_left_out_and_stops_nobody() -> None:
    slow = Candidate("slow", 512, 0.01, 0.5)
    ends = ends_of(lambda candidate, start: 0.1)
    best = ends.best(SOONEST, [slow, OTHER])
    assert best is not None
    assert {candidate.batch for candidate in ends.ended} == {64, 32}
    assert ends_of(lambda candidate, start: 0.1).best(slow, [OTHER]) is None


def test_a_batch_that_raced_at_a_rate_of_zero_is_left_out() -> None:
    """A user's rate before a warm-up: no factor moves it."""
    ends = ends_of(lambda candidate, start: 0.1)
    assert ends.best(SOONEST, [replace(OTHER, lr=0.0), replace(OTHER, batch=16)]) is not None
    assert {candidate.batch for candidate in ends.ended} == {64, 16}


def test_a_rate_whose_next_higher_one_failed_in_the_race_is_not_taken_though_it_ends_best() -> None:
    """0.02 ends best, and 0.025 gave up in the race: another start may not bear 0.02, and 0.01 ends nearly as well."""
    ends = ends_of(lambda candidate, start: {1.0: 0.11, 2.0: 0.1}.get(round(candidate.lr / 0.01, 3), 0.3))
    assert ends.earlier is not None
    failed = Candidate("soonest", 64, 0.025, 0.01)
    ends.earlier.runs.append(Run(failed, 1.0, ends.history.target, ((1.0, 0.0),), 0, gave_up=True))
    best = ends.best(SOONEST, [])
    assert best is not None
    assert best.candidate.lr == pytest.approx(0.01)
    assert "whose next higher rate did not fail" in ends.description(best)
