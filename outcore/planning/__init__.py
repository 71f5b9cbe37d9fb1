"""Trace + Machine + Budget -> Plan -> Schedule -> Timeline. Pure Python and NumPy, never torch."""

from outcore.planning.lower import lower
from outcore.planning.planners import AS_IT_IS, PLANNERS, plan, plans
from outcore.planning.simulate import simulate
from outcore.planning.verify import verify

__all__ = ["AS_IT_IS", "PLANNERS", "lower", "plan", "plans", "simulate", "verify"]
