"""Measures the overhead of outcore when everything fits: a step under a sufficient budget, compared with a plain step.

Plain and limited steps alternate, so that load on the machine slows both alike; the ratio is of medians. On a GPU the
networks are those of the headline table at batches that fit; on a CPU small ones. `--help` says more.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn

import outcore
from benchmarks.slowdown import FIELDS, about, hardware

GPU_BATCHES = {"resnet50": 128, "vit_l": 32, "llama": 8, "resnet152": 64}


def small_networks() -> dict[str, tuple[nn.Module, Callable[[], Tensor]]]:
    """For a CPU: a convolutional network and a transformer layer, both of a few hundred milliseconds a step."""
    torch.manual_seed(0)
    convs = nn.Sequential(*[nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()) for _ in range(6)])
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    image, tokens = torch.randn(16, 32, 64, 64), torch.randn(8, 128, 256)
    return {
        "convolutions": (convs, lambda: convs(image).sum()),
        "transformer layer": (layer, lambda: layer(tokens).sum()),
    }


def gpu_networks(names: list[str]) -> dict[str, tuple[nn.Module, Callable[[], Tensor]]]:
    from benchmarks.networks import build

    built = {name: build(name, GPU_BATCHES.get(name, 32)) for name in names}
    return {name: (network.model, network.loss) for name, network in built.items()}


def compare(model: nn.Module, loss_of: Callable[[], Tensor], num_pairs: int) -> dict[str, Any]:
    """Median seconds of a plain step and of ours, in turns."""
    ooc = outcore.limit(model, "100%")

    def step(ours: bool) -> float:
        began = time.perf_counter()
        if ours:
            with ooc.step():
                loss_of().backward()
        else:
            loss_of().backward()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        took = time.perf_counter() - began
        model.zero_grad()
        return took

    for _ in range(8):  # recorded, timed again, planned, measured closely
        step(True)
        step(False)
    pairs = [(step(False), step(True)) for _ in range(num_pairs)]
    plain, ours = (statistics.median(side) for side in zip(*pairs, strict=True))
    ooc.close()
    return {"in_core_step_s": plain, "step_s": ours, "slowdown": ours / plain - 1, "num_pairs": num_pairs}


@click.command()
@click.option("--networks", default="resnet50,resnet152,vit_l,llama", show_default=True, help="On a GPU.")
@click.option("--pairs", default=40, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(networks: str, pairs: int, out: Path | None) -> None:
    """The cost of a budget larger than needed."""
    found = gpu_networks(networks.split(",")) if torch.cuda.is_available() else small_networks()
    rows = []
    for name, (model, loss_of) in found.items():
        row = dict.fromkeys(FIELDS) | {"network": name, "method": "hybrid", "batch": GPU_BATCHES.get(name)}
        rows.append(row | compare(model, loss_of, pairs))
        print(f"{name:20} plain {rows[-1]['in_core_step_s']:.4f} s, ours {rows[-1]['slowdown']:+.2%}", flush=True)
    out = out or Path(f"benchmarks/results/overhead_{hardware()}_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps({"question": "overhead", **about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
