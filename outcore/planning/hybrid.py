"""Terrain + Machine + Budget -> decisions, near the least step time: the default planner."""

from __future__ import annotations

from outcore.planning.scoring import Decisions, Progress, lean_bytes, score
from outcore.planning.simple import keep_all, leanest
from outcore.planning.terrain import Terrain
from outcore.values import Budget, Machine


def hybrid(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    kept = keep_all(terrain, machine, budget, progress)
    if int(lean_bytes(terrain, budget, kept).max(initial=0)) <= budget.device_bytes:
        return kept
    best = leanest(terrain, machine, budget, progress)
    return best
