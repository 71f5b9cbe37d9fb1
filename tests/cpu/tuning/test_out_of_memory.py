"""A batch that ran out of memory although a plan said that it fits: never tried in vain, and never in silence."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from outcore.tuning.data.samples import Samples
from outcore.tuning.reasons import why_out_of_memory
from outcore.tuning.throughput.bench import Bench
from outcore.tuning.throughput.builder import CurveBuilder
from outcore.tuning.throughput.probes import Probes
from tests.cpu.tuning.flat import tune
from tests.cpu.tuning.nets import CPU, make_sgd, mlp, stripes
from tests.cpu.tuning.test_prediction import small_family

pytestmark = pytest.mark.usefixtures("quick")

SAID = "a batch of 64 was predicted to fit and did not: CUDA out of memory"


class Fails:
    """A loss that runs out of memory beyond 40 samples, so many times."""

    def __init__(self, num: int) -> None:
        self.num, self.at = num, 0

    def __call__(self, out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if len(out) > 40 and self.num:
            self.num, self.at = self.num - 1, len(out)
            raise torch.OutOfMemoryError("CUDA out of memory\nand much more")
        return F.cross_entropy(out, labels)


def test_what_ran_out_is_kept_in_mind(folder: str) -> None:
    model = mlp().train()
    bench = Bench(model, Fails(2), Samples(stripes(), CPU), make_sgd(model.parameters()), "16MiB", disk=folder)
    family = small_family(bench)
    builder = CurveBuilder.start(bench, family)
    builder.predict([16, 32, 64], lambda what, part: None)
    assert builder.curve.point(64).fits
    assert not builder.measure(64).fits
    assert why_out_of_memory(bench.out_of_memory) == [SAID]
    bench.out_of_memory.clear()
    climb = Probes(bench, 512, [])
    assert not climb.run(family, 64)
    assert climb.largest == 63
    assert why_out_of_memory(bench.out_of_memory) == [SAID]
    bench.close()


def test_advice_says_what_ran_out(folder: str) -> None:
    loss = Fails(1)
    advice = tune(mlp, loss, stripes(), optimizer=make_sgd, memory="16MiB", race=False, trial_s=0.2, disk=folder)
    assert loss.at > 40
    said = [why for why in advice.why if "was predicted to fit and did not" in why]
    assert said == [f"a batch of {loss.at} was predicted to fit and did not: CUDA out of memory"]
