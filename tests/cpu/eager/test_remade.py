"""Values that are let go in between and remade each time: the same numbers, the predicted peak, the planned actions."""

from __future__ import annotations

import random

import pytest

from outcore.limit import limit
from outcore.planning import PLANNERS
from outcore.planning.planners.scoring import Decisions, Planner, Progress
from outcore.planning.trace_index import TraceIndex
from outcore.values import Budget, Machine
from tests.cpu.test_same_numbers import assert_followed, plain
from tests.cpu.training import build, train
from tests.cpu.zoo import ZOO


def remake_all(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    return {value: "remake" if trace_index.recomputable[value] else "keep" for value in trace_index.evictable}


def anything(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Drawn, with remaking as often as all else together."""
    drawn, decisions = random.Random(len(trace_index.evictable)), Decisions()
    for value in trace_index.evictable:
        decisions[value] = drawn.choice(("keep", "swap"))
        if trace_index.recomputable[value]:
            decisions[value] = drawn.choice(("keep", "swap", "recompute", "remake", "remake", "remake"))
    return decisions


CASES = [(name, anything) for name in ZOO] + [(name, remake_all) for name in ("resnet", "vit", "unet", "lstm")]


@pytest.mark.parametrize(("name", "planner"), CASES)
def test_same_numbers_where_values_are_remade(name: str, planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLANNERS, "recompute-all", planner)
    model, loss = build(name)
    ooc = limit(model, "100%", planner="recompute-all", measure=True)
    got = train(model, loss, ooc)
    plain(name).assert_same(got)
    assert_followed(ooc)
    ooc.close()


def test_an_op_runs_again_for_each_need_and_what_it_made_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    num_reruns, peaks = [], []
    for planner in (PLANNERS["recompute-all"], remake_all):
        monkeypatch.setitem(PLANNERS, "recompute-all", planner)
        model, loss = build("vit")
        ooc = limit(model, "100%", planner="recompute-all", measure=True)
        train(model, loss, ooc)
        assert ooc.timeline is not None
        reruns = [action.split()[2] for action in ooc.timeline.actions if " rerun " in action]
        num_reruns.append(len(reruns))
        peaks.append(ooc.timeline.peak_bytes)
        ooc.close()
    assert num_reruns[1] > num_reruns[0]
    assert peaks[1] < peaks[0]
