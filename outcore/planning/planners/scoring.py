"""Decisions -> Scored: the step time and memory by which all planners compare decisions.

A planner is a plain function from (TraceIndex, Machine, Budget, Progress) to decisions, one per evictable value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outcore.planning.program.lower import Lean, lean_of, lower_steps, tiers_of
from outcore.planning.program.simulate import Clocked, Step, clock_of, memory_of
from outcore.planning.program.unroll import unroll
from outcore.planning.trace_index import Int64s, TraceIndex
from outcore.values import Budget, Decision, Machine

Decisions = dict[int, Decision]
Progress = Callable[[str, float], None]  # what is being done, part done
Planner = Callable[[TraceIndex, Machine, Budget, Progress], Decisions]


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
