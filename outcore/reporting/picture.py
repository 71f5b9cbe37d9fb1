"""Curves and spans -> SVG. Both pictures share one clock, so that they can stand above each other."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from outcore.reporting.curve import is_own
from outcore.reporting.text import short_name
from outcore.units import format_bytes, format_seconds
from outcore.values import Span, Timeline, Trace

WIDTH, LEFT, RIGHT = 1040, 84, 16
PLOT_HEIGHT, LANE_HEIGHT, LANE_GAP, AXIS_HEIGHT, TOP = 260, 30, 8, 24, 8
JOIN_PX = 0.5  # neighbours of one colour closer than this are drawn as one
LANES = (("compute", "compute"), ("swap_out", "swap out"), ("swap_in", "swap in"))


def memory_picture(
    in_core: Sequence[tuple[float, int]],
    ours: Sequence[tuple[float, int]],
    budget_bytes: int,
    end_s: float,
    *,
    measured: Sequence[tuple[float, int]] = (),
) -> str:
    """The curve of the plan in front of the curve of everything kept, under the line of the budget."""
    top_bytes = 1.06 * max(budget_bytes, max(level for _, level in [*in_core, *ours, *measured]))
    clock = _Clock(end_s)

    def y_of(num_bytes: float) -> float:
        return TOP + PLOT_HEIGHT * (1 - num_bytes / top_bytes)

    def path(curve: Sequence[tuple[float, int]]) -> str:
        points = [f"M{clock.x(curve[0][0]):.2f} {y_of(0):.2f}"]
        points += [f"H{clock.x(at_s):.2f}V{y_of(level):.2f}" for at_s, level in curve]
        return "".join(points) + f"V{y_of(0):.2f}"

    parts = [_rule(y_of(level), format_bytes(level)) for level in _byte_marks(top_bytes)]
    parts.append(f'<path d="{path(in_core)}Z" fill="var(--in-core-fill)" stroke="var(--in-core)" stroke-width="1"/>')
    parts.append(f'<path d="{path(ours)}Z" fill="var(--ours-fill)" stroke="var(--ours)" stroke-width="1.3"/>')
    if measured:
        parts.append(f'<path d="{path(measured)}" fill="none" stroke="var(--ink)" stroke-width="1"/>')
    limit_y = y_of(budget_bytes)
    parts.append(
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{limit_y:.2f}" y2="{limit_y:.2f}" stroke="var(--limit)" '
        f'stroke-width="1.3" stroke-dasharray="5 4"/><text x="{LEFT + 6}" y="{limit_y - 6:.2f}" '
        f'style="fill:var(--limit)">budget {format_bytes(budget_bytes)}</text>'
    )
    return _svg(parts, TOP + PLOT_HEIGHT, clock, "Device memory over the step")


def lanes_picture(trace: Trace, timeline: Timeline, end_s: float) -> str:
    """One row per stream, one box per op, rerun, wait or copy."""
    clock, parts = _Clock(end_s), []
    phases = iter(op.phase for op in trace.ops)
    coloured = [(span, _colour(span, phases)) for span in timeline.spans]
    for row, (stream, name) in enumerate(LANES):
        y = TOP + row * (LANE_HEIGHT + LANE_GAP)
        parts.append(f'<text x="{LEFT - 10}" y="{y + LANE_HEIGHT / 2 + 4}" text-anchor="end">{name}</text>')
        parts.append(_box(LEFT, y, WIDTH - RIGHT - LEFT, "faint", ""))
        mine = sorted(((s, c) for s, c in coloured if s.stream == stream), key=lambda pair: pair[0].start_s)
        parts += [_box(x, y, width, colour, title) for x, width, colour, title in _boxes(mine, clock)]
    return _svg(parts, TOP + len(LANES) * (LANE_HEIGHT + LANE_GAP), clock, "Lanes of the step")


def _colour(span: Span, phases: Iterator[str]) -> str:
    if is_own(span):
        return next(phases)
    if span.stream != "compute":
        return "swap" if span.stream == "swap_out" else "swap-in"
    return "limit" if span.what == "stall" else "recompute"


def _boxes(spans: Sequence[tuple[Span, str]], clock: _Clock) -> Iterator[tuple[float, float, str, str]]:
    """(x, width, colour, words), with neighbours of one colour joined where the eye could not part them."""
    x = end = 0.0
    colour, words, num_joined = "", "", 0
    for span, its_colour in spans:
        start, stop = clock.x(span.start_s), clock.x(span.end_s)
        if its_colour == colour and start - end < JOIN_PX and (stop - start < 2 or end - x < 2):
            end, num_joined = max(end, stop), num_joined + 1
            continue
        if colour:
            yield x, end - x, colour, words if num_joined == 1 else f"{words} and {num_joined - 1} more"
        x, end, colour, num_joined = start, stop, its_colour, 1
        words = f"{short_name(span.what)}, {format_seconds(span.end_s - span.start_s)}"
    if colour:
        yield x, end - x, colour, words if num_joined == 1 else f"{words} and {num_joined - 1} more"


def _box(x: float, y: float, width: float, colour: str, title: str) -> str:
    inside = f"<title>{escape(title)}</title>" if title else ""
    shape = f'x="{x:.2f}" y="{y}" width="{max(width, 0.3):.2f}" height="{LANE_HEIGHT}"'
    return f'<rect {shape} fill="var(--{colour})">{inside}</rect>'


class _Clock:
    """Seconds -> x."""

    def __init__(self, end_s: float) -> None:
        self.end_s = end_s or 1.0

    def x(self, at_s: float) -> float:
        return LEFT + (WIDTH - RIGHT - LEFT) * at_s / self.end_s

    def marks_s(self) -> list[float]:
        step_s = _round_step(self.end_s / 8)
        return [step_s * index for index in range(int(self.end_s / step_s) + 1)]


def _round_step(least: float) -> float:
    """The next of 1, 2, 5, 10 ... at or above `least`."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def _byte_marks(top_bytes: float) -> list[int]:
    step_bytes = 2 ** max(0, math.ceil(math.log2(top_bytes / 6)))
    return [step_bytes * index for index in range(int(top_bytes / step_bytes) + 1)]


def _rule(y: float, words: str) -> str:
    line = f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.2f}" y2="{y:.2f}" stroke="var(--line)"/>'
    return f'{line}<text x="{LEFT - 10}" y="{y + 4:.2f}" text-anchor="end">{words}</text>'


def _svg(parts: Sequence[str], height: float, clock: _Clock, label: str) -> str:
    below = f'y="{height + 16}" text-anchor="middle"'
    marks = [
        f'<text x="{clock.x(at_s):.2f}" {below}>{format_seconds(at_s) if at_s else 0}</text>'
        for at_s in clock.marks_s()
    ]
    box = f'viewBox="0 0 {WIDTH} {height + AXIS_HEIGHT:g}" role="img" aria-label="{label}"'
    return f"<svg {box}>{''.join(parts)}{''.join(marks)}</svg>"
