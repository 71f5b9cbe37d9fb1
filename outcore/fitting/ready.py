"""PreparedStep + what its device makes of it -> Ready: what a step follows."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.eager.program import Program
from outcore.values import PreparedStep


@dataclass(frozen=True)
class Ready:
    """A plan that a step can follow, and go back to."""

    prepared: PreparedStep
    program: Program
    covers_bytes: int  # it holds as long as no more than this is there before the step
    sums_in_place: bool  # it counts on autograd adding gradients in place: no dispatch mode may be active
