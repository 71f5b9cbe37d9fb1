"""Trace + Machine + Budget -> Plan -> Schedule -> Timeline. Pure Python and NumPy, never torch."""

from outcore.planning.planners.registry import AS_IT_IS, PLANNERS, plan, plans
from outcore.planning.preparing import lower, simulate, verify

__all__ = ["AS_IT_IS", "PLANNERS", "lower", "plan", "plans", "simulate", "verify"]
