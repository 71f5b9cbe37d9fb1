"""What the hot path is told of a schedule."""

from __future__ import annotations

import pytest

from outcore.eager.program import Program
from outcore.values import Action, Op, Schedule, Storage, Tick, Trace, Value

INPUT, NORMED, MEAN, DEVIATION = range(4)


def trace_of(*saved: int) -> Trace:
    """A norm with a norm replay, and what autograd saves of it."""
    norm = Op(0, "norm", "forward", 1.0, (INPUT,), (NORMED, MEAN, DEVIATION), norm_replay=True, norm_replay_s=0.5)
    values = tuple(Value(number, 0, -1 if number == INPUT else 0) for number in range(4))
    storages = tuple(Storage(64, 0, 9, external=number == INPUT) for number in range(4))
    packs = [Tick(1 + pack, "pack", value, pack, -1) for pack, value in enumerate(saved)]
    unpack = Tick(8, "unpack", NORMED, saved.index(NORMED), 9)
    return Trace((norm,), values, storages, (*packs, unpack), 0)


def program_of(trace: Trace, decisions: dict[int, str]) -> Program:
    rerun = Action(len(trace.ticks) - 1, "rerun", op=0, values=(NORMED,))
    return Program(trace, Schedule(trace.fingerprint, (Action(0, "drop", NORMED), rerun), decisions))


def test_a_norm_is_applied_again_from_statistics_that_are_kept() -> None:
    program = program_of(trace_of(NORMED, MEAN, DEVIATION), {NORMED: "recompute", MEAN: "keep"})
    assert program.norm_replays == {0}
    assert program.cells == {NORMED}  # autograd has the statistics


@pytest.mark.parametrize("decision", ["swap", "recompute"])
def test_nothing_begins_from_statistics_that_are_put_away(decision: str) -> None:
    program = program_of(trace_of(NORMED, MEAN, DEVIATION), {NORMED: "recompute", DEVIATION: decision})
    assert not program.norm_replays


def test_nothing_begins_from_statistics_that_nobody_saves() -> None:
    assert not program_of(trace_of(NORMED, MEAN), {NORMED: "recompute"}).norm_replays


def test_dropping_a_value_is_no_work() -> None:
    program = program_of(trace_of(NORMED, MEAN, DEVIATION), {NORMED: "recompute"})
    assert [tick.is_busy for tick in program.ticks] == [False, False, False, True]
    assert [tick.needs_cell for tick in program.ticks] == [True, False, False, True]
