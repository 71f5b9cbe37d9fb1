"""Curves and spans -> SVG. All pictures of a page share one clock, so that they can stand above each other.

Each is drawn for a width: text in a picture that is shrunk to a phone would be too small to read. So a page holds every
picture twice, and its style shows the one that suits the reader's window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

from outcore.reporting.curve import is_own
from outcore.reporting.module_memory import ModuleMemory
from outcore.reporting.text import short_name
from outcore.units import format_bytes, format_seconds
from outcore.values import Span, Timeline, Trace

WIDE, NARROW = 1040, 372  # pixels that a page gives a picture on a screen, and on a phone of 420
PLOT_HEIGHT, LANE_HEIGHT, LANE_GAP, AXIS_HEIGHT, TOP = 260, 30, 8, 24, 16
JOIN_PX = 0.5  # neighbours of one colour closer than this are drawn as one
MARK_PX, FEWEST_MARKS = 105, 4  # between two marks of the clock; on a phone they stand closer
LANES = (("compute", "compute"), ("swap_out", "swap out"), ("swap_in", "swap in"))
Points = Sequence[tuple[float, int]]


@dataclass(frozen=True)
class Clock:
    """Maps seconds to x in a picture of this width."""

    end_s: float
    width: int = WIDE
    left: int = 84
    right: int = 16

    @property
    def span_px(self) -> int:
        return self.width - self.left - self.right

    def x(self, at_s: float) -> float:
        return self.left + self.span_px * at_s / (self.end_s or 1.0)

    def marks_s(self) -> list[float]:
        end_s = self.end_s or 1.0
        step_s = _round_step(end_s / max(FEWEST_MARKS, self.span_px // MARK_PX))
        return [step_s * index for index in range(int(end_s / step_s + 1e-9) + 1)]


def both_widths(draw: Callable[[Clock], str], end_s: float) -> str:
    """Draws the picture twice, for screens and for phones; the page's style shows the one that suits the window."""
    wide, narrow = draw(Clock(end_s)), draw(Clock(end_s, NARROW, left=76, right=8))
    return f'<div class="wide">{wide}</div><div class="narrow">{narrow}</div>'


def memory_picture(clock: Clock, in_core: Points, ours: Points, budget_bytes: int, *, measured: Points = ()) -> str:
    """Draws device memory under the plan in front of device memory with everything kept, and the budget as a line."""
    top_bytes = 1.1 * max(budget_bytes, max(level for _, level in [*in_core, *ours, *measured]))
    y_of = _height_of(top_bytes)

    def path(curve: Points) -> str:
        points = [f"M{clock.x(curve[0][0]):.2f} {y_of(0):.2f}"]
        points += [f"H{clock.x(at_s):.2f}V{y_of(level):.2f}" for at_s, level in curve]
        return "".join(points) + f"V{y_of(0):.2f}"

    parts = [_rule(clock, y_of(level), format_bytes(level)) for level in _byte_marks(top_bytes)]
    parts.append(f'<path d="{path(in_core)}Z" fill="var(--in-core-fill)" stroke="var(--in-core)" stroke-width="1"/>')
    parts.append(f'<path d="{path(ours)}Z" fill="var(--ours-fill)" stroke="var(--ours)" stroke-width="1.3"/>')
    if measured:
        parts.append(f'<path d="{path(measured)}" fill="none" stroke="var(--ink)" stroke-width="1"/>')
    parts.append(_budget_line(clock, y_of(budget_bytes), budget_bytes))
    return _svg(parts, TOP + PLOT_HEIGHT, clock, "Device memory over the step")


def module_picture(clock: Clock, shares: Sequence[ModuleMemory], budget_bytes: int) -> str:
    """Draws the memory of the modules, stacked."""
    totals = [sum(levels) for levels in zip(*(share.levels for share in shares))]
    top_bytes = 1.1 * max([budget_bytes, *totals])
    y_of = _height_of(top_bytes)
    parts = [_rule(clock, y_of(level), format_bytes(level)) for level in _byte_marks(top_bytes)]
    below = [0] * len(totals)
    for number, share in enumerate(shares):
        above = [low + level for low, level in zip(below, share.levels)]
        outline = [*_steps(clock, share.times_s, above, y_of), *reversed(_steps(clock, share.times_s, below, y_of))]
        d = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in outline) + "Z"
        parts.append(f'<path d="{d}" fill="var(--module-{number})"><title>{escape(share.module)}</title></path>')
        below = above
    parts.append(_budget_line(clock, y_of(budget_bytes), budget_bytes))
    return _svg(parts, TOP + PLOT_HEIGHT, clock, "Device memory by module over the step")


