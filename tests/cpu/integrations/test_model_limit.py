"""What integrations do with the options of `outcore.limit`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from outcore.errors import BadSize, OutcoreError
from outcore.integrations.model_limit import OPTIONS, ModelLimit
from outcore.limit import limit


def test_options_are_those_of_limit() -> None:
    names = set(limit.__kwdefaults__ or ())
    assert set(OPTIONS) == names - {"optimizer", "update"}


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"memory": "lots"}, BadSize, "'lots' is not a size"),
        ({"memory": "120%"}, BadSize, "is not between"),
        ({"memory": "1GiB", "host": "many"}, BadSize, "'many' is not a size"),
        ({"memory": "1GiB", "planner": "magic"}, OutcoreError, "there is no planner 'magic'"),
        ({"memory": "1GiB", "measures": True}, OutcoreError, "there is no option 'measures' here; choose from memory"),
    ],
)
def test_what_cannot_be_right_is_refused_before_anything_is_loaded(
    options: dict[str, Any], error: type[OutcoreError], says: str
) -> None:
    with pytest.raises(error, match=says):
        ModelLimit(**options)


def test_options_reach_the_limit() -> None:
    model = nn.Linear(8, 8)
    known = ModelLimit("50%", planner="swap", measure=True, cache=False)
    ooc = known.of(model)
    assert (ooc.planner, ooc.measure) == ("swap", True)
    with ooc.step():
        model(torch.ones(2, 8)).sum().backward()
    assert known.of(model) is ooc
    ooc.close()
