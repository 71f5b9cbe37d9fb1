"""PreparedStep: a plan that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.values.plan import Plan
from outcore.values.residency import Residency
from outcore.values.schedule import Schedule
from outcore.values.timeline import Timeline
from outcore.values.trace import Trace


@dataclass(frozen=True)
class PreparedStep:
    """A plan and everything that follows from it.

    `trace` is the step as it was planned: the recorded one, rewritten (`outcore.planning.rewrites`). Code that needs
    the trace of a plan or schedule uses this one.
    """

    trace: Trace
    plan: Plan
    schedule: Schedule
    predicted: Timeline
    residency: Residency | None = None  # of the training state, if that may leave the device
