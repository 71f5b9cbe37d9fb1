"""Compares estimates with recorded and measured steps.

    python -m benchmarks.estimate -o benchmarks/results/estimate_cpu_DATE.json
    python -m benchmarks.estimate --measured benchmarks/results/slowdown_h200_20261118.json \
        -o benchmarks/results/estimate_h200_DATE.json

Without `--measured`: eight small networks on this machine's CPU, estimated first, then trained in the same budgets. Of
each: the in-core peak and the least budget, estimated and as planned from a recorded step; and for a budget half way
between the two, the slowdown that was estimated and the one that was measured, once the plan has settled. Plain steps
and steps under the budget take turns at going first; measured is the median of their ratios. Others on the machine slow
some steps down more than others: `measured_cpu` compares what the step's thread computed, which they hardly change, and
leaves out what it waited for.
Run one network at a time on a quiet machine; `--add` puts it beside those of the file.

With `--measured`: the six networks of the README, estimated here, without a GPU, with the figures of the H200's vendor,
against what was measured on an H200. It needs torchvision and transformers, no GPU, and a few minutes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import outcore
from benchmarks.networks import build as build_large
from benchmarks.small_networks import NETWORKS, Build
from outcore.errors import BudgetTooSmall
from outcore.estimating.fake_step import without_memory
from outcore.planning import plan
from outcore.units import GIB
from outcore.values import Budget

NUM_STEPS, MOST_S = 24, 40.0  # pairs that are compared, at least so many or for so long
MOST_FIRST_S = 60.0  # until the plan is settled
TIMES = 16
MACHINE = "h200"


def measure(name: str, build: Build) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss = build(TIMES)
    optimizer = torch.optim.AdamW(model.parameters())
    found = outcore.estimate(model, lambda: loss().backward(), optimizer=optimizer)
    budget_bytes = (found.least_bytes + found.in_core_peak_bytes) // 2
    found = outcore.estimate(model, lambda: loss().backward(), budget_bytes, optimizer=optimizer)
    (wanted,) = [point for point in found.budgets if point.budget_bytes == budget_bytes]
    in_core_peak_bytes, least_bytes = _recorded(build)
    plain_s, ours_s, predicted, settled = _measured(build, budget_bytes)
    ratios, cpu_ratios = (
        sorted(ours[at] / plain[at] for plain, ours in zip(plain_s, ours_s, strict=True)) for at in (0, 1)
    )
    quarter = len(ratios) // 4
    return {
        "network": name,
        "in_core_peak_bytes": {"estimated": found.in_core_peak_bytes, "measured": in_core_peak_bytes},
        "least_bytes": {"estimated": found.least_bytes, "recorded": least_bytes},
        "budget_bytes": budget_bytes,
        "in_core_step_s": {
            "estimated": found.in_core_step_s,
            "measured": statistics.median(wall_s for wall_s, _ in plain_s),
        },
        "over_in_core": {
            "estimated": wanted.over_in_core,
            "predicted": predicted,
            "measured": statistics.median(ratios) - 1,
            "measured_quartiles": [ratios[quarter] - 1, ratios[-quarter - 1] - 1],
            "measured_cpu": statistics.median(cpu_ratios) - 1,
        },
        "num_pairs": len(ratios),
        "settled": settled,
    }


def _recorded(build: Build) -> tuple[int, int]:
    """The measured in-core peak, and the least budget of the recorded step."""
    model, loss = build(TIMES)
    optimizer = torch.optim.AdamW(model.parameters())
    with outcore.limit(model, "100%", planner="keep-all", cache=False) as ooc:
        _train(ooc, loss, optimizer, 3)
        assert ooc.trace is not None
        assert ooc.timeline is not None
        try:
            plan(ooc.trace, ooc.machine, Budget(1, 0, ooc.machine.disk_bytes))
        except BudgetTooSmall as error:
            return ooc.timeline.peak_bytes, error.needed_bytes
    raise AssertionError("a plan for one byte")


Seconds = tuple[float, float]  # of the clock, and of the thread's computing


def _measured(build: Build, budget_bytes: int) -> tuple[list[Seconds], list[Seconds], float, bool]:
    """Seconds of plain steps and of steps under the budget, what their plan predicts over in-core, and whether it was
    settled."""
    (model, loss), (limited_model, limited_loss) = build(TIMES), build(TIMES)
    plain, limited = (torch.optim.AdamW(network.parameters()) for network in (model, limited_model))
    seconds: tuple[list[Seconds], list[Seconds]] = [], []
    with outcore.limit(limited_model, budget_bytes, cache=False) as ooc:
        began_s = time.monotonic()
        while not ooc.settled and time.monotonic() - began_s < MOST_FIRST_S:
            _train(ooc, limited_loss, limited, 1)
        runs = [(None, loss, plain), (ooc, limited_loss, limited)]
        began_s = time.monotonic()
        while len(seconds[0]) < NUM_STEPS or time.monotonic() - began_s < MOST_S:
            for at in (0, 1) if len(seconds[0]) % 2 else (1, 0):
                seconds[at].append(_train(*runs[at], 1))
        made, settled = ooc.plan, ooc.settled
    predicted = made.predicted_step_s / made.in_core_step_s - 1 if made is not None else 0.0
    return seconds[0], seconds[1], predicted, settled


def _train(ooc: Any, loss: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> Seconds:
    """Seconds in the steps."""
    wall_s = cpu_s = 0.0
    for _ in range(num_steps):
        began_s, began_cpu_s = time.perf_counter(), time.thread_time()
        if ooc is None:
            loss().backward()
        else:
            with ooc.step():
                loss().backward()
        wall_s += time.perf_counter() - began_s
        cpu_s += time.thread_time() - began_cpu_s
        optimizer.step()
        optimizer.zero_grad()
    return wall_s, cpu_s


def compare(name: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A network that was measured elsewhere, at the budgets it was measured in. Its steps had no optimizer."""
    with without_memory():
        network = build_large(name, device="cpu")
    found: list[dict[str, Any]] = []
    for row in rows:
        budget_bytes = int(row["memory_gib"] * GIB)
        with FakeTensorMode(allow_non_fake_inputs=True):
            made = outcore.estimate(network.model, lambda: network.loss().backward(), budget_bytes, machine=MACHINE)
        (wanted,) = [point for point in made.budgets if point.budget_bytes == budget_bytes]
        found.append(
            {
                "network": name,
                "memory_gib": row["memory_gib"],
                "in_core_peak_bytes": {"estimated": made.in_core_peak_bytes, "measured": row["in_core_peak_bytes"]},
                "least_bytes": {"estimated": made.least_bytes},
                "in_core_step_s": {"estimated": made.in_core_step_s, "measured": row["in_core_step_s"]},
                "over_in_core": {"estimated": wanted.over_in_core, "measured": row["slowdown"]},
                "commit": row["commit"],
            }
        )
        show(found[-1])
    return found


