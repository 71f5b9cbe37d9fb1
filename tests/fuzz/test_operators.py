"""Every differentiable operator of PyTorch's own database has the gradients of plain PyTorch when its step is planned.

One sample of each; OUTCORE_EXPLORE=1 checks all fourteen thousand.
"""

from __future__ import annotations

import gc
import os

import pytest
import torch

from tests.fuzz.operators import check_operator, operators

pytest.importorskip("expecttest", reason="PyTorch's operator database needs expecttest")

NUM_GROUPS = 6
MOST_SAMPLES = None if "OUTCORE_EXPLORE" in os.environ else 1


@pytest.mark.timeout(0 if MOST_SAMPLES is None else 180)
@pytest.mark.parametrize("group", range(NUM_GROUPS))
def test_operators_have_the_same_gradients_when_planned(group: int) -> None:
    names = list(operators())[group::NUM_GROUPS]
    gc.collect()
    gc.freeze()
    answers = [check_operator(name, MOST_SAMPLES) for name in names]
    assert not [line for answer in answers for line in answer["wrong"]]
    planned = sum(answer["counts"].get("same", 0) for answer in answers)
    assert planned > len(names), "most samples follow a plan, under both planners"


def test_a_wrong_gradient_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    sin = torch.sin
    calls: list[int] = []

    def drifting(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return sin(x) * (1 if len(calls) < 3 else 2)  # plain PyTorch calls it twice

    monkeypatch.setattr(operators()["sin"], "op", drifting)
    assert check_operator("sin", 1)["outcome"] == "wrong"
