"""The race: today's setting against the advice, by training both. Seconds are given, so that no clock decides."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

import outcore
from outcore.tuning.advice import Advice
from outcore.tuning.choosing import Choosing
from outcore.tuning.curve import Curve, Planned, Point
from outcore.tuning.probing import Bench
from outcore.tuning.race import NUM_RUNNERS, Race, Runner
from outcore.tuning.samples import Samples
from outcore.tuning.tuner import Asked, Tuner
from tests.cpu.tuning.nets import CPU, convnet, make_sgd, mlp, stripes
from tests.cpu.tuning.test_tune import assert_same, everything_of, generators

pytestmark = pytest.mark.usefixtures("quick")

DATA = stripes()
LONG_S = 1e6  # however slow the machine is: a race then ends by its epochs


def race_of(model: torch.nn.Module, in_core: int = 64) -> Race:
    return Race(model, make_sgd(model.parameters()), F.cross_entropy, Samples(DATA, CPU), None, in_core, print)


def test_an_advice_that_does_not_train_loses_to_today() -> None:
    race = race_of(mlp())
    winner = race.between(Runner("today", 32, 0.05, 0.01), Runner("the advice", 64, 1e30, 0.015), LONG_S)
    assert winner is not None
    assert winner.runner.name == "today"
    assert [found.gave_up for found in race.ran[:3]] == [False, True, True]
    assert "today (batch 32, rate 0.05)" in race.told(winner)
    assert "the advice (batch 64, rate 1e+30) gave up" in race.told(winner)


def test_a_better_rate_wins_and_three_times_that_is_tried_too() -> None:
    race = race_of(mlp())
    winner = race.between(Runner("today", 32, 1e-5, 0.01), Runner("the advice", 32, 0.003, 0.01), LONG_S)
    assert winner is not None
    assert winner.runner.lr >= 0.003
    rates = [found.runner.lr for found in race.ran]
    assert rates[:4] == pytest.approx([1e-5, 0.003, 0.001, 0.009])
    assert [found.runner.num_warm_up_steps for found in race.ran[:4]] == [0, 0, 0, len(DATA) // 320]
    assert len(rates) <= NUM_RUNNERS
    best = min(found.loss for found in race.ran)
    assert winner.loss <= best * 1.1


def test_a_warm_up_is_over_long_before_the_race_is() -> None:
    """Or a rate would win that never was run."""
    race = race_of(mlp())
    race.run_s = 0.8
    assert race.samples.num is not None
    assert race.samples.num > 80
    assert race._warmed(Runner("one", 1, 0.05, 0.01)).num_warm_up_steps == 8


def test_of_two_that_train_alike_today_stays() -> None:
    race = race_of(mlp())
    race.samples.data = torch.utils.data.TensorDataset(DATA.tensors[0], DATA.tensors[1].roll(1))  # nothing to learn
    winner = race.between(Runner("today", 32, 1e-7, 0.01), Runner("the advice", 32, 1e-6, 0.01), LONG_S)
    assert winner is not None
    assert winner.runner.name == "today"


def test_every_run_starts_alike_and_nothing_is_left_of_it() -> None:
    """Dropout, BatchNorm, momentum; and a batch that runs in smaller parts sees the same samples."""
    torch.manual_seed(3)
    model = convnet()
    race = race_of(model)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    race.optimizer.step()  # so that there is momentum to keep
    before, numbers, state = everything_of(model), generators(), deepcopy(race.optimizer.state_dict())
    race.run_s = 0.16
    first, again = (race._run(Runner("one", 32, 0.05, 0.01, num_warm_up_steps=4), None) for _ in range(2))
    assert first.losses == again.losses
    assert len(set(first.losses)) == len(first.losses)
    assert_same(before, everything_of(model))
    assert generators() == numbers
    after = race.optimizer.state_dict()
    assert after["param_groups"] == state["param_groups"]
    for key, kept in state["state"].items():
        assert torch.equal(after["state"][key]["momentum_buffer"], kept["momentum_buffer"])
    whole, parts = (race_of(net, in_core) for net, in_core in ((mlp(), 64), (mlp(), 16)))
    parts.model.load_state_dict(whole.model.state_dict())
    whole.run_s = parts.run_s = 0.08
    runner = Runner("one", 64, 0.05, 0.01)
    assert parts._run(runner, None).losses == pytest.approx(whole._run(runner, None).losses, rel=1e-3)


def test_no_verdict_where_there_is_no_time_for_one() -> None:
    assert race_of(mlp()).between(Runner("today", 32, 0.1, 1.0), Runner("the advice", 32, 1.0, 1.0), 20.0) is None


@pytest.mark.parametrize(("race", "chosen"), [(True, 64), (False, 256)])
def test_theory_alone_takes_no_batch_that_is_too_slow_to_be_raced(race: bool, chosen: int) -> None:
    """All noise: whatever trains the most samples per second, and with a race no longer than its steps may take."""
    steps_s = {32: 0.01, 64: 0.015, 256: 0.05}
    points = [Point(b, 0, s, b / s, 0, 0, 0, True, True, measured_step_s=s) for b, s in steps_s.items()]
    asked = Asked(mlp, F.cross_entropy, make_sgd, 1, None, True, None, "adascale", trial_s=5.0, race=race)
    tuner = Tuner(asked, Samples(DATA, CPU), mlp(), None, lambda what, part: None)
    curve = Curve(tuple(points), 1, 0.0, largest_in_core=256)
    choosing = Choosing(cast(Bench, None), cast(Planned, None), curve)  # every batch ran: neither is asked
    assert tuner._by_goodput(choosing, 1e9, 32) == (chosen, chosen)


def tuned(lr: float, **options: Any) -> Advice:
    make = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    given: dict[str, Any] = {"dataset": DATA, "optimizer": make, "memory": "16MiB", "trial_s": LONG_S} | options
    return outcore.tune(mlp, F.cross_entropy, **given)


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
