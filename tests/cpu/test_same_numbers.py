"""Loss, gradients, parameters, buffers and RNG after five steps equal plain PyTorch's, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.errors import BudgetTooSmall
from outcore.limit import Limited, limit
from outcore.planning import PLANNERS
from outcore.planning.planners import hybrid
from outcore.planning.settings import HYBRID
from outcore.values import Timeline
from tests.cpu.training import Outcome, build, train
from tests.cpu.zoo import ZOO


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any plan must give the same numbers."""
    monkeypatch.setattr(hybrid, "HYBRID", replace(HYBRID, max_flips=300))


PLAIN: dict[str, Outcome] = {}
NEEDS: dict[str, tuple[int, int]] = {}


def plain(name: str) -> Outcome:
    if name not in PLAIN:
        PLAIN[name] = train(*build(name))
    return PLAIN[name]


def needs(name: str) -> tuple[int, int]:
    """The bytes of the leanest step and of the step in-core, as outcore sees them."""
    if name not in NEEDS:
        model, loss = build(name)
        ooc = Limited(model, 1)
        with pytest.raises(BudgetTooSmall) as caught:
            train(model, loss, ooc, num_steps=2)
        ooc.close()
        model, loss = build(name)
        ooc = limit(model, "100%")
        train(model, loss, ooc, num_steps=2)
        assert ooc.plan is not None
        NEEDS[name] = (caught.value.needed_bytes, ooc.plan.in_core_peak_bytes)
        ooc.close()
    return NEEDS[name]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0], ids=["leanest", "between", "roomy"])
@pytest.mark.parametrize("planner", [name for name in PLANNERS if name not in ("exact", "priced")])  # first of hybrid's
@pytest.mark.parametrize("name", ZOO)
def test_same_numbers_in_every_plan(name: str, planner: str, share: float) -> None:
    check(name, planner, share)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0], ids=["leanest", "between", "roomy"])
@pytest.mark.parametrize("name", ["custom_function", "saved_twice", "autocast"])
def test_same_numbers_in_the_exact_plan(name: str, share: float) -> None:
    """The mixed-integer planner takes up to a minute on larger steps: it is for judging."""
    check(name, "exact", share)


def check(name: str, planner: str, share: float) -> None:
    least, most = needs(name)
    budget = int(least + share * (most - least))
    model, loss = build(name)
    ooc = limit(model, budget, planner=planner, measure=True)
    try:
        got = train(model, loss, ooc)
    except BudgetTooSmall as error:
        budget = error.needed_bytes  # that many bytes then succeed
        ooc.close()
        model, loss = build(name)
        ooc = limit(model, budget, planner=planner, measure=True)
        got = train(model, loss, ooc)
    plain(name).assert_same(got)
    assert assert_followed(ooc).peak_bytes <= budget
    assert ooc.store.num_parcels == 0
    ooc.close()


def assert_followed(ooc: Limited) -> Timeline:
    """Every step did what was planned, in the memory that was predicted; what was measured."""
    predicted, measured = ooc.predicted, ooc.timeline
    assert predicted is not None
    assert measured is not None
    assert [kind.num_left for kind in ooc.kinds.values()] == [0]
    assert measured.actions == predicted.actions
    assert abs(measured.peak_bytes - predicted.peak_bytes) <= 0.03 * predicted.peak_bytes
    return measured
