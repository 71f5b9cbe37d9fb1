"""Trace + Schedule + spans -> device bytes over the clock.

The simulator's memory has one level per slot, an op or a tick. Here every slot gets its place on the clock: an op from
its span; a tick, with its reruns and waits inside, from the end of the op before it to the start of the op after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from outcore.planning.program.simulate import clock_of, memory_of, steps_of
from outcore.planning.trace_index import Int64s, index_of
from outcore.values import Machine, Schedule, Span, Trace

Curve = list[tuple[float, int]]  # (seconds since the step began, device bytes from there on)


def curve_of(trace: Trace, schedule: Schedule, machine: Machine) -> Curve:
    """The memory a schedule is predicted to use, over the clock. `trace` is that of the prepared step."""
    trace_index, steps = index_of(trace), steps_of(schedule)
    levels = memory_of(trace_index, steps, schedule.decisions)
    return _over_the_clock(trace, levels, clock_of(trace_index, steps, machine, detail=True).spans)


def in_core_curve(trace: Trace, machine: Machine) -> Curve:
    """The same with everything kept."""
    return curve_of(trace, Schedule(trace.fingerprint, (), {}), machine)


def is_own(span: Span) -> bool:
    """An op of the step itself, not a rerun and not a wait."""
    return span.stream == "compute" and not span.is_wait and not span.what.startswith("rerun ")


def _over_the_clock(trace: Trace, levels: Int64s, spans: Sequence[Span]) -> Curve:
    own = [span for span in spans if is_own(span)]
    at_slot = {op.slot: span for op, span in zip(trace.ops, own, strict=True)}
    curve, now_s = Curve(), 0.0
    for slot, num_bytes in enumerate(levels.tolist()):
        span = at_slot.get(slot)
        curve.append((span.start_s if span is not None else now_s, num_bytes))
        now_s = span.end_s if span is not None else now_s
    curve.append((max((span.end_s for span in spans if span.stream == "compute"), default=0.0), curve[-1][1]))
    return curve
