"""Gradients that are accumulated take room of their own: where there is none, batches are trained at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import outcore
from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.choosing import Choosing, micro_batch_for, ways_to
from outcore.tuning.climbing import climb
from outcore.tuning.probing import Bench
from outcore.tuning.race import Race, Runner
from outcore.tuning.samples import Samples
from outcore.tuning.tuner import Asked, Tuner, _check_trains_in_core
from outcore.units import KIB, MIB, parse_bytes
from tests.cpu.tuning.nets import CPU, stripes

pytestmark = pytest.mark.usefixtures("quick")

DATA = stripes()
make_adam = partial(torch.optim.Adam, lr=1e-3)


def heavy() -> nn.Module:
    """More weights than activations: with Adam's state they take 4 MiB, and gradients beside them 1 MiB more."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 256))


def nothing(what: str, part: float) -> None:
    """To tell."""


def test_noise_is_measured_where_gradients_fit_besides(tmp_path: Any) -> None:
    """It sums them up, outside any plan."""
    tune = partial(outcore.tune, heavy, F.cross_entropy, DATA, optimizer=make_adam, disk=tmp_path)
    told = " ".join(tune(memory=4 * MIB + 400 * KIB, race=False, trial_s=0.2).why)
    assert "the noise of the gradients was not measured" in told
    assert "noise scale of" in " ".join(tune(memory=32 * MIB, race=False, trial_s=0.2).why)


def laid_out(memory: int, folder: Any) -> Choosing:
    model = heavy()
    bench = Bench(model, F.cross_entropy, Samples(DATA, CPU), make_adam(model.parameters()), memory, disk=folder)
    found = climb(bench, 64, nothing)
    assert found.family is not None
    choosing = Choosing.start(bench, found.family, found.measured)
    choosing.curve = replace(choosing.curve, largest_in_core=choosing.planned.largest_in_core(64))
    choosing.lay_out([1, 2, 4, 8, 16, 32, 64], nothing)
    choosing.look_at_accumulating()
    return choosing


def test_multiples_are_offered_where_gradients_fit_besides(tmp_path: Any) -> None:
    tight = laid_out(4 * MIB + 400 * KIB, tmp_path)
    fitting = [point.micro_batch for point in tight.curve.fitting]
    assert len(fitting) > 2
    assert tight.curve.most_accumulating == 0
    assert tight.curve.in_core_accumulating == 0 < tight.curve.largest_in_core
    assert ways_to(tight.curve, 512) == {size: size for size in fitting}
    assert micro_batch_for(fitting[-1])(tight.curve) == fitting[-1]
    wide = laid_out(32 * MIB, tmp_path)
    assert wide.curve.in_core_accumulating == wide.curve.largest_in_core == 64
    assert wide.curve.most_accumulating == 64
    knee = wide.curve.knee.micro_batch
    assert ways_to(wide.curve, 512)[4 * knee] == knee
    between = laid_out(5 * MIB + 250 * KIB, tmp_path)
    most = between.curve.most_accumulating
    assert most
    assert 0 < most < between.curve.fitting[-1].micro_batch
    assert all(batch == size or size <= most for batch, size in ways_to(between.curve, 512).items())
    for choosing in (tight, wide, between):
        choosing.bench.close()


def test_a_free_batch_is_advised_where_nothing_can_be_accumulated(tmp_path: Any) -> None:
    tune = partial(outcore.tune, heavy, F.cross_entropy, DATA, optimizer=make_adam, disk=tmp_path)
    advice = tune(memory=4 * MIB + 400 * KIB, race=False, trial_s=0.2)
    assert advice.accumulation == 1
    assert advice.peak_bytes <= advice.curve.memory_bytes


def test_a_kept_batch_that_cannot_be_accumulated_says_what_it_needs(tmp_path: Any) -> None:
    tune = partial(outcore.tune, heavy, F.cross_entropy, DATA, optimizer=make_adam, disk=tmp_path)
    with pytest.raises(TuningError, match=r"a batch of 256 does not fit at once.*; raise it to") as caught:
        tune(memory=4 * MIB + 400 * KIB, batch=256)
    enough = str(caught.value).partition("raise it to ")[2].partition(" or ")[0]
    advice = tune(memory=parse_bytes(enough), batch=256)
    assert advice.accumulation > 1
    assert advice.peak_bytes <= parse_bytes(enough)


def test_a_race_leaves_out_what_does_not_fit(tmp_path: Any) -> None:
    choosing = laid_out(4 * MIB + 400 * KIB, tmp_path)
    asked = Asked(heavy, F.cross_entropy, make_adam, 1, None, True, None, "sqrt", trial_s=0.2, race=True)
    tuner = Tuner(asked, Samples(DATA, CPU), choosing.bench.model, choosing.bench.optimizer, nothing)
    tuner.bench, tuner.rate_batch = choosing.bench, 8
    advice = Advice(8, 1, 1e-3, 1.0, 1.0, 1, choosing.curve, (), first_batch=8)
    found = tuner._others(advice, choosing, {"half": 4, "64 times": 512})
    choosing.bench.close()
    assert {name: like.effective_batch for name, like in found.items()} == {"half": 4}


def test_nothing_races_over_the_budget(tmp_path: Any) -> None:
    """A batch beyond in-core runs in micro-batches that are in-core beside gradients, or not at all."""
    between = laid_out(5 * MIB + 250 * KIB, tmp_path)
    tight = replace(between.curve, largest_in_core=4, most_in_core=0)
    advice = Advice(8, 1, 1e-3, 1.0, 1.0, 1, tight, (), first_batch=8)
    with pytest.raises(TuningError, match="a batch of 8 is not in-core, nor is one sample"):
        _check_trains_in_core(advice, tight)
    _check_trains_in_core(advice, replace(tight, most_in_core=2))
    _check_trains_in_core(advice, replace(tight, largest_in_core=8))
    between.bench.close()


@pytest.mark.parametrize(("accumulating", "size"), [(None, 16), (8, 8), (3, 2)])
def test_a_race_cuts_batches_beyond_in_core_as_gradients_allow(accumulating: int | None, size: int) -> None:
    model = heavy()
    samples = Samples(DATA, CPU)
    race = Race(model, make_adam(model.parameters()), F.cross_entropy, samples, None, 16, nothing, run_s=2.0)
    race.accumulating, sizes = accumulating, list[int]()
    model.register_forward_pre_hook(lambda model, given: sizes.append(len(given[0])) if model.training else None)
    next(race._looks(Runner("beyond", 32, 1e-3, 0.1), 0, 0))
    assert set(sizes) == {size}
