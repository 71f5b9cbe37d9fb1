"""Trace + Schedule -> Program: a schedule made ready to be followed, all that the hot path asks of it looked up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outcore.planning.crowd import Placeholder
from outcore.planning.echoes import step_of
from outcore.values import Action, Schedule, Tick, Trace

Moves = tuple[list[int], list[int]]  # placeholders to give back, then those to take, by number


class PlannedTick:
    """What the hot path needs to know of one tick."""

    __slots__ = (
        "actions",
        "decision",
        "dtype",
        "is_busy",
        "is_pack",
        "moves",
        "needs_cell",
        "number",
        "pack",
        "shape",
        "value",
    )

    def __init__(self, number: int, tick: Tick, decision: str) -> None:
        self.number = number
        self.is_pack = tick.kind == "pack"
        self.pack = tick.pack
        self.value = tick.value
        self.shape = tick.shape
        self.dtype = getattr(torch, tick.dtype, None)
        self.decision = decision
        self.needs_cell = self.is_busy = False
        self.actions: list[Action] = []
        self.moves: Moves | None = None


class Program:
    """A schedule made ready to be followed."""

    def __init__(
        self,
        trace: Trace,
        schedule: Schedule,
        placeholders: Sequence[Placeholder] = (),
        *,
        gradients_aside: bool = False,
    ) -> None:
        trace = step_of(trace, schedule)
        self.fingerprint = trace.fingerprint
        self.schedule = schedule
        self.ticks = [
            PlannedTick(number, tick, schedule.decisions.get(tick.value, "")) for number, tick in enumerate(trace.ticks)
        ]
        for action in schedule.actions:
            self.ticks[action.tick].actions.append(action)
        rerun = {action.op for action in schedule.actions if action.kind == "rerun"}
        self.captured = {op: trace.ops[op] for index in rerun for op in (*trace.ops[index].fused, index)}
        put_away = {value for value, decision in schedule.decisions.items() if decision != "keep"}
        kept = {tick.value for tick in trace.ticks} - put_away
        # Norms that are applied again from the statistics that autograd keeps.
        self.twins = {index for index, op in self.captured.items() if op.twin and kept.issuperset(op.writes[1:3])}
        self.echoes = {index: op.repeats for index, op in enumerate(trace.ops) if op.is_echo}
        self.repeated = {index: trace.ops[index].writes[0] for index in self.echoes.values()}
        self.outside = {v for op in self.captured.values() for v in op.writes if _is_outside(trace, v)}
        self.gradients_aside = gradients_aside
        self.placeholders = placeholders
        moves = _moves(placeholders)
        for recorded, planned in zip(trace.ticks, self.ticks):
            planned.moves = moves.get(recorded.slot)
        self.moves = {index: moves[op.slot] for index, op in enumerate(trace.ops) if op.slot in moves}
        self.last_watched = max((*self.captured, *self.moves, *self.echoes), default=-1)
        self.names = [op.name for op in trace.ops[: self.last_watched + 1]]
        self.ends_in_forward = _ends_in_forward(trace, self.last_watched)
        written = {trace.values[value].storage for op in self.captured.values() for value in op.writes}
        reads = {value for op in self.captured.values() for value in op.reads}
        # Parameters, buffers and inputs that captured ops only read: they are there all along, and need no cell.
        self.held = {v for v in reads if _is_outside(trace, v) and trace.values[v].storage not in written}
        self.cells = put_away | (reads - self.held) | set(self.repeated.values())
        for tick in self.ticks:
            tick.needs_cell = tick.value in self.cells
            # To drop a value there is nothing to do: its pack does not hold it.
            tick.is_busy = tick.moves is not None or any(action.kind != "drop" for action in tick.actions)
        self.swapped_bytes = sum(
            trace.bytes_of(value) for value, decision in schedule.decisions.items() if decision == "swap"
        )

    @classmethod
    def empty(cls) -> Program:
        """No plan: the first tick leaves it."""
        return cls(Trace((), (), (), (), 0), Schedule("", (), {}))


def _moves(placeholders: Sequence[Placeholder]) -> dict[int, Moves]:
    """By slot; what is there before the step is nobody's."""
    found: dict[int, Moves] = {}
    for number, one in enumerate(placeholders):
        found.setdefault(one.until, ([], []))[0].append(number)
        if one.since >= 0:
            found.setdefault(one.since, ([], []))[1].append(number)
    return found


def _is_outside(trace: Trace, value: int) -> bool:
    """Written into something that was there before the step: nothing we bring back."""
    return trace.storages[trace.values[value].storage].external


def _ends_in_forward(trace: Trace, last_watched: int) -> bool:
    """Is anything saved between the last op to be looked at and the backward? Only then Python stops looking."""
    backward = next((op.slot for op in trace.ops if op.phase == "backward"), trace.num_slots)
    after = trace.ops[last_watched].slot if last_watched >= 0 else -1
    return last_watched < 0 or any(tick.kind == "pack" and after < tick.slot < backward for tick in trace.ticks)
