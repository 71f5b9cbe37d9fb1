"""PreparedStep + device -> Ready: a plan in the form that a step follows."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.eager.program import Program
from outcore.values import PreparedStep


@dataclass(frozen=True)
class Ready:
    """A plan that a step can follow."""

    prepared: PreparedStep
    program: Program
    covers_bytes: int  # the plan is valid while no more than this is in use before the step
    sums_in_place: bool  # it assumes that autograd adds gradients in place, as it does without a dispatch mode
