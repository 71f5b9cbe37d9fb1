"""Every exception outcore raises on purpose, and how it warns.

OutcoreError
├── BadSize            a size, rate or time that cannot be read
├── BadFile            a JSON file that is broken, of another kind, or of a future version
├── BudgetTooSmall     no plan fits; carries the bytes that would
├── PlanMismatch       a plan made for another step
├── ScheduleError      verify found a use after free or an unordered access
├── StoreError         pinned host memory or the swap file failed (full, unwritable, cannot be pinned)
├── ReplayError        a value cannot be recomputed exactly
├── TilingError        a product that cannot be planned or finished
├── ElasticError       a worker, centre or launch that failed
└── TuningError        a batch size or learning rate cannot be advised

Every message says what happened, with both numbers if there are two, and then what to do.
"""

from __future__ import annotations

import sys
import warnings
from types import FrameType

from outcore.formats import format_bytes

_NOT_THE_USERS = {"outcore", "torch", "contextlib"}  # packages whose frames are skipped in warnings


class OutcoreError(Exception):
    """The base class of all exceptions that outcore raises on purpose.

    ```python
    import outcore
    import torch

    try:
        ooc = outcore.limit(torch.nn.Linear(8, 8), memory="16 parsecs")
    except outcore.OutcoreError as error:
        print(error)
    ```
    """


class BadSize(OutcoreError, ValueError):
    """A size, rate or time that cannot be read. Sizes are written as `"16GiB"`, `"500MB"` or a number of bytes.

    ```python
    import outcore
    import torch

    try:
        ooc = outcore.limit(torch.nn.Linear(8, 8), memory="16 parsecs")
    except outcore.BadSize as error:
        print(error)
    ```
    """


class BadFile(OutcoreError, ValueError):
    """A JSON file that is broken, of another kind, or of a future version.

    ```python
    import outcore

    try:
        plan = outcore.Plan.load("step.trace.json")  # a trace
    except outcore.BadFile as error:
        print(error)
    ```
    """


class BudgetTooSmall(OutcoreError):
    """No plan fits the budget. `needed_bytes` is the smallest budget that would.

    ```python
    import outcore

    trace = outcore.Trace.load("step.trace.json")
    machine = outcore.Machine.load("here.machine.json")
    try:
        plan = outcore.plan(trace, machine, outcore.Budget(device_bytes=1000))
    except outcore.BudgetTooSmall as error:
        plan = outcore.plan(trace, machine, outcore.Budget(error.needed_bytes, disk_bytes=10**12))
    ```
    """

    def __init__(
        self,
        needed_bytes: int,
        budget_bytes: int,
        at_op: str,
        *,
        where: str = "device",
        before_bytes: int = 0,  # of `needed_bytes`: in use before the step
        planner: str = "",  # the planner that found no plan, if another one may
    ) -> None:
        self.needed_bytes, self.budget_bytes, self.before_bytes = needed_bytes, budget_bytes, before_bytes
        self.at_op, self.where, self.planner = at_op, where, planner
        needed, budget = format_bytes(needed_bytes), format_bytes(budget_bytes)
        if budget == needed:
            budget += f" ({budget_bytes} bytes)"
        own, before = format_bytes(needed_bytes - before_bytes), format_bytes(before_bytes)
        if planner:
            super().__init__(
                f"planner {planner!r} finds no plan for {budget} on {where}: {at_op} needs {needed} "
                f"({needed_bytes} bytes) with what is in use before the step; use planner='hybrid', or raise the budget"
            )
        elif before_bytes:
            super().__init__(
                f"no plan fits {budget} on {where}: {at_op} needs {own} beside {before} that are in use before the "
                f"step, {needed} ({needed_bytes} bytes) in all; raise the budget or lower the batch size"
            )
        else:
            super().__init__(
                f"no plan fits {budget} on {where}: {at_op} alone needs {needed} ({needed_bytes} bytes); raise the "
                "budget or lower the batch size"
            )

    def on(self, where: str, *, needed_bytes: int | None = None, budget_bytes: int | None = None) -> BudgetTooSmall:
        """Returns the same error for a device and a budget of which the planner did not know."""
        return BudgetTooSmall(
            self.needed_bytes if needed_bytes is None else needed_bytes,
            self.budget_bytes if budget_bytes is None else budget_bytes,
            self.at_op,
            where=where,
            before_bytes=self.before_bytes,
            planner=self.planner,
        )

    @classmethod
    def for_model(cls, there_bytes: int, budget_bytes: int, *, where: str) -> BudgetTooSmall:
        """Returns the error for a model whose parameters alone exceed the budget."""
        error = cls(there_bytes, budget_bytes, "the model", where=where)
        error.args = (
            f"the model's parameters and buffers take {format_bytes(there_bytes)} on {where}, more than the "
            f"budget of {format_bytes(budget_bytes)}; raise the budget above what a step needs beside them "
            "(outcore.estimate tells), or take a smaller model",
        )
        return error

    def __reduce__(self) -> tuple[object, ...]:
        kept = self.needed_bytes, self.budget_bytes, self.at_op, self.where, self.before_bytes, self.planner, self.args
        return _remake_budget_too_small, kept


