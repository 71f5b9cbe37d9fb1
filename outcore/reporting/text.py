"""Machine, Plan, Timelines, explanations -> tables for people."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from outcore.reporting.comparison import Compared, compared, format_over, predicted_figures
from outcore.reporting.explanation import Explained, ModuleShare
from outcore.units import format_bytes, format_rate, format_seconds
from outcore.values import MADE_AGAIN, Budget, Decision, Machine, Plan, PreparedStep, Timeline, Trace

WIDTH = 110  # of a table that goes to a file or a pipe


def report(
    budget: Budget,
    trace: Trace | None,
    plan: Plan | None,
    predicted: Timeline | None,
    measured: Timeline | None,
    *,
    where: str,
    because: str = "",
    is_first: bool = False,
) -> str:
    """Shows what was planned beside what was measured. `because` says why the last step followed no plan, and
    `is_first` that another plan will replace this one."""
    room = f"outcore: {format_bytes(budget.device_bytes)} on {where}"
    why = f"the last step followed no plan: {because}" if because else ""
    if trace is None:
        return f"{room}; {why or 'nothing recorded yet: run a step'}"
    if plan is None or predicted is None:
        return f"{room}; {why or f'{len(trace.ops)} ops recorded, planned when the next step begins'}"
    table = render(plan_table(budget, trace, plan, predicted, measured, where=where, is_first=is_first))
    return f"{table}\n{why}" if why else table


_IS_FIRST = "a first plan; a better one follows"


def summary(trace: Trace | None, prepared: PreparedStep | None, *, settled: bool, is_first: bool = False) -> str:
    """Says in a few words which phase a step is in."""
    if trace is None:
        return "nothing recorded yet"
    if prepared is None:
        return f"{len(trace.ops)} ops recorded, not planned yet"
    plan, predicted = prepared.plan, prepared.predicted
    over = format_over(predicted_figures(plan, predicted).over_in_core)
    over = f" ({over} over in-core)" if over else ""
    state = "settled" if settled else _IS_FIRST if is_first else "being tried"
    return f"{state}, predicted {format_seconds(predicted.step_s)}{over}, peak {format_bytes(predicted.peak_bytes)}"


def as_html(text: str) -> str:
    """A report for a notebook."""
    return f'<pre style="line-height: 1.2">{html.escape(text)}</pre>'


def plan_table(
    budget: Budget,
    trace: Trace,
    plan: Plan,
    predicted: Timeline,
    measured: Timeline | None = None,
    *,
    where: str,
    is_first: bool = False,
) -> Table:
    """In-core, predicted and, where there is one, measured."""
    title = f"outcore: {trace.model or 'a step'} in {format_bytes(budget.device_bytes)} on {where}"
    rows = _compared(plan, predicted, measured)
    rows += [(name, "", _part(plan, decisions, num_bytes), "") for name, decisions, num_bytes in _parts(predicted)]
    rows.append(("recompute time", "", format_seconds(predicted.recompute_s), ""))
    rows.append(("waiting for copies", "", format_seconds(predicted.stall_s), ""))
    rows.append(("the least a plan could predict", "", f"{format_seconds(plan.bound_step_s)}{_gap(plan)}", ""))
    rows.append(("planner", "", plan.planner, ""))
    if is_first:
        rows.append(("", "", _IS_FIRST, ""))
    headings = ("", "in-core", "predicted") + (("measured",) if measured is not None else ())
    return _table(title, headings, [row[: len(headings)] for row in rows])


def _compared(plan: Plan, predicted: Timeline, measured: Timeline | None) -> list[tuple[str, ...]]:
    step_s, peak_bytes = (measured.step_s, measured.peak_bytes) if measured is not None else (0.0, 0)
    rows: list[tuple[str, ...]] = [
        ("step", *map(format_seconds, (plan.in_core_step_s, predicted.step_s, step_s))),
        ("over in-core, as predicted", "", format_over(predicted_figures(plan, predicted).over_in_core), ""),
        ("peak memory", *map(format_bytes, (plan.in_core_peak_bytes, predicted.peak_bytes, peak_bytes))),
    ]
    if measured is not None and measured.reserved_bytes:
        rows.append(("reserved by the allocator", "", "", format_bytes(measured.reserved_bytes)))
    rows.append(("peak at", "", predicted.peak_at, ""))
    return rows


def _parts(predicted: Timeline) -> list[tuple[str, tuple[Decision, ...], int]]:
    return [
        ("kept", ("keep",), predicted.kept_bytes),
        ("swapped", ("swap",), predicted.swapped_bytes),
        ("recomputed", MADE_AGAIN, predicted.recomputed_bytes),
    ]


def _part(plan: Plan, decisions: tuple[Decision, ...], num_bytes: int) -> str:
    num_values = plan.count(*decisions)
    return f"{format_bytes(num_bytes)} ({num_values} of {len(plan.decisions)} values)"


def _gap(plan: Plan) -> str:
    if not plan.bound_step_s or not plan.predicted_step_s:
        return ""
    return f" (this one: {format_percent(plan.predicted_step_s / plan.bound_step_s - 1)} over it)"


def machine_table(machine: Machine) -> Table:
    """Shows capacities and rates, and which of them were given and not measured."""
    rows: list[tuple[str, str]] = [
        ("device memory", format_bytes(machine.device_bytes)),
        ("pinned host memory", format_bytes(machine.host_bytes) if machine.host_bytes else "none: the disk is next"),
        ("disk", format_bytes(machine.disk_bytes) if machine.disk_bytes else "none: name a folder with --folder"),
    ]
    if machine.host_bytes:
        rows.append(("swap out to the host", format_rate(machine.swap_out_bytes_per_s)))
        rows.append(("swap in from the host", format_rate(machine.swap_in_bytes_per_s)))
    if machine.disk_bytes:
        rows.append(("write to the disk", format_rate(machine.disk_write_bytes_per_s)))
        rows.append(("read from the disk", format_rate(machine.disk_read_bytes_per_s)))
    rows.append(("rate each way while both run", format_percent(machine.duplex_share)))
    rows.append(("fixed cost of a copy", format_seconds(machine.copy_latency_s)))
    if machine.op_rates is not None:
        rates = machine.op_rates
        rows.append(("products in float32", f"{rates.float32_flops_per_s / 1e12:.3g} TFLOP/s"))
        rows.append(("products in half precision", f"{rates.half_flops_per_s / 1e12:.3g} TFLOP/s"))
        rows.append(("the device's own memory", format_rate(rates.memory_bytes_per_s)))
    if machine.given:
        rows.append(("given, not measured", ", ".join(machine.given)))
    title = f"outcore: {machine.device}" + (f", measured {machine.measured_at}" if machine.measured_at else "")
    return rows_table(title, rows)


def module_table(shares: Sequence[ModuleShare], num_rows: int) -> Table:
    """Shows what each module saves and what becomes of it."""
    rows = [
        (
            share.module or "(no module)",
            str(share.num_values),
            *(format_bytes(part) if part else "" for part in _bytes_of(share)),
            format_seconds(share.recompute_s) if share.recompute_s else "",
            "" if not share.copy_s else format_seconds(share.copy_s),
        )
        for share in shares[:num_rows]
    ]
    headings = ("module", "values", "kept", "swapped", "recomputed", "rerun", "copies")
    return _table(_titled("by module", len(rows), len(shares)), headings, rows)


def _bytes_of(share: ModuleShare) -> tuple[int, int, int]:
    return share.kept_bytes, share.swapped_bytes, share.recomputed_bytes


def value_table(explained: Sequence[Explained], num_rows: int) -> Table:
    """Shows the largest saved values, one by one."""
    largest = sorted(explained, key=lambda item: (-item.bytes, item.value))[:num_rows]
    rows = [
        (
            f"{item.op} {short_name(item.name)}",
            item.module,
            f"{item.decision} ({item.tier})" if item.tier else item.decision,
            format_bytes(item.bytes),
            cost_of(item),
            item.why,
        )
        for item in largest
    ]
    headings = ("op", "module", "decision", "bytes", "costs", "why")
    return _table(
        _titled("by saved value, largest first", len(rows), len(explained)), headings, rows, left=(0, 1, 2, 5)
    )


def cost_of(item: Explained) -> str:
    """Formats the seconds of a value. One that a rerun for another value made on the way costs nothing more."""
    if item.seconds:
        return format_seconds(item.seconds)
    return "with another" if item.decision in MADE_AGAIN else ""


def _titled(what: str, num_shown: int, num_all: int) -> str:
    return what if num_shown == num_all else f"{what}: {num_shown} of {num_all} (--top shows more)"


def short_name(name: str) -> str:
    """`aten.relu_.default` -> `relu_`."""
    return name.removeprefix("aten.").removesuffix(".default")


def format_percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def demo_table(facts: Mapping[str, Any]) -> Table:
    """Shows the result of `outcore demo`."""
    measured = compared(facts["in_core_step_s"], facts["step_s"])
    predicted = compared(facts["predicted_in_core_step_s"], facts["predicted_step_s"])
    share = facts["peak_bytes"] / facts["in_core_peak_bytes"]
    equal = "equal, bit for bit" if facts["bitwise_equal"] else "DIFFERENT"
    rows = [
        ("data", facts["data"]),
        ("in-core peak", format_bytes(facts["in_core_peak_bytes"])),
        ("budget", format_bytes(facts["budget_bytes"])),
        ("measured peak", f"{format_bytes(facts['peak_bytes'])} ({format_percent(share)} of in-core)"),
        ("predicted peak", format_bytes(facts["predicted_peak_bytes"])),
        ("measured step", _over_of(measured)),
        ("predicted step", _over_of(predicted)),
        ("swapped", format_bytes(facts["swapped_bytes"])),
        ("recomputed", format_bytes(facts["recomputed_bytes"])),
        ("loss", f"{facts['first_loss']:.4f} -> {facts['last_loss']:.4f} in {facts['num_steps']} steps"),
        ("loss, gradients, parameters", equal),
    ]
    return rows_table(f"outcore demo: a ResNet on digits, batch {facts['batch']}, on {facts['device']}", rows)


def _over_of(figures: Compared) -> str:
    in_core = format_seconds(figures.in_core_step_s)
    return f"{format_seconds(figures.step_s)}, {format_over(figures.over_in_core)} over {in_core} in-core"


def rows_table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    """Shows names and their values, without headings."""
    return _table(title, ("", ""), rows, left=(0, 1))


def _table(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,)) -> Table:
    table = Table(title=title, title_justify="left", show_header=any(headings))
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="left" if column in left else "right")
    for row in rows:
        table.add_row(*map(escape, row))
    return table


def render(table: Table) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip()
