"""Recorded step -> the same step with ops that compute the same value merged.

Under autocast every linear layer casts its own input: queries, keys and values have three equal copies of what they
read, and autograd saves all three. An op that calls the same operator on the same values as an earlier op *repeats* it,
and its result has the same bits. What was saved of the repeated op is then saved of the first one: it is kept, swapped
or recomputed once, and the storage of the repeated op is freed when the program releases it. The runtime checks in
every step that a merged op still repeats the first one (`outcore.eager.execution`).

Only values that can be evicted are merged: a value that the program holds until autograd asks for it, or a small one,
is in memory anyway. The first op must also be the one whose result is saved first, because the runtime holds saved
tensors.

A recomputed value stays in memory until autograd has unpacked it for the last time, so repeated ops whose results are
needed far apart are not merged. If everything can be kept, plans merge nothing, and no op has to be watched. The
planners that recompute nothing merge nothing either: they are the fallback for steps in which code writes into tensors
without an op. The rewritten step keeps the fingerprint of the recorded one.
"""

from __future__ import annotations

from dataclasses import replace

from outcore.planning.settings import LOWERING
from outcore.planning.trace_index import index_of, remembered
from outcore.values import Trace


def merged(trace: Trace) -> Trace:
    return remembered(trace, _merge)


def _merge(trace: Trace) -> Trace:
    first_of = _repeated_values(trace)
    if not first_of:
        return trace
    merged = replace(
        trace,
        ops=tuple(
            replace(
                op,
                reads=tuple(first_of.get(value, value) for value in op.reads),
                is_merged=op.repeats >= 0 and op.writes[0] in first_of,
            )
            for op in trace.ops
        ),
        ticks=tuple(replace(tick, value=first_of.get(tick.value, tick.value)) for tick in trace.ticks),
    )
    vars(merged)["fingerprint"] = trace.fingerprint
    return merged


def _repeated_values(trace: Trace) -> dict[int, int]:
    """Value of a repeated op -> the value of the first op."""
    trace_index, repeated = index_of(trace), {}
    near_slots = max(LOWERING.near_slots, int(LOWERING.near_share * trace.num_slots))
    evictable = set(trace_index.evictable)

    def is_plain(value: int) -> bool:
        return value in evictable and bool(trace_index.unpacks[value]) and value not in trace_index.always_swapped

    ticks: dict[int, list[int]] = {}  # first value -> the ticks of all that are like it
    for op in trace.ops:
        if op.repeats < 0:
            continue
        first, value = trace.ops[op.repeats].writes[0], op.writes[0]
        if not is_plain(first) or not is_plain(value) or trace_index.packs[first][0] > trace_index.packs[value][0]:
            continue
        asked = [*ticks.get(first, trace_index.unpacks[first]), *trace_index.unpacks[value]]
        slots = [trace_index.tick_slots[tick] for tick in asked]
        if max(slots) - min(slots) <= near_slots and trace_index.packs[value][-1] < min(asked):
            repeated[value], ticks[first] = first, asked
    return repeated
