"""How short trainings are ranked, and when another setting takes the place of today's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.tuning.settings import SETTINGS
from outcore.tuning.trainings.runs import Candidate, Run, best_candidate, is_hopeless
from outcore.tuning.trainings.target import NO_TARGET, Target

EXCESS = SETTINGS.comparison.give_up_excess_share


def run_with(*metrics: float, target: Target = NO_TARGET, lr: float = 0.1) -> Run:
    """An evaluation every second."""
    evaluations = tuple((float(at), metric) for at, metric in enumerate(metrics, 1))
    return Run(Candidate("one", 32, lr, 0.5), float(len(metrics)), target, evaluations)


def test_the_first_at_the_target_ranks_before_the_better_end() -> None:
    target = Target("val_accuracy", 0.6)
    sooner, better, never = (
        run_with(*metrics, target=target) for metrics in ((0.5, 0.7, 0.6), (0.4, 0.5, 0.9), (0.3, 0.5, 0.59))
    )
    assert sooner.target_s == pytest.approx(1.5)  # halfway between two evaluations
    assert better.target_s == pytest.approx(2.25)
    assert never.target_s is None
    assert sorted([never, better, sooner], key=lambda run: run.rank) == [sooner, better, never]
    assert sooner.cost < better.cost < never.cost < replace(sooner, gave_up=True).cost


def test_the_end_counts_and_not_the_mean_on_the_way() -> None:
    """A high rate looks bad until it falls: the mean of the evaluations would take the other."""
    noisy, calm = run_with(1.5, 1.6, 1.5, 0.8), run_with(1.3, 1.1, 1.0, 0.95)
    assert noisy.cost < calm.cost


def test_of_candidates_that_reach_the_target_together_the_best_end_wins() -> None:
    target = Target("val_accuracy", 0.6)

    def starts(*, end: float, target_s: float) -> list[Run]:
        evaluations = (target_s, 0.6), (3.0, end)
        return [Run(Candidate("", 32, 0.1, 0.01), 3.0, target, evaluations, start=start) for start in range(3)]

    today, soon, good, late = (Candidate(name, 32, 0.1, 0.01) for name in ("today", "soon", "good", "late"))
    field = {today: starts(end=0.9, target_s=2.0), soon: starts(end=0.7, target_s=1.0)}
    assert best_candidate(field, today) == soon
    assert best_candidate({**field, good: starts(end=0.8, target_s=1.1)}, today) == good
    assert best_candidate({**field, late: starts(end=0.8, target_s=1.3)}, today) == soon
    assert best_candidate({today: field[today], good: starts(end=0.95, target_s=1.95)}, today) == today
    few = {today: field[today][:1], good: starts(end=0.95, target_s=1.5)[:1]}
    assert best_candidate(few, today) == today  # one start of each tells less
    assert best_candidate({**few, good: starts(end=0.95, target_s=1.3)[:1]}, today) == good
    near, far = (
        replace(run, evaluations=((3.0, end),)) for run, end in zip(starts(end=0.5, target_s=1.0), (0.55, 0.2))
    )
    assert best_candidate({today: [far], good: [near]}, today) == good  # the target is not reached yet


def test_few_held_out_samples_leave_an_accuracy_unsure() -> None:
    target = Target("val_accuracy", 0.93)
    assert target.held_out_error(500) == pytest.approx((0.93 * 0.07 / 500) ** 0.5 / 0.07)
    assert target.held_out_error(10) == 0.5
    for unknown, num in ((target, 0), (Target("val_accuracy", 1.0), 500), (Target("val_loss", 0.1), 500)):
        assert unknown.held_out_error(num) == 0.0


def test_losses_below_zero_are_compared_too() -> None:
    """Of a density, say: a share of such a number points the other way."""
    today, other = Candidate("today", 32, 0.1, 0.01), Candidate("other", 32, 0.2, 0.01)
    assert best_candidate({today: [run_with(-4.0)], other: [run_with(-5.0)]}, today) == other
    assert best_candidate({today: [run_with(-4.0)], other: [run_with(-4.1)]}, today) == today
    assert best_candidate({today: [replace(run_with(-4.0), gave_up=True)], other: [run_with(-1.0)]}, today) == other
    assert run_with(-1.0).target_s is None  # without a target none is reached
    assert run_with(0.0).target_s is None


def test_a_run_that_reached_the_target_does_not_give_up() -> None:
    target = Target("val_accuracy", 0.85)
    leader = run_with(0.9, 0.95, 1.0, 1.0, 1.0, target=target)
    assert not is_hopeless(run_with(0.92, 0.95, 0.94, 0.93, target=target), leader, EXCESS)
    assert not is_hopeless(run_with(0.6, 0.7, 0.7, 0.75, target=target), leader, EXCESS)
    assert is_hopeless(run_with(0.1, 0.1, 0.1, 0.1, target=target), leader, EXCESS)
