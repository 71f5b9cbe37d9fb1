"""`verify` catches what could corrupt a gradient: good schedules with one fault each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from outcore.errors import ScheduleError
from outcore.planning import lower, verify
from outcore.values import Action, Budget, Decision, Machine, Plan, Schedule, Tick
from tests.pure.planning.random_steps import chain

MACHINE = Machine("pretend", 10**6, 10**6, 10**6, 10.0, 10.0, 1.0, 1.0)


def lowered(decisions: dict[int, Decision]) -> Schedule:
    trace = chain()
    return lower(trace, Plan(trace.fingerprint, "test", Budget(40, 1000), decisions, 8), MACHINE)


def without(kind: str, value: int, *, nth: int = 0) -> Callable[[list[Action]], list[Action]]:
    def change(actions: list[Action]) -> list[Action]:
        hits = [at for at, act in enumerate(actions) if act.kind == kind and value in (act.value, act.op)]
        return [act for at, act in enumerate(actions) if at != hits[nth]]

    return change


def first(kind: str, value: int, *, nth: int = 0) -> Callable[[list[Action]], list[Action]]:
    """The action moved to the beginning of its tick's predecessor."""

    def change(actions: list[Action]) -> list[Action]:
        hits = [at for at, act in enumerate(actions) if act.kind == kind and value in (act.value, act.op)]
        moved = replace(actions[hits[nth]], tick=0)
        return [moved, *(act for at, act in enumerate(actions) if at != hits[nth])]

    return change


def altered(kind: str, value: int, **fields: object) -> Callable[[list[Action]], list[Action]]:
    def change(actions: list[Action]) -> list[Action]:
        return [
            replace(act, **fields) if act.kind == kind and value in (act.value, act.op) else act  # type: ignore[arg-type]
            for act in actions
        ]

    return change


SWAPPED: dict[int, Decision] = {1: "swap", 3: "swap", 4: "swap"}
REMADE: dict[int, Decision] = {1: "swap", 3: "recompute", 4: "recompute"}
FAULTS = [
    (SWAPPED, without("wait_out", 1), "not waited for"),
    (SWAPPED, without("swap_out", 3), "starts no copy|not started|not held"),
    (SWAPPED, without("wait_in", 3), "not there|still being filled"),
    (SWAPPED, without("swap_in", 4), "not started"),
    (SWAPPED, first("swap_in", 1), "not waited for"),
    (SWAPPED, without("free", 1), "still there"),
    (SWAPPED, first("free", 1, nth=1), "not held|out of the order"),
    (SWAPPED, altered("swap_out", 1, tier=""), "no tier"),
    (REMADE, without("drop", 4), "keeps it"),
    ({1: "swap", 3: "remake", 4: "remake"}, without("drop", 4), "keeps it"),
    (REMADE, without("rerun", 1), "not there"),
    (REMADE, without("rerun", 2), "not there"),
    (REMADE, without("rerun", 3), "not there|not held"),
    (REMADE, without("wait_in", 1), "not there"),
    (REMADE, altered("rerun", 1, values=()), "not there|not held"),
    (REMADE, altered("rerun", 3, values=(5,)), "does not write|not held"),
    (REMADE, altered("rerun", 3, op=4), "may not be rerun"),
    (REMADE, altered("rerun", 1, in_place=True), "overwrites nothing"),
    (REMADE, altered("drop", 3, tick=3), "out of the order|not at the pack"),
    ({1: "keep", 3: "keep", 4: "recompute"}, altered("rerun", 3, in_place=True, op=2, values=(3,)), "not there"),
]


@pytest.mark.parametrize(
    "decisions",
    [SWAPPED, REMADE, {1: "recompute", 3: "swap", 4: "recompute"}, {1: "swap", 3: "remake", 4: "remake"}],
)
def test_the_good_ones_pass(decisions: dict[int, Decision]) -> None:
    verify(chain(), lowered(decisions))


@pytest.mark.parametrize(("decisions", "fault", "says"), FAULTS, ids=lambda part: part if isinstance(part, str) else "")
def test_a_seeded_fault_is_refused(
    decisions: dict[int, Decision], fault: Callable[[list[Action]], list[Action]], says: str
) -> None:
    good = lowered(decisions)
    bad = replace(good, actions=tuple(fault(list(good.actions))))
    assert bad != good
    with pytest.raises(ScheduleError, match=says) as caught:
        verify(chain(), bad)
    assert "\n" not in str(caught.value)


def test_overwriting_what_is_being_copied_is_refused() -> None:
    trace = chain()
    packed_early = replace(trace, ticks=(trace.ticks[0], replace(trace.ticks[1], value=2), *trace.ticks[2:]))
    ops = list(packed_early.ops)
    ops[2] = replace(ops[2], slot=5)
    ops[3] = replace(ops[3], slot=3, reads=(0,))
    packed_early = replace(packed_early, ops=tuple(sorted(ops, key=lambda op: op.slot)))
    good = lowered(SWAPPED)
    actions = [replace(act, value=2) if act.value == 3 else act for act in good.actions]
    held_on = [act for act in actions if not (act.kind == "free" and act.value == 2)]
    bad = Schedule(packed_early.fingerprint, tuple(held_on), {1: "swap", 2: "swap", 4: "swap"})
    with pytest.raises(ScheduleError, match="overwrites value 2"):
        verify(packed_early, bad)


def test_an_in_place_rerun_may_not_eat_what_is_still_asked_for() -> None:
    trace = chain()
    asked_again = replace(
        trace,
        ticks=(
            *trace.ticks[:1],
            Tick(3, "pack", 2, 3, -1),
            *trace.ticks[1:5],
            Tick(13, "unpack", 2, 3, 14),
            trace.ticks[5],
        ),
    )
    schedule = Schedule(
        asked_again.fingerprint,
        (
            Action(1, "drop", 2),
            Action(2, "drop", 3),
            Action(5, "rerun", op=1, values=(2,)),
            Action(5, "rerun", op=2, values=(3,), in_place=True),
        ),
        {2: "recompute", 3: "recompute"},
    )
    with pytest.raises(ScheduleError, match="somebody still needs"):
        verify(asked_again, schedule)


def test_a_pass_may_be_rerun_if_all_its_ops_may() -> None:
    one = chain()
    ops = list(one.ops)
    ops[2] = replace(ops[2], fused=(1,), fused_s=1.0)
    trace = replace(one, ops=tuple(ops))
    good = lower(trace, Plan(trace.fingerprint, "test", Budget(40, 1000), REMADE, 8), MACHINE)
    assert {act.op for act in good.actions if act.kind == "rerun"} == {2, 3}
    verify(trace, good)
    ops[1] = replace(ops[1], replay="no")
    with pytest.raises(ScheduleError, match="may not be rerun"):
        verify(replace(trace, ops=tuple(ops)), good)


def test_a_schedule_for_another_step_is_refused() -> None:
    with pytest.raises(ScheduleError, match="another step"):
        verify(chain(), Schedule("abc", (), {}))
