"""Are the numbers the same? Trains each network in-core and under its budget, with deterministic algorithms, and
compares loss, gradients, parameters and buffers bit for bit. `python -m benchmarks.exactness --help`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from datetime import date
from pathlib import Path
from typing import Any

import click

GIB = 1024**3


def train(name: str, memory_gib: float | None, steps: int, planner: str) -> dict[str, Any]:
    import torch

    from benchmarks.networks import build
    from outcore.limit import limit

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (memory_gib or 1e9) * GIB / total))
    network = build(name)
    optimizer = torch.optim.SGD(network.model.parameters(), lr=1e-3)
    ooc = limit(network.model, int(memory_gib * GIB), planner=planner) if memory_gib else None
    torch.manual_seed(7)
    losses = []
    digest = hashlib.sha256()
    for step in range(steps):
        if ooc is None:
            loss = network.loss()
            loss.backward()
        else:
            with ooc.step():
                loss = network.loss()
                loss.backward()
        losses.append(float(loss.detach()))
        if step == steps - 1:
            for parameter in network.model.parameters():
                assert parameter.grad is not None
                digest.update(parameter.grad.cpu().numpy().tobytes())
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    for tensor in network.model.state_dict().values():
        digest.update(tensor.cpu().numpy().tobytes())
    digest.update(torch.cuda.get_rng_state().numpy().tobytes())
    found = {"losses": losses, "digest": digest.hexdigest()[:24], "peak_gib": peak / GIB}
    if ooc is not None:
        assert ooc.predicted is not None
        found["predicted_peak_gib"] = ooc.predicted.peak_bytes / GIB
        ooc.close()
    del network, optimizer, ooc, loss
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


@click.command()
@click.option("--networks", default="resnet50,llama", show_default=True)
@click.option("--steps", default=5, show_default=True)
@click.option("--planners", default="hybrid", show_default=True)
@click.option("--repeat/--no-repeat", default=True, help="Run in-core twice, to show that it repeats itself.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(networks: str, steps: int, planners: str, repeat: bool, out: Path | None) -> None:
    """Bitwise comparison with in-core training."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    import torch

    from benchmarks.networks import BATCHES, BUDGETS_GIB
    from benchmarks.slowdown import about

    torch.use_deterministic_algorithms(True)  # with warn_only, attention would stay as it is
    rows = []
    for name in networks.split(","):
        try:
            plain = train(name, None, steps, "")
            again = train(name, None, steps, "") if repeat else plain
        except Exception as error:
            rows.append({"network": name, "error": repr(error)[:300]})
            continue
        for planner in planners.split(","):
            row: dict[str, Any] = {"network": name, "batch": BATCHES[name], "method": planner}
            row |= {
                "memory_gib": BUDGETS_GIB[name],
                "in_core": plain,
                "in_core_repeats": plain == again if repeat else None,
            }
            try:
                ours = train(name, BUDGETS_GIB[name], steps, planner)
                row["ours"] = ours
                row["bitwise_equal"] = ours["digest"] == plain["digest"] and ours["losses"] == plain["losses"]
            except Exception as error:
                row["error"] = repr(error)[:300]
            rows.append(row)
            print(json.dumps(row), flush=True)
    result = {"question": "exactness", **about(), "rows": rows}
    out = out or Path(f"benchmarks/results/exactness_h200_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
