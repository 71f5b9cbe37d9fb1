"""Every planner gives what verifies and fits, or a number with which it succeeds; none beats the bound."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from outcore.errors import BudgetTooSmall, OutcoreError, PlanMismatch
from outcore.planning import PLANNERS, lower, plan, plans, simulate, verify
from outcore.planning.planners import hybrid as hybrid_planner
from outcore.planning.planners.pricing import Pricing
from outcore.planning.planners.scoring import bound_step_s, score, score_if_it_can_fit, stored_fits
from outcore.planning.settings import HYBRID
from outcore.planning.trace_index import index_of
from outcore.values import Budget, Decision, Machine, Op, Plan, Storage, Tick, Trace, Value
from tests.pure.planning.random_steps import MACHINES, chain, steps

QUICK = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    return Budget(draw(st.integers(1, 120)), draw(st.sampled_from([0, 15, 1000])), draw(st.sampled_from([0, 20, 1000])))


def check(trace: Trace, machine: Machine, made: Plan) -> None:
    schedule = lower(trace, made, machine)
    verify(trace, schedule)
    timeline = simulate(trace, schedule, machine)
    assert timeline.peak_bytes == made.predicted_peak_bytes <= made.budget.device_bytes
    assert timeline.step_s == made.predicted_step_s
    assert timeline.host_peak_bytes <= made.budget.host_bytes
    assert timeline.disk_peak_bytes <= made.budget.disk_bytes
    assert made.bound_step_s <= made.predicted_step_s + 1e-12


@pytest.mark.parametrize("planner", PLANNERS)
@QUICK
@given(trace=steps(), machine=MACHINES, budget=budgets())
def test_a_plan_fits_or_says_what_would(planner: str, trace: Trace, machine: Machine, budget: Budget) -> None:
    needed_bytes = 0
    try:
        made = plan(trace, machine, budget, planner)
    except BudgetTooSmall as error:
        needed_bytes = error.needed_bytes
        made = plan(trace, machine, Budget(needed_bytes, budget.host_bytes, budget.disk_bytes), planner)
    assert needed_bytes == 0 or needed_bytes > budget.device_bytes
    check(trace, machine, made)


@QUICK
@given(trace=steps(), machine=MACHINES, budget=budgets(), brief=st.booleans())
def test_several_plans_are_different_and_the_best_comes_first(
    trace: Trace, machine: Machine, budget: Budget, brief: bool
) -> None:
    try:
        found = plans(trace, machine, budget, most=5, brief=brief)
    except BudgetTooSmall:
        assume(False)
    for made in found:
        check(trace, machine, made)
    took_s = [made.predicted_step_s for made in found]
    assert took_s == sorted(took_s)
    assert len({tuple(sorted(made.decisions.items())) for made in found}) == len(found) <= 5
    assert found == plans(trace, machine, budget, most=5, brief=brief)


@QUICK
@given(trace=steps(), machine=MACHINES, budget=budgets())
def test_a_search_that_begins_from_a_plan_ends_no_worse(trace: Trace, machine: Machine, budget: Budget) -> None:
    """Found for less memory, or for more, which may not fit; and nothing comes of a start that cannot be done."""
    try:
        less = plan(trace, machine, replace(budget, device_bytes=int(0.9 * budget.device_bytes)))
    except BudgetTooSmall:
        assume(False)
    more = plan(trace, machine, replace(budget, device_bytes=2 * budget.device_bytes))
    again: dict[int, Decision] = dict.fromkeys(less.decisions, "recompute")
    for starts in (
        [less],
        [more],
        [less, more],
        [replace(less, decisions=again)],
        [replace(less, fingerprint="other")],
    ):
        made = plans(trace, machine, budget, most=1, starts=starts)[0]
        check(trace, machine, made)
        assert made.predicted_step_s <= less.predicted_step_s + 1e-12 or less not in starts


def test_a_brief_search_is_a_fifth_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    num_drawn = [0]

    def draw(self: hybrid_planner.Flips, scored: object) -> None:
        num_drawn[0] += 1

    monkeypatch.setattr(hybrid_planner, "bound_step_s", lambda *asked: 0.0)  # nothing is good enough
    monkeypatch.setattr(hybrid_planner.Flips, "draw", draw)
    monkeypatch.setattr(hybrid_planner, "HYBRID", replace(HYBRID, first_patience=HYBRID.max_flips))
    trace, took = chain(), list[int]()
    budget = Budget(plan(trace, MACHINE, Budget(1000, 1000), "keep-all").predicted_peak_bytes - 1, 1000)
    for brief in (False, True):
        num_drawn[0] = 0
        plan(trace, MACHINE, budget, brief=brief)
        took.append(num_drawn[0])
    assert took == [HYBRID.max_flips, int(HYBRID.brief_times * HYBRID.max_flips)]


def test_however_little_work_is_allowed_prices_are_tried_until_an_offer_fits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The leanest plan, which fits, is no offer."""
    trace, asked, forced = chain(), list[float](), {share for share, _ in HYBRID.forced_offers} - {1.5}
    budget = Budget(plan(trace, MACHINE, Budget(1000, 1000), "keep-all").predicted_peak_bytes - 1, 1000)
    really = Pricing.cheapest_fit

    def cheapest_fit(
        self: Pricing, share: float, device_bytes: int, *, remakes: bool = False
    ) -> dict[int, Decision] | None:
        asked.extend([] if remakes else [share])
        self.work = 1
        return really(self, share, device_bytes) if share in forced else None

    monkeypatch.setattr(Pricing, "cheapest_fit", cheapest_fit)
    monkeypatch.setattr(hybrid_planner, "HYBRID", replace(HYBRID, pricing_work=0))
    hybrid_planner.hybrid(index_of(trace), MACHINE, budget, lambda what, part: None)
    assert asked[-1] in forced
    assert len(asked) < len(HYBRID.offers) + len(HYBRID.forced_offers)


