"""How well are estimates met? Eight networks on this machine's CPU: estimated first, then trained in the same budgets.

    python -m benchmarks.estimate -o benchmarks/results/estimate_cpu_DATE.json

Of each network: the in-core peak and the least budget, estimated and as planned from a recorded step; and for a budget
half way between the two, the slowdown that was estimated and the one that was measured. Steps with everything kept and
steps under the budget take turns, so that a busy machine slows both alike; medians are compared.
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

import outcore
from benchmarks.small_networks import NETWORKS, Build
from outcore.errors import BudgetTooSmall
from outcore.planning import plan
from outcore.values import Budget

NUM_STEPS = 12  # that are compared, behind those that are recorded and watched
NUM_FIRST = 5
TIMES = 16


def measure(name: str, build: Build) -> dict[str, Any]:
    torch.manual_seed(0)
    model, loss = build(TIMES)
    optimizer = torch.optim.AdamW(model.parameters())
    found = outcore.estimate(model, lambda: loss().backward(), optimizer=optimizer)
    budget_bytes = (found.least_bytes + found.in_core_peak_bytes) // 2
    found = outcore.estimate(model, lambda: loss().backward(), budget_bytes, optimizer=optimizer)
    (wanted,) = [point for point in found.budgets if point.budget_bytes == budget_bytes]
    in_core_peak_bytes, least_bytes = _recorded(build)
    plain_s, ours_s = _measured(build, budget_bytes)
    return {
        "network": name,
        "in_core_peak_bytes": {"estimated": found.in_core_peak_bytes, "measured": in_core_peak_bytes},
        "least_bytes": {"estimated": found.least_bytes, "recorded": least_bytes},
        "budget_bytes": budget_bytes,
        "in_core_step_s": {"estimated": found.in_core_step_s, "measured": plain_s},
        "over_in_core": {"estimated": wanted.over_in_core, "measured": ours_s / plain_s - 1},
    }


def _recorded(build: Build) -> tuple[int, int]:
    """The measured in-core peak, and the least budget of the recorded step."""
    model, loss = build(TIMES)
    optimizer = torch.optim.AdamW(model.parameters())
    with outcore.limit(model, "100%", planner="keep-all") as ooc:
        _train(ooc, loss, optimizer, 3)
        assert ooc.trace is not None
        assert ooc.timeline is not None
        try:
            plan(ooc.trace, ooc.machine, Budget(1, 0, ooc.machine.disk_bytes))
        except BudgetTooSmall as error:
            return ooc.timeline.peak_bytes, error.needed_bytes
    raise AssertionError("a plan for one byte")


def _measured(build: Build, budget_bytes: int) -> tuple[float, float]:
    (model, loss), (limited_model, limited_loss) = build(TIMES), build(TIMES)
    plain, limited = (torch.optim.AdamW(network.parameters()) for network in (model, limited_model))
    seconds: tuple[list[float], list[float]] = [], []
    with outcore.limit(limited_model, budget_bytes) as ooc:
        for _ in range(NUM_FIRST + NUM_STEPS):
            seconds[0].append(_train(None, loss, plain, 1))
            seconds[1].append(_train(ooc, limited_loss, limited, 1))
    return statistics.median(seconds[0][NUM_FIRST:]), statistics.median(seconds[1][NUM_FIRST:])


def _train(ooc: Any, loss: Any, optimizer: torch.optim.Optimizer, num_steps: int) -> float:
    """Seconds in the steps."""
    total_s = 0.0
    for _ in range(num_steps):
        began_s = time.perf_counter()
        if ooc is None:
            loss().backward()
        else:
            with ooc.step():
                loss().backward()
        total_s += time.perf_counter() - began_s
        optimizer.step()
        optimizer.zero_grad()
    return total_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, build in NETWORKS.items():
        rows.append(measure(name, build))
        row = rows[-1]
        peak, least = row["in_core_peak_bytes"], row["least_bytes"]
        print(
            f"{name:32} peak {peak['estimated'] / peak['measured'] - 1:+.2%}, least "
            f"{least['estimated'] / least['recorded'] - 1:+.2%}, slowdown estimated "
            f"{row['over_in_core']['estimated']:+.1%}, measured {row['over_in_core']['measured']:+.1%}",
            flush=True,
        )
    result = {"benchmark": "estimate", "device": "cpu", "torch": torch.__version__, "date": date.today().isoformat()}
    if args.out is not None:
        args.out.write_text(
            json.dumps({**result, "num_threads": 1, "num_steps": NUM_STEPS, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
