"""The data that rooms exchange: Machine, Trace, Budget, Plan, Schedule, Timeline; PreparedStep holds four of them. All
are frozen dataclasses, and need no torch."""

from outcore.values.machine import HostCosts, Machine, OpRates
from outcore.values.plan import MADE_AGAIN, Budget, Decision, Plan
from outcore.values.prepared import PreparedStep
from outcore.values.residency import Residency, StateUnit
from outcore.values.schedule import Action, Schedule
from outcore.values.timeline import Span, Timeline
from outcore.values.trace import Op, Replay, StateUse, Storage, Tick, Trace, Value

__all__ = [
    "MADE_AGAIN",
    "Action",
    "Budget",
    "Decision",
    "HostCosts",
    "Machine",
    "Op",
    "OpRates",
    "Plan",
    "PreparedStep",
    "Replay",
    "Residency",
    "Schedule",
    "Span",
    "StateUnit",
    "StateUse",
    "Storage",
    "Tick",
    "Timeline",
    "Trace",
    "Value",
]
