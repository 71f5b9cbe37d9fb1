"""How large a plan is that steps of many sizes share: the model of the allocator decides."""

from __future__ import annotations

import math

import pytest

from outcore.errors import BudgetTooSmall
from outcore.planning.families import sharing
from outcore.planning.families.sharing import plan_shared
from outcore.planning.preparing import Planned
from outcore.planning.settings import FAMILIES
from outcore.units import MIB
from outcore.values import Budget, Trace
from tests.pure.planning.test_allocator_model import MACHINE, large_chain

BUDGET = Budget(220 * MIB, 10**9)


def shared(usable_share: float = 1.0, budget: Budget = BUDGET) -> Planned:
    return plan_shared(large_chain(), MACHINE, budget, "hybrid", usable_share, ())


def share_of(planned: Planned) -> float:
    return planned.plan.budget.device_bytes / BUDGET.device_bytes


def restarts_above(share: float, monkeypatch: pytest.MonkeyPatch, lost_s: float = math.inf) -> None:
    """Larger plans make the allocator start over."""

    def lost(planned: Planned, trace: Trace, memory_bytes: int, there: object) -> float:
        return lost_s if share_of(planned) > share + 1e-3 else 0.0

    monkeypatch.setattr(sharing, "restarts_s", lost)


def test_the_largest_plan_without_a_restart_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts_above(0.82, monkeypatch)
    assert share_of(shared()) == pytest.approx(0.82, abs=1e-3)


def test_a_restart_that_costs_less_than_a_smaller_plan_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts_above(0.0, monkeypatch, lost_s=1e-12)
    assert share_of(shared()) == pytest.approx(FAMILIES.shares[0], abs=1e-3)


def test_after_running_out_of_memory_plans_are_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    restarts_above(1.0, monkeypatch)
    assert share_of(shared(usable_share=0.8)) == pytest.approx(0.78, abs=1e-3)


def test_the_model_of_the_allocator_is_asked_where_the_weights_lie() -> None:
    planned = shared()
    assert sharing.restarts_s(planned, large_chain(), 10**9, ()) == 0.0
    assert sharing.restarts_s(planned, large_chain(), 100 * MIB, ()) == math.inf


def test_a_budget_that_is_too_small_for_every_plan_is_refused() -> None:
    with pytest.raises(BudgetTooSmall):
        shared(budget=Budget(MIB, 10**9))
