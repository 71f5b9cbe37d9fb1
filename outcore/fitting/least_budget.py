"""A kind of step that does not fit the budget -> the error of the kind that needs most.

A loop may have several kinds of steps, planned one after the other. With accumulation, the micro-batch that finds
gradients needs more than the one that makes them. The bytes that an error names must be enough for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from outcore.errors import BudgetTooSmall
from outcore.fitting.kinds import Kind
from outcore.fitting.phases import Phase
from outcore.fitting.preparing import Preparer
from outcore.values import Trace


def begin_with_all_kinds(kind: Kind, kinds: Iterable[Kind], preparer: Preparer, before_bytes: int) -> Phase:
    """Returns the phase in which a step of `kind` runs. If it does not fit the budget, raises the error of whichever
    recorded kind without a plan needs most."""
    try:
        return kind.begin(before_bytes)
    except BudgetTooSmall as error:
        too_small = error.with_traceback(None)  # a traceback holds all frames, and with them the user's tensors
    grown_bytes = max(0, before_bytes - kind.trace.before_bytes) if kind.trace is not None else 0
    for other in kinds:
        if other is not kind and other.trace is not None and other.plan is None:
            trace = replace(other.trace, before_bytes=other.trace.before_bytes + grown_bytes)
            too_small = max(too_small, _too_small_for(trace, preparer) or too_small, key=lambda one: one.needed_bytes)
    try:
        raise too_small
    finally:
        del too_small


def _too_small_for(trace: Trace, preparer: Preparer) -> BudgetTooSmall | None:
    """Returns the error that planning this step would raise, or None if it fits the budget."""
    margin = preparer.settings.margin_share if preparer.memory.has_caching_allocator else 0.0
    sizes = [(int(preparer.budget.device_bytes * (1 - margin)), 0)]
    try:
        preparer.plan_of_size(trace, sizes, preparer.brief_planner, [], margin)
    except BudgetTooSmall as error:
        return error.with_traceback(None)
    return None
