"""Trace + Machine + Budget -> a step time that no plan can beat.

Consider one slot. Every evictable value that the program has released and autograd has not unpacked yet must be kept,
swapped out by then, or recomputed later. The memory for keeping is the budget less what every plan holds in this slot.
The bytes swapped out are at most the lane's rate times the clock. The rest costs seconds: those of recomputing it, the
cheapest bytes first, or of waiting for the lane. The slot with the highest cost gives the bound.

The seconds of an op are shared among the values whose recomputation needs it, so that any set of values costs at least
the sum of their shares. Sharing evenly per byte makes the bound tight where values need the same ops.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outcore.planning.planners.costs import segments_of
from outcore.planning.planners.scoring import Decisions, lean_bytes
from outcore.planning.program.simulate import clock_of
from outcore.planning.settings import BOUND
from outcore.planning.trace_index import Int64s, TraceIndex, clock_seconds
from outcore.values import Budget, Machine

ROUNDING = 1 - 1e-9  # the simulator adds the same seconds in another order, so its sums differ in the last digits


def bound_step_s(trace_index: TraceIndex, machine: Machine, budget: Budget) -> float:
    """Returns a lower bound on the step time of every plan for this budget."""
    op_s = clock_of(trace_index, (), machine).step_s
    if not trace_index.evictable:
        return op_s * ROUNDING
    over_bytes = _over_bytes(trace_index, budget)
    clock_s = _slot_clock(trace_index) / machine.speed
    rate = _fastest_out(machine, budget)
    urgent = np.where(over_bytes > 0, over_bytes - rate * clock_s, -np.inf)
    looked_at = np.argsort(urgent, kind="stable")[::-1][: BOUND.num_slots]
    shares_s = _shares(trace_index)
    delay_s = max(
        (
            _delay_at(trace_index, machine, budget, int(slot), int(over_bytes[slot]), float(clock_s[slot]), shares_s)
            for slot in looked_at
            if over_bytes[slot] > 0
        ),
        default=0.0,
    )
    return (op_s + delay_s) * ROUNDING


def _over_bytes(trace_index: TraceIndex, budget: Budget) -> Int64s:
    """Returns, for each slot of an op, by how many bytes keeping everything would exceed the budget; 0 at ticks."""
    swapped: Decisions = dict.fromkeys(trace_index.evictable, "swap")
    change = np.zeros(trace_index.trace.num_slots + 1, dtype=np.int64)
    for value, (first, end) in trace_index.spans.items():
        if first < end:
            change[first] += trace_index.value_bytes[value]
            change[end] -= trace_index.value_bytes[value]
    kept: Decisions = dict.fromkeys(trace_index.evictable, "keep")
    # Two saved versions of one storage have two spans but one block. The memory with everything kept counts it once.
    held = np.minimum(
        lean_bytes(trace_index, budget, swapped) + np.cumsum(change)[:-1], lean_bytes(trace_index, budget, kept)
    )
    over: Int64s = held - budget.device_bytes
    over[trace_index.tick_slots] = 0
    return over


def _slot_clock(trace_index: TraceIndex) -> NDArray[np.float64]:
    """Returns the seconds of all ops before each slot."""
    seconds = np.zeros(trace_index.trace.num_slots + 1)
    for op, op_s in zip(trace_index.trace.ops, clock_seconds(trace_index.trace)):
        seconds[op.slot + 1] = op_s
    clock_s: NDArray[np.float64] = np.cumsum(seconds)[:-1]
    return clock_s


def _fastest_out(machine: Machine, budget: Budget) -> float:
    rates = [machine.swap_out_bytes_per_s] if budget.host_bytes else []
    rates += [machine.disk_write_bytes_per_s] if budget.disk_bytes else []
    return max(rates, default=0.0)


def _shares(trace_index: TraceIndex) -> dict[int, float]:
    """Returns each value's share of the seconds of recomputing it."""
    segments = {value: ops for value, ops in segments_of(trace_index).items() if trace_index.unpacks[value]}
    users: dict[int, list[int]] = {}
    for value, ops in segments.items():
        for op in ops:
            users.setdefault(op, []).append(value)
    share_s = dict.fromkeys(segments, 0.0)
    given: dict[int, dict[int, float]] = {op: {} for op in users}
    shared = [op for op, values in users.items() if len(values) > 1]
    for op, values in users.items():
        if len(values) == 1:
            share_s[values[0]] += trace_index.trace.ops[op].rerun_s
    for _ in range(BOUND.num_sharing_rounds):
        for op in shared:
            for value, seconds in given[op].items():
                share_s[value] -= seconds
            given[op] = _level(trace_index, users[op], share_s, trace_index.trace.ops[op].rerun_s)
            for value, seconds in given[op].items():
                share_s[value] += seconds
    return share_s


