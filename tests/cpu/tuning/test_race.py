"""The race: today's setting against the advice, by training both. Seconds are given, so that no clock decides."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import outcore
from outcore.tuning.advice import Advice
from outcore.tuning.choosing import Choosing
from outcore.tuning.curve import Curve, Planned, Point
from outcore.tuning.probing import Bench
from outcore.tuning.race import LOSS, Finish, Race, Runner, _best_of, _is_hopeless
from outcore.tuning.samples import Samples
from outcore.tuning.starts import Starts
from outcore.tuning.targets import Target, num_held_out
from outcore.tuning.tuner import Asked, Tuner
from tests.cpu.tuning.nets import CPU, convnet, make_sgd, mlp, stripes
from tests.cpu.tuning.test_tune import assert_same, everything_of, generators

pytestmark = pytest.mark.usefixtures("quick")

DATA = stripes()
LONG_S = 1e6  # however slow the machine is: a race then ends by its epochs


def race_of(model: torch.nn.Module, in_core: int = 64, target: Target = LOSS) -> Race:
    samples, optimizer = Samples(DATA, CPU), make_sgd(model.parameters())
    return Race(model, optimizer, F.cross_entropy, samples, None, in_core, print, target)


def unsure(race: Race) -> float:
    return 1 + race.target.unsure(num_held_out(len(DATA)))


def finish(*metrics: float, target: Target = LOSS, lr: float = 0.1) -> Finish:
    looks = tuple((float(at), metric) for at, metric in enumerate(metrics, 1))
    return Finish(Runner("one", 32, lr, 0.5), float(len(metrics)), target, looks)


def test_the_first_at_the_target_is_before_who_is_better_in_the_end() -> None:
    target = Target("val_accuracy", 0.6)
    sooner, better, never = (
        finish(*found, target=target) for found in ((0.5, 0.7, 0.6), (0.4, 0.5, 0.9), (0.3, 0.5, 0.59))
    )
    assert sooner.target_s == pytest.approx(1.5)  # halfway between two looks
    assert better.target_s == pytest.approx(2.25)
    assert never.target_s is None
    assert sorted([never, better, sooner], key=lambda found: found.place) == [sooner, better, never]
    race = race_of(mlp(), target=target)
    assert race.length_s(sooner) == pytest.approx(1.5 * 3.0 * unsure(race))
    assert sooner.cost < better.cost < never.cost < replace(sooner, gave_up=True).cost


def test_nearer_in_the_end_counts_and_not_the_mean_on_the_way() -> None:
    """A high rate looks bad until it falls: the mean of the looks would take the other."""
    noisy, calm = finish(1.5, 1.6, 1.5, 0.8), finish(1.3, 1.1, 1.0, 0.95)
    assert noisy.cost < calm.cost


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
def test_other_orders_of_the_data_decide(seconds: tuple[float, ...], wins: bool) -> None:
    """Today's setting takes 2 s, whatever the order."""
    target = Target("val_accuracy", 0.6)
    race = race_of(mlp(), target=target)
    race.run_s = 3.0

    def run(runner: Runner, leader: Finish | None, limit_s: float, order: int = 0) -> Finish:
        took_s = 2.0 if runner == today else seconds[order]
        looks = ((took_s, 0.6), (3.0, 0.7)) if took_s < 3 else ((3.0, 0.5),)
        race.ran.append(Finish(runner, 3.0, target, looks, order=order))
        return race.ran[-1]

    today, other = Runner("today's setting", 32, 0.1, 0.01), Runner("the advice", 64, 0.2, 0.01)
    race.run = run  # type: ignore[method-assign]
    done = [run(other, None, 9.0), run(today, None, 9.0)]
    assert race._final(done, today, 60.0).runner == (other if wins else today)
    assert len(race.ran) == 6


TODAY, ADVICE = Runner("today's setting", 32, 0.1, 0.01), Runner("the advice", 64, 0.2, 0.01)