def test_a_plan_for_one_step_is_an_offer_that_nobody_improves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even where anchors do not do and values must be remade."""
    trace, asked = chain(), list[bool]()
    really = Pricing.cheapest_fit

    def cheapest_fit(
        self: Pricing, share: float, device_bytes: int, *, remakes: bool = False
    ) -> dict[int, Decision] | None:
        asked.append(remakes)
        return really(self, share, device_bytes, remakes=remakes) if remakes else None

    def improved(self: hybrid_planner.Walk, *offers: object) -> None:
        pytest.fail("improved")

    monkeypatch.setattr(Pricing, "cheapest_fit", cheapest_fit)
    monkeypatch.setattr(hybrid_planner.Walk, "improved", improved)
    most = plan(trace, MACHINE, Budget(1000, 1000), "keep-all").predicted_peak_bytes
    check(trace, MACHINE, plan(trace, MACHINE, Budget(most - 1, 1000), "priced"))
    assert True in asked
    least = plan(trace, MACHINE, Budget(1000, 1000), "swap-all").predicted_peak_bytes
    check(trace, MACHINE, plan(trace, MACHINE, Budget(least, 1000), "priced"))


@pytest.mark.parametrize("speed", [1.0, 2.0])
def test_what_takes_too_long_without_any_wait_is_known_before_it_is_lowered(speed: float) -> None:
    trace, machine, budget = chain(), replace(MACHINE, speed=speed), Budget(10**6, 10**6)
    trace_index = index_of(trace)
    decisions: dict[int, Decision] = dict.fromkeys(trace_index.evictable, "keep")
    decisions |= {value: "recompute" for value in trace_index.evictable if trace_index.recomputable[value]}
    scored = score(trace_index, machine, budget, decisions)
    assert scored.step_s > trace_index.total_s / speed  # and nothing is swapped: this is all there is to it
    assert score_if_it_can_fit(trace_index, machine, budget, decisions, scored.step_s * 1.001) is not None
    assert score_if_it_can_fit(trace_index, machine, budget, decisions, scored.step_s * 0.999) is None


def test_walks_that_lead_nowhere_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where no flip fits at all, so that each walk ends where it began."""
    trace, drawn = chain(), list[int]()
    kept = plan(trace, MACHINE, Budget(1000, 1000), "keep-all")
    budget = Budget(kept.predicted_peak_bytes - 1, 1000)
    monkeypatch.setattr(hybrid_planner, "bound_step_s", lambda *asked: 0.0)  # nothing is good enough
    monkeypatch.setattr(hybrid_planner.Flips, "draw", lambda self, scored: drawn.append(1))
    hybrid_planner.hybrid(index_of(trace), MACHINE, budget, lambda what, part: None)
    assert 0 < len(drawn) < HYBRID.max_flips / 2


