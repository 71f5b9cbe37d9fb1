"""Plan + Timelines -> a table for people."""

from __future__ import annotations

import io

from rich.console import Console
from rich.table import Table

from outcore.units import format_bytes, format_seconds
from outcore.values import Budget, Plan, Timeline, Trace


def report(
    budget: Budget,
    trace: Trace | None,
    plan: Plan | None,
    predicted: Timeline | None,
    measured: Timeline | None,
    *,
    where: str,
) -> str:
    """What was planned and what was measured, side by side."""
    if trace is None:
        return f"outcore: {format_bytes(budget.device_bytes)} on {where}; nothing recorded yet: run a step"
    if plan is None or predicted is None:
        room = format_bytes(budget.device_bytes)
        return f"outcore: {room} on {where}; {len(trace.ops)} ops recorded, planned when the next step begins"
    table = Table(
        title=f"outcore: {trace.model} in {format_bytes(budget.device_bytes)} on {where}", title_justify="left"
    )
    for heading in ("", "in-core", "predicted", "measured"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row(
        "step", *_row(format_seconds, plan.in_core_step_s, predicted.step_s, measured.step_s if measured else None)
    )
    table.add_row(
        "peak memory",
        *_row(format_bytes, plan.in_core_peak_bytes, predicted.peak_bytes, measured.peak_bytes if measured else None),
    )
    if measured is not None and measured.reserved_bytes:
        table.add_row("reserved by the allocator", "", "", format_bytes(measured.reserved_bytes))
    table.add_row("peak at", "", predicted.peak_at, "")
    table.add_row("kept", "", format_bytes(predicted.kept_bytes), f"{plan.count('keep')} values")
    table.add_row("swapped", "", format_bytes(predicted.swapped_bytes), f"{plan.count('swap')} values")
    table.add_row("recomputed", "", format_bytes(predicted.recomputed_bytes), f"{plan.count('recompute')} values")
    table.add_row("recompute time", "", format_seconds(predicted.recompute_s), "")
    table.add_row("waiting for copies", "", format_seconds(predicted.stall_s), "")
    table.add_row("no plan is faster than", "", format_seconds(plan.bound_step_s), f"planner {plan.planner}")
    return render(table)


def _row(form: object, *numbers: float | None) -> list[str]:
    return [form(number) if number is not None else "" for number in numbers]  # type: ignore[operator]


def render(table: Table) -> str:
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()