def race_by(target_s: Callable[[Runner, int, float], float], run_s: float = 1.0) -> Race:
    """Its runs come to the target after so many seconds of (runner, order, length), if they last so long."""
    race = race_of(mlp(), target=Target("val_accuracy", 0.6))
    race.run_s = run_s

    def run(runner: Runner, leader: Finish | None, limit_s: float, order: int = 0) -> Finish:
        took_s = target_s(runner, order, race.run_s)
        looks = ((took_s, 0.6), (race.run_s, 0.7)) if took_s <= race.run_s else ((race.run_s, 0.55),)
        race.ran.append(Finish(runner, race.run_s, race.target, looks, order=order))
        race.spent_s += race.run_s
        return race.ran[-1]

    race.run = run  # type: ignore[method-assign]
    return race


@pytest.mark.parametrize("lucky", [False, True])
def test_runs_grow_until_the_target_is_reached_in_every_order(lucky: bool) -> None:
    """A leader that was lucky would make all runs, and the training advised, as short as its own."""
    race = race_by(lambda runner, order, run_s: 0.7 if lucky and order == 1 else 0.3)
    winner = race.between(TODAY, [ADVICE], limit_s=16.0)
    assert winner is not None
    assert race.ran[0].run_s == 0.5
    assert winner.run_s == pytest.approx(0.96 if lucky else 0.375)  # six epochs at most
    assert {found.order for found in race.final[winner.runner]} == {0, 1, 2}


@pytest.mark.parametrize("is_near", [False, True])
def test_a_race_goes_on_for_as_long_again_where_the_target_is_near(is_near: bool) -> None:
    race, left = race_of(mlp(), target=Target("val_accuracy", 0.9 if is_near else 0.98)), 0.25

    def run(runner: Runner, leader: Finish | None, limit_s: float, order: int = 0) -> Finish:
        end = 1 - left * (runner.lr / 0.2) ** 0.1 / race.run_s
        race.ran.append(Finish(runner, race.run_s, race.target, ((race.run_s, end),), order=order))
        race.spent_s += race.run_s
        return race.ran[-1]

    race.run = run  # type: ignore[method-assign]
    today, advice = (replace(runner, step_s=0.05) for runner in (TODAY, ADVICE))
    winner = race.between(today, [advice], limit_s=13.0)
    assert winner is not None
    assert max(found.run_s for found in race.ran) == pytest.approx(3.2 if is_near else 1.6)
    assert len(race.final[today]) == 3  # runs are no longer than a final from every start allows
    assert (winner.target_s is not None) == is_near
    assert race.spent_s < (4 if is_near else 2) * 13.0


@pytest.mark.parametrize("target", [LOSS, Target("val_accuracy", 0.9)])
def test_today_is_compared_with_another_also_where_it_leads_and_time_is_short(target: Target) -> None:
    """In short runs today's setting is ahead, in longer ones the advice: with one run left, nobody else was known."""
    race = race_of(mlp(), target=target)

    def run(runner: Runner, leader: Finish | None, limit_s: float, order: int = 0) -> Finish:
        grows = 0.5 if runner.name == today.name else 0.9
        left = (0.5 if runner.name == today.name else 0.55) / (race.run_s / 0.8) ** grows
        end = 1 - left if target is not LOSS else left
        race.ran.append(Finish(runner, race.run_s, race.target, ((race.run_s, end),), order=order))
        race.spent_s += race.run_s
        return race.ran[-1]

    race.run = run  # type: ignore[method-assign]
    today, advice = (replace(runner, step_s=0.05) for runner in (TODAY, ADVICE))
    race.run_s = 0.8
    done = [race.run(found, None, 9.0) for found in (today, advice, advice.times(0.5))]
    race.run_s = 1.6
    ranked = [race.run(today, None, 9.0), *done]
    winner = race._final(ranked, today, race.spent_s + 12.0)
    assert winner.runner == advice
    assert [len(race.final[runner]) for runner in (today, advice)] == [3, 3]


def test_where_time_is_short_fewer_are_compared_in_all_orders() -> None:
    race = race_by(lambda runner, order, run_s: 0.4 + runner.lr)
    others = [ADVICE.times(factor) for factor in (1.0, 0.5, 0.25)]
    done = [race.run(runner, None, 9.0) for runner in (*others, TODAY)]
    winner = race._final(done, TODAY, race.spent_s + 6.0)
    assert [len(race.final[runner]) for runner in (*others, TODAY)] == [1, 3, 3, 3]
    assert winner.runner == TODAY  # 0.45 s are not clearly sooner than its 0.5
    assert "from the same start: 10 runs" in race.told(winner)
    assert "in the mean over 1 to 3 orders of the data" in race.told(winner)
    race.starts_differ = True
    assert "in the mean over 1 to 3 starts" in race.told(winner)
    assert "which stays: nothing was clearly better every time" in race.told(winner)


