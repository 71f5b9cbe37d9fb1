"""Draws docs/results.svg from the rows of benchmarks/slowdown.py: step time over memory, with a panel per network.

A dot shows a method's peak memory, and the increase of its step time over plain PyTorch's. Axes are linear; methods
that take more than half as long again are only named above the panel. outcore is blue: the budget of the README's
table, connected to other budgets. Hollow dots compute other numbers. Every dot has its name beside it, without
overlaps, or a line to it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from html import escape
from typing import NamedTuple

from benchmarks.headline import FONT, OURS, TITLES, networks_of
from benchmarks.markdown import Result, Row

NAMES = {
    "in-core": "plain PyTorch",
    "hybrid": "outcore",
    "checkpoint": "checkpoint",
    "selective": "selective",
    "accumulate:4": "accumulate 4",
    "compile": "compile",
    "compile-budget": "compile, budget",
    "save_on_cpu": "save_on_cpu",
    "trl-offload": "TRL offload",
}
OTHER_NUMBERS = ("compile", "compile-budget", "accumulate:4")
GREY, INK, FAINT = "#57606a", "#24292f", "#d8dee4"
COLUMNS, WIDTH, HEIGHT = 2, 420, 262  # of a panel, in pixels
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 46, 34  # around the axes
LOWEST, HIGHEST = -50.0, 50.0  # percent over plain PyTorch
SIZE, LETTER = 12, 7.2  # pixels: of the text, of a letter of it
FAR = 20  # pixels: a name farther than this from its dot has a line to it


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float

    def meets(self, other: Box) -> bool:
        across = self.x < other.x + other.width and other.x < self.x + self.width
        return across and self.y < other.y + other.height and other.y < self.y + self.height

    def lies_in(self, other: Box) -> bool:
        across = other.x <= self.x and self.x + self.width <= other.x + other.width
        return across and other.y <= self.y and self.y + self.height <= other.y + other.height


def plot(result: Result) -> str:
    """The SVG."""
    networks = networks_of(result)
    lines = -(-len(networks) // COLUMNS)
    width, height = COLUMNS * WIDTH, lines * HEIGHT + 30
    parts = []
    for at, (name, methods) in enumerate(networks.items()):
        curve = [row for row in result.get("curves", []) if row["network"] == name]
        parts += [f'<g transform="translate({at % COLUMNS * WIDTH} {at // COLUMNS * HEIGHT + 4})">']
        parts += [*_panel(TITLES.get(name, name), methods, curve), "</g>"]
    note = (
        "Across: peak of allocated memory. Up: step time over plain PyTorch. Blue: outcore's budgets. Hollow: other "
        "numbers."
    )
    parts.append(_text(14, height - 12, note, fill=GREY))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    label = "Step time against memory of six networks"
    frame = f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6" fill="#ffffff" stroke="#d0d7de"/>'
    return "\n".join((f'{head} font-family="{FONT}" role="img" aria-label="{label}">', frame, *parts, "</svg>\n"))


def _panel(title: str, methods: dict[str, Row], curve: list[Row]) -> Iterator[str]:
    right_gib = 1.12 * max(row["peak_gib"] for row in methods.values())
    axes = Box(LEFT, TOP, WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM)

    def place(row: Row) -> tuple[float, float]:
        share = (HIGHEST - 100 * row["slowdown"]) / (HIGHEST - LOWEST)
        return axes.x + axes.width * row["peak_gib"] / right_gib, axes.y + axes.height * share

    yield from _axes(axes, right_gib)
    shown = {name: methods[name] for name in NAMES if name in methods and methods[name]["slowdown"] * 100 <= HIGHEST}
    beyond = [f"{NAMES[name]} {1 + methods[name]['slowdown']:.1f}x" for name in NAMES if name in methods.keys() - shown]
    yield _text(LEFT, 18, title, weight="600", size=14)
    yield _text(LEFT, 36, f"slower than +{HIGHEST:g} %: {', '.join(beyond)}" if beyond else "", fill=GREY)
    budgets = [row for row in curve if row["method"] == "hybrid" and 100 * row.get("slowdown", 9) <= HIGHEST]
    if "hybrid" in shown:
        budgets = [row for row in budgets if row["memory_gib"] != shown["hybrid"]["memory_gib"]] + [shown["hybrid"]]
    points = sorted(place(row) for row in budgets)
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    yield f'<polyline points="{joined}" fill="none" stroke="{OURS}" stroke-width="1.5" opacity="0.6"/>'
    yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{OURS}"/>' for x, y in points)
    places = {name: place(row) for name, row in shown.items()}
    yield from (_dot(name, x, y) for name, (x, y) in places.items())
    yield from labels(places, [*points, *places.values()], axes)


def _axes(axes: Box, right_gib: float) -> Iterator[str]:
    step_gib = next(step for step in (2, 5, 10, 20, 50) if right_gib / step <= 7)
    for percent in (-50, -25, 0, 25, 50):
        y = axes.y + axes.height * (HIGHEST - percent) / (HIGHEST - LOWEST)
        yield f'<path d="M{axes.x} {y:.1f}H{axes.x + axes.width}" stroke="{GREY if percent == 0 else FAINT}"/>'
        yield _text(axes.x - 6, y + 4, f"{percent:+d} %" if percent else "0 %", fill=GREY, anchor="end")
    for gib in range(0, int(right_gib) + 1, step_gib):
        x = axes.x + axes.width * gib / right_gib
        bottom = axes.y + axes.height
        yield f'<path d="M{x:.1f} {bottom}v4" stroke="{GREY}"/>'
        yield _text(x, bottom + 18, f"{gib} GiB" if gib else "0", fill=GREY, anchor="middle")


def _dot(name: str, x: float, y: float) -> str:
    if name == "hybrid":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{OURS}"/>'
    fill = "#ffffff" if name in OTHER_NUMBERS else GREY
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{fill}" stroke="{GREY}" stroke-width="1.5"/>'


def labels(places: dict[str, tuple[float, float]], dots: list[tuple[float, float]], axes: Box) -> Iterator[str]:
    """Each name as near to its dot as there is room: inside the axes, over no dot and no other name."""
    taken = [Box(x - 6, y - 6, 12, 12) for x, y in dots]
    taken.append(Box(axes.x, axes.y + axes.height / 2 - 1, axes.width, 2))  # the line of plain PyTorch
    for name, (x, y) in places.items():
        text = NAMES[name]
        boxes = list(_candidates(x, y, LETTER * len(text)))
        free = (box for box in boxes if box.lies_in(axes) and not any(map(box.meets, taken)))
        box = next(free, boxes[0])
        taken.append(box)
        is_ours = name == "hybrid"
        if abs(box.y + SIZE / 2 - y) > FAR:
            end_x = min(max(x, box.x), box.x + box.width)
            yield f'<path d="M{x:.1f} {y:.1f}L{end_x:.1f} {box.y if box.y > y else box.y + SIZE:.1f}" stroke="{GREY}"/>'
        fill, weight = (OURS, "600") if is_ours else (INK, "400")
        yield _text(box.x, box.y + SIZE - 1, text, fill=fill, weight=weight)


def _candidates(x: float, y: float, width: float) -> Iterator[Box]:
    sides = (x + 9, x - 9 - width, x - width / 2)
    for rise, left in itertools.product((0, *(sign * rise for rise in range(8, 80, 8) for sign in (-1, 1))), sides):
        yield Box(left, y - SIZE / 2 + rise, width, SIZE + 2)


def _text(
    x: float, y: float, text: str, *, fill: str = INK, weight: str = "400", size: int = SIZE, anchor: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>' if text else ""
