"""Compares predicted and measured time and memory of steps, for several networks, budgets and planners in one run.

Every row is a step that was planned, predicted and then measured under a hard cap. In-core runs once per network: the
sum of its op times, compared with its measured step, shows how well ops are timed.
`python -m benchmarks.prediction --help`.
"""

from __future__ import annotations

import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import click

from benchmarks.slowdown import OURS, about, hardware, run_in_process_of_its_own

BUDGETS_GIB = {
    "resnet50": (16.0, 24.0, 40.0),
    "llama": (28.0, 48.0),
    "vit_l": (12.0, 20.0),
    "resnet152": (12.0, 20.0),
    "vgg16": (20.0,),
    "r3d18": (12.0,),
}


@click.command()
@click.option("--networks", default="resnet50,llama,vit_l,resnet152", show_default=True)
@click.option("--methods", default="in-core,hybrid", show_default=True, help="in-core, and our planners.")
@click.option("--memory-gib", type=float, multiple=True, help="Budgets; default: two or three of each network's.")
@click.option("--steps", default=10, show_default=True)
@click.option("--limit-s", default=300.0, show_default=True, help="Seconds for one network.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(
    networks: str, methods: str, memory_gib: tuple[float, ...], steps: int, limit_s: float, out: Path | None
) -> None:
    """Predicted against measured: step seconds and peak bytes."""
    rows: list[dict[str, Any]] = []
    for name in networks.split(","):
        budgets = memory_gib or BUDGETS_GIB[name]
        run_in_process_of_its_own(name, methods, budgets, steps, limit_s, None, lambda row: rows.append(judged(row)))
    out = out or Path(f"benchmarks/results/prediction_{hardware()}_{date.today():%Y%m%d}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"question": "prediction", **about(), "rows": rows}, indent=1))
    show(rows)


def judged(row: dict[str, Any]) -> dict[str, Any]:
    """The row with how far off its prediction was, as shares of what was measured."""
    if row.get("method") not in OURS or not row.get("step_s"):
        return row
    return {
        **row,
        "step_error": row["predicted_step_s"] / row["step_s"] - 1,
        "peak_error": row["predicted_peak_gib"] / row["peak_gib"] - 1,
    }


def show(rows: list[dict[str, Any]]) -> None:
    found = [row for row in rows if "step_error" in row]
    print(f"{'network':10} {'method':9} {'GiB':>6} {'predicted s':>11} {'measured s':>10} {'off':>7} {'peak off':>8}")
    for row in found:
        print(
            f"{row['network']:10} {row['method']:9} {row['memory_gib']:6.1f} {row['predicted_step_s']:11.4f} "
            f"{row['step_s']:10.4f} {100 * row['step_error']:+6.1f}% {100 * row['peak_error']:+7.2f}%"
        )
    for row in rows:
        if "step_error" not in row and row.get("error"):
            print(f"{row['network']:10} {row.get('method', ''):9} {row['error'][:90]}")
    if found:
        worst = max(abs(row["step_error"]) for row in found)
        middle = statistics.median(abs(row["step_error"]) for row in found)
        print(f"step: {100 * middle:.1f} % off in the middle, {100 * worst:.1f} % at worst")


if __name__ == "__main__":
    main()
