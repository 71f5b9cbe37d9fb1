"""TraceIndex + Budget -> decisions that do one thing only, and the decisions that need the least memory.

They mark the ends of the scale: what fits without any of it, what each does alone, and the least memory for a step.
"""

from __future__ import annotations

from outcore.planning.planners.scoring import Decisions, Progress, lean_bytes
from outcore.planning.settings import PEERS
from outcore.planning.trace_index import TraceIndex
from outcore.values import Budget, Machine


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
