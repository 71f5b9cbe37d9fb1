"""Rows of benchmarks/slowdown.py -> docs/headline.svg, the README's picture, and tables that compare methods.

For each headline network three bars: plain PyTorch, every block checkpointed, and outcore in its budget. Bars are drawn
as shares of what plain PyTorch needs, so that networks of unlike sizes compare. The text is SVG text at 12 pixels or
more on a background of its own: legible at 600 pixels, in light and dark pages. `python -m benchmarks.tables` writes
the file, and a test fails when it is not what the results say.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from benchmarks.markdown import Result, Row

TITLES = {  # as papers write them
    "resnet50": "ResNet-50",
    "resnet152": "ResNet-152",
    "llama": "Llama 0.9B",
    "vit_l": "ViT-L",
    "vgg16_nhwc": "VGG-16",
    "r3d18_nhwc": "R3D-18",
}
WIDTH, LEFT, FULL, TIME = (
    600,
    112,
    300,
    588,
)  # pixels: the picture, where bars begin, a bar of 100 %, right edge of text
TOP, BAR, PITCH, GAP = 62, 13, 15, 12  # pixels: first bar, its height, from bar to bar, between networks
PLAIN, CHECKPOINT, OURS = "#c3cad3", "#858e99", "#2563c9"
METHODS = (
    ("in-core", "plain PyTorch", PLAIN),
    ("checkpoint", "every block checkpointed", CHECKPOINT),
    ("hybrid", "outcore", OURS),
)
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def networks_of(result: Result) -> dict[str, dict[str, Row]]:
    """The rows, by method, of each network that was compared with more than checkpointing."""
    found: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        if row.get("step_s") is not None:
            found.setdefault(row["network"], {}).setdefault(row["method"], row)
    wanted = {method for method, _, _ in METHODS}
    return {name: rows for name, rows in found.items() if wanted <= rows.keys() and len(rows) > len(wanted)}


def lines(result: Result) -> Iterator[tuple[str, ...]]:
    """The same figures as rows of the README's table."""
    for name, methods in networks_of(result).items():
        ours, other = methods["hybrid"], methods["checkpoint"]
        yield (
            f"{TITLES.get(name, name)}, batch {ours['batch']}",
            f"{methods['in-core']['peak_gib']:.1f} GiB",
            f"**{ours['memory_gib']:g} GiB, {100 * ours['slowdown']:+.1f} %**",
            f"{other['peak_gib']:.1f} GiB, {100 * other['slowdown']:+.1f} %",
        )


COMPARED = {  # methods as a user knows them, in the order of docs/is-it-for-you.md
    "in-core": "plain PyTorch",
    "hybrid": "**outcore**",
    "checkpoint": "`torch.utils.checkpoint`, every block",
    "selective": "selective checkpointing (saves convolutions, products, attention)",
    "accumulate:4": "gradient accumulation, 4 parts ¹",
    "compile": "`torch.compile` ²",
    "compile-budget": "`torch.compile`, `activation_memory_budget` ²",
    "save_on_cpu": "`save_on_cpu(pin_memory=True)`",
    "trl-offload": "TRL `OffloadActivations`",
}


def comparison(result: Result) -> tuple[tuple[str, ...], Iterator[tuple[str, ...]]]:
    """Headings and rows: a method in a line, a network in a column, peak memory and step time in a cell."""
    networks = networks_of(result)
    failed = {(row["network"], row["method"]) for row in result["rows"] if row.get("step_s") is None}

    def cell(name: str, method: str) -> str:
        row = networks[name].get(method)
        if row is None:
            return "does not run" if (name, method) in failed else ""
        times = 1 + row["slowdown"]
        over = f"{times:.1f} times" if times > 2 else f"{100 * row['slowdown']:+.1f} %"
        cells = (f"{row['peak_gib']:.1f} GiB", *(() if method == "in-core" else (over,)))
        return ", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in cells)

    headings = ("", *(f"{TITLES.get(name, name)}, batch {rows['hybrid']['batch']}" for name, rows in networks.items()))
    return headings, ((title, *(cell(name, method) for name in networks)) for method, title in COMPARED.items())


def picture(result: Result) -> str:
    """The SVG."""
    where = str(result.get("hardware", "")).upper()
    source = f"Measured on one {where}, torch {result.get('torch', '?')}, {result.get('date', '')}."
    parts = [_legend()]
    y = TOP
    for name, methods in networks_of(result).items():
        parts += _network(TITLES.get(name, name), methods, y)
        y += len(METHODS) * PITCH + GAP
    parts.append(_text(12, y + 10, source, size=12, fill="#57606a"))
    height = y + 22
    label = "Device memory and step time of six training steps: plain PyTorch, checkpointing, outcore"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
            f'height="{height}" font-family="{FONT}" role="img" aria-label="{label}">',
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="6" fill="#ffffff" stroke="#d0d7de"/>',
            *parts,
            "</svg>\n",
        )
    )


def _legend() -> str:
    parts, x = [], 12
    for method, title, colour in METHODS:
        parts.append(f'<rect x="{x}" y="12" width="{BAR}" height="{BAR}" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 18, 23, title, weight="600" if method == "hybrid" else "400"))
        x += 38 + 7 * len(title)
    parts.append(_text(LEFT, 50, "device memory of one training step", fill="#57606a", size=12))
    parts.append(_text(TIME, 50, "step time", fill="#57606a", size=12, anchor="end"))
    return "\n".join(parts)


def _network(title: str, methods: dict[str, Row], y: int) -> list[str]:
    plain_gib = methods["in-core"]["peak_gib"]
    parts = [
        _text(12, y + 11, title, size=14, weight="600"),
        _text(12, y + 28, f"batch {methods['hybrid']['batch']}", size=12, fill="#57606a"),
    ]
    for at, (method, _, colour) in enumerate(METHODS):
        row, top = methods[method], y + at * PITCH
        is_ours = method == "hybrid"
        gib = row["memory_gib"] if is_ours else row["peak_gib"]  # of ours the budget, which its peak stays below
        length = FULL * gib / plain_gib
        weight, fill = ("600", OURS) if is_ours else ("400", "#24292f")
        size = f"{gib:g} GiB" if is_ours else f"{gib:.1f} GiB"
        parts.append(
            f'<rect x="{LEFT}" y="{top}" width="{length:.1f}" height="{BAR}" rx="2" fill="{colour}"/>',
        )
        parts.append(_text(round(LEFT + length + 6), top + 11, size, weight=weight, fill=fill, size=12))
        over = "" if method == "in-core" else f"{100 * row['slowdown']:+.1f} %"
        parts.append(_text(TIME, top + 11, over, weight=weight, fill=fill, size=12, anchor="end"))
    return parts


def _text(
    x: int, y: int, text: str, *, size: int = 13, weight: str = "400", fill: str = "#24292f", anchor: str = "start"
) -> str:
    style = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>' if text else ""
