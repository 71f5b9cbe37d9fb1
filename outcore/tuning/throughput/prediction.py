"""Predicts a planned step of any batch size.

The trace of a batch that never ran is scaled from those that did (`planning.families.scaling`), then planned, lowered,
verified and simulated, also beyond the sizes that fit in-core. A `Point` is the part of the result that the curve
keeps; a `PredictedBatch` holds what a real step needs to follow the plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from outcore.errors import BudgetTooSmall
from outcore.planning import plan
from outcore.planning.families.scaling import Family
from outcore.planning.preparing import prepare
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.tuning.settings import SETTINGS
from outcore.values import Budget, Machine, Plan, Trace

CURVE = SETTINGS.curve


@dataclass(frozen=True)
class Point:
    """One micro-batch. `step_s` and `samples_per_s` are those of a whole step, including the optimizer."""

    micro_batch: int
    peak_bytes: int
    step_s: float
    samples_per_s: float
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    in_core: bool  # everything is kept
    fits: bool
    measured_step_s: float | None = None
    measured_peak_bytes: int | None = None
    num_swapped: int = 0  # values
    spread: float = 0.0  # of the timings behind `measured_step_s`, as a share of it; 0: unknown

    @property
    def charged_bytes(self) -> int:
        """The bytes that determine the cost of swapping: those swapped, and a constant for each value."""
        return self.swapped_bytes + CURVE.swapped_value_bytes * self.num_swapped

    @property
    def error(self) -> float | None:
        """Measured over predicted seconds; None if no real step ran."""
        return None if self.measured_step_s is None else self.measured_step_s / self.step_s

    def with_swap_cost(self, swap_s_per_byte: float) -> Point:
        step_s = self.step_s + swap_s_per_byte * self.charged_bytes
        return replace(self, step_s=step_s, samples_per_s=self.micro_batch / step_s)


@dataclass(frozen=True)
class PredictedBatch:
    """A point with the trace and the plan behind it, ready to be run."""

    point: Point
    trace: Trace
    plan: Plan | None  # None: nothing fits
    brief: bool = False  # the search was short; a training may find a faster plan


@dataclass(frozen=True)
class BatchPlanner:
    """Plans any batch of a family for one machine and budget. It has no state."""

    family: Family
    machine: Machine
    budget: Budget
    optimizer_s: float
    resident_bytes: int = 0  # in addition to the recorded step: accumulated gradients

    def predict(self, batch: int, *, brief: bool = False) -> PredictedBatch:
        """Predicts a batch. `brief` limits the search to deciding whether the batch is worth a real step."""
        trace = self.family.at(batch)
        if self.resident_bytes:
            trace = replace(trace, before_bytes=trace.before_bytes + self.resident_bytes)
        step = _as_run(trace)
        try:
            chosen = plan(step, self.machine, self.budget, brief=brief)
        except BudgetTooSmall as error:
            return PredictedBatch(self._too_large(batch, error.needed_bytes), trace, None)
        timeline = prepare(step, chosen, self.machine).predicted
        step_s = timeline.step_s + self.optimizer_s
        in_core = timeline.swapped_bytes + timeline.recomputed_bytes == 0
        point = Point(
            batch,
            timeline.peak_bytes,
            step_s,
            batch / step_s,
            timeline.kept_bytes,
            timeline.swapped_bytes,
            timeline.recomputed_bytes,
            in_core,
            fits=True,
            num_swapped=chosen.count("swap"),
        )
        return PredictedBatch(point, trace, chosen, brief=brief and not in_core)

    def _too_large(self, batch: int, needed_bytes: int) -> Point:
        step_s = self.family.step_s(batch) + self.optimizer_s  # with enough memory
        return Point(batch, needed_bytes, step_s, batch / step_s, 0, 0, 0, in_core=False, fits=False)

    def in_core_bytes(self, batch: int) -> int:
        """Returns the peak with everything kept."""
        trace = _as_run(self.family.at(batch))
        keep_all = Plan(trace.fingerprint, "keep-all", self.budget, {}, trace.before_bytes)
        timeline = prepare(trace, keep_all, self.machine).predicted
        return timeline.peak_bytes + self.resident_bytes

    def largest_in_core(self, at_most: int) -> int:
        """Returns the largest batch that fits with everything kept; 0 if not even one sample does.

        Bytes grow nearly linearly with the batch, so the search interpolates first and bisects later.
        """
        budget_bytes, low, high = self.budget.device_bytes, 0, at_most
        known = {0: self.family.recorded[0].trace.before_bytes + self.resident_bytes, high: self.in_core_bytes(high)}
        if known[high] <= budget_bytes:
            return high
        while high - low > 1:
            slope_bytes = max(1, known[high] - known[low])
            interpolated = (budget_bytes - known[low]) / slope_bytes
            part = interpolated if len(known) < CURVE.max_interpolations else 0.5
            batch = min(max(low + int(part * (high - low)), low + 1), high - 1)
            known[batch] = self.in_core_bytes(batch)
            low, high = (batch, high) if known[batch] <= budget_bytes else (low, batch)
        return low


def swap_s_per_byte(simulated: Iterable[Point], measured_s: Iterable[float], in_core_error: float) -> float:
    """Returns the cost of a swapped byte beyond the simulated cost, from the measured batches beyond in-core.

    The simulator assumes that copies overlap with compute at no cost; on a CPU they do not. Reruns are simulated with
    their own seconds. The cost is limited to doubling a step: larger deviations have another cause.
    """
    beyond_s, whole_s, charged_bytes = 0.0, 0.0, 0
    for point, step_s in zip(simulated, measured_s):
        expected_s = in_core_error * point.step_s
        beyond_s += min(step_s - expected_s, expected_s)
        whole_s += expected_s
        charged_bytes += point.charged_bytes
    return beyond_s / charged_bytes if charged_bytes and beyond_s > CURVE.swap_cost_share * whole_s else 0.0


def _as_run(trace: Trace) -> Trace:
    """Returns the step that `limit` plans for: on a GPU without other workers, gradients are summed in place."""
    return trace if trace.device == "cpu" or _is_distributed() else sums_in_place(trace)


def _is_distributed() -> bool:
    """Whether there may be collectives, which hold gradients, so that autograd does not add in place."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
