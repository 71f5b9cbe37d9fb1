"""TraceIndex + Budget -> decisions that do one thing only, and the leanest there is.

Their value is as the ends of the scale: what fits without any of it, what each means alone, and what is the least
memory the step can run in.
"""

from __future__ import annotations

from outcore.planning.planners.scoring import Decisions, Progress, lean_bytes
from outcore.planning.settings import PEERS
from outcore.planning.trace_index import TraceIndex
from outcore.values import Budget, Machine


def keep_all(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Nothing is evicted."""
    return dict.fromkeys(trace_index.evictable, "keep")


def swap_all(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Everything is swapped, oldest first; what neither host nor disk can hold is kept."""
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
    """Everything that can be recomputed is, and what outlives the step swapped; the rest is kept."""
    swapped = swap_all(trace_index, machine, budget, progress)
    rest = {value: swapped[value] if value in trace_index.left_behind else "keep" for value in trace_index.evictable}
    return {value: "recompute" if trace_index.recomputable[value] else decision for value, decision in rest.items()}


def leanest(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """The decisions with the least memory we know: mostly everything swapped, waited for at once. Where host and disk
    cannot hold it, everything remade, in steps that are not too deep: that reruns ops as often as there are values."""
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
