"""Today's setting against others by short trainings: given ones, so that no clock decides, and real ones."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from outcore.tuning.trainings.comparison import Comparison
from outcore.tuning.trainings.runs import Candidate, Run
from outcore.tuning.trainings.target import NO_TARGET, Target
from outcore.tuning.trainings.trial import num_held_out
from tests.cpu.tuning.nets import convnet, mlp
from tests.cpu.tuning.scripted import DATA, Evaluations, comparison_of, reaching, scripted
from tests.cpu.tuning.test_runs import run_with
from tests.cpu.tuning.test_tune import assert_same, everything_of, generators

ACCURACY = Target("val_accuracy", 0.6)
TODAY, ADVICE = Candidate("today's setting", 32, 0.1, 0.01), Candidate("the advice", 64, 0.2, 0.01)
LONG_S = 1e6  # however slow the machine is: a comparison then ends by its epochs


def length_factor(comparison: Comparison) -> float:
    """By which a length is stretched, since few samples are held out."""
    return 1 + comparison.history.target.held_out_error(num_held_out(len(DATA)))


def run_all(comparison: Comparison, *candidates: Candidate) -> list[Run]:
    return [comparison.history.run(candidate, comparison.run_s, 9.0) for candidate in candidates]


@pytest.mark.parametrize(
    ("seconds", "wins"),
    [
        ((1.5, 1.6, 1.4), True),
        ((1.0, 2.6, 2.7), False),
        ((1.85, 1.85, 1.85), False),
        ((1.0, 1.1, 9.0), False),
        ((1.0, 1.1, 2.1), False),
    ],
    ids=["every time", "luck", "hardly", "not always there", "not always sooner"],
)
def test_other_starts_decide(seconds: tuple[float, ...], wins: bool) -> None:
    """Today's setting takes 2 s, whatever the start."""

    def script(candidate: Candidate, start: int, run_s: float) -> Evaluations:
        took_s = 2.0 if candidate == TODAY else seconds[start]
        return ((took_s, 0.6), (3.0, 0.7)) if took_s < 3 else ((3.0, 0.5),)

    comparison = scripted(script, ACCURACY, run_s=3.0)
    done = run_all(comparison, ADVICE, TODAY)
    assert comparison.run_final(done, TODAY, 60.0).candidate == (ADVICE if wins else TODAY)
    assert len(comparison.history.runs) == 6


@pytest.mark.parametrize("lucky", [False, True])
def test_runs_grow_until_the_target_is_reached_from_every_start(lucky: bool) -> None:
    """A leader that was lucky would make all runs, and the advised training, as short as its own."""
    comparison = scripted(
        reaching(lambda candidate, start, run_s: 0.7 if lucky and start == 1 else 0.3), ACCURACY, run_s=1.0
    )
    winner = comparison.winner(TODAY, [ADVICE], limit_s=16.0)
    assert winner is not None
    assert comparison.history.runs[0].run_s == 0.5
    assert winner.run_s == pytest.approx(0.96 if lucky else 0.375)  # six epochs at most
    assert {run.start for run in comparison.final[winner.candidate]} == {0, 1, 2}


@pytest.mark.parametrize("is_near", [False, True])
def test_a_comparison_goes_on_for_as_long_again_where_the_target_is_near(is_near: bool) -> None:
    comparison = scripted(
        lambda candidate, start, run_s: ((run_s, 1 - 0.25 * (candidate.lr / 0.2) ** 0.1 / run_s),),
        Target("val_accuracy", 0.9 if is_near else 0.98),
    )
    today, advice = (replace(candidate, step_s=0.05) for candidate in (TODAY, ADVICE))
    winner = comparison.winner(today, [advice], limit_s=13.0)
    assert winner is not None
    assert max(run.run_s for run in comparison.history.runs) == pytest.approx(3.2 if is_near else 1.6)
    assert len(comparison.final[today]) == 3  # runs are no longer than a final from every start allows
    assert (winner.target_s is not None) == is_near
    assert comparison.history.spent_s < (4 if is_near else 2) * 13.0


def test_no_run_begins_when_the_clock_has_run_out() -> None:
    """Reading the data may take far longer than the compute that is counted."""
    comparison = scripted(reaching(lambda candidate, start, run_s: 0.3), ACCURACY)
    history = comparison.history
    history.clock = lambda: history.began_s + 100 * len(history.runs)
    assert comparison.winner(TODAY, [ADVICE], limit_s=16.0) is not None
    assert len(history.runs) < 5


