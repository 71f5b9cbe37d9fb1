"""What `tune` changes, it has compared with today's setting; what it cannot compare, it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn import functional as F

from outcore.tuning.advice import Advice
from outcore.tuning.data.samples import Samples
from outcore.tuning.gradients.goodput import goodput
from outcore.tuning.options import Data, Effort, Memory, Request
from outcore.tuning.parts import Parts
from outcore.tuning.reasons import why_goodput
from outcore.tuning.setting_builder import SettingBuilder
from outcore.tuning.throughput.bench import Bench
from outcore.tuning.throughput.builder import CurveBuilder, effective_batches
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.throughput.prediction import BatchPlanner, Point
from outcore.tuning.tuner import Tuner
from tests.cpu.tuning.flat import tune
from tests.cpu.tuning.nets import CPU, make_sgd, mlp, stripes
from tests.cpu.tuning.test_tune import generators

pytestmark = pytest.mark.usefixtures("quick")

DATA = stripes(256)


def silent(what: str, part: float) -> None:
    """No progress is shown."""


def tuned(lr: float, make_model: Callable[[], torch.nn.Module] = mlp, **options: Any) -> Advice:
    make = partial(torch.optim.SGD, lr=lr, momentum=0.9)
    given: dict[str, Any] = {"dataset": DATA, "optimizer": make, "memory": "16MiB", "trial_s": 8.0} | options
    return tune(make_model, F.cross_entropy, **given)


def parts_of(request: Request, optimizer: torch.optim.Optimizer | None = None, bench: Any = None) -> Parts:
    model = mlp()
    has_state = optimizer is not None and bool(optimizer.state)
    return Parts(request, model, True, optimizer, Samples(DATA, CPU), None, silent, bench, has_state=has_state)


# -- what is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("race", "chosen"), [(True, 64), (False, 256)])
def test_no_batch_is_proposed_whose_steps_are_too_long_to_be_compared(race: bool, chosen: int) -> None:
    """All noise: whatever trains the most samples per second."""
    steps_s = {32: 0.01, 64: 0.015, 256: 0.05}
    points = [Point(b, 0, s, b / s, 0, 0, 0, True, True, measured_step_s=s) for b, s in steps_s.items()]
    effort = Effort(trial_s=5.0, race=race)
    bench = SimpleNamespace(device=torch.device("cuda"))  # every batch ran: nothing else is asked of it
    parts = parts_of(Request(mlp, F.cross_entropy, make_sgd, Data(DATA), Memory(1), effort=effort), bench=bench)
    tuner = Tuner(parts)
    curve = Curve(tuple(points), 1, 0.0, largest_in_core=256)
    curves = CurveBuilder(cast(Bench, bench), cast(BatchPlanner, None), curve)
    tuner.settings = SettingBuilder(parts, curves, today_batch=32)
    assert tuner._by_goodput(curves, 1e9) == (chosen, chosen)


def test_tune_races_what_it_would_change(folder: str) -> None:
    numbers = generators()
    advice = tuned(1e-6, disk=folder)
    assert generators() == numbers
    said = [why for why in advice.why if why.startswith("raced")]
    assert len(said) == 1
    assert "today's setting (batch 32, rate 1e-06)" in said[0]
    assert advice.learning_rate is not None
    assert 1e-4 < advice.learning_rate < 3
    assert not advice.unchecked
    assert Advice.from_json(advice.to_json()) == advice


@pytest.mark.parametrize("shared", [False, True])
def test_a_race_makes_further_models_unless_the_user_holds_the_first(folder: str, shared: bool) -> None:
    """A function that returns a module of the user's may do anything to it: it is called once."""
    body, num_made = mlp(), 0
    before = deepcopy(body.state_dict())

    def make() -> torch.nn.Module:
        nonlocal num_made
        num_made += 1
        return body if shared else mlp()

    advice = tuned(1e-6, make, disk=folder, batch=32, learning_rate="find")
    (said,) = [why for why in advice.why if why.startswith("raced")]
    assert num_made == (1 if shared else 3)
    assert ("3 orders of the data" if shared else "3 starts") in said
    torch.testing.assert_close(body.state_dict(), before, rtol=0, atol=0)


