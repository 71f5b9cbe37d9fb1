"""Compares the step times of an earlier commit and of the present code, on the same networks in one run.

    git archive 4411db0 outcore benchmarks/ | tar -x -C .carry/before
    python -m benchmarks.before_after --before .carry/before --networks resnet50,resnet152,llama

Every network is timed in-core and planned with today's code, then planned with the code before, each tree in a process
of its own with the budgets of its own `benchmarks.slowdown`. Both slowdowns are over the one in-core step.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click

from benchmarks.slowdown import about, hardware

ROOT = Path(__file__).parents[1]


@click.command()
@click.option("--before", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--label", default="before", show_default=True, help="What the earlier code is called in the rows.")
@click.option("--networks", default="resnet50,resnet152,llama", show_default=True)
@click.option("--steps", default=10, show_default=True)
@click.option("--limit-s", default=560.0, show_default=True, help="Seconds for everything.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(before: Path, label: str, networks: str, steps: int, limit_s: float, out: Path | None) -> None:
    """Time planned steps with the code before and after, over one in-core step."""
    ends_s = time.monotonic() + limit_s
    out = out or Path(f"benchmarks/results/before-after_{hardware()}_{date.today():%Y%m%d}.json")
    rows: list[dict[str, Any]] = []
    for network in networks.split(","):
        in_core: dict[str, Any] = {}
        for code, tree, methods in (("today", ROOT, "in-core,hybrid"), (label, before, "hybrid")):
            for row in rows_of(tree.resolve(), network, methods, steps, ends_s):
                in_core = row if row["method"] == "in-core" else in_core
                rows.append({"code": code, **row, **over(in_core, row)})
                out.write_text(json.dumps({"question": "before-after", **about(), "rows": rows}, indent=1))
    for row in rows:
        told = row.get("error") or f"{row['step_s']:.4f} s, {row['slowdown']:+.2%}, loop {row['loop_slowdown']:+.2%}"
        print(f"{row['network']:10} {row['method']:8} {row['code']:8} {told}", flush=True)


def over(in_core: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The slowdowns of a row over the one in-core step of its network."""
    if not (in_core.get("step_s") and row.get("step_s")):
        return {}
    return {
        "in_core_step_s": in_core["step_s"],
        "slowdown": row["step_s"] / in_core["step_s"] - 1,
        "loop_slowdown": row["loop_step_s"] / in_core["loop_step_s"] - 1,
    }


def rows_of(tree: Path, network: str, methods: str, steps: int, ends_s: float) -> Iterator[dict[str, Any]]:
    """The rows of `benchmarks.slowdown` in a tree, as they come; the last one says so if the time was over."""
    command = [sys.executable, "-m", "benchmarks.slowdown", "--one", network, "--methods", methods]
    paths = [str(tree), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        [*command, "--steps", str(steps)], cwd=tree, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    timer = threading.Timer(max(1.0, ends_s - time.monotonic()), process.kill)
    timer.start()
    for line in process.stdout:
        if line.startswith("ROW "):
            yield json.loads(line.removeprefix("ROW "))
        else:
            print(line, end="", flush=True)
    timer.cancel()
    if process.wait() != 0:
        yield {
            "network": network,
            "method": methods,
            "step_s": None,
            "error": f"ended with status {process.returncode}",
        }


if __name__ == "__main__":
    main()
