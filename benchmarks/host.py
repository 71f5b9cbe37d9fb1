"""Is it the host or the device that a step waits for? Both sides of each step's forward, in a loop that waits.

A forward that the host cannot queue as fast as the device runs it takes the host's time. How fast a host is changes
from second to second on a shared machine, so each step has the seconds of a short loop of plain Python beside it: where
these double, everything on the host does. `python -m benchmarks.host --help`.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

import outcore
from benchmarks.networks import BATCHES, BUDGETS_GIB, Network, build
from benchmarks.peers import training_step
from benchmarks.slowdown import FIELDS, GIB, MOST_WARM, MOST_WARM_S, about, hardware

NUM_LOOP = 100_000


def loop_s() -> float:
    """Seconds of a loop of plain Python."""
    began, total = time.perf_counter(), 0
    for number in range(NUM_LOOP):
        total += number
    return time.perf_counter() - began


def one_step(
    network: Network, around: AbstractContextManager[Any], optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Seconds of a step and of its forward, on the host and on the device."""
    python_s = loop_s()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    began = time.perf_counter()
    with around:
        marks[0].record()
        loss = network.loss()
        marks[1].record()
        forward_s = time.perf_counter() - began
        loss.backward()
        marks[2].record()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    step_s = time.perf_counter() - began
    device_s, backward_s = (one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks))
    return {
        "step_s": step_s,
        "forward_host_s": forward_s,
        "forward_device_s": device_s,
        "backward_device_s": backward_s,
        "python_loop_s": python_s,
    }


def steps_of(name: str, method: str, num_steps: int) -> list[dict[str, Any]]:
    memory_gib = BUDGETS_GIB[name]
    capped_share = memory_gib * GIB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if method == "in-core" else capped_share)
    network = build(name, BATCHES[name])
    optimizer = torch.optim.SGD(network.model.parameters(), lr=1e-3)
    ooc = None if method == "in-core" else outcore.limit(network.model, int(memory_gib * GIB), planner=method)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext if ooc is None else ooc.step
    began = time.perf_counter()
    for number in itertools.count():
        waited = number >= MOST_WARM and time.perf_counter() - began >= MOST_WARM_S
        if number >= 5 and (ooc is None or ooc.settled or waited):
            break
        training_step(network, around, optimizer, ours=ooc is not None)
    head = dict.fromkeys(FIELDS) | {"network": name, "batch": network.batch, "memory_gib": memory_gib, "method": method}
    rows = [head | one_step(network, around(), optimizer) for _ in range(num_steps)]
    if ooc is not None:
        ooc.close()
    del network, optimizer, ooc, around
    gc.collect()
    torch.cuda.empty_cache()
    return rows


@click.command()
@click.option("--networks", default="resnet152", show_default=True)
@click.option("--methods", default="in-core,hybrid", show_default=True)
@click.option("--steps", default=40, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(networks: str, methods: str, steps: int, out: Path | None) -> None:
    """Host and device seconds of forwards; on a CPU they are the same, and there is nothing to ask."""
    if not torch.cuda.is_available():
        raise click.ClickException("this asks who waits for whom, the host or a GPU; there is no GPU here")
    rows: list[dict[str, Any]] = []
    for name in networks.split(","):
        for method in methods.split(","):
            found = steps_of(name, method, steps)
            rows += found
            median = {key: statistics.median(row[key] for row in found) for key in ("step_s", "forward_host_s")}
            print(
                f"{name} {method}: step {median['step_s']:.4f} s, host's forward {median['forward_host_s']:.4f} s",
                flush=True,
            )
    out = out or Path(f"benchmarks/results/host_{hardware()}_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps({"question": "host", **about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