def test_a_rate_beside_one_that_fails_comes_to_the_final_last() -> None:
    """It may be the first at the target: another start may not bear it."""
    race = race_by(lambda runner, order, run_s: 0.2 + 0.01 / runner.lr)
    safe, edge, *low = (ADVICE.times(factor) for factor in (1.0, 3**0.5, 0.5, 0.25))
    done = [race.run(runner, None, 9.0) for runner in (edge, safe, *low, TODAY)]
    assert not any(race.is_at_the_edge(found.runner) for found in done)
    failed = ADVICE.times(3.0)
    for end in (Finish(failed, 1.0, race.target, ((0.5, 0.1),), gave_up=True), finish(0.4, 0.076, target=race.target)):
        race.ran = [*done, replace(end, runner=failed)]
        assert [race.is_at_the_edge(found.runner) for found in done] == [True, False, False, False, False]
    assert race._final(done, TODAY, 60.0).runner == safe
    assert edge not in race.final


def test_the_length_goes_by_the_worst_order_and_the_number_of_held_out_samples() -> None:
    race = race_of(mlp(), target=Target("val_accuracy", 0.88))
    runner = Runner("one", 32, 0.1, 0.5)
    short, good, bad = (
        Finish(runner, run_s, race.target, ((run_s, end),)) for run_s, end in ((4.0, 0.8), (8.0, 0.9), (8.0, 0.89))
    )
    race.ran = [short, good]
    best_s = race.length_s(good)
    race.final = {runner: [good, bad]}
    length_s = race.length_s(good)
    assert best_s == pytest.approx(1.25 * 8.0 * unsure(race))  # it ended beyond the target: a quarter is enough
    assert length_s == pytest.approx(1.25 * 8.0 * unsure(race))  # 0.11 to 0.108 is little
    race.final = {runner: [good, replace(bad, looks=((8.0, 0.84),))]}
    assert race.length_s(good) == pytest.approx(1.25 * 8.0 * (0.16 / 0.108) * unsure(race))  # a guess, and stretched


def test_every_order_of_the_data_has_a_start_of_its_own() -> None:
    """Weights and buffers, made once; the model has its own again afterwards."""
    torch.manual_seed(7)
    race, num_made = race_of(convnet()), 0

    def make() -> torch.nn.Module:
        nonlocal num_made
        num_made += 1
        made = convnet()
        made.get_buffer("1.running_mean").fill_(num_made)
        return made

    starts = Starts(make, race.model, race.optimizer, 1 << 30)
    begun: list[list[torch.Tensor]] = []

    def noted(order: int) -> bool:
        differ = starts.put(order)
        assert differ == (order > 0)
        begun.append([tensor.clone() for tensor in race.model.state_dict().values()])
        return differ

    race.start, race.run_s = noted, 0.2
    before = deepcopy(race.model.state_dict())
    for order in (0, 1, 2, 1):
        race.run(Runner("one", 32, 0.05, 0.05), None, 60.0, order)
    torch.testing.assert_close(race.model.state_dict(), before, rtol=0, atol=0)
    assert num_made == 2
    assert all(map(torch.equal, begun[0], before.values()))
    assert all(map(torch.equal, begun[1], begun[3]))
    assert len({float(weights[0].detach().sum()) for weights in begun}) == 3
    means = [weights[[*before].index("1.running_mean")] for weights in begun]
    assert [float(found.mean()) for found in means] == [0, 1, 2, 1]
    assert race.starts_differ


