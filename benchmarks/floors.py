"""Measures the least memory in which a network runs without gradients and with nothing saved.

The forward of one step runs under `torch.no_grad()`, with plain PyTorch, under caps that grow until one is sufficient.
This memory is held by the model's own frames and the running op; no plan for saved tensors can need less.
Going over a cap is a real out-of-memory error, which is why this is a benchmark and not the library.

    python -m benchmarks.floors --out benchmarks/results/floors_h200_20261118.json    # about 30 s
"""

from __future__ import annotations

import gc
import json
import time
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.networks import BUDGETS_GIB, Network, build
from benchmarks.slowdown import FIELDS, GIB, about, hardware

Row = dict[str, Any]
STEP_GIB = 0.25


@click.command()
@click.option("--networks", default="vgg16,vgg16_nhwc,r3d18,r3d18_nhwc", show_default=True)
@click.option("--least-gib", default=6.0, show_default=True, help="The first cap that is tried.")
@click.option("--most-gib", default=24.0, show_default=True)
@click.option("--limit-s", default=60.0, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(networks: str, least_gib: float, most_gib: float, limit_s: float, out: Path | None) -> None:
    """The least cap under which a forward without gradients runs."""
    until_s = time.monotonic() + limit_s
    out = out or Path(f"benchmarks/results/floors_{hardware()}_{date.today():%Y%m%d}.json")
    rows: list[Row] = []
    for name in networks.split(","):
        network = build(name)
        found = _caps(network, least_gib, most_gib, until_s)
        print(name, *found[-1:], flush=True)
        rows += found
        out.write_text(json.dumps({"question": "floors", **about(), "rows": rows}, indent=1))
        del network
        _give_back()


def _caps(network: Network, least_gib: float, most_gib: float, until_s: float) -> list[Row]:
    """One row for each cap, the last one with what its forward held."""
    rows: list[Row] = []
    cap_gib = least_gib
    while cap_gib <= most_gib and time.monotonic() < until_s:
        head: Row = dict.fromkeys(FIELDS) | {"network": network.name, "batch": network.batch, "memory_gib": cap_gib}
        rows.append(head | {"method": "forward without gradients", "issue_gib": BUDGETS_GIB[network.name]})
        rows[-1] |= _run(network, cap_gib)
        if rows[-1]["runs"]:
            break
        cap_gib += STEP_GIB
    return rows


def _run(network: Network, cap_gib: float) -> Row:
    _give_back()
    torch.cuda.set_per_process_memory_fraction(cap_gib * GIB / torch.cuda.get_device_properties(0).total_memory)
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    try:
        with torch.no_grad():
            network.loss()
        torch.cuda.synchronize()
    except torch.OutOfMemoryError as error:
        return {"runs": False, "error": str(error)[:120]}
    held = {"peak_gib": torch.cuda.max_memory_allocated() / GIB, "before_gib": before_bytes / GIB}
    return {"runs": True, **held, "reserved_gib": torch.cuda.max_memory_reserved() / GIB}


def _give_back() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


if __name__ == "__main__":
    main()
