"""Measures the cost of recording a step, compared with a step that swaps everything, and its parts.

A first recording also pays for page-locked host memory and for libraries that PyTorch loads once; a later one (for
inputs of another shape) does not. Both are reported as a multiple of the swap-all step.
`python -m benchmarks.recording --help`.
"""

from __future__ import annotations

import cProfile
import gc
import itertools
import json
import pstats
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

import outcore
from benchmarks.overhead import small_networks
from benchmarks.slowdown import FIELDS, PINNED_S, about, hardware, watch_pinning
from outcore.limit import Limited

GIB = 1024**3
NUM_STEPS, MOST_WARM, MOST_WARM_S = 3, 12, 30.0
NUM_LINES = 25  # of the profile
Row = dict[str, Any]
Loss = Callable[[], torch.Tensor]


def timed(ooc: Limited | None, model: torch.nn.Module, loss_of: Loss) -> float:
    """Seconds of a step, until the device is done."""
    model.zero_grad()
    began_s = _now_s()
    if ooc is None:
        loss_of().backward()
    else:
        with ooc.step():
            loss_of().backward()
    return _now_s() - began_s


def _now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def swap_all_s(model: torch.nn.Module, loss_of: Loss, memory: int | str) -> float:
    ooc = outcore.limit(model, memory, planner="swap-all")
    began = time.perf_counter()
    for number in itertools.count():
        timed(ooc, model, loss_of)
        if ooc.settled or (number >= MOST_WARM and time.perf_counter() - began >= MOST_WARM_S):
            break
    found = statistics.median(timed(ooc, model, loss_of) for _ in range(NUM_STEPS))
    ooc.close()
    return found


def measure(model: torch.nn.Module, loss_of: Loss, memory: int | str) -> Row:
    """The first recording, later ones, and one of these under a profiler."""
    watch_pinning()
    ooc = outcore.limit(model, memory)
    PINNED_S.clear()
    first_s = timed(ooc, model, loss_of)
    pinning_s = sum(PINNED_S)
    again_s = []
    for _ in range(NUM_STEPS):
        ooc.kinds.clear()
        again_s.append(timed(ooc, model, loss_of))
    assert ooc.trace is not None
    num_ops = len(ooc.trace.ops)
    ooc.kinds.clear()
    profile = cProfile.Profile()
    profile.runcall(timed, ooc, model, loss_of)
    ooc.close()
    gc.collect()
    whole_s = swap_all_s(model, loss_of, memory)
    again = statistics.median(again_s)
    row = {
        "num_ops": num_ops,
        "first_record_s": first_s,
        "pinning_s": pinning_s,
        "record_s": again,
        "swap_all_s": whole_s,
    }
    return row | {"first_times": first_s / whole_s, "times": again / whole_s, "profile": _lines(profile)}


def _lines(profile: cProfile.Profile) -> list[list[Any]]:
    """Where it was by itself for longest: function, calls, seconds by itself, with what it calls. A profiler makes
    short functions look longer than they are."""
    found = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    slowest = sorted(found.items(), key=lambda item: -item[1][2])[:NUM_LINES]
    return [
        [f"{Path(file).name}:{line}({name})", calls, round(own_s, 4), round(all_s, 4)]
        for (file, line, name), (_, calls, own_s, all_s, _) in slowest
    ]


@click.command()
@click.option("--networks", default="vit_l,resnet50", show_default=True, help="On a GPU; on a CPU small ones.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(networks: str, out: Path | None) -> None:
    """Seconds of a recorded step against the swap-all step of the same process."""
    rows: list[Row] = []
    on_gpu = torch.cuda.is_available()
    for name in networks.split(",") if on_gpu else small_networks():
        batch, memory_gib = None, None
        if on_gpu:
            from benchmarks.networks import BATCHES, BUDGETS_GIB, build

            network, batch, memory_gib = build(name), BATCHES[name], BUDGETS_GIB[name]
            model, loss_of = network.model, network.loss
            torch.cuda.set_per_process_memory_fraction(
                memory_gib * GIB / torch.cuda.get_device_properties(0).total_memory
            )
        else:
            model, loss_of = small_networks()[name]
        row = dict.fromkeys(FIELDS) | {"network": name, "batch": batch, "memory_gib": memory_gib, "method": "record"}
        rows.append(row | measure(model, loss_of, int(memory_gib * GIB) if memory_gib else "100%"))
        shown = {key: rows[-1][key] for key in ("first_record_s", "record_s", "swap_all_s", "first_times", "times")}
        print(name, {key: round(found, 3) for key, found in shown.items()}, flush=True)
        del model, loss_of
        gc.collect()
    out = out or Path(f"benchmarks/results/recording_{hardware()}_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps({"question": "recording", **about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