def test_a_start_is_left_as_it_is_where_there_is_no_other() -> None:
    """One model instead of a function, no memory, a function whose models differ, are all the same, or that fails."""
    model = mlp()
    optimizer, before = make_sgd(model.parameters()), deepcopy(model.state_dict())
    model_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def same() -> torch.nn.Module:
        made = mlp()
        made.load_state_dict(before)
        return made

    def fails() -> torch.nn.Module:
        raise RuntimeError("made once")

    for make in (model, convnet, same, fails, lambda: model):
        assert not Starts(make, model, optimizer, 1 << 30).put(1)
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert not Starts(mlp, model, optimizer, 3 * model_bytes - 1).put(1)  # two models, and what is kept of one
    assert Starts(mlp, model, optimizer, 3 * model_bytes).put(1)
    assert not torch.equal(model.state_dict()["1.weight"], before["1.weight"])
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # momentum is as large as the model, and counts
    assert not Starts(mlp, model, optimizer, 4 * model_bytes - 1).put(2)
    assert Starts(mlp, model, optimizer, 4 * model_bytes).put(2)


def test_starts_leave_the_generators_where_they_were_and_no_model_behind() -> None:
    """A model may hold itself; Python's and NumPy's generators may have a part in its weights."""
    alive: list[Any] = []

    class Circular(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.tensor([random.random(), np.random.rand(), float(torch.rand(1))]))
            self.me = [self]
            alive.append(weakref.ref(self))

    model = Circular()
    starts, before = Starts(Circular, model, make_sgd(model.parameters()), 1 << 30), generators()
    weights = []
    for order in (1, 2):
        assert starts.put(order)
        weights.append(model.weight.detach().clone())
    assert (weights[0] != weights[1]).all()
    assert [found() is not None for found in alive] == [True, False, False]
    assert before == generators()


def test_few_held_out_samples_leave_an_accuracy_unsure() -> None:
    target = Target("val_accuracy", 0.93)
    assert target.unsure(500) == pytest.approx((0.93 * 0.07 / 500) ** 0.5 / 0.07)
    assert target.unsure(10) == 0.5
    assert target.unsure(0) == Target("val_accuracy", 1.0).unsure(500) == Target("val_loss", 0.1).unsure(500) == 0.0


def test_an_advice_that_does_not_train_loses_to_today() -> None:
    race = race_of(mlp())
    winner = race.between(Runner("today", 32, 0.05, 0.01), [Runner("the advice", 64, 1e30, 0.015)], LONG_S)
    assert winner is not None
    assert winner.runner.name == "today"
    assert [found.gave_up for found in race.ran[:3]] == [False, True, True]
    assert "today (batch 32, rate 0.05)" in race.told(winner)
    assert "the advice (batch 64, rate 1e+30)" in race.told(winner)
    assert f"gave up; the winner is {winner.runner.told}" in race.told(winner)
    assert len(race.told(winner)) < 600


def test_higher_rates_are_tried_until_none_is_better() -> None:
    race = race_of(mlp())
    winner = race.between(Runner("today", 32, 1e-5, 0.01, warms_up=False), [Runner("the advice", 32, 1e-3, 0.01)], 60.0)
    assert winner is not None
    assert winner.runner.lr > 9e-3  # beyond the highest that it began with
    rates = [found.runner.lr for found in race.ran]
    assert rates[:6] == pytest.approx([1e-5, 1e-3, 3e-3, 1e-3 / 3, 9e-3, 1e-5 * 3**0.5])
    assert race.ran[5].runner.name == "today"
    assert race.ran[5].num_warm_up_steps > 0
    assert race.ran[0].num_warm_up_steps == 0
    assert race.ran[1].num_warm_up_steps > 0
    assert race.spent_s <= 120.0
    longest = [found for found in race.ran if found.run_s == winner.run_s]
    finalists = {found.runner for found in longest if found.order == 2}
    assert len(finalists) > 2
    costs = {runner: sum(found.cost for found in longest if found.runner == runner) for runner in finalists}
    assert winner.runner == min(costs, key=lambda runner: costs[runner])  # without a target the end is all there is