@pytest.mark.parametrize("target", [NO_TARGET, Target("val_accuracy", 0.9)])
def test_today_meets_another_also_where_it_leads_and_time_is_short(target: Target) -> None:
    """In short runs today's setting is ahead, in longer ones the advice: with one run left, nobody else was known."""

    def script(candidate: Candidate, start: int, run_s: float) -> Evaluations:
        grows = 0.5 if candidate.name == TODAY.name else 0.9
        remaining = (0.5 if candidate.name == TODAY.name else 0.55) / (run_s / 0.8) ** grows
        return ((run_s, 1 - remaining if target is not NO_TARGET else remaining),)

    comparison = scripted(script, target, run_s=0.8)
    today, advice = (replace(candidate, step_s=0.05) for candidate in (TODAY, ADVICE))
    done = run_all(comparison, today, advice, advice.at_rate(0.5))
    comparison.run_s = 1.6
    in_order = [*run_all(comparison, today), *done]
    winner = comparison.run_final(in_order, today, comparison.history.spent_s + 12.0)
    assert winner.candidate == advice
    assert [len(comparison.final[candidate]) for candidate in (today, advice)] == [3, 3]


def test_where_time_is_short_fewer_are_compared_from_all_starts() -> None:
    comparison = scripted(reaching(lambda candidate, start, run_s: 0.4 + candidate.lr), ACCURACY, run_s=1.0)
    others = [ADVICE.at_rate(factor) for factor in (1.0, 0.5, 0.25)]
    done = run_all(comparison, *others, TODAY)
    winner = comparison.run_final(done, TODAY, comparison.history.spent_s + 6.0)
    assert [len(comparison.final[candidate]) for candidate in (*others, TODAY)] == [1, 3, 3, 3]
    assert winner.candidate == TODAY  # 0.45 s are not clearly sooner than its 0.5
    assert "from the same start: 10 runs" in comparison.description(winner)
    assert "in the mean over 1 to 3 orders of the data" in comparison.description(winner)
    comparison.history.trainer.starts_differ = True
    assert "in the mean over 1 to 3 starts" in comparison.description(winner)
    assert "which stays: nothing was clearly better every time" in comparison.description(winner)


def test_a_rate_below_one_that_fails_comes_to_the_final_last() -> None:
    """It may be the first at the target: another start may not bear it."""
    comparison = scripted(reaching(lambda candidate, start, run_s: 0.2 + 0.01 / candidate.lr), ACCURACY, run_s=1.0)
    history = comparison.history
    safe, edge, *low = (ADVICE.at_rate(factor) for factor in (1.0, 3**0.5, 0.5, 0.25))
    done = run_all(comparison, edge, safe, *low, TODAY)
    assert not any(history.is_below_a_failure(run.candidate) for run in done)
    failed = ADVICE.at_rate(3.0)
    for end in (Run(failed, 1.0, ACCURACY, ((0.5, 0.1),), gave_up=True), run_with(0.4, 0.076, target=ACCURACY)):
        history.runs = [*done, replace(end, candidate=failed)]
        assert [history.is_below_a_failure(run.candidate) for run in done] == [True, False, False, False, False]
    assert comparison.run_final(done, TODAY, 60.0).candidate == safe
    assert edge not in comparison.final


def test_the_length_goes_by_the_worst_start_and_the_number_of_held_out_samples() -> None:
    target = Target("val_accuracy", 0.88)
    comparison, candidate = comparison_of(mlp(), target=target), Candidate("one", 32, 0.1, 0.5)
    short, good, bad = (
        Run(candidate, run_s, target, ((run_s, end),)) for run_s, end in ((4.0, 0.8), (8.0, 0.9), (8.0, 0.89))
    )
    comparison.history.runs = [short, good]
    quarter_s = pytest.approx(1.25 * 8.0 * length_factor(comparison))
    assert comparison.length_s(good) == quarter_s  # it ended beyond the target: a quarter is enough
    comparison.final = {candidate: [good, bad]}
    assert comparison.length_s(good) == quarter_s  # 0.11 to 0.108 is little
    comparison.final = {candidate: [good, replace(bad, evaluations=((8.0, 0.84),))]}
    assert comparison.length_s(good) == pytest.approx(1.25 * 8.0 * (0.16 / 0.108) * length_factor(comparison))