def all_decisions(trace: Trace, budget: Budget) -> list[dict[int, Decision]]:
    trace_index = index_of(trace)
    choices: list[list[Decision]] = [
        ["keep", "swap", "recompute", "remake"] if trace_index.recomputable[value] else ["keep", "swap"]
        for value in trace_index.evictable
    ]
    made = [dict(zip(trace_index.evictable, combination)) for combination in product(*choices)]
    return [decisions for decisions in made if stored_fits(trace_index, budget, decisions)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
@given(trace=steps(max_ops=5), machine=MACHINES, budget=budgets())
def test_exact_is_brute_force_and_nothing_beats_the_bound(trace: Trace, machine: Machine, budget: Budget) -> None:
    trace_index = index_of(trace)
    assume(1 <= len(trace_index.evictable) <= 4)
    fastest_s = None
    bound_s = bound_step_s(trace_index, machine, budget)
    for decisions in all_decisions(trace, budget):
        scored = score(trace_index, machine, budget, decisions)
        if scored.fits:
            assert bound_s <= scored.step_s + 1e-12
            fastest_s = scored.step_s if fastest_s is None else min(fastest_s, scored.step_s)
    try:
        found = plan(trace, machine, budget, "exact")
    except BudgetTooSmall:
        assert fastest_s is None
    else:
        assert found.predicted_step_s == fastest_s


@QUICK
@given(trace=steps(), machine=MACHINES, budget=budgets())
def test_hybrid_is_never_slower_than_the_simple_ones(trace: Trace, machine: Machine, budget: Budget) -> None:
    found = []
    for planner in ("keep-all", "swap-all"):
        try:
            found.append(plan(trace, machine, budget, planner).predicted_step_s)
        except BudgetTooSmall:
            continue
    assume(found)
    assert plan(trace, machine, budget, "hybrid").predicted_step_s <= min(found) + 1e-12


@QUICK
@given(trace=steps(), machine=MACHINES)
def test_with_room_for_everything_everything_is_kept(trace: Trace, machine: Machine) -> None:
    made = plan(trace, machine, Budget(10**9))
    assert set(made.decisions.values()) <= {"keep"}
    assert made.predicted_step_s == made.in_core_step_s
    assert made.predicted_peak_bytes == made.in_core_peak_bytes
    assert lower(trace, made, machine).actions == ()


TRACE = chain()
MACHINE = Machine("cpu", 1, 0, 1, 1.0, 1.0, 1.0, 1.0)


def test_an_unknown_planner_is_named_with_those_there_are() -> None:
    with pytest.raises(OutcoreError, match="no planner 'best'; choose one of keep-all, swap-all"):
        plan(TRACE, MACHINE, Budget(1), "best")


def test_lives_beyond_the_step_end_with_it() -> None:
    """A recorder may not know when something dies, or may see an unpack whose pack was in an earlier step."""
    longer = replace(
        TRACE,
        storages=tuple(
            replace(storage, dies=storage.dies + 100 * (at > 4)) for at, storage in enumerate(TRACE.storages)
        ),
        ticks=(*(replace(tick, dies=tick.dies * 10) for tick in TRACE.ticks), Tick(14, "unpack", 5, 99, 200)),
    )
    for planner in PLANNERS:
        made = plan(longer, MACHINE, Budget(60, 1000), planner)
        verify(longer, lower(longer, made, MACHINE))
        assert simulate(longer, lower(longer, made, MACHINE), MACHINE).peak_bytes <= 60


def test_a_plan_for_another_step_is_refused() -> None:
    with pytest.raises(PlanMismatch, match="made for step abc"):
        lower(TRACE, Plan("abc", "hybrid", Budget(1), {}, 0), MACHINE)


def test_two_saved_versions_of_one_storage_take_one_block() -> None:
    """Found by exploring: the bound counted the block twice and promised less than keeping everything does."""
    ops = (
        Op(0, "aten.pretend.default", "forward", 0.0, (), (0,), replay="pure"),
        Op(2, "aten.pretend.default", "forward", 0.0, (0,), (1,), replay="pure"),  # overwrites what was saved
        Op(4, "aten.pretend.default", "forward", 0.0, (), (2,), replay="pure"),
        Op(7, "aten.pretend.default", "backward", 0.0, (), (3,)),
    )
    values = (Value(0, 0, 0), Value(0, 1, 1), Value(1, 0, 2), Value(2, 0, 3))
    storages = (Storage(8, 0, 3), Storage(8, 4, 4), Storage(8, 7, 7))
    ticks = (
        Tick(1, "pack", 0, 0, -1),
        Tick(3, "pack", 1, 1, -1),
        Tick(5, "unpack", 1, 1, 5),
        Tick(6, "unpack", 0, 0, 6),
    )
    trace = Trace(ops, values, storages, ticks, before_bytes=0)
    machine = Machine("pretend", 1000, 1000, 1000, 1.0, 1.0, 2.0, 3.0)
    made = plan(trace, machine, Budget(16, 0, 20), "keep-all")
    check(trace, machine, made)