def _steps(
    clock: Clock, times_s: Sequence[float], levels: Sequence[int], y_of: Callable[[float], float]
) -> list[tuple[float, float]]:
    """Returns the corners of a step curve. Of several within one pixel only the highest stays."""
    corners: list[tuple[float, float]] = []
    for at_s, level in zip(times_s, levels):
        x, y = clock.x(at_s), y_of(level)
        if corners and x - corners[-1][0] < 1:
            corners[-1] = (corners[-1][0], min(y, corners[-1][1]))
        else:
            corners.append((x, y))
    ends = [x for x, _ in corners[1:]] + [clock.x(times_s[-1])]
    return [point for (x, y), end in zip(corners, ends) for point in ((x, y), (max(x, end), y))]


def lanes_picture(clock: Clock, trace: Trace, timeline: Timeline, measured: Timeline | None = None) -> str:
    """One row per stream, one box per op, rerun, wait or copy; below them, what was measured of the compute stream."""
    parts: list[str] = []
    phases = iter(op.phase for op in trace.ops)
    coloured = [(span, _colour(span, phases)) for span in timeline.spans]
    rows = [(name, [pair for pair in coloured if pair[0].stream == stream]) for stream, name in LANES]
    if measured is not None and measured.spans:
        whole = Span("compute", 0.0, measured.step_s, "the step")
        rows.append(("measured", [(whole, "forward"), *((span, _measured_colour(span)) for span in measured.spans)]))
    for row, (name, pairs) in enumerate(rows):
        y = TOP + row * (LANE_HEIGHT + LANE_GAP)
        parts.append(f'<text x="{clock.left - 10}" y="{y + LANE_HEIGHT / 2 + 4}" text-anchor="end">{name}</text>')
        parts.append(_box(clock.left, y, clock.span_px, "faint", ""))
        mine = sorted(pairs, key=lambda pair: pair[0].start_s)
        if name == "measured":  # the others lie in the first
            whole, colour = mine.pop(0)
            parts += [_box(x, y, width, colour, words) for x, width, colour, words in _boxes([(whole, colour)], clock)]
        parts += [_box(x, y, width, colour, title) for x, width, colour, title in _boxes(mine, clock)]
    return _svg(parts, TOP + len(rows) * (LANE_HEIGHT + LANE_GAP), clock, "Lanes of the step")


def _measured_colour(span: Span) -> str:
    return "limit" if span.is_wait else "recompute"


def _colour(span: Span, phases: Iterator[str]) -> str:
    if is_own(span):
        return next(phases)
    if span.stream != "compute":
        return "swap" if span.stream == "swap_out" else "swap-in"
    return "limit" if span.is_wait else "recompute"


def _boxes(spans: Sequence[tuple[Span, str]], clock: Clock) -> Iterator[tuple[float, float, str, str]]:
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


def _round_step(least: float) -> float:
    """Returns the smallest of 1, 2, 5, 10, ... that is not below `least`."""
    power: float = 10.0 ** math.floor(math.log10(least))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least * 0.999)


def _height_of(top_bytes: float) -> Callable[[float], float]:
    return lambda num_bytes: TOP + PLOT_HEIGHT * (1 - num_bytes / top_bytes)


def _byte_marks(top_bytes: float) -> list[int]:
    step_bytes = 2 ** max(0, math.ceil(math.log2(top_bytes / 6)))
    return [step_bytes * index for index in range(int(top_bytes / step_bytes) + 1)]


def _rule(clock: Clock, y: float, words: str) -> str:
    line = f'<line x1="{clock.left}" x2="{clock.width - clock.right}" y1="{y:.2f}" y2="{y:.2f}" stroke="var(--line)"/>'
    return f'{line}<text x="{clock.left - 10}" y="{y + 4:.2f}" text-anchor="end">{words}</text>'


def _budget_line(clock: Clock, y: float, budget_bytes: int) -> str:
    """Draws the budget with its label, which has a background so that it is legible over the curves."""
    words = f"budget {format_bytes(budget_bytes)}"
    return (
        f'<line x1="{clock.left}" x2="{clock.width - clock.right}" y1="{y:.2f}" y2="{y:.2f}" stroke="var(--limit)" '
        f'stroke-width="1.3" stroke-dasharray="5 4"/><text x="{clock.left + 6}" y="{y - 5:.2f}" class="on-ground" '
        f'style="fill:var(--limit)">{words}</text>'
    )


def _svg(parts: Sequence[str], height: float, clock: Clock, label: str) -> str:
    marks = []
    for at_s in clock.marks_s():
        x = clock.x(at_s)
        anchor = "end" if x > clock.width - 30 else "middle"
        where = f'x="{min(x, clock.width):.2f}" y="{height + 16}" text-anchor="{anchor}"'
        marks.append(f"<text {where}>{format_seconds(at_s) if at_s else 0}</text>")
    box = f'viewBox="0 0 {clock.width} {height + AXIS_HEIGHT:g}" role="img" aria-label="{label}"'
    return f"<svg {box}>{''.join(parts)}{''.join(marks)}</svg>"
