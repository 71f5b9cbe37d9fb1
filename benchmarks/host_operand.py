"""Measures an op whose operands exceed the budget: VGG-16's largest weight gradient with one operand on the host.

It is computed from two tensors of 3.06 GiB, which exceed a budget of 6 GiB. A kernel can read page-locked host memory
over the link, with the same sums in the same order; this benchmark measures how long that takes. H200, about 20 s.

    python -m benchmarks.host_operand --out benchmarks/results/host-operand_h200_20261116.json
"""

from __future__ import annotations

import json
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.slowdown import about, hardware

GIB = 1024**3
NUM_RUNS = 3
SHAPE, WEIGHT = (256, 64, 224, 224), (64, 64, 3, 3)


def on_host(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensor as the device sees it in page-locked host memory, and the host's tensor that owns it."""
    owner = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, pin_memory=True).copy_(tensor)
    storage = torch._C._construct_storage_from_data_pointer(
        owner.data_ptr(), tensor.device, owner.untyped_storage().nbytes()
    )
    seen = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return seen.set_(storage, 0, tensor.shape, tensor.stride()), owner


def weight_gradient(gradient: torch.Tensor, read: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    ones = [1, 1]
    made: torch.Tensor = torch.ops.aten.convolution_backward(
        gradient, read, weight, None, ones, ones, ones, False, [0, 0], 1, [False, True, False]
    )[1]
    return made


def timed(gradient: torch.Tensor, read: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    made, seconds = weight_gradient(gradient, read, weight), []
    for _ in range(NUM_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.reset_peak_memory_stats()
        begin.record()
        made = weight_gradient(gradient, read, weight)
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return made, statistics.median(seconds), torch.cuda.max_memory_allocated() / GIB


def rows_of(layout: torch.memory_format) -> list[dict[str, Any]]:
    generator = torch.Generator("cuda").manual_seed(1)
    gradient, read = (
        torch.randn(SHAPE, device="cuda", generator=generator).contiguous(memory_format=layout) for _ in range(2)
    )
    weight = torch.randn(WEIGHT, device="cuda", generator=generator).contiguous(memory_format=layout)
    expected, kept_s, kept_gib = timed(gradient, read, weight)
    rows: list[dict[str, Any]] = [
        {"operand_on_host": None, "seconds": kept_s, "device_gib": kept_gib, "same_bits": True}
    ]
    for name in ("input", "gradient"):
        seen, owner = on_host(read if name == "input" else gradient)
        made, seconds, _ = timed(*((gradient, seen) if name == "input" else (seen, read)), weight)
        rows.append({"operand_on_host": name, "seconds": seconds, "same_bits": torch.equal(made, expected)})
        del seen, owner
    name = "channels last" if layout is torch.channels_last else "channels first"
    return [{"layout": name, "operand_gib": read.nbytes / GIB, **row} for row in rows]


@click.command()
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(out: Path | None) -> None:
    """Seconds of one weight gradient with each operand on the device and on the host."""
    rows = []
    for layout in (torch.channels_last, torch.contiguous_format):
        rows += rows_of(layout)
        for row in rows[-3:]:
            print(json.dumps(row), flush=True)
        torch.cuda.empty_cache()
    out = out or Path(f"benchmarks/results/host-operand_{hardware()}_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps({"question": "host-operand", **about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