def measured_rows(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Network -> the newest row of each budget, with the peak that everything kept took."""
    rows = json.loads(path.read_text())
    rows = [row for row in (*rows["curves"], *rows["rows"]) if not row.get("error")]
    found: dict[str, dict[float, dict[str, Any]]] = {}
    peaks_gib = {row["network"]: row["peak_gib"] for row in rows if row["method"] == "in-core"}
    for row in rows:
        if row["method"] == "hybrid" and row["network"] not in ("vgg16", "r3d18"):  # these run with channels last
            peak_bytes = int(peaks_gib[row["network"]] * GIB)
            found.setdefault(row["network"], {})[row["memory_gib"]] = row | {"in_core_peak_bytes": peak_bytes}
    return {name: [budgets[gib] for gib in sorted(budgets)] for name, budgets in found.items()}


def show(row: dict[str, Any]) -> None:
    peak, step, over = row["in_core_peak_bytes"], row["in_core_step_s"], row["over_in_core"]
    least = row["least_bytes"]
    least_off = f", least {least['estimated'] / least['recorded'] - 1:+.2%}" if "recorded" in least else ""
    print(
        f"{row['network']:20} {row.get('memory_gib', '')!s:5} peak {peak['estimated'] / peak['measured'] - 1:+.2%}"
        f"{least_off}, in-core step {step['estimated'] / step['measured'] - 1:+.0%}, slowdown estimated "
        f"{over['estimated']:+.1%}, measured {over['measured']:+.1%}"
        + (
            " ({:+.1%} to {:+.1%}), ".format(*over["measured_quartiles"])
            + f"computing {over['measured_cpu']:+.1%}, planned {over['predicted']:+.1%}"
            if "predicted" in over
            else ""
        ),
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--measured", type=Path, help="a result of benchmarks.slowdown on an H200")
    parser.add_argument("--networks", help="some of them, with commas between")
    parser.add_argument("--add", action="store_true", help="keep the rows of other networks that the file has")
    args = parser.parse_args()
    names = args.networks.split(",") if args.networks else None
    rows: list[dict[str, Any]] = []
    if args.measured is not None:
        for name, measured in measured_rows(args.measured).items():
            rows += compare(name, measured) if names is None or name in names else []
    else:
        torch.set_num_threads(1)
        for name, build in NETWORKS.items():
            if names is None or name in names:
                rows.append(measure(name, build))
                show(rows[-1])
    device = "h200, estimated on a CPU" if args.measured else "cpu"
    about: dict[str, Any] = {"benchmark": "estimate", "device": device, "torch": torch.__version__}
    about |= {"date": date.today().isoformat()}
    pairs = f"{NUM_STEPS}, or those of {MOST_S:.0f} s"
    about |= {"machine": MACHINE, "measured": args.measured.name} if args.measured else {"pairs": pairs}
    if args.out is not None:
        before = json.loads(args.out.read_text())["rows"] if args.add and args.out.exists() else []
        measured_now = {row["network"] for row in rows}
        rows = [row for row in before if row["network"] not in measured_now] + rows
        args.out.write_text(
            json.dumps({**about, "num_threads": torch.get_num_threads(), "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
