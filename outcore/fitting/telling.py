"""A change of phase -> one sentence in the log, at level INFO."""

from __future__ import annotations

import logging

from outcore.fitting.phases import GivenUp, New, Phase, Recorded, Settled, Timed, Timing, Trying
from outcore.fitting.ready import Ready
from outcore.units import format_bytes, format_seconds

log = logging.getLogger("outcore")


def tell_change(before: Phase, after: Phase) -> None:
    """Logs a change of the phase or of the plan."""
    has_new_plan = after.ready is not None and after.ready is not before.ready
    if type(before) is not type(after) or has_new_plan:
        sentence = _sentence(before, after)
        if sentence and log.isEnabledFor(logging.INFO):
            log.info("%s", sentence)


def _sentence(before: Phase, after: Phase) -> str:
    if isinstance(after, GivenUp):
        return f"steps of this kind run unplanned from here on, everything swapped: {after.because}"
    if isinstance(after, New):
        return "the next step of this kind is recorded"
    if after.trace is None:
        return ""
    if isinstance(before, New) and isinstance(after, Recorded | Timed):
        return f"a step of {len(after.trace.ops)} ops was recorded; the next one like it is planned when it begins"
    if after.ready is None:
        return ""
    plan = _described(after.ready)
    if isinstance(after, Timing):
        return f"the step follows a first plan while its ops are timed once more: {plan}"
    if isinstance(after, Trying):
        return f"the step follows a plan that is tried: {plan}"
    if isinstance(after, Settled):
        return f"the steps of this kind follow this plan from here on: {plan}"
    return ""


def _described(ready: Ready) -> str:
    plan, predicted = ready.prepared.plan, ready.prepared.predicted
    over = f", {predicted.step_s / plan.in_core_step_s - 1:+.1%} over in-core" if plan.in_core_step_s else ""
    return (
        f"{format_seconds(predicted.step_s)} predicted{over}, peak {format_bytes(predicted.peak_bytes)}; "
        f"{plan.count('keep')} values kept, {plan.count('swap')} swapped, "
        f"{plan.count('recompute', 'remake')} recomputed"
    )
