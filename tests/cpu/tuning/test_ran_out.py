"""A batch that ran out of memory although a plan said that it fits: never tried in vain, and never in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

import outcore
from outcore.tuning.choosing import Choosing
from outcore.tuning.climbing import Climb
from outcore.tuning.probing import Bench
from outcore.tuning.reasons import why_ran_out
from outcore.tuning.samples import Samples
from tests.cpu.tuning.nets import CPU, make_sgd, mlp, stripes
from tests.cpu.tuning.test_predicted_steps import small_family

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


def test_what_ran_out_is_kept_in_mind(tmp_path: Any) -> None:
    model = mlp().train()
    bench = Bench(model, Fails(2), Samples(stripes(), CPU), make_sgd(model.parameters()), "16MiB", disk=tmp_path)
    family = small_family(bench)
    choosing = Choosing.start(bench, family)
    choosing.lay_out([16, 32, 64], lambda what, part: None)
    assert choosing.curve.point(64).fits
    assert not choosing.confirm(64).fits
    assert why_ran_out(bench.ran_out) == [SAID]
    bench.ran_out.clear()
    climb = Climb(bench, 512, [])
    assert not climb.run(family, 64)
    assert climb.largest == 63
    assert why_ran_out(bench.ran_out) == [SAID]
    bench.close()


def test_advice_says_what_ran_out(tmp_path: Any) -> None:
    loss = Fails(1)
    advice = outcore.tune(
        mlp, loss, stripes(), optimizer=make_sgd, memory="16MiB", race=False, trial_s=0.2, disk=tmp_path
    )
    assert loss.at > 40
    said = [why for why in advice.why if "was predicted to fit and did not" in why]
    assert said == [f"a batch of {loss.at} was predicted to fit and did not: CUDA out of memory"]
