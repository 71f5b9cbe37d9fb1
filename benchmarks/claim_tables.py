"""Results about elastic averaging, tiled layers and tuning -> tables of docs/results.md, which tables.py fills in.

A table shows what was measured, missed bars included; `holds` and `SHORT` are worked out from the figures.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from benchmarks.markdown import NONE_YET, Result, markdown
from outcore.units import format_seconds


def _percent(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{100 * value:.{digits}f} %"


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} x"


def _seconds(value: float | None) -> str:
    return "not reached" if value is None else format_seconds(value)


def _verdict(holds: bool) -> str:
    return "holds" if holds else "**SHORT**"


# --- elastic averaging ------------------------------------------------------------------------------------------------


def _claims(result: Result) -> str:
    """Every method to one accuracy: medians over seeds, and the bars."""
    num_seeds = len({row["seed"] for row in result["rows"]})
    rows = (
        (
            name,
            _seconds(row["seconds_to_target"]),
            _times(row["over_level_3"]),
            _percent(row["final_accuracy"], 2),
            *(_percent(row[key]) for key in ("share", "first_share", "last_share")),
        )
        for name, row in result["medians"].items()
    )
    asked = f"{result['num_workers']} workers, {num_seeds} seed(s)", f"to {_percent(result['target'])}"
    headings = (*asked, "over level 3", "in the end", "communication", "first tenth", "last tenth")
    bars = (
        (bar["bar"], "not reached" if bar["measured"] is None else f"{bar['measured']:.3g}", _verdict(bar["holds"]))
        for bar in result["bars"]
    )
    return f"{markdown(headings, rows)}\n\n{markdown(('bar', 'measured', ''), bars)}"


def _predicted_workers(result: Result) -> str:
    rows = (
        (
            str(row["num_workers"]),
            row["name"],
            format_seconds(row["predicted_s"]),
            _seconds(row["measured_s"]),
            "" if row["predicted_over_measured"] is None else f"{100 * (row['predicted_over_measured'] - 1):+.0f} %",
        )
        for row in result.get("rows", [])
    )
    beyond = ", ".join(f"{name} {_percent(said['efficiency'])}" for name, said in result.get("beyond", {}).items())
    table = markdown(("workers", "method", "predicted step", "measured", "off by"), rows)
    return f"{table}\n\n4,352 workers, simulated and not measured, efficiency: {beyond}."


def _soak(result: Result) -> str:
    """Random deaths over two hosts."""

    def rows() -> Iterator[tuple[str, ...]]:
        for run in result["runs"]:
            kinds = Counter(death["kind"] for death in run["deaths"])
            back_s = [death["back_s"] for death in run["deaths"]]
            counts = (str(kinds[kind]) for kind in ("replica", "host", "center"))
            back = (f"{seconds:.1f} s" for seconds in (median(back_s), max(back_s)))
            yield run["method"], *counts, *back, "; ".join(run["problems"]) or "none"

    headings = ("method", "replicas killed", "hosts", "centres", "all exchange again after", "at most", "problems")
    return markdown(headings, rows())


def _levels(result: Result) -> str:
    """The three levels and the round robin as printed, to the accuracy that all of them reach."""

    def rows() -> Iterator[tuple[str, ...]]:
        for case in result["sections"]["levels"]["found"]["summary"]:
            for name, row in case["table"].items():
                figures = row["s_per_step"], row["over_level_3"], row["communication_share"]
                step_s, over, share = (figure["median"] for figure in figures)
                size = f"{case['num_workers']} x {case['batch']}", _percent(case["target_accuracy"])
                yield *size, name, format_seconds(step_s), _times(over), _percent(share)

    return markdown(("workers x batch", "accuracy", "method", "step", "seconds to it", "communication"), rows())


def _scaling(result: Result) -> str:
    rows = (
        (bar["bar"], f"{bar['measured']:.1f} %", _verdict(bar["holds"]))
        for bar in result["bars"]
        if bar["bar"].endswith("92 %")
    )
    return markdown(("weak scaling", "measured", ""), rows)


def _partition(result: Result) -> str:
    """A chip cut into groups, against one group with the same batch and against the best single group."""
    rows = (
        (
            f"{_percent(row['target_accuracy'])}",
            str(row["num_groups"]),
            row["method"],
            str(row["batch"]),
            _seconds(row["seconds_to_target"]),
            _times(row["speed_up"]),
            _times(row["speed_up_over_best_lone"]),
        )
        for row in result["sections"]["partition"]["found"]["table"]
    )
    headings = ("accuracy", "groups", "method", "batch", "seconds to it", "over a lone group, same batch")
    return markdown((*headings, "over the best lone group"), rows)


# --- tiled layers, tuning ---------------------------------------------------------------------------------------------


def _tiled_training(result: Result) -> str:
    rows = (
        (
            row["method"],
            format_seconds(row["seconds"]),
            f"{row['tflops']:.3g}",
            "" if row.get("device_peak_gib") is None else f"{row['device_peak_gib']:.1f}",
            "" if "over_bound" not in row else f"{100 * row['over_bound']:+.1f} %",
        )
        for row in result["rows"]
    )
    shapes = result["shapes"]
    step = f"{shapes['features']} x {shapes['features']}, {shapes['num_tokens']} tokens"
    return markdown((step, "step with AdamW", "TFLOP/s", "device GiB", "over the bound"), rows)


def _paper_batch(result: Result) -> str:
    rows = (
        (
            row["card"],
            str(row["caffe_batch"]),
            str(row["in_core_batch"]),
            f"{row['best_alone']} ({row['best_alone_of_caffe']:.1f} x), {100 * row['gain_alone_over_caffe']:+.1f} %",
            f"{row['best_of_8']} ({row['best_of_8_of_caffe']:.1f} x), {100 * row['gain_of_8_over_caffe']:+.1f} %",
            f"{row['largest_batch']}, {100 * row['largest_against_best_alone']:+.1f} %",
            ", ".join(f"{batch} at {noise}" for noise, batch in row["best_of_8_by_goodput"].items()),
        )
        for row in result["verdicts"]
    )
    headings = ("card", "Caffe's batch", "largest in-core", "best alone (of Caffe's), gain", "best of 8 cards, gain")
    return markdown((*headings, "the largest, against the best", "of 8 by goodput, at a noise scale"), rows)


# What stands on docs/results.md: section -> the question whose results fill it, and how.
SECTIONS: dict[str, tuple[str, Callable[[Result], str]]] = {
    "elastic-claims": ("elastic-claims-mnist", _claims),
    "elastic-prediction": ("elastic-claims-prediction", _predicted_workers),
    "elastic-soak": ("elastic-soak", _soak),
    "tiled-training": ("tiled-training", _tiled_training),
    "paper-batch": ("tuning-paper", _paper_batch),
}

# Section -> the one file that fills it: the question `elastic` has many sections, each with a run of its own.
NAMED: dict[str, tuple[str, Callable[[Result], str]]] = {
    "elastic-levels": ("elastic_x86_64-16cpu_20261116.json", _levels),
    "elastic-scaling": ("elastic_x86_64-16cpu_20261116.json", _scaling),
    "elastic-ahead": ("elastic-ahead_x86_64-16cpu_20261116.json", _scaling),
    "elastic-partition": ("elastic_x86_64-16cpu_20261116.json", _partition),
}


def of_file(path: Path, table: Callable[[Result], str]) -> str:
    if not path.exists():
        return NONE_YET
    result = json.loads(path.read_text())
    return f"{table(result)}\n\n{result['hardware']}, {result['date']}, `benchmarks/results/{path.name}`"
