"""What a training loop knows of steps that do the same work: Kind.

The first one is recorded, the second follows a plan while its ops are timed again, those after it follow a plan that is
tried, fitted to the allocator and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.running.program import Program
from outcore.running.room import Room
from outcore.units import MIB
from outcore.values import Plan, Schedule, Timeline, Trace

NEARLY = 0.9  # as many bytes: weights and statistics do not count


@dataclass
class Kind:
    """Steps that do the same work."""

    trace: Trace | None = None
    plan: Plan | None = None
    schedule: Schedule | None = None
    program: Program | None = None
    predicted: Timeline | None = None
    measured: Timeline | None = None
    num_steps: int = 0  # planned steps so far
    num_left: int = 0  # steps that left the plan
    timed_again: bool = False  # op times were corrected on a planned step
    in_place: bool = False  # planned as it runs where Python looks at no op of the backward
    watched: bool = False  # Python looks at all of it, whatever the plan
    taken_bytes: int = 0  # that were there before the step when a plan that was given was taken up
    stale: bool = True  # to be planned (again) when it comes next
    room: Room | None = None  # what plans may use of a CUDA budget
    num_slowed: int = 0  # times copies turned out slower than measured
    unplanned: bool = False  # given up

    @property
    def made(self) -> tuple[Plan | None, Schedule | None, Timeline | None, Program | None]:
        """What it takes to follow the plan, and to come back to it."""
        return self.plan, self.schedule, self.predicted, self.program

    @property
    def is_final(self) -> bool:
        """Will its plan not change any more?"""
        return self.program is not None and not self.stale and (self.room is None or self.room.settled)

    def has_grown(self, before_bytes: int) -> bool:
        """Is more there before the step than its plan is for? One that was given may be for less: it stays as it is,
        and is taken up anew only where more is there than it was taken up with."""
        known_bytes = max(self.plan.before_bytes, self.taken_bytes) if self.plan is not None else before_bytes
        return before_bytes > known_bytes + MIB

    def take_times(self, names: Sequence[str], seconds: Sequence[float]) -> bool:
        """Of its ops, timed once more: the smaller figures count; False where other ops ran. It is to be planned anew
        either way: the plan so far was a brief one, for the step that was timed."""
        self.stale = True
        if self.room is not None:
            self.room.forget()
        if self.trace is None or list(names) != [op.name for op in self.trace.ops]:
            return False
        ops = tuple(replace(op, seconds=min(op.seconds, s)) for op, s in zip(self.trace.ops, seconds, strict=True))
        trace = replace(self.trace, ops=ops)
        passes = {index: _pass_s(trace, index) for index, op in enumerate(ops) if op.fused}
        ops = tuple(replace(op, fused_s=passes.get(index, 0.0)) for index, op in enumerate(ops))
        self.trace = replace(trace, ops=ops)
        return True

    def go_at(self, pace: float) -> None:
        """Every op takes so many times as long as was thought."""
        assert self.trace is not None
        self.trace = replace(self.trace, ops=tuple(op.at(pace) for op in self.trace.ops))


def _pass_s(trace: Trace, index: int) -> float:
    """A pass takes no longer than the one of its ops, run as it is, that moves as many bytes."""
    op = trace.ops[index]
    moved_bytes = sum(trace.bytes_of(value) for value in (*trace.rerun_reads[index], *op.writes))
    parts = [part for part in (*(trace.ops[inner] for inner in op.fused), op) if not part.twin]
    as_much = [
        part.seconds
        for part in parts
        if sum(trace.bytes_of(value) for value in (*part.reads, *part.writes)) >= NEARLY * moved_bytes
    ]
    return min((op.fused_s, *as_much))
