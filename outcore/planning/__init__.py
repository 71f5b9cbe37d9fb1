"""Trace + Machine + Budget -> Plan -> Schedule -> Timeline. Pure Python and NumPy, never torch."""

from outcore.planning.preparing import AS_IT_IS, PLANNERS, check_planner, lower, plan, plans, simulate, verify

__all__ = ["AS_IT_IS", "PLANNERS", "check_planner", "lower", "plan", "plans", "simulate", "verify"]
