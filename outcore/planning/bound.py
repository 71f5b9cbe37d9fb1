"""Trace + Machine + Budget -> seconds no plan can beat."""

from __future__ import annotations

from outcore.planning.terrain import Terrain
from outcore.values import Budget, Machine


def bound_step_s(terrain: Terrain, machine: Machine, budget: Budget) -> float:
    return terrain.total_s / machine.speed
