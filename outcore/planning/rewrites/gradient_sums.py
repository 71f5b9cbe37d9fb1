"""Recorded step -> the same step with gradients added in place, as autograd does while ops are not watched.

Where two gradients of a tensor are added, autograd writes the sum into the first one if nothing else refers to it.
Under a dispatch mode, or if Python refers to its storage, as in a recorded step, autograd allocates a third tensor. So
a recorded step needs up to one gradient more than the steps that follow its plan. The rewritten step keeps its
fingerprint.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from outcore.planning.trace_index import remembered
from outcore.values import Trace


def sums_in_place(trace: Trace) -> Trace:
    return remembered(trace, _join)


def adds_in_place(trace: Trace) -> bool:
    """Whether autograd may add in place where nobody looks; not if anything is saved after the backward began."""
    return not remembered(trace, _saves_late)


def _join(trace: Trace) -> Trace:
    if not adds_in_place(trace):
        return trace
    storages, values = list(trace.storages), list(trace.values)
    versions: defaultdict[int, list[int]] = defaultdict(list)  # storage -> its values
    for number, value in enumerate(values):
        versions[value.storage].append(number)
    for op in trace.ops:
        if not op.joins:
            continue
        first, total = values[op.reads[0]].storage, values[op.writes[0]].storage
        one, other = storages[first], storages[total]
        if first == total or one.external or one.bytes != other.bytes or one.dies != op.slot:
            continue
        if any(values[read].storage == first for read in op.reads[1:]):  # one gradient, twice
            continue
        for number in versions.pop(total):
            values[number] = replace(values[number], storage=first, version=len(versions[first]))
            versions[first].append(number)
        storages[first], storages[total] = replace(one, dies=other.dies), replace(other, bytes=0)
    joined = replace(trace, storages=tuple(storages), values=tuple(values))
    vars(joined)["fingerprint"] = trace.fingerprint
    return joined


def _saves_late(trace: Trace) -> bool:
    """Is anything saved after its backward began? Then either that is differentiated too, and autograd never adds in
    place, or another forward follows, and Python may look at ops until that is over."""
    began = next((op.slot for op in trace.ops if op.phase == "backward"), trace.num_slots)
    return any(tick.kind == "pack" and tick.slot > began for tick in trace.ticks)