def _level(trace_index: TraceIndex, values: list[int], share_s: dict[int, float], seconds: float) -> dict[int, float]:
    """Distributes `seconds` to the values with the fewest seconds per byte, until these are equal."""
    by_density = sorted(values, key=lambda value: share_s[value] / trace_index.value_bytes[value])
    num_bytes, held_s = 0, 0.0
    for at, value in enumerate(by_density):
        num_bytes += trace_index.value_bytes[value]
        held_s += share_s[value]
        level = (held_s + seconds) / num_bytes
        after = by_density[at + 1] if at + 1 < len(by_density) else None
        if after is None or level <= share_s[after] / trace_index.value_bytes[after]:
            break
    return {value: level * trace_index.value_bytes[value] - share_s[value] for value in by_density[: at + 1]}


def _delay_at(
    trace_index: TraceIndex,
    machine: Machine,
    budget: Budget,
    slot: int,
    over_bytes: int,
    clock_s: float,
    shares_s: dict[int, float],
) -> float:
    """Returns the least extra seconds with which this slot fits: recompute the cheapest bytes, or wait for the lane."""
    rate, stored_bytes = _fastest_out(machine, budget), budget.host_bytes + budget.disk_bytes
    remade = _remake_offers(trace_index, machine, slot, shares_s)
    first_unpack = min((ticks[0] for ticks in trace_index.unpacks.values() if ticks), default=0)
    if slot < trace_index.tick_slots[first_unpack]:  # no op has run again yet, so only waiting gives the lane more time
        copied_bytes = min(rate * clock_s, stored_bytes)
        wait = [(1 / rate, max(stored_bytes - copied_bytes, 0.0))] if rate > 0 else []
        return _cheapest(sorted(remade + wait), over_bytes - copied_bytes)
    low_s, high_s = 0.0, _cheapest(remade, float(over_bytes - min(rate * clock_s, stored_bytes)))
    high_s = min(high_s, over_bytes / rate if rate > 0 else high_s)
    for _ in range(BOUND.num_halvings):  # a delay gives the lane time, too: find the fixed point
        middle_s = (low_s + high_s) / 2
        left_bytes = over_bytes - min(rate * (clock_s + middle_s), stored_bytes)
        low_s, high_s = (middle_s, high_s) if _cheapest(remade, left_bytes) > middle_s else (low_s, middle_s)
    return low_s


def _remake_offers(
    trace_index: TraceIndex, machine: Machine, slot: int, shares_s: dict[int, float]
) -> list[tuple[float, float]]:
    """Returns (seconds per byte, bytes) of the values that need not exist in this slot, the cheapest first."""
    offers = []
    for value, (first, end) in trace_index.spans.items():
        if first <= slot < end and trace_index.recomputable[value]:
            num_bytes = trace_index.value_bytes[value]
            offers.append((shares_s.get(value, 0.0) / machine.speed / num_bytes, float(num_bytes)))
    return sorted(offers)


def _cheapest(offers: list[tuple[float, float]], num_bytes: float) -> float:
    """Returns the seconds to free `num_bytes` with the cheapest offers; the last one may be used in part."""
    seconds = 0.0
    for density, offered_bytes in offers:
        if num_bytes <= 0:
            break
        taken_bytes = min(offered_bytes, num_bytes)
        seconds += taken_bytes * density
        num_bytes -= taken_bytes
    return seconds
