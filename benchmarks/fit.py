"""Finds the largest batch of ResNet-50 and the deepest ResNet that train in 16 GiB, per method.

Every trial is two real steps under a hard cap, four for outcore, whose first one is recorded; each method has a
separate process. Other methods show by running out of memory whether a size fits; outcore states the memory it needs.
The result is found by doubling and bisection, to one part in sixteen. Nothing else may use the GPU meanwhile.
`python -m benchmarks.fit --help`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click

GIB = 1024**3
METHODS = "in-core,checkpoint,selective,save_on_cpu,hybrid"
OURS = ("hybrid", "pooch", "swap", "swap-all")
PRECISION = 16  # the answer is right to one part in this many
FIRST = {"batch": 64, "depth": 152}
MOST = {"batch": 8192, "depth": 6002}
DEPTH_BATCH = 32


def largest(works: Callable[[int], bool], first: int, most: int) -> int:
    """The largest size that works, up to a part in PRECISION, if every smaller one does; 0 if not even the first."""
    good, bad = 0, first
    while bad <= most and works(bad):
        good, bad = bad, 2 * bad
    bad = min(bad, most + 1)
    while good and bad - good > max(1, good // PRECISION):
        middle = (good + bad) // 2
        good, bad = (middle, bad) if works(middle) else (good, middle)
    return good


@click.command()
@click.option("--questions", default="batch,depth", show_default=True)
@click.option("--methods", default=METHODS, show_default=True)
@click.option("--memory-gib", default=16.0, show_default=True)
@click.option("--limit-s", default=120.0, show_default=True, help="Seconds for one method's search.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
@click.option("--first", default=0, help="Size to begin with, if known to run [batch 64, depth 152].")
@click.option("--here", nargs=2, default=None, hidden=True, help="QUESTION METHOD: search in this process.")
def main(
    questions: str,
    methods: str,
    memory_gib: float,
    limit_s: float,
    out: Path | None,
    first: int,
    here: tuple[str, str] | None,
) -> None:
    """The largest batch and the deepest network under one budget, per method."""
    if here is not None:
        search_here(*here, memory_gib, first)
        return
    from benchmarks.slowdown import about, hardware

    out = out or Path(f"benchmarks/results/fit_{hardware()}_{date.today():%Y%m%d}.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for question in questions.split(","):
        for method in methods.split(","):
            rows.append(search(question, method, memory_gib, limit_s, first))
            out.write_text(json.dumps({"question": "fit", **about(), "rows": rows}, indent=1))
    for row in rows:
        found = f"{'' if row['complete'] else '>='}{row['largest']}"
        print(f"{row['question']:6} {row['method']:12} {found:>8}  {row['samples_per_s'] or 0:8.1f} samples/s")


def search(question: str, method: str, memory_gib: float, limit_s: float, first: int) -> dict[str, Any]:
    """What a process of its own found until the time was up."""
    command = [sys.executable, "-m", "benchmarks.fit", "--memory-gib", str(memory_gib), "--first", str(first)]
    command += ["--here", question, method]
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", **os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    trials: list[dict[str, Any]] = []
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("TRIAL "):
            trials.append(json.loads(line[6:]))
            print("TRIAL", question, method, json.dumps(trials[-1]), flush=True)
    complete = process.wait() == 0
    timer.cancel()
    return summary(question, method, memory_gib, trials, complete=complete)


def summary(
    question: str, method: str, memory_gib: float, trials: list[dict[str, Any]], *, complete: bool
) -> dict[str, Any]:
    """The row of one search; if it is not complete, `largest` is only the largest seen to run."""
    best = max((trial for trial in trials if "error" not in trial), key=lambda trial: trial["size"], default={})
    found = best.get("size", 0)
    return {
        "network": "resnet50" if question == "batch" else "resnet",
        "question": question,
        "batch": found if question == "batch" else DEPTH_BATCH,
        "memory_gib": memory_gib,
        "method": method,
        "largest": found,
        "complete": complete,
        "step_s": best.get("step_s"),
        "in_core_step_s": None,
        "peak_gib": best.get("peak_gib"),
        "predicted_step_s": best.get("predicted_step_s"),
        "predicted_peak_gib": best.get("predicted_peak_gib"),
        "samples_per_s": best.get("samples_per_s"),
        "trials": trials,
    }


def search_here(question: str, method: str, memory_gib: float, first: int) -> None:
    """Under the cap; prints one line a trial."""
    import gc

    import torch

    from outcore.errors import OutcoreError

    torch.cuda.set_per_process_memory_fraction(memory_gib * GIB / torch.cuda.get_device_properties(0).total_memory)

    def works(size: int) -> bool:
        try:
            found = _steps(question, method, size, memory_gib)
        except (torch.OutOfMemoryError, OutcoreError) as error:
            found = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        print("TRIAL " + json.dumps({"size": size, **found}), flush=True)
        return "error" not in found

    largest(works, first or FIRST[question], MOST[question])


def _steps(question: str, method: str, size: int, memory_gib: float) -> dict[str, Any]:
    import torch

    from benchmarks.networks import build, deep_resnet
    from benchmarks.peers import PEERS, training_step
    from outcore.limit import limit

    network = build("resnet50", size) if question == "batch" else deep_resnet(size, DEPTH_BATCH)
    optimizer = torch.optim.SGD(network.model.parameters(), lr=1e-3)
    ooc = limit(network.model, int(memory_gib * GIB), planner=method) if method in OURS else None
    around: Any = ooc.step if ooc is not None else PEERS[method](network)
    step_s = 0.0
    try:
        for _ in range(4 if ooc is not None else 2):
            torch.cuda.synchronize()
            began = time.perf_counter()
            training_step(network, around, optimizer, ours=ooc is not None)
            step_s = time.perf_counter() - began
        found: dict[str, Any] = {"step_s": step_s, "samples_per_s": network.batch / step_s}
        found["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
        if ooc is not None and ooc.predicted is not None:
            found["predicted_step_s"] = ooc.predicted.step_s
            found["predicted_peak_gib"] = ooc.predicted.peak_bytes / GIB
        return found
    finally:
        if ooc is not None:
            ooc.close()


if __name__ == "__main__":
    main()
