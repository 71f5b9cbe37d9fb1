"""Budget: how many bytes of each tier a step may use. Plan: what happens to each saved value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from outcore.values.codec import Saved

Decision = Literal["keep", "swap", "recompute", "remake"]
MADE_AGAIN: tuple[Decision, ...] = ("recompute", "remake")  # recomputed once and then held; recomputed at each use


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

    fingerprint: str  # of the trace for which the plan was made
    planner: str
    budget: Budget
    decisions: dict[int, Decision]  # value -> decision; a saved value without a decision is kept
    before_bytes: int  # bytes that the plan assumes to be allocated when the step begins
    predicted_step_s: float = 0.0
    predicted_peak_bytes: int = 0
    in_core_step_s: float = 0.0
    in_core_peak_bytes: int = 0
    bound_step_s: float = 0.0  # no plan for this budget can be faster
    # whether common ops are merged in the planned step (`outcore.planning.rewrites.common_ops`)
    merges_ops: bool = False
    reasons: dict[int, str] | None = None  # value -> why, in a few words, for `explain`

    @property
    def keeps_all(self) -> bool:
        return self.count("keep") == len(self.decisions)

    def count(self, *decisions: Decision) -> int:
        return sum(1 for made in self.decisions.values() if made in decisions)
