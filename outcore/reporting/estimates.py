"""An estimate -> a table, a picture of slowdown against budget, a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich.table import Table

from outcore.reporting.text import rows_table
from outcore.units import format_bytes, format_seconds

WIDTH, HEIGHT = 600, 340
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 56, 64
STYLE = (
    "svg{--ink:#1d2126;--soft:#5b6472;--line:#dddad4;--ours:#2f6fde;--limit:#c2281f;background:#ffffff;"
    "font-family:system-ui,sans-serif}"
    "@media (prefers-color-scheme:dark){svg{--ink:#e8eaed;--soft:#a3acb8;--line:#2d333b;--ours:#7aa5f0;"
    "--limit:#ff7b72;background:#14171b}}"
    "text{fill:var(--soft);font-size:13px}.title{fill:var(--ink);font-size:15px;font-weight:600}"
    ".value{fill:var(--ink);font-size:13px}"
)


@dataclass(frozen=True)
class EstimatedBudget:
    """A budget and what a plan for it is estimated to cost."""

    budget_bytes: int
    fits: bool
    step_s: float = 0.0
    over_in_core: float = 0.0  # 0.13: 13 % slower than with everything kept
    swapped_bytes: int = 0
    recomputed_bytes: int = 0


def format_over(share: float) -> str:
    """`format_over(0.131) == "+13 %"`: an estimate has no tenths."""
    return f"{100 * share:+.0f} %"


def estimate_table(facts: Mapping[str, Any]) -> Table:
    rows = [(words, format_bytes(facts[name])) for name, words in _PARTS if facts[name] or name in _ALWAYS]
    rows += [
        ("largest op", f"{format_bytes(facts['largest_op_bytes'])}, {facts['largest_op']}"),
        (
            "in-core peak",
            f"{format_bytes(facts['in_core_peak_bytes'])}; the device has {format_bytes(facts['device_bytes'])}",
        ),
        ("least budget that works", format_bytes(facts["least_bytes"])),
        ("in-core step", f"{format_seconds(facts['in_core_step_s'])} ({facts['seconds_are']})"),
    ]
    rows += [(f"in {format_bytes(point['budget_bytes'])}", _cost(point)) for point in facts["budgets"]]
    rows += [("note", note) for note in facts["notes"]]
    return rows_table(f"outcore: estimate of {facts['model']} on {facts['machine']}, nothing was run", rows)


_PARTS = (
    ("parameter_bytes", "parameters"),
    ("gradient_bytes", "gradients"),
    ("optimizer_bytes", "optimizer state"),
    ("buffer_bytes", "buffers"),
    ("input_bytes", "inputs"),
    ("activation_bytes", "saved for backward"),
)
_ALWAYS = ("parameter_bytes", "gradient_bytes", "optimizer_bytes", "activation_bytes")


def _cost(point: Mapping[str, Any]) -> str:
    if not point["fits"]:
        return "no plan fits"
    moved = [
        f"{format_bytes(point[name])} {word}"
        for name, word in (("swapped_bytes", "swapped"), ("recomputed_bytes", "recomputed"))
        if point[name]
    ]
    return f"step {format_over(point['over_in_core'])}, {' and '.join(moved) or 'everything kept'}"


def slowdown_picture(budgets: Sequence[EstimatedBudget], least_bytes: int, in_core_bytes: int, *, title: str) -> str:
    """Draws slowdown against budget as an SVG that needs no other file and is legible from 420 px on."""
    points = [point for point in budgets if point.fits]
    right_bytes = max([in_core_bytes, *(point.budget_bytes for point in points)]) * 1.04
    top_share = max([0.1, *(point.over_in_core for point in points)]) * 1.15

    def x(num_bytes: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * num_bytes / right_bytes

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * max(share, 0.0) / top_share

    parts = [f'<text x="{LEFT - 48}" y="26" class="title">{escape(title)}</text>']
    parts.append(f'<text x="{LEFT - 48}" y="45">how much slower a step is than with everything kept (estimated)</text>')
    parts += [_rule(y(share), share) for share in _marks(top_share)]
    floor = HEIGHT - BOTTOM
    parts.append(
        f'<rect x="{LEFT}" y="{TOP}" width="{x(least_bytes) - LEFT:.1f}" height="{floor - TOP}" fill="var(--limit)" '
        'fill-opacity="0.12"/>'
    )
    line = " ".join(f"{x(point.budget_bytes):.1f},{y(point.over_in_core):.1f}" for point in points)
    parts.append(f'<polyline points="{line}" fill="none" stroke="var(--ours)" stroke-width="2.5"/>')
    for point in points:
        parts.append(
            f'<circle cx="{x(point.budget_bytes):.1f}" cy="{y(point.over_in_core):.1f}" r="4.5" fill="var(--ours)">'
            f"<title>{format_bytes(point.budget_bytes)}: {format_over(point.over_in_core)}</title></circle>"
        )
    parts += _labels([(x(p.budget_bytes), y(p.over_in_core), format_over(p.over_in_core)) for p in points])
    parts += _axis(x(least_bytes), x(in_core_bytes), least_bytes, in_core_bytes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}: slowdown against budget"><style>{STYLE}</style>{"".join(parts)}</svg>'
    )


def _marks(top: float) -> list[float]:
    step = next(step for step in _STEPS if top / step <= 5)
    return [step * index for index in range(int(top / step) + 1)]


_STEPS = tuple(factor * 10.0**power for power in range(-2, 6) for factor in (1, 2, 5))


def _rule(at: float, share: float) -> str:
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}" stroke="var(--line)"/>'
        f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{100 * share:.0f} %</text>'
    )


def _labels(points: Sequence[tuple[float, float, str]]) -> list[str]:
    """Writes the slowdown above each point, unless it would overlap the label before it."""
    shown, end = [], -1e9
    for at_x, at_y, words in points:
        width = 8 * len(words)
        if at_x >= end + 6:
            inside = min(at_x + width / 2, WIDTH - RIGHT - width / 2)  # beside the line, which falls to the right
            shown.append(
                f'<text x="{inside:.1f}" y="{at_y - 12:.1f}" text-anchor="middle" class="value">{words}</text>'
            )
            end = inside + width / 2
    return shown


def _axis(least_x: float, in_core_x: float, least_bytes: int, in_core_bytes: int) -> list[str]:
    """Writes the least budget and the in-core peak below the axis, on two lines if they would overlap on one."""
    least, in_core = f"least: {format_bytes(least_bytes)}", f"in-core: {format_bytes(in_core_bytes)}"
    floor = HEIGHT - BOTTOM
    is_crowded = in_core_x - 8 * len(in_core) < least_x + 4 * len(least)
    start = min(max(least_x, LEFT + 4 * len(least)), WIDTH - RIGHT - 4 * len(least))
    ticks = "".join(
        f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{floor}" stroke="var(--soft)" stroke-dasharray="4 4"/>'
        for at in (least_x, in_core_x)
    )
    return [
        ticks,
        f'<text x="{start:.1f}" y="{floor + 20}" text-anchor="middle">{least}</text>',
        f'<text x="{in_core_x:.1f}" y="{floor + (38 if is_crowded else 20)}" text-anchor="end">{in_core}</text>',
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">budget for the whole step</text>',
    ]


def estimate_page(facts: Mapping[str, Any], picture: str) -> str:
    """The picture, what the memory consists of, and every budget."""
    parts = [(words, format_bytes(facts[name])) for name, words in _PARTS]
    parts += [
        ("in-core peak", format_bytes(facts["in_core_peak_bytes"])),
        ("least budget that works", format_bytes(facts["least_bytes"])),
        (f"largest op: {facts['largest_op']}", format_bytes(facts["largest_op_bytes"])),
    ]
    parts += [(f"in {format_bytes(point['budget_bytes'])}", _cost(point)) for point in facts["budgets"]]
    rows = "".join(f"<tr><td>{escape(name)}</td><td>{escape(text)}</td></tr>" for name, text in parts)
    notes = "".join(f"<p>{escape(note)}</p>" for note in facts["notes"])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>outcore: estimate of {escape(facts['model'])}</title><style>{_PAGE_STYLE}</style></head>"
        f"<body><main>{picture}<table>{rows}</table><p>Seconds are {escape(facts['seconds_are'])}.</p>{notes}"
        "</main></body></html>\n"
    )


_PAGE_STYLE = (
    ":root{color-scheme:light dark}body{margin:0;font:15px/1.5 system-ui,sans-serif}"
    "main{max-width:760px;margin:0 auto;padding:24px 16px}main>svg{display:block;width:100%;height:auto}"
    "table{border-collapse:collapse;width:100%;margin:16px 0;font-variant-numeric:tabular-nums}"
    "td{padding:5px 8px 5px 0;border-bottom:1px solid #8884;vertical-align:top;overflow-wrap:anywhere}"
    "td+td{text-align:right}p{opacity:.75}"
)
