"""Trace + the ops timed once more -> the trace with the smaller times, because a measurement can only overstate."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outcore.values import Trace

log = logging.getLogger("outcore")


@dataclass(frozen=True)
class TimedOps:
    """The ops of a step that were timed again."""

    names: Sequence[str]
    seconds: Sequence[float]
    host_s: Sequence[float] = ()  # of the host before each op; empty if unknown


def timed_again(trace: Trace, times: TimedOps, pass_bytes_share: float) -> Trace:
    """Returns the trace with the smaller times, or unchanged if other ops ran. For `pass_bytes_share` see `_pass_s`."""
    if not are_ops_of(trace, times.names):
        log.info("the first planned step ran other ops than recorded; its times were not used")
        return trace
    host_s = times.host_s or [op.host_s for op in trace.ops]
    ops = tuple(
        replace(op, seconds=min(op.seconds, op_s), host_s=min(op.host_s, gap_s))
        for op, op_s, gap_s in zip(trace.ops, times.seconds, host_s, strict=True)
    )
    timed = replace(trace, ops=ops)
    passes = {index: _pass_s(timed, index, pass_bytes_share) for index, op in enumerate(ops) if op.fused}
    return replace(timed, ops=tuple(replace(op, fused_s=passes.get(index, 0.0)) for index, op in enumerate(ops)))


def are_ops_of(trace: Trace, names: Sequence[str]) -> bool:
    """Whether the names are those of the trace's ops. Ops that add gradients may differ, since autograd does that in
    place in some steps and not in others."""
    return len(names) == len(trace.ops) and all(op.joins or op.name == name for op, name in zip(trace.ops, names))


def _pass_s(trace: Trace, index: int, share: float) -> float:
    """Returns the seconds of a pass: no more than those of any of its ops that moves at least this share of its bytes
    when it runs alone. The share leaves weights and statistics out."""
    op = trace.ops[index]
    moved_bytes = sum(trace.bytes_of(value) for value in (*trace.rerun_reads[index], *op.writes))
    parts = [part for part in (*(trace.ops[inner] for inner in op.fused), op) if not part.norm_replay]
    as_much = [
        part.seconds
        for part in parts
        if sum(trace.bytes_of(value) for value in (*part.reads, *part.writes)) >= share * moved_bytes
    ]
    return min((op.fused_s, *as_much))
