"""Trace + Plan + clock -> device bytes per module over the step.

A byte belongs to the module whose op made it: while the program holds it, and while the plan keeps or has brought back
what autograd saved. What a copy or a rerun needs for a moment only is in the curve of the whole step, and not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from outcore.planning.trace_index import Int64s, TraceIndex, index_of
from outcore.values import Plan, Trace

MOST_MODULES = 6  # that are told apart; the others are one
BEFORE, BACKWARD, OTHERS = "in use before the step", "gradients and backward", "other modules"


@dataclass(frozen=True)
class ModuleMemory:
    module: str
    times_s: tuple[float, ...]
    levels: tuple[int, ...]  # bytes from each of these times on


def module_memory(trace: Trace, plan: Plan, curve: Sequence[tuple[float, int]]) -> list[ModuleMemory]:
    """What was in use before the step first, then the modules with the most, in the order they run. `curve` is the one
    of the plan, whose times are those of the slots."""
    trace_index = index_of(trace)
    changes: dict[str, Int64s] = {}
    names = _names(trace)
    for number, storage in enumerate(trace.storages):
        if not storage.external and storage.dies >= storage.born:
            _hold(changes, trace, names[number], storage.bytes, storage.born, storage.dies)
    for value in trace_index.evictable:
        number, num_bytes = trace_index.storage[value], trace_index.value_bytes[value]
        for first, last in _held(trace_index, plan, value):
            _hold(changes, trace, names[number], num_bytes, first, last)
    times_s = tuple(at_s for at_s, _ in curve[: trace.num_slots])
    levels = {name: np.cumsum(change)[:-1] for name, change in changes.items()}
    largest = sorted(levels, key=lambda name: -int(levels[name].max(initial=0)))[:MOST_MODULES]
    shown = [name for name in levels if name in largest]
    rest = [levels[name] for name in levels if name not in largest]
    shares = [ModuleMemory(BEFORE, times_s, (trace.before_bytes,) * len(times_s))]
    shares += [ModuleMemory(name, times_s, tuple(map(int, levels[name]))) for name in shown]
    if rest:
        shares.append(ModuleMemory(OTHERS, times_s, tuple(map(int, np.sum(rest, axis=0)))))
    return shares


def _held(trace_index: TraceIndex, plan: Plan, value: int) -> list[tuple[int, int]]:
    """Returns the slots in which a saved value is on the device though the program no longer holds it."""
    first, end = trace_index.spans[value]
    spans = [(first, end - 1)] if plan.decisions.get(value, "keep") == "keep" else []
    ticks = trace_index.unpacks[value]
    return spans + [(trace_index.tick_slots[tick], trace_index.given_until[tick]) for tick in ticks[-1:]]


def _hold(changes: dict[str, Int64s], trace: Trace, name: str, num_bytes: int, first: int, last: int) -> None:
    change = changes.setdefault(name, np.zeros(trace.num_slots + 1, dtype=np.int64))
    if first <= last:
        change[first] += num_bytes
        change[min(last, trace.num_slots - 1) + 1] -= num_bytes


def _names(trace: Trace) -> list[str]:
    """Returns, for each storage, the module that made it, by the shortest prefix that tells a few modules apart."""
    makers = [""] * len(trace.storages)
    for value in reversed(trace.values):
        if value.producer >= 0:
            op = trace.ops[value.producer]
            makers[value.storage] = op.module if op.phase == "forward" else BACKWARD
    parts = {maker: maker.split(".") for maker in makers if maker not in ("", BACKWARD)}
    depth = 1
    while depth < 3 and len({tuple(part[:depth]) for part in parts.values()}) < 3:
        depth += 1
    return [".".join(parts[maker][:depth]) if maker in parts else maker or OTHERS for maker in makers]
