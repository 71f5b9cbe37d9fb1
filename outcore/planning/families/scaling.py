"""Traces of one step at a few batch sizes -> its trace at any other batch size.

A training step does the same ops in the same order for every batch size. Only the seconds of ops and the bytes of
storages change, and both are nearly linear between two batch sizes that are not far apart. So every number of a trace
is interpolated between the two nearest recorded batches, or extrapolated from the last two. Two kinds of numbers need
care:

- *Bytes* are exact, but on CUDA the allocator rounds them up, and a library may take another workspace at another size:
  a workspace that shrinks while the batch grows stays at the last one seen. The recorder lets autograd keep tensors
  of less than 4 KiB, so that they seem to live long: batches from a few thousand bytes per tensor on tell the truth,
  smaller ones err on the side of too much.
- *Seconds* of one op are noisy, those of the whole step are not. The lines of the ops only share out the line of the
  step, which is drawn through steps that really ran. A step takes the longer of the host's seconds and the device's:
  that bends upward where the device takes over, and between two batches on both sides of a bend lies below their line.

AccUDNN (arXiv 1901.06773) models a step's time per layer and batch with formulas of its network framework; here nothing
is known about an op but what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.errors import TuningError
from outcore.planning.settings import ALLOCATOR, FAMILIES
from outcore.values import Op, Storage, Tick, Trace


@dataclass(frozen=True)
class Recorded:
    """One recorded step of `batch` samples, whose op seconds add up to what the step really takes."""

    batch: int
    trace: Trace

    @property
    def total_s(self) -> float:
        return sum(op.seconds for op in self.trace.ops)


@dataclass(frozen=True)
class Family:
    """The same step at two or more batch sizes, in ascending order."""

    recorded: tuple[Recorded, ...]

    def __post_init__(self) -> None:
        if len(self.recorded) < 2:
            raise TuningError("a trace is scaled between two recorded batches; record one more batch size")
        for before, after in zip(self.recorded, self.recorded[1:]):
            if before.batch >= after.batch:
                raise TuningError(f"batches {before.batch} and {after.batch} are not in ascending order")
            unlike = difference(before.trace, after.trace)
            if unlike:
                raise TuningError(
                    f"this step does other work with {before.batch} samples than with {after.batch} ({unlike}), so "
                    "neither tells about the other; make every sample the same shape and the step free of branches "
                    "on the batch"
                )

    @property
    def largest(self) -> int:
        return self.recorded[-1].batch

    def at(self, batch: int) -> Trace:
        """Returns the trace of a step of `batch` samples, as it would be recorded."""
        for recorded in self.recorded:
            if recorded.batch == batch:
                return recorded.trace
        at = self._above(batch)
        return _between(self.recorded[at - 1], self.recorded[at], batch, self.step_s(batch))

    def step_s(self, batch: int) -> float:
        """Returns the seconds of the step with everything kept, the middle of the possible range near a bend."""
        least_s, most_s = self.bounds_s(batch)
        return most_s if most_s < (1 + FAMILIES.bend_share) * least_s else (least_s + most_s) / 2

    def bounds_s(self, batch: int) -> tuple[float, float]:
        """Returns bounds on the seconds of the step, which is assumed to be increasing and convex in the batch size.
        The lower bound continues the lines of neighbouring batches, the upper bound is the chord between the nearest
        two."""
        at = self._above(batch)
        chord_s = self._line_s(at, batch)
        if not 2 <= at < len(self.recorded) - 1 or batch in (recorded.batch for recorded in self.recorded):
            return chord_s, chord_s
        low_s, lines_s = self.recorded[at - 1].total_s, (self._line_s(at - 1, batch), self._line_s(at + 1, batch))
        return min(chord_s, max(low_s, *lines_s)), chord_s

    def _line_s(self, at: int, batch: int) -> float:
        low, high = self.recorded[at - 1 : at + 1]
        return _Line(low.batch, high.batch, batch).seconds(low.total_s, high.total_s)

    def _above(self, batch: int) -> int:
        """Returns the position of the upper one of the nearest two batches, or the last."""
        return next((at for at, high in enumerate(self.recorded) if at and batch <= high.batch), len(self.recorded) - 1)


@dataclass(frozen=True)
class _Line:
    """The line through the numbers of two batches, evaluated at a third."""

    low: int
    high: int
    batch: int

    def number(self, low: float, high: float) -> float:
        return high + (high - low) * (self.batch - self.high) / (self.high - self.low)

    def whole(self, low: int, high: int) -> int:
        """Returns an integer, exactly if the slope is an integer, as for shapes and bytes."""
        return high + ((high - low) * (self.batch - self.high)) // (self.high - self.low)

    def seconds(self, low: float, high: float) -> float:
        return max(self.number(low, high), FAMILIES.least_share * min(low, high))

    def bytes(self, low: int, high: int, grain: int) -> int:
        return max(0, -(-self.whole(low, high) // grain) * grain)

    def workspace(self, low: int, high: int, grain: int) -> int:
        return high if high < low else self.bytes(low, high, grain)


def _between(low: Recorded, high: Recorded, batch: int, total_s: float) -> Trace:
    line = _Line(low.batch, high.batch, batch)
    pair = low.trace, high.trace
    grain = 1 if pair[1].device == "cpu" else ALLOCATOR.round_bytes
    ops = tuple(_op(line, grain, *ops) for ops in zip(pair[0].ops, pair[1].ops))
    shared_s = sum(op.seconds for op in ops)
    return replace(
        pair[1],
        ops=tuple(stretched(ops, total_s / shared_s)) if shared_s > 0 else ops,
        storages=tuple(_storage(line, grain, *storages) for storages in zip(pair[0].storages, pair[1].storages)),
        ticks=tuple(_tick(line, *ticks) for ticks in zip(pair[0].ticks, pair[1].ticks)),
        before_bytes=line.bytes(pair[0].before_bytes, pair[1].before_bytes, 1),
    )


def _op(line: _Line, grain: int, low: Op, high: Op) -> Op:
    norm_replay, fused = low.norm_replay and high.norm_replay, low.fused if low.fused == high.fused else ()
    return replace(
        high,
        seconds=line.seconds(low.seconds, high.seconds),
        workspace_bytes=line.workspace(low.workspace_bytes, high.workspace_bytes, grain),
        norm_replay=norm_replay,
        norm_replay_s=line.seconds(low.norm_replay_s, high.norm_replay_s) if norm_replay else 0.0,
        fused=fused,
        repeats=low.repeats if low.repeats == high.repeats else -1,
        fused_s=line.seconds(low.fused_s, high.fused_s) if fused else 0.0,
    )


def _storage(line: _Line, grain: int, low: Storage, high: Storage) -> Storage:
    return high if low.bytes == high.bytes else replace(high, bytes=line.bytes(low.bytes, high.bytes, grain))


def _tick(line: _Line, low: Tick, high: Tick) -> Tick:
    return replace(high, shape=tuple(line.whole(*sides) for sides in zip(low.shape, high.shape)))


def stretched(ops: Sequence[Op], factor: float) -> list[Op]:
    """Returns the ops with all seconds multiplied by one factor."""
    return [op.at(factor) for op in ops]


def fastest(traces: Sequence[Trace]) -> Trace:
    """Returns the trace with the smallest measured seconds of each op, because noise only adds."""
    first = traces[0]
    alike = [trace for trace in traces if not difference(first, trace)]
    ops = [
        replace(group[0], **{name: min(getattr(op, name) for op in group) for name in Op.SECONDS})
        for group in zip(*(trace.ops for trace in alike))
    ]
    return replace(first, ops=tuple(ops))


def difference(one: Trace, other: Trace) -> str:
    """Returns the first difference between the work of two traces in a few words, or an empty string."""
    for at, (op, op2) in enumerate(zip(one.ops, other.ops)):
        if op.name != op2.name:
            return f"op {at} is {op.name}, then {op2.name}"
        if (op.reads, op.writes, op.slot) != (op2.reads, op2.writes, op2.slot):
            return f"op {at}, {op.name}, is wired differently"
    if len(one.ops) != len(other.ops):
        return f"{len(one.ops)} ops, then {len(other.ops)}"
    for tick, tick2 in zip(one.ticks, other.ticks):
        same = (tick.slot, tick.kind, tick.value, tick.pack) == (tick2.slot, tick2.kind, tick2.value, tick2.pack)
        if not same or len(tick.shape) != len(tick2.shape):
            return f"autograd's {tick.kind} {tick.pack} differs"
    if len(one.ticks) != len(other.ticks) or len(one.storages) != len(other.storages):
        return "autograd saves other tensors"
    return ""
