"""Terrain + Budget -> decisions that do one thing only, and the leanest there is.

Their value is as the ends of the scale: what fits without any of it, what each means alone, and what is the least
memory the step can run in.
"""

from __future__ import annotations

from outcore.planning.scoring import Decisions, Progress, lean_bytes
from outcore.planning.terrain import Terrain
from outcore.values import Budget, Machine

MOST_REMADE = 500_000  # values x ops


def keep_all(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Nothing is evicted."""
    return dict.fromkeys(terrain.evictable, "keep")


def swap_all(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Everything is swapped, oldest first; what neither host nor disk can hold is kept."""
    decisions: Decisions = keep_all(terrain, machine, budget, progress)
    host_bytes, disk_bytes = budget.host_bytes, budget.disk_bytes
    for value in terrain.evictable:
        num_bytes = terrain.value_bytes[value]
        if num_bytes <= host_bytes:
            host_bytes -= num_bytes
        elif num_bytes <= disk_bytes:
            disk_bytes -= num_bytes
        else:
            continue
        decisions[value] = "swap"
    return decisions


def recompute_all(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Everything that can be recomputed is; the rest is kept."""
    return {value: "recompute" if terrain.recomputable[value] else "keep" for value in terrain.evictable}


def leanest(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """The decisions with the least memory we know: mostly everything swapped, waited for at once. Where host and disk
    cannot hold it, everything remade, in steps that are not too deep: that reruns ops as often as there are values."""
    swapped = swap_all(terrain, machine, budget, progress)
    again = recompute_all(terrain, machine, budget, progress)
    choices = [swapped, again, keep_all(terrain, machine, budget, progress)]
    if "keep" in swapped.values():
        choices.append({value: again[value] if made == "keep" else made for value, made in swapped.items()})
        if len(terrain.evictable) * len(terrain.trace.ops) <= MOST_REMADE:
            remade: Decisions = {value: "remake" if made == "recompute" else made for value, made in again.items()}
            choices.append(remade)
            choices.append({value: remade[value] if made == "keep" else made for value, made in swapped.items()})
    return min(choices, key=lambda made: int(lean_bytes(terrain, budget, made).max(initial=0)))