def test_of_those_that_come_together_the_best_in_the_end_is_taken() -> None:
    target = Target("val_accuracy", 0.6)

    def starts(*, end: float, target_s: float) -> list[Finish]:
        looks = (target_s, 0.6), (3.0, end)
        return [Finish(Runner("", 32, 0.1, 0.01), 3.0, target, looks, order=order) for order in range(3)]

    today, soon, good, late = (Runner(name, 32, 0.1, 0.01) for name in ("today", "soon", "good", "late"))
    field = {today: starts(end=0.9, target_s=2.0), soon: starts(end=0.7, target_s=1.0)}
    assert _best_of(field, today) == soon
    assert _best_of({**field, good: starts(end=0.8, target_s=1.1)}, today) == good
    assert _best_of({**field, late: starts(end=0.8, target_s=1.3)}, today) == soon
    assert _best_of({today: field[today], good: starts(end=0.95, target_s=1.95)}, today) == today
    few = {today: field[today][:1], good: starts(end=0.95, target_s=1.5)[:1]}
    assert _best_of(few, today) == today  # one start of each tells less
    assert _best_of({**few, good: starts(end=0.95, target_s=1.3)[:1]}, today) == good
    near, far = (replace(found, looks=((3.0, end),)) for found, end in zip(starts(end=0.5, target_s=1.0), (0.55, 0.2)))
    assert _best_of({today: [far], good: [near]}, today) == good  # nobody is there yet


def test_smaller_batches_are_tried_and_the_target_ends_the_growing() -> None:
    """Where a step of 128 costs as much as one of 32, 128 wins; where it costs four times as much, not."""
    for name, step_s in (
        ("alike", {128: 0.01, 64: 0.01, 32: 0.01}),
        ("by the sample", {128: 0.04, 64: 0.02, 32: 0.01}),
    ):
        race = race_of(mlp(), in_core=128, target=Target("val_accuracy", 0.95))
        advised = [Runner(f"{batch}", batch, 1e-3, seconds) for batch, seconds in step_s.items()]
        winner = race.between(Runner("today", 128, 1e-6, step_s[128], warms_up=False), advised, 100.0)
        assert {ran.runner.batch for ran in race.ran} == {32, 64, 128}
        assert winner is not None
        assert winner.target_s is not None
        assert winner.target_s <= winner.run_s <= race.ran[0].run_s
        assert 1.25 * winner.run_s <= (race.length_s(winner) or 0.0) / unsure(race) <= 1.5 * winner.run_s
        assert name == "alike" or winner.runner.batch < 128


def test_a_length_is_continued_along_the_ends_of_runs_but_not_far() -> None:
    race = race_of(mlp(), target=Target("val_accuracy", 0.88))
    race.ran = [
        Finish(Runner("one", 32, 0.1, 0.5), run_s, race.target, ((run_s, 1 - 0.8 / run_s**0.5),))
        for run_s in (4.0, 16.0)
    ]
    assert race.length_s(race.ran[-1]) == pytest.approx(1.25 * (0.8 / 0.108) ** 2 * unsure(race))
    race.target = Target("val_accuracy", 0.95)
    assert race.length_s(race.ran[-1]) is None
    race.ran = race.ran[:1]
    assert race.length_s(race.ran[-1]) is None
    assert race_of(mlp()).length_s(finish(1.0, 0.9)) is None  # a loss has no target


def test_a_warm_up_is_over_long_before_the_race_is() -> None:
    """Or a rate would win that never was run."""
    race = race_of(mlp())
    race.run_s = 0.8
    assert race.samples.num is not None
    assert race.samples.num > 80
    assert race._num_warm_up_steps(Runner("one", 1, 0.05, 0.01)) == 8
    assert race._num_warm_up_steps(Runner("one", 1, 0.05, 0.01, warms_up=False)) == 0


def test_of_two_that_train_alike_today_stays() -> None:
    race = race_of(mlp())
    race.samples.data = torch.utils.data.TensorDataset(DATA.tensors[0], DATA.tensors[1].roll(1))  # nothing to learn
    winner = race.between(Runner("today", 32, 1e-7, 0.01), [Runner("the advice", 32, 1e-6, 0.01)], LONG_S)
    assert winner is not None
    assert winner.runner.name == "today"


def test_the_rate_of_a_run_ends_at_zero() -> None:
    race, rates = race_of(mlp()), []
    race.run_s = 0.3
    race.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    race.run(Runner("one", 32, 0.06, 0.01, warms_up=False), None, 1.0)
    assert rates[:20] == pytest.approx([0.06] * 20)
    assert rates[20:] == pytest.approx([0.006 * left for left in range(10, 0, -1)])


