"""A plan and what was seen of it -> the figures that every report shows: terminal, page and JSON.

There is one in-core time, one step time and one "over in-core" of each kind. Predicted times are compared with the
predicted in-core time, measured ones with a measured one and with nothing else: a recorded op may have met a busy
machine, and then the two kinds differ by more than a plan does.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.values import Plan, Timeline


@dataclass(frozen=True)
class Compared:
    """Seconds and shares. What was not measured is 0 or None."""

    in_core_step_s: float
    step_s: float
    over_in_core: float | None  # 0.1: 10 % slower

    @property
    def is_known(self) -> bool:
        return bool(self.step_s)


def compared(in_core_step_s: float, step_s: float) -> Compared:
    over = step_s / in_core_step_s - 1 if in_core_step_s and step_s else None
    return Compared(in_core_step_s, step_s, over)


def predicted_figures(plan: Plan, predicted: Timeline) -> Compared:
    return compared(plan.in_core_step_s, predicted.step_s)


def measured_figures(measured: Timeline | None, in_core_step_s: float = 0.0) -> Compared:
    """`in_core_step_s`: as it was measured, if it was."""
    return compared(in_core_step_s, measured.step_s if measured is not None else 0.0)


def format_over(over: float | None) -> str:
    """`format_over(0.0834) == "+8.3 %"`; nothing where it is not known."""
    return "" if over is None else f"{100 * over:+.1f} %"
