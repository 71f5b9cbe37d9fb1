"""Machine + Trace + Plan + Schedule + Timelines -> one HTML page: the memory curve, the lanes, the decisions.

The page stands alone: no network, no script; the pictures are SVG, the colours follow the reader's light or dark
setting. One colour means one thing throughout: blue is swapping, orange is recomputing, red is the limit and waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from outcore.planning.trace_index import index_of
from outcore.reporting.comparison import format_over, measured_figures, predicted_figures
from outcore.reporting.curve import Curve, curve_of, in_core_curve
from outcore.reporting.explanation import Explained, ModuleShare, by_module, explain
from outcore.reporting.module_memory import ModuleMemory, module_memory
from outcore.reporting.picture import both_widths, lanes_picture, memory_picture, module_picture
from outcore.reporting.text import cost_of, short_name
from outcore.units import format_bytes, format_seconds
from outcore.values import Machine, Plan, PreparedStep, Timeline, Trace

NUM_VALUES = 40  # rows of the table of saved values

STYLE = """
:root { color-scheme: light dark;
  --page: #fbfaf8; --card: #ffffff; --ink: #1d2126; --soft: #6a727c; --line: #e3e1dc; --faint: #f1efeb;
  --forward: #8d99a8; --backward: #5b6776; --keep: #a9b1bb; --swap: #2f6fde; --swap-in: #7aa5f0; --recompute: #e08a1e;
  --limit: #d0342c; --ours: #2f6fde; --ours-fill: #2f6fde2b; --in-core: #a9b1bb; --in-core-fill: #a9b1bb24;
  --module-0: #c9ced6; --module-1: #2f6fde; --module-2: #e08a1e; --module-3: #3a9b78; --module-4: #a35bc4;
  --module-5: #c9535d; --module-6: #5d8aa8; --module-7: #8c8c7a; }
@media (prefers-color-scheme: dark) { :root {
  --page: #14171b; --card: #1b1f25; --ink: #e8eaed; --soft: #98a1ad; --line: #2d333b; --faint: #22272e;
  --forward: #77838f; --backward: #a7b2be; --keep: #5f6a76; --swap: #5b93f5; --swap-in: #9dbdf9; --recompute: #f0a645;
  --limit: #ff6b61; --ours: #5b93f5; --ours-fill: #5b93f533; --in-core: #76818d; --in-core-fill: #76818d22; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -.01em; } h2 { font-size: 16px; margin: 0 0 4px; }
p { margin: 4px 0 0; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 12px; }
section { padding: 20px; margin-top: 20px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px; margin-top: 24px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 12px; padding: 14px 16px; }
.tile b { display: block; font-size: 22px; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; }
.narrow { display: none; }
.on-ground { paint-order: stroke; stroke: var(--card); stroke-width: 4px; stroke-linejoin: round; }
code { overflow-wrap: anywhere; } ul { margin: 6px 0 0; padding-left: 20px; } li { margin: 4px 0; }
@media (max-width: 700px) { main { padding: 20px 8px 40px; } section { padding: 14px; } .wide { display: none; }
  .narrow { display: block; } .tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
  .tile b { font-size: 18px; } }
svg { display: block; width: 100%; height: auto; margin-top: 12px; }
svg text { font: 11px system-ui, sans-serif; fill: var(--soft); }
.key { display: flex; flex-wrap: wrap; gap: 4px 18px; margin-top: 8px; color: var(--soft); font-size: 13px; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 6px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; margin-top: 10px; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; }
th, td { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
td.wide { white-space: normal; min-width: 180px; } .num { text-align: right; } tr:last-child td { border: 0; }
.bar { display: flex; height: 10px; border-radius: 3px; overflow: hidden; background: var(--faint); min-width: 140px; }
.keep { color: var(--soft); } .swap { color: var(--swap); } .recompute, .remake { color: var(--recompute); }
"""


def page(
    machine: Machine,
    trace: Trace,
    prepared: PreparedStep,
    measured: Timeline | None = None,
    in_core_step_s: float = 0.0,
) -> str:
    """The report page of a recorded step and what was prepared for it, with spans: `prepare(..., detail=True)`.
    `in_core_step_s`: of the step with everything kept, if that was measured."""
    plan, predicted = prepared.plan, prepared.predicted
    explained = explain(prepared.trace, plan, machine)
    curves = in_core_curve(trace, machine), curve_of(prepared.trace, prepared.schedule, machine)
    end_s = max(curves[0][-1][0], predicted.step_s)
    lanes_end_s = max(end_s, measured.step_s if measured is not None else 0.0)
    modules = module_memory(prepared.trace, plan, curves[1])
    body = "\n".join(
        [
            _heading(machine, trace, plan),
            _tiles(plan, predicted, measured, in_core_step_s),
            _memory_section(plan, predicted, measured, curves, end_s),
            _module_memory_section(modules, plan, end_s),
            _lanes_section(trace, predicted, measured, lanes_end_s),
            _less_section(prepared.trace, predicted),
            _modules_section(by_module(explained)),
            _values_section(explained),
            _perfetto_section(),
        ]
    )
    title = f"outcore: {escape(trace.model or 'a step')} in {format_bytes(plan.budget.device_bytes)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>\n'
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def _heading(machine: Machine, trace: Trace, plan: Plan) -> str:
    facts = [machine.device, f"planner {plan.planner}", f"{len(trace.ops)} ops", f"step {trace.fingerprint}"]
    facts += [f"recorded {trace.recorded_at}"] if trace.recorded_at else []
    name = escape(trace.model or "A step")
    return f"<h1>{name} in {format_bytes(plan.budget.device_bytes)}</h1><p>{escape(' · '.join(facts))}</p>"


def _tiles(plan: Plan, predicted: Timeline, measured: Timeline | None, in_core_step_s: float) -> str:
    """The figures of the terminal's table, with the same names (`outcore.reporting.comparison`)."""
    promised, seen = predicted_figures(plan, predicted), measured_figures(measured, in_core_step_s)
    peak = f"peak, predicted; in-core {format_bytes(plan.in_core_peak_bytes)}"
    step = f"step, predicted; in-core {format_seconds(promised.in_core_step_s)}"
    tiles = [(format_bytes(predicted.peak_bytes), peak), (format_seconds(promised.step_s), step)]
    if measured is not None:
        against = f"; in-core {format_seconds(seen.in_core_step_s)}" if seen.in_core_step_s else ""
        tiles = [
            (format_bytes(measured.peak_bytes), "peak, measured"),
            (format_seconds(seen.step_s), f"step, measured{against}"),
            *tiles,
        ]
    if seen.over_in_core is not None:
        tiles.append((format_over(seen.over_in_core), "over in-core, measured"))
    if promised.over_in_core is not None:
        least = f"; the least a plan could predict: {format_seconds(plan.bound_step_s)}" if plan.bound_step_s else ""
        tiles.append((format_over(promised.over_in_core), f"over in-core, predicted{least}"))
    tiles += [
        (format_bytes(predicted.swapped_bytes), f"swapped each way; {format_seconds(predicted.stall_s)} waited"),
        (format_bytes(predicted.recomputed_bytes), f"recomputed; {format_seconds(predicted.recompute_s)} of reruns"),
    ]
    return '<div class="tiles">' + "".join(_tile(number, words) for number, words in tiles) + "</div>"


def _tile(number: str, words: str) -> str:
    return f'<div class="tile"><b>{number}</b><span>{words}</span></div>'


def _memory_section(
    plan: Plan,
    predicted: Timeline,
    measured: Timeline | None,
    curves: tuple[Curve, Curve],
    end_s: float,
) -> str:
    said = f"Predicted peak {format_bytes(predicted.peak_bytes)}, at {predicted.peak_at}."
    if measured is not None:
        said += f" Measured peak {format_bytes(measured.peak_bytes)}."
    seen, budget_bytes = measured.memory if measured is not None else (), plan.budget.device_bytes
    picture = both_widths(lambda clock: memory_picture(clock, *curves, budget_bytes, measured=seen), end_s)
    key = [("in-core", "everything kept"), ("ours", "with this plan"), ("limit", "budget")]
    return f"<section><h2>Device memory over the step</h2><p>{escape(said)}</p>{picture}{_key(key)}</section>"


def _module_memory_section(shares: Sequence[ModuleMemory], plan: Plan, end_s: float) -> str:
    picture = both_widths(lambda clock: module_picture(clock, shares, plan.budget.device_bytes), end_s)
    key = [(f"module-{number}", escape(share.module)) for number, share in enumerate(shares)]
    said = "Whose tensors fill it, as predicted; what a copy or a rerun holds for a moment is not in it."
    return f"<section><h2>Memory by module</h2><p>{said}</p>{picture}{_key(key)}</section>"


def _lanes_section(trace: Trace, predicted: Timeline, measured: Timeline | None, end_s: float) -> str:
    key = [("forward", "forward"), ("backward", "backward"), ("recompute", "recomputing"), ("limit", "waiting")]
    key += [("swap", "swap out"), ("swap-in", "swap in")]
    said = "Compute, and the copies beside it, on the same clock, as predicted."
    if measured is not None and measured.spans:
        said += " The last row is what was measured: the whole step, and in it the reruns and the waits."
    picture = both_widths(lambda clock: lanes_picture(clock, trace, predicted, measured), end_s)
    return f"<section><h2>Lanes</h2><p>{said}</p>{picture}{_key(key)}</section>"


def _less_section(trace: Trace, predicted: Timeline) -> str:
    """The section that says what to change to need less memory."""
    rows = "".join(f"<li>{escape(sentence)}</li>" for sentence in needs_less(trace, predicted))
    return f"<section><h2>To need less</h2><ul>{rows}</ul></section>"


def needs_less(trace: Trace, predicted: Timeline) -> list[str]:
    """Sentences with numbers: what the peak consists of, and what would lower it."""
    trace_index, before_bytes = index_of(trace), trace.before_bytes
    least_bytes = int(trace_index.natural_bytes.max(initial=before_bytes))
    at = trace_index.op_at(int(trace_index.natural_bytes.argmax())) if len(trace_index.natural_bytes) else "no op"
    half_bytes = before_bytes + (least_bytes - before_bytes) // 2
    sentences = [
        f"{format_bytes(before_bytes)} of the peak of {format_bytes(predicted.peak_bytes)} are in use before the step: "
        "parameters, optimizer state and inputs. An optimizer with less state, or weights in half precision, lower it.",
        f"No plan needs less than {format_bytes(least_bytes)}: that is {at} with what the program itself holds then. "
        f"With half the batch it would be about {format_bytes(half_bytes)}.",
    ]
    kept_bytes = sum(trace_index.value_bytes[value] for value in trace_index.kept_for)
    if kept_bytes > predicted.peak_bytes // 10:
        sentences.append(
            f"{format_bytes(kept_bytes)} of what autograd saves can be neither moved nor made again; the table of "
            "saved values says why."
        )
    return sentences


def _perfetto_section() -> str:
    return (
        "<section><h2>In Perfetto</h2><p>The same lanes, to zoom into: run the command that wrote this page with "
        "<code>--perfetto step.json</code>, and open the file at ui.perfetto.dev.</p></section>"
    )


def _key(items: Sequence[tuple[str, str]]) -> str:
    parts = [f'<span><i style="background:var(--{colour})"></i>{words}</span>' for colour, words in items]
    return f'<div class="key">{"".join(parts)}</div>'


def _modules_section(shares: Sequence[ModuleShare]) -> str:
    largest = max((share.bytes for share in shares), default=1) or 1
    rows = [
        [
            escape(share.module or "(no module)"),
            str(share.num_values),
            *(format_bytes(part) if part else "" for _, part in _colours(share)),
            format_seconds(share.recompute_s) if share.recompute_s else "",
            format_seconds(share.copy_s) if share.copy_s else "",
            _bar(share, largest),
        ]
        for share in shares
    ]
    headings = ("module", "#values", "#kept", "#swapped", "#recomputed", "#rerun", "#copies", "")
    key = _key([("keep", "kept"), ("swap", "swapped"), ("recompute", "recomputed")])
    return (
        f"<section><h2>By module</h2><p>What each saves for backward.</p>{key}{_html_table(headings, rows)}</section>"
    )


def _colours(share: ModuleShare) -> list[tuple[str, int]]:
    return [("keep", share.kept_bytes), ("swap", share.swapped_bytes), ("recompute", share.recomputed_bytes)]


def _bar(share: ModuleShare, largest_bytes: int) -> str:
    parts = [
        f'<div style="width:{100 * num_bytes / largest_bytes:.2f}%;background:var(--{colour})"></div>'
        for colour, num_bytes in _colours(share)
        if num_bytes
    ]
    return f'<div class="bar">{"".join(parts)}</div>'


def _values_section(explained: Sequence[Explained]) -> str:
    largest = sorted(explained, key=lambda item: (-item.bytes, item.value))[:NUM_VALUES]
    rows = [
        [
            f"{item.op} {escape(short_name(item.name))}",
            escape(item.module),
            f'<span class="{item.decision}">{item.decision}{f" ({item.tier})" if item.tier else ""}</span>',
            format_bytes(item.bytes),
            cost_of(item),
            escape(item.why),
        ]
        for item in largest
    ]
    some = f"The {len(rows)} largest of {len(explained)}." if len(rows) < len(explained) else "All of them."
    headings = ("op", "module", "decision", "#bytes", "#costs", "why")
    return f"<section><h2>By saved value</h2><p>{some}</p>{_html_table(headings, rows)}</section>"


def _html_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A column whose heading begins with # is right-aligned. The last column may wrap."""
    kinds = [' class="num"' if heading.startswith("#") else "" for heading in headings]
    kinds[-1] = ' class="wide"'
    top = "".join(f"<th{kind}>{heading.lstrip('#')}</th>" for heading, kind in zip(headings, kinds))
    lines = ["".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(row, kinds)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'
