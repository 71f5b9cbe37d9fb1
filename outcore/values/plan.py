"""What may be used, and what becomes of each saved value: Budget, Plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outcore.values.codec import Saved

Decision = Literal["keep", "swap", "recompute", "remake"]
MADE_AGAIN: tuple[Decision, ...] = ("recompute", "remake")  # made again: once, and then held; each time it is needed


@dataclass(frozen=True)
class Budget(Saved):
    """Limits in bytes, one per tier. `device_bytes` means the peak over the whole step, everything included.

    ```python
    import outcore

    budget = outcore.Budget(device_bytes=16 * 2**30, host_bytes=64 * 2**30)
    ```
    """

    KIND: ClassVar[str] = "budget"

    device_bytes: int
    host_bytes: int = 0
    disk_bytes: int = 0


@dataclass(frozen=True)
class Plan(Saved):
    """keep, swap, recompute or remake for every value that autograd saves and the step itself made.

    ```python
    import outcore

    plan = outcore.Plan.load("step.plan.json")  # written by `outcore plan`
    print(plan.count("keep"), "values are kept,", plan.count("swap"), "swapped")
    print(plan.predicted_peak_bytes, "bytes instead of", plan.in_core_peak_bytes)
    ```
    """

    KIND: ClassVar[str] = "plan"

    fingerprint: str  # of the trace it was made for
    planner: str
    budget: Budget
    decisions: dict[int, Decision]  # value -> decision; a saved value that is not here is kept
    before_bytes: int  # what the plan assumes is allocated when the step begins
    predicted_step_s: float = 0.0
    predicted_peak_bytes: int = 0
    in_core_step_s: float = 0.0
    in_core_peak_bytes: int = 0
    bound_step_s: float = 0.0  # no plan for this budget can be faster
    merges_ops: bool = False  # made for the step with common ops merged (`outcore.planning.rewrites.common_ops`)
    reasons: dict[int, str] | None = None  # value -> why, in a few words, for `explain`

    def count(self, *decisions: Decision) -> int:
        return sum(1 for made in self.decisions.values() if made in decisions)