def _remake_budget_too_small(
    needed_bytes: int, budget_bytes: int, at_op: str, where: str, before_bytes: int, planner: str, said: tuple[str, ...]
) -> BudgetTooSmall:
    error = BudgetTooSmall(needed_bytes, budget_bytes, at_op, where=where, before_bytes=before_bytes, planner=planner)
    error.args = said
    return error


class PlanMismatch(OutcoreError):
    """A plan made for another step.

    ```python
    from dataclasses import replace

    import outcore

    trace = outcore.Trace.load("step.trace.json")
    machine = outcore.Machine.load("here.machine.json")
    plan = outcore.Plan.load("step.plan.json")
    try:
        schedule = outcore.lower(trace, replace(plan, fingerprint="of another step"), machine)
    except outcore.PlanMismatch as error:
        print(error)
    ```
    """


class ScheduleError(OutcoreError):
    """`verify` found a use after free or an unordered access between streams.

    ```python
    from dataclasses import replace

    import outcore

    trace = outcore.Trace.load("step.trace.json")
    schedule = outcore.lower(trace, outcore.Plan.load("step.plan.json"), outcore.Machine.load("here.machine.json"))
    broken = replace(schedule, actions=schedule.actions[:-1])
    try:
        outcore.verify(trace, broken)
    except outcore.ScheduleError as error:
        print(error)
    ```
    """


class StoreError(OutcoreError):
    """Pinned host memory or the swap file failed.

    ```python
    import outcore
    import torch

    try:
        ooc = outcore.limit(torch.nn.Linear(8, 8), memory="1MiB", disk="a folder that is not there")
    except outcore.StoreError as error:
        print(error)
    ```
    """


class ReplayError(OutcoreError):
    """A value cannot be recomputed exactly. Plans do not recompute values for which that is known, so this is rare.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    with outcore.limit(model, memory="1MiB") as ooc:
        for _ in range(3):
            try:
                with ooc.step():
                    model(torch.randn(4, 8)).sum().backward()
            except outcore.ReplayError:
                model.zero_grad()  # this step is lost; the next ones are not affected
    ```
    """


class TilingError(OutcoreError):
    """A product that cannot be planned or finished."""


class ElasticError(OutcoreError):
    """A worker, centre or launch that failed."""


class TuningError(OutcoreError):
    """A batch size or learning rate cannot be advised."""


def warn(message: str) -> None:
    """Issues a warning that points to the nearest line of the user's own code."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _package_of(frame) in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    warnings.warn(f"outcore: {message}", stacklevel=level + 1)


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