def test_a_length_is_continued_along_the_ends_of_runs_but_not_far() -> None:
    def runs(target: Target, *lengths_s: float) -> list[Run]:
        candidate = Candidate("one", 32, 0.1, 0.5)
        return [Run(candidate, run_s, target, ((run_s, 1 - 0.8 / run_s**0.5),)) for run_s in lengths_s]

    for value, lengths_s, is_known in ((0.88, (4.0, 16.0), True), (0.95, (4.0, 16.0), False), (0.88, (4.0,), False)):
        target = Target("val_accuracy", value)
        comparison = comparison_of(mlp(), target=target)
        comparison.history.runs = runs(target, *lengths_s)
        expected_s = 1.25 * (0.8 / 0.108) ** 2 * length_factor(comparison)
        found_s = comparison.length_s(comparison.history.runs[-1])
        assert found_s == (pytest.approx(expected_s) if is_known else None)
    run = run_with(2.0, 1.5)
    assert run.target_s is None
    sooner = run_with(0.5, 0.7, 0.6, target=ACCURACY)
    reached = comparison_of(mlp(), target=ACCURACY)
    assert reached.length_s(sooner) == pytest.approx(1.5 * 3.0 * length_factor(reached))
    assert comparison_of(mlp()).length_s(run_with(1.0, 0.9)) is None  # a loss has no target


def test_a_setting_that_diverges_from_some_starts_gets_no_length() -> None:
    target = Target("val_loss", 0.5)
    comparison, candidate = comparison_of(mlp(), target=target), Candidate("one", 32, 0.1, 0.5)
    ended = [Run(candidate, 8.0, target, ((8.0, end),), gave_up=end != end) for end in (0.6, float("nan"), 0.55)]
    comparison.history.runs = [*ended, replace(ended[0], run_s=4.0, evaluations=((4.0, 0.8),))]
    comparison.final = {candidate: [ended[0], ended[2]]}
    assert comparison.length_s(ended[0]) is not None
    comparison.final = {candidate: ended}
    assert comparison.length_s(ended[0]) is None
    comparison.final = {candidate: [replace(run, gave_up=False) for run in ended[1:2]]}
    assert comparison.length_s(ended[0]) is None


# -- real trainings ----------------------------------------------------------------------------------------------------


def test_an_advice_that_diverges_loses_to_today() -> None:
    comparison = comparison_of(mlp())
    winner = comparison.winner(Candidate("today", 32, 0.05, 0.01), [Candidate("the advice", 64, 1e30, 0.015)], LONG_S)
    assert winner is not None
    assert winner.candidate.name == "today"
    assert [run.gave_up for run in comparison.history.runs[:3]] == [False, True, True]
    words = comparison.description(winner)
    assert "today (batch 32, rate 0.05)" in words
    assert "the advice (batch 64, rate 1e+30)" in words
    assert f"gave up; the winner is {winner.candidate.description}" in words
    assert len(words) < 600


def test_higher_rates_are_tried_until_none_is_better() -> None:
    comparison = comparison_of(mlp())
    today = Candidate("today", 32, 1e-5, 0.01, warms_up=False)
    winner = comparison.winner(today, [Candidate("the advice", 32, 1e-3, 0.01)], 60.0)
    assert winner is not None
    assert winner.candidate.lr > 9e-3  # beyond the highest that it began with
    runs = comparison.history.runs
    rates = [run.candidate.lr for run in runs]
    assert rates[:6] == pytest.approx([1e-5, 1e-3, 3e-3, 1e-3 / 3, 9e-3, 1e-5 * 3**0.5])
    assert runs[5].candidate.name == "today"
    assert runs[5].num_warm_up_steps > 0
    assert runs[0].num_warm_up_steps == 0
    assert runs[1].num_warm_up_steps > 0
    assert comparison.history.spent_s <= 120.0
    longest = [run for run in runs if run.run_s == winner.run_s]
    finalists = {run.candidate for run in longest if run.start == 2}
    assert len(finalists) > 2
    costs = {candidate: sum(run.cost for run in longest if run.candidate == candidate) for candidate in finalists}
    assert winner.candidate == min(costs, key=lambda candidate: costs[candidate])  # without a target the end decides