def test_every_run_starts_alike_and_nothing_is_left_of_it() -> None:
    """Dropout, BatchNorm, momentum; and a batch that runs in smaller parts sees the same samples."""
    torch.manual_seed(3)
    model = convnet()
    race = race_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    race.optimizer.step()  # so that there is momentum to keep
    before, numbers, state = everything_of(model), generators(), deepcopy(race.optimizer.state_dict())
    race.run_s = 0.4
    first, again = (race.run(Runner("one", 32, 0.05, 0.01), None, 1.0) for _ in range(2))
    assert first.num_warm_up_steps == 1
    assert first.looks == again.looks
    assert len(set(first.looks)) == len(first.looks)
    assert_same(before, everything_of(model))
    assert generators() == numbers
    after = race.optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, kept in state["state"].items():
        assert torch.equal(after["state"][key]["momentum_buffer"], kept["momentum_buffer"])
    whole, parts = (race_of(net, in_core) for net, in_core in ((mlp(), 64), (mlp(), 16)))
    parts.model.load_state_dict(whole.model.state_dict())
    whole.run_s = parts.run_s = 0.08
    ends = [
        [metric for _, metric in race.run(Runner("one", 64, 0.05, 0.01), None, 1.0).looks] for race in (whole, parts)
    ]
    assert ends[1] == pytest.approx(ends[0], rel=1e-3)


def test_no_verdict_where_there_is_no_time_for_one() -> None:
    assert race_of(mlp()).between(Runner("today", 32, 0.1, 1.0), [Runner("the advice", 32, 1.0, 1.0)], 20.0) is None


@pytest.mark.parametrize(("race", "chosen"), [(True, 64), (False, 256)])
def test_theory_alone_takes_no_batch_that_is_too_slow_to_be_raced(race: bool, chosen: int) -> None:
    """All noise: whatever trains the most samples per second, and with a race no longer than its steps may take."""
    steps_s = {32: 0.01, 64: 0.015, 256: 0.05}
    points = [Point(b, 0, s, b / s, 0, 0, 0, True, True, measured_step_s=s) for b, s in steps_s.items()]
    asked = Asked(mlp, F.cross_entropy, make_sgd, 1, None, True, None, "adascale", trial_s=5.0, race=race)
    tuner = Tuner(asked, Samples(DATA, CPU), mlp(), None, lambda what, part: None)
    curve = Curve(tuple(points), 1, 0.0, largest_in_core=256)
    bench = SimpleNamespace(device=torch.device("cuda"))  # every batch ran: nothing else is asked of it
    choosing = Choosing(cast(Bench, bench), cast(Planned, None), curve)
    assert tuner._by_goodput(choosing, 1e9, 32) == (chosen, chosen)


def tuned(lr: float, make_model: Callable[[], torch.nn.Module] = mlp, **options: Any) -> Advice:
    make = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    given: dict[str, Any] = {"dataset": DATA, "optimizer": make, "memory": "16MiB", "trial_s": LONG_S} | options
    return outcore.tune(make_model, F.cross_entropy, **given)


def test_tune_races_what_it_would_change(tmp_path: Any) -> None:
    numbers = generators()
    advice = tuned(1e-6, disk=tmp_path)
    assert generators() == numbers
    said = [why for why in advice.why if why.startswith("raced")]
    assert len(said) == 1
    assert "today's setting (batch 32, rate 1e-06)" in said[0]
    assert advice.learning_rate is not None
    assert 1e-4 < advice.learning_rate < 3
    assert Advice.from_json(advice.to_json()) == advice


@pytest.mark.parametrize("shared", [False, True])
def test_a_race_makes_further_starts_unless_the_model_is_somebody_elses(tmp_path: Any, shared: bool) -> None:
    """A function that hands out a module of the user's may do anything to it: it is called once."""
    body, num_made = mlp(), 0
    before = deepcopy(body.state_dict())

    def make() -> torch.nn.Module:
        nonlocal num_made
        num_made += 1
        return body if shared else mlp()

    advice = tuned(1e-6, make, disk=tmp_path)
    (said,) = [why for why in advice.why if why.startswith("raced")]
    assert num_made == (1 if shared else 3)
    assert ("3 orders of the data" if shared else "3 starts") in said
    torch.testing.assert_close(body.state_dict(), before, rtol=0, atol=0)


