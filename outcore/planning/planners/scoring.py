"""Decisions -> Scored: the step time and memory by which all planners compare decisions, and the ends of that scale.

A planner is a plain function from (TraceIndex, Machine, Budget, Progress) to decisions, one per evictable value.

Three planners do one thing only, and mark what fits without any of it and what each does alone; `leanest` is the least
memory for a step. The *bound* is a step time that no plan can beat. For it, consider one slot. Every evictable value
that the program has released and autograd has not unpacked yet must be kept, swapped out by then, or recomputed later.
The memory for keeping is the budget less what every plan holds in this slot. The bytes swapped out are at most the
lane's rate times the clock. The rest costs seconds: those of recomputing it, the cheapest bytes first, or of waiting
for the lane. The slot with the highest cost gives the bound.

The seconds of an op are shared among the values whose recomputation needs it, so that any set of values costs at least
the sum of their shares. Sharing evenly per byte makes the bound tight where values need the same ops.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outcore.planning.program.lower import Lean, lean_of, lower_steps, tiers_of, unroll
from outcore.planning.program.simulate import Clocked, Step, clock_of, memory_of
from outcore.planning.settings import BOUND, PEERS
from outcore.planning.trace_index import Int64s, TraceIndex, clock_seconds, segments_of
from outcore.values import Budget, Decision, Machine

Decisions = dict[int, Decision]
Progress = Callable[[str, float], None]  # what is being done, part done
Planner = Callable[[TraceIndex, Machine, Budget, Progress], Decisions]
ROUNDING = 1 - 1e-9  # the simulator adds the same seconds in another order, so its sums differ in the last digits


@dataclass(frozen=True)
class Scored:
    """Decisions, and the result of lowering and simulating them."""

    decisions: Mapping[int, Decision]
    steps: list[Step]
    clocked: Clocked
    slot_bytes: Int64s
    fits: bool  # device, host and disk

    @property
    def step_s(self) -> float:
        return self.clocked.step_s

    @property
    def peak_bytes(self) -> int:
        return int(self.slot_bytes.max(initial=0))


def score(
    trace_index: TraceIndex,
    machine: Machine,
    budget: Budget,
    decisions: Mapping[int, Decision],
    lean: Lean | None = None,
) -> Scored:
    """Lowers and simulates decisions."""
    decisions = trace_index.binding(decisions)
    lean = lean or lean_of(trace_index, decisions, budget)
    steps = lower_steps(trace_index, decisions, machine, budget, lean)
    slot_bytes = lean.slot_bytes if steps is lean.steps else memory_of(trace_index, steps, decisions)
    fits = int(slot_bytes.max(initial=0)) <= budget.device_bytes and stored_fits(trace_index, budget, decisions)
    return Scored(decisions, steps, clock_of(trace_index, steps, machine), slot_bytes, fits)


def score_if_it_can_fit(
    trace_index: TraceIndex,
    machine: Machine,
    budget: Budget,
    decisions: Mapping[int, Decision],
    below_s: float = math.inf,
) -> Scored | None:
    """Returns what `score` returns, or None if even the leanest program of these decisions does not fit or takes
    `below_s` without any stalls. Both are known without a simulation."""
    decisions = trace_index.binding(decisions)
    unrolled = unroll(trace_index, decisions)
    if (trace_index.total_s + unrolled.rerun_s(trace_index)) / machine.speed >= below_s:
        return None
    lean = lean_of(trace_index, decisions, budget, unrolled)
    return score(trace_index, machine, budget, decisions, lean) if lean.peak_bytes <= budget.device_bytes else None


def lean_bytes(trace_index: TraceIndex, budget: Budget, decisions: Mapping[int, Decision]) -> Int64s:
    """Returns the device bytes per slot of the leanest program for these decisions."""
    return lean_of(trace_index, decisions, budget).slot_bytes


def stored_fits(trace_index: TraceIndex, budget: Budget, decisions: Mapping[int, Decision]) -> bool:
    """Whether swapped values fit into host and disk. Values that are always swapped do not count: if there is no space
    for them, they stay on the device and the runtime warns."""
    tiers = tiers_of(trace_index, decisions, budget)
    on_disk = [value for value, tier in tiers.items() if tier == "disk" and value not in trace_index.always_swapped]
    return sum(trace_index.value_bytes[value] for value in on_disk) <= budget.disk_bytes


def better(best: Scored, other: Scored) -> Scored:
    """The one that fits; of two that fit, the faster one."""
    return other if other.fits and (other.step_s < best.step_s or not best.fits) else best


# -- decisions that do one thing only ----------------------------------------------------------------------------------


def keep_all(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Keeps everything."""
    return dict.fromkeys(trace_index.evictable, "keep")


def swap_all(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Swaps everything, the oldest first. Values that neither host nor disk can hold are kept."""
    decisions: Decisions = keep_all(trace_index, machine, budget, progress)
    host_bytes, disk_bytes = budget.host_bytes, budget.disk_bytes
    for value in trace_index.evictable:
        num_bytes = trace_index.value_bytes[value]
        if num_bytes <= host_bytes:
            host_bytes -= num_bytes
        elif num_bytes <= disk_bytes:
            disk_bytes -= num_bytes
        else:
            continue
        decisions[value] = "swap"
    return decisions


def recompute_all(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Recomputes everything that can be recomputed, swaps values that outlive the step, and keeps the rest."""
    swapped = swap_all(trace_index, machine, budget, progress)
    rest = {value: swapped[value] if value in trace_index.left_behind else "keep" for value in trace_index.evictable}
    return {value: "recompute" if trace_index.recomputable[value] else decision for value, decision in rest.items()}


def leanest(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Returns the decisions that need the least memory: usually everything is swapped. If host and disk cannot hold it,
    values are remade at each use, in steps that are small enough: ops may run as often as there are values."""
    swapped = swap_all(trace_index, machine, budget, progress)
    again = recompute_all(trace_index, machine, budget, progress)
    choices = [swapped, again, keep_all(trace_index, machine, budget, progress)]
    if "keep" in swapped.values():
        choices.append({value: again[value] if decision == "keep" else decision for value, decision in swapped.items()})
        if len(trace_index.evictable) * len(trace_index.trace.ops) <= PEERS.most_remade:
            remade: Decisions = {
                value: "remake" if decision == "recompute" else decision for value, decision in again.items()
            }
            choices.append(remade)
            choices.append(
                {value: remade[value] if decision == "keep" else decision for value, decision in swapped.items()}
            )
    return min(choices, key=lambda decision: int(lean_bytes(trace_index, budget, decision).max(initial=0)))


# -- the bound ---------------------------------------------------------------------------------------------------------


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