@pytest.mark.parametrize(
    ("name", "step_s"),
    [("alike", {128: 0.01, 64: 0.01, 32: 0.01}), ("by the sample", {128: 0.04, 64: 0.02, 32: 0.01})],
)
def test_smaller_batches_are_tried_and_the_target_ends_the_growing(name: str, step_s: dict[int, float]) -> None:
    """Where a step of 128 costs as much as one of 32, 128 wins; where it costs four times as much, it does not."""
    comparison = comparison_of(mlp(), in_core=128, target=Target("val_accuracy", 0.95))
    advised = [Candidate(f"{batch}", batch, 1e-3, seconds) for batch, seconds in step_s.items()]
    winner = comparison.winner(Candidate("today", 128, 1e-6, step_s[128], warms_up=False), advised, 100.0)
    runs = comparison.history.runs
    assert {run.candidate.batch for run in runs} == {32, 64, 128}
    assert winner is not None
    assert winner.target_s is not None
    assert winner.target_s <= winner.run_s <= runs[0].run_s
    length_s = (comparison.length_s(winner) or 0.0) / length_factor(comparison)
    assert 1.25 * winner.run_s <= length_s <= 1.5 * winner.run_s
    assert name == "alike" or winner.candidate.batch < 128


def test_a_warm_up_is_over_long_before_the_run_is() -> None:
    """Or a rate would win that never was run."""
    trainer = comparison_of(mlp()).history.trainer
    assert trainer.samples.num is not None
    assert trainer.samples.num > 80
    assert trainer.num_warm_up_steps(Candidate("one", 1, 0.05, 0.01), 0.8) == 8
    assert trainer.num_warm_up_steps(Candidate("one", 1, 0.05, 0.01, warms_up=False), 0.8) == 0


def test_of_two_that_train_alike_today_stays() -> None:
    comparison = comparison_of(mlp())
    shuffled = torch.utils.data.TensorDataset(DATA.tensors[0], DATA.tensors[1].roll(1))  # nothing to learn
    comparison.history.trainer.samples.data = shuffled
    winner = comparison.winner(Candidate("today", 32, 1e-7, 0.01), [Candidate("the advice", 32, 1e-6, 0.01)], LONG_S)
    assert winner is not None
    assert winner.candidate.name == "today"


def test_the_rate_of_a_run_ends_at_zero() -> None:
    history, rates = comparison_of(mlp()).history, []
    optimizer = history.trainer.optimizer
    optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    history.run(Candidate("one", 32, 0.06, 0.01, warms_up=False), 0.3, 1.0)
    assert rates[:20] == pytest.approx([0.06] * 20)
    assert rates[20:] == pytest.approx([0.006 * left for left in range(10, 0, -1)])


def test_every_run_starts_alike_and_leaves_nothing_behind() -> None:
    """Dropout, BatchNorm, momentum; and a batch that runs in smaller parts sees the same samples."""
    torch.manual_seed(3)
    model = convnet()
    history = comparison_of(model).history
    optimizer = history.trainer.optimizer
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # so that there is momentum to keep
    before, numbers, state = everything_of(model), generators(), deepcopy(optimizer.state_dict())
    first, again = (history.run(Candidate("one", 32, 0.05, 0.01), 0.4, 1.0) for _ in range(2))
    assert first.num_warm_up_steps == 1
    assert first.evaluations == again.evaluations
    assert len(set(first.evaluations)) == len(first.evaluations)
    assert_same(before, everything_of(model))
    assert generators() == numbers
    after = optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, kept in state["state"].items():
        assert torch.equal(after["state"][key]["momentum_buffer"], kept["momentum_buffer"])


def test_a_batch_in_smaller_parts_trains_alike() -> None:
    whole, parts = (comparison_of(mlp(), in_core).history for in_core in (64, 16))
    parts.trainer.model.load_state_dict(whole.trainer.model.state_dict())
    runs = [history.run(Candidate("one", 64, 0.05, 0.01), 0.08, 1.0) for history in (whole, parts)]
    ends = [[metric for _, metric in run.evaluations] for run in runs]
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


def test_there_is_no_winner_where_steps_take_too_long() -> None:
    today, advice = Candidate("today", 32, 0.1, 1.0), Candidate("the advice", 32, 1.0, 1.0)
    assert comparison_of(mlp()).winner(today, [advice], 20.0) is None