def test_a_target_reached_in_the_race_is_not_trained_for_again(folder: str) -> None:
    told: list[str] = []
    advice = tuned(
        1e-6,
        disk=folder,
        target=("val_accuracy", 0.8),
        trial_s=20.0,
        progress=lambda what, part: told.append(what),
    )
    assert advice.num_steps > 0
    assert advice.target_s == pytest.approx(advice.num_steps * advice.step_s)
    assert not any("training towards" in what for what in told)
    assert f"{advice.num_steps} steps, the rate falling to zero" in str(advice)
    assert Advice.from_json(advice.to_json()) == advice


def test_what_trains_begins_without_the_momentum_of_timed_steps() -> None:
    """Ten steps of one batch at a rate of zero leave ten times its gradient."""
    model = mlp()
    request = Request(mlp, F.cross_entropy, make_sgd, Data(DATA), Memory(1))
    optimizer = make_sgd(model.parameters())
    parts = parts_of(request, optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    kept = [optimizer.state[parameter]["momentum_buffer"] for parameter in model.parameters()]
    with parts.without_momentum():
        assert not optimizer.state
        optimizer.step()
    for parameter, buffer in zip(model.parameters(), kept):
        assert optimizer.state[parameter]["momentum_buffer"] is buffer
        assert torch.equal(buffer, torch.ones_like(buffer))
    ready = torch.optim.Adagrad(model.parameters())  # which has state before its first step
    with parts_of(request, ready).without_momentum():
        assert ready.state


# -- what is not compared ----------------------------------------------------------------------------------------------


def draw(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.randint(0, len(DATA), (size,))
    return DATA.tensors[0][rows], DATA.tensors[1][rows]


NOT_COMPARED: dict[str, tuple[dict[str, Any], str]] = {
    "no time": ({"learning_rate": "find", "trial_s": 1e-3}, "its steps take too long for a race; raise trial_s"),
    "no race": (
        {"batch": 4, "free": True, "race": False},
        "nothing was trained to compare it with, as race=False asks",
    ),
    "a function": (
        {"dataset": draw, "batch": 4, "free": True, "largest": 64},
        "a function's samples cannot be held out",
    ),
    "no optimizer": ({"optimizer": None, "batch": 4, "free": True}, "without an optimizer nothing can be trained"),
    "few samples": (
        {"dataset": stripes(12), "batch": 4, "free": True},
        "the data set has 12 samples, and noise, rates and trainings need 32 or more",
    ),
}


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_what_cannot_be_compared_leaves_todays_setting(name: str, folder: str) -> None:
    changed, reason = NOT_COMPARED[name]
    options: dict[str, Any] = {"batch": 32, "trial_s": 2.0, "disk": folder} | changed
    advice = tuned(1e-5, **options)
    rate = None if "optimizer" in changed else 1e-5
    assert (advice.effective_batch, advice.learning_rate) == (options["batch"], rate)
    assert reason in advice.unchecked
    assert (advice.num_warm_up_steps, advice.beta2, advice.rule) == (0, None, "fixed")
    assert reason in " ".join(str(advice).split())
    assert Advice.from_json(advice.to_json()) == advice


def test_the_proposal_is_told_beside_todays_setting(folder: str) -> None:
    advice = tuned(1e-5, disk=folder, batch=4, free=True, race=False, trial_s=2.0)
    proposal = advice.proposal
    assert proposal is not None
    assert proposal.effective_batch > 4
    assert f"a batch of {proposal.effective_batch} at a rate of" in " ".join(str(advice).split())


def test_without_a_batch_the_assumed_one_is_said(folder: str) -> None:
    advice = tuned(1e-5, disk=folder, race=False, trial_s=2.0)
    assert (advice.effective_batch, advice.learning_rate) == (32, 1e-5)
    assert "no batch was given: 32 is assumed as the one you train with" in advice.why


def test_what_changes_nothing_needs_no_race(folder: str) -> None:
    advice = tuned(0.05, disk=folder, batch=64)
    assert not advice.unchecked
    assert not any("raced" in why or "compared" in why for why in advice.why)


def test_speed_alone_is_advised_where_no_training_is_known(folder: str) -> None:
    advice = tune(mlp, F.cross_entropy, DATA, memory="16MiB", disk=folder, largest=64)
    assert not advice.unchecked
    assert advice.effective_batch == advice.curve.knee.micro_batch


# -- timings that cannot be trusted -----------------------------------------------------------------------------------


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real steps take half as long again as predicted: something else ran meanwhile."""
    measured = Curve.measured

    def disturbed(self: Curve, micro_batch: int, step_s: float, *others: Any) -> Curve:
        return measured(self, micro_batch, 1.5 * step_s, *others)

    monkeypatch.setattr(Curve, "measured", disturbed)


@pytest.mark.usefixtures("busy")
@pytest.mark.parametrize("changed", [{"free": True}, {"learning_rate": "find"}, {}], ids=["batch", "rate", "neither"])
def test_timings_of_a_busy_machine_change_nothing(changed: dict[str, Any], folder: str) -> None:
    advice = tuned(1e-5, disk=folder, batch=32, trial_s=2.0, **changed)
    assert (advice.effective_batch, advice.learning_rate) == (32, 1e-5)
    assert "too busy for its timings to be trusted" in advice.unchecked
    assert (advice.micro_batch, advice.accumulation) == (32, 1)  # by its bytes: all of it is in-core
    said = " ".join(advice.why)
    assert "% off what was predicted" in said
    assert "faster" not in said


# -- the table and the sentences --------------------------------------------------------------------------------------


def advice_with(goodputs: dict[int, float], taken: int, unchecked: str = "") -> Advice:
    """A curve whose batches have these goodputs at a noise scale of 64, against a batch of 32."""
    rates = {batch: worth / goodput(1.0, batch, 32, 64.0) for batch, worth in goodputs.items()}
    points = tuple(Point(b, b, b / rate, rate, b, 0, 0, in_core=True, fits=True) for b, rate in rates.items())
    curve = Curve(points, 1 << 20, 0.0, largest_in_core=max(goodputs), most_accumulating=0)
    step_s = taken / rates[taken]
    return Advice(taken, 1, 0.1, rates[taken], step_s, 1, curve, (), noise=64.0, first_batch=32, unchecked=unchecked)


@pytest.mark.parametrize("goodputs", [{32: 900.0, 64: 1000.0, 128: 800.0}, {32: 900.0, 64: 850.0, 128: 1000.0}])
@pytest.mark.parametrize("taken", [32, 64, 128])
@pytest.mark.parametrize("unchecked", ["", "no time"])
def test_only_the_batch_with_the_highest_goodput_gets_furthest_per_second(
    goodputs: dict[int, float], taken: int, unchecked: str
) -> None:
    advice = advice_with(goodputs, taken, unchecked)
    best = max(goodputs, key=lambda batch: goodputs[batch])
    (said,) = why_goodput(advice, 1024)
    shown = {line.split()[1]: line.split()[-2] for line in str(advice).splitlines() if line.startswith("│ ")}
    for batch, worth in goodputs.items():
        assert shown[str(batch)] == f"{worth:.4g}"
    if taken == best:
        assert f"of all batches, {best} gets furthest per second" in said
    else:
        assert f"a batch of {best} would get furthest per second, with {goodputs[best]:.4g}" in said
        assert f"where {taken} has {goodputs[taken]:.4g}" in said
        assert said.endswith("today's setting" if unchecked else "the race")


def test_sentence_and_table_agree_after_a_race(folder: str) -> None:
    advice = tuned(1e-3, disk=folder, batch=32, free=True, trial_s=4.0)
    assert advice.noise is not None
    curve, noise = advice.curve, advice.noise
    worth = {
        batch: goodput(curve.rate(size, batch // size), batch, 32, noise)
        for batch, size in effective_batches(curve, 512).items()
    }
    (said,) = [why for why in advice.why if "furthest per second" in why]
    best = max(worth, key=lambda batch: worth[batch])
    ours = goodput(curve.rate(advice.micro_batch, advice.accumulation), advice.effective_batch, 32, noise)
    furthest = best if f"{worth[best]:.4g}" != f"{ours:.4g}" else advice.effective_batch
    assert f"{furthest} gets furthest" in said or f"a batch of {furthest} would get furthest" in said
