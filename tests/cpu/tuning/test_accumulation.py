"""Gradients that are accumulated take room of their own: where there is none, batches are trained at once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.check import SettingCheck, check_trains_in_core
from outcore.tuning.data.samples import Samples
from outcore.tuning.options import Batch, Data, Memory, Request
from outcore.tuning.parts import Parts
from outcore.tuning.setting_builder import SettingBuilder
from outcore.tuning.throughput.bench import Bench
from outcore.tuning.throughput.builder import CurveBuilder, effective_batches, micro_batch_for
from outcore.tuning.throughput.probes import probe_batches
from outcore.tuning.trainings.runs import Candidate
from outcore.tuning.trainings.target import NO_TARGET
from outcore.tuning.trainings.trainer import Trainer
from outcore.units import KIB, MIB, parse_bytes
from tests.cpu.tuning.flat import tune
from tests.cpu.tuning.nets import CPU, stripes

pytestmark = pytest.mark.usefixtures("quick")

DATA = stripes()
make_adam = partial(torch.optim.Adam, lr=1e-3)


def heavy() -> nn.Module:
    """More weights than activations: with Adam's state they take 4 MiB, and gradients beside them 1 MiB more."""
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 256))


def nothing(what: str, part: float) -> None:
    """To tell."""


def test_noise_is_measured_where_gradients_fit_besides(folder: str) -> None:
    """It sums them up, outside any plan."""
    tune_heavy = partial(tune, heavy, F.cross_entropy, DATA, optimizer=make_adam, disk=folder)
    told = " ".join(tune_heavy(memory=4 * MIB + 400 * KIB, race=False, trial_s=0.2).why)
    assert "the noise of the gradients was not measured" in told
    assert "noise scale of" in " ".join(tune_heavy(memory=32 * MIB, race=False, trial_s=0.2).why)


def laid_out(memory: int, folder: Any) -> CurveBuilder:
    model = heavy()
    bench = Bench(model, F.cross_entropy, Samples(DATA, CPU), make_adam(model.parameters()), memory, disk=folder)
    found = probe_batches(bench, 64, nothing)
    assert found.family is not None
    builder = CurveBuilder.start(bench, found.family, found.measured)
    builder.curve = replace(builder.curve, largest_in_core=builder.planner.largest_in_core(64))
    builder.predict([1, 2, 4, 8, 16, 32, 64], nothing)
    builder.find_accumulation_limits()
    return builder


def test_multiples_are_offered_where_gradients_fit_besides(folder: str) -> None:
    tight = laid_out(4 * MIB + 400 * KIB, folder)
    fitting = [point.micro_batch for point in tight.curve.fitting]
    assert len(fitting) > 2
    assert tight.curve.most_accumulating == 0
    assert tight.curve.in_core_accumulating == 0 < tight.curve.largest_in_core
    assert effective_batches(tight.curve, 512) == {size: size for size in fitting}
    assert micro_batch_for(fitting[-1])(tight.curve) == fitting[-1]
    wide = laid_out(32 * MIB, folder)
    assert wide.curve.in_core_accumulating == wide.curve.largest_in_core == 64
    assert wide.curve.most_accumulating == 64
    knee = wide.curve.knee.micro_batch
    assert effective_batches(wide.curve, 512)[4 * knee] == knee
    between = laid_out(5 * MIB + 250 * KIB, folder)
    most = between.curve.most_accumulating
    assert most
    assert 0 < most < between.curve.fitting[-1].micro_batch
    assert all(batch == size or size <= most for batch, size in effective_batches(between.curve, 512).items())
    for builder in (tight, wide, between):
        builder.bench.close()


def test_a_free_batch_is_advised_where_nothing_can_be_accumulated(folder: str) -> None:
    tune_heavy = partial(tune, heavy, F.cross_entropy, DATA, optimizer=make_adam, disk=folder)
    advice = tune_heavy(memory=4 * MIB + 400 * KIB, race=False, trial_s=0.2)
    assert advice.accumulation == 1
    assert advice.peak_bytes <= advice.curve.memory_bytes


def test_a_kept_batch_that_cannot_be_accumulated_says_what_it_needs(folder: str) -> None:
    tune_heavy = partial(tune, heavy, F.cross_entropy, DATA, optimizer=make_adam, disk=folder)
    with pytest.raises(TuningError, match=r"a batch of 256 does not fit at once.*; raise it to") as caught:
        tune_heavy(memory=4 * MIB + 400 * KIB, batch=256)
    enough = str(caught.value).partition("raise it to ")[2].partition(" or ")[0]
    advice = tune_heavy(memory=parse_bytes(enough), batch=256)
    assert advice.accumulation > 1
    assert advice.peak_bytes <= parse_bytes(enough)


def test_a_race_leaves_out_what_does_not_fit(folder: str) -> None:
    curves = laid_out(4 * MIB + 400 * KIB, folder)
    bench = curves.bench
    request = Request(heavy, F.cross_entropy, make_adam, Data(DATA), Memory(1), Batch(8, free=True))
    parts = Parts(request, bench.model, True, bench.optimizer, bench.samples, None, nothing, bench)
    settings = SettingBuilder(parts, curves, today_batch=8, today_rate=1e-3, rate_batch=8)
    others = SettingCheck(parts, settings)._others({"half": 4, "64 times": 512})
    bench.close()
    assert {name: setting.effective_batch for name, setting in others.items()} == {"half": 4}


def test_nothing_races_over_the_budget(folder: str) -> None:
    """A batch beyond in-core runs in micro-batches that are in-core beside gradients, or not at all."""
    between = laid_out(5 * MIB + 250 * KIB, folder)
    tight = replace(between.curve, largest_in_core=4, most_in_core=0)
    advice = Advice(8, 1, 1e-3, 1.0, 1.0, 1, tight, (), first_batch=8)
    with pytest.raises(TuningError, match="a batch of 8 is not in-core, nor is one sample"):
        check_trains_in_core(advice, tight)
    check_trains_in_core(advice, replace(tight, most_in_core=2))
    check_trains_in_core(advice, replace(tight, largest_in_core=8))
    between.bench.close()


@pytest.mark.parametrize(("accumulating", "size"), [(None, 16), (8, 8), (3, 2)])
def test_a_race_cuts_batches_beyond_in_core_as_gradients_allow(accumulating: int | None, size: int) -> None:
    model, sizes = heavy(), list[int]()
    trainer = Trainer(model, make_adam(model.parameters()), F.cross_entropy, Samples(DATA, CPU), None, 16, accumulating)
    model.register_forward_pre_hook(lambda model, given: sizes.append(len(given[0])) if model.training else None)
    next(trainer.train(Candidate("beyond", 32, 1e-3, 0.1), 2.0, NO_TARGET, 0, 0, 0))
    assert set(sizes) == {size}