def test_a_setting_that_diverges_from_some_starts_gets_no_length() -> None:
    race = race_of(mlp(), target=Target("val_loss", 0.5))
    runner = Runner("one", 32, 0.1, 0.5)
    ended = [Finish(runner, 8.0, race.target, ((8.0, end),), gave_up=end != end) for end in (0.6, float("nan"), 0.55)]
    race.ran = [*ended, replace(ended[0], run_s=4.0, looks=((4.0, 0.8),))]
    race.final = {runner: [ended[0], ended[2]]}
    assert race.length_s(ended[0]) is not None
    race.final = {runner: ended}
    assert race.length_s(ended[0]) is None
    race.final = {runner: [replace(found, gave_up=False) for found in ended[1:2]]}
    assert race.length_s(ended[0]) is None


def test_a_target_reached_in_the_race_is_not_trained_for_again(tmp_path: Any) -> None:
    told: list[str] = []
    say = lambda what, part: told.append(what)  # noqa: E731
    advice = tuned(1e-6, disk=tmp_path, target=("val_accuracy", 0.8), trial_s=60.0, progress=say)
    assert advice.num_steps > 0
    assert advice.target_s == pytest.approx(advice.num_steps * advice.step_s)
    assert not any("training towards" in what for what in told)
    assert f"{advice.num_steps} steps, the rate falling to zero" in str(advice)
    assert Advice.from_json(advice.to_json()) == advice


def test_what_trains_begins_without_the_momentum_of_timed_steps() -> None:
    """Ten steps of one batch at a rate of zero leave ten times its gradient."""
    model = mlp()
    asked = Asked(mlp, F.cross_entropy, make_sgd, 1, None, True, None, "adascale", trial_s=5.0, race=True)
    optimizer = make_sgd(model.parameters())
    tuner = Tuner(asked, Samples(DATA, CPU), model, optimizer, lambda what, part: None)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    with tuner._anew():
        assert not optimizer.state
        optimizer.step()
    for parameter, buffer in zip(model.parameters(), kept):
        assert optimizer.state[parameter]["momentum_buffer"] is buffer
        assert torch.equal(buffer, torch.ones_like(buffer))
    ready = torch.optim.Adagrad(model.parameters())  # which has state before its first step
    tuner = Tuner(asked, Samples(DATA, CPU), model, ready, lambda what, part: None)
    with tuner._anew():
        assert ready.state


def test_without_time_for_a_race_it_says_so(tmp_path: Any) -> None:
    advice = tuned(1e-6, disk=tmp_path, batch=32, learning_rate="find", trial_s=1e-3)
    assert any("its steps take too long for a race; raise trial_s" in why for why in advice.why)


def test_no_race_where_nothing_changes_nor_where_it_is_not_wanted(tmp_path: Any) -> None:
    for options in ({"batch": 64}, {"race": False}):
        assert not any("raced" in why or "compared" in why for why in tuned(0.05, disk=tmp_path, **options).why)


def test_a_function_has_no_samples_to_hold_out(tmp_path: Any) -> None:
    def draw(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.randint(0, len(DATA), (size,))
        return DATA.tensors[0][rows], DATA.tensors[1][rows]

    advice = tuned(1e-5, dataset=draw, disk=tmp_path, largest=64)
    assert any("a function's samples cannot be held out" in why for why in advice.why)


def test_losses_below_zero_race_too() -> None:
    """Of a density, say: a share of such a number points the other way."""
    today, other = Runner("today", 32, 0.1, 0.01), Runner("other", 32, 0.2, 0.01)
    assert _best_of({today: [finish(-4.0)], other: [finish(-5.0)]}, today) == other
    assert _best_of({today: [finish(-4.0)], other: [finish(-4.1)]}, today) == today
    assert _best_of({today: [replace(finish(-4.0), gave_up=True)], other: [finish(-1.0)]}, today) == other
    assert finish(-1.0).target_s is None  # without a target none is reached
    assert finish(0.0).target_s is None


def test_who_reached_the_target_does_not_give_up() -> None:
    target = Target("val_accuracy", 0.85)
    leader = finish(0.9, 0.95, 1.0, 1.0, 1.0, target=target)
    assert not _is_hopeless(finish(0.92, 0.95, 0.94, 0.93, target=target), leader)
    assert not _is_hopeless(finish(0.6, 0.7, 0.7, 0.75, target=target), leader)
    assert _is_hopeless(finish(0.1, 0.1, 0.1, 0.1, target=target), leader)
