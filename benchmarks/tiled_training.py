"""Measures whole training steps, including the optimizer, of a layer larger than its device memory.

    python -m benchmarks.tiled_training                    # 65536 x 65536 in bf16, about two minutes on one H200
    python -m benchmarks.tiled_training --small            # small shapes, runs on a CPU too

One linear layer, 16384 tokens, AdamW with its averages in the weight's type. In the same run: everything on the device
(the bound by compute), `TiledLinear` with `TiledAdamW` (weights updated on the device while the backward runs),
`TiledLinear` with torch's fused AdamW on the host, and moving weight and state to the device in every step. The bound
of the tiled step is the longer of the in-core step and of the bytes it moves at the link's measured rates. A part that
fails leaves its error in the results and the next one runs; none starts after `--limit-s` seconds.
"""

from __future__ import annotations

import os

# Locks pinned memory with several threads; has to be set before torch is imported.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "pinned_use_cuda_host_register:True,pinned_num_register_threads:8")

import argparse
import datetime
import gc
import json
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.tiling.adamw import TiledAdamW
from outcore.tiling.lanes import make_lane
from outcore.tiling.linear import TiledLinear
from outcore.tiling.rates import measure_rates
from outcore.tiling.tiles import Rates
from outcore.units import GIB, parse_bytes

Row = dict[str, Any]
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda:0" if CUDA else "cpu")
SETTINGS: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.01}
NUM_STEPS = 4  # of each method; the first, which locks and allocates, is not counted


@dataclass
class Shapes:
    features: int = 65536
    num_tokens: int = 16384
    memory: str = "8GiB"

    @property
    def num_weights(self) -> int:
        return self.features**2


@dataclass
class Bench:
    shapes: Shapes
    limit_s: float
    path: Path
    rows: list[Row] = field(default_factory=list)
    notes: list[Row] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    def attempt(self, name: str, action: Callable[[Bench], None]) -> None:
        left_s = self.limit_s - (time.monotonic() - self.started_s)
        if left_s < 10:
            self.notes.append({"what": name, "skipped": "no time left"})
            return
        print(f"{name} ({left_s:.0f} s left)", flush=True)
        try:
            action(self)
        except Exception as error:
            told = f"{type(error).__name__}: {error}"[:500]
            self.notes.append({"what": name, "error": told, "trace": traceback.format_exc()[-1500:]})
            print(f"  {told[:200]}", flush=True)
        gc.collect()
        if CUDA:
            torch.cuda.empty_cache()
        self.save()

    def row(self, method: str, seconds: list[float], **more: Any) -> Row:
        counted = seconds[1:] or seconds
        flop = 6.0 * self.shapes.num_tokens * self.shapes.num_weights
        row: Row = {"method": method, "seconds": min(counted), "all_seconds": seconds}
        row |= {"tflops": flop / min(counted) / 1e12, "device_peak_gib": peak_gib(), **more}
        self.rows.append(row)
        print(f"  {method:40} {row['seconds']:8.3f} s  {row['tflops']:8.2f} TFLOP/s", flush=True)
        return row

    def save(self) -> None:
        machine = {"torch": torch.__version__, "cuda": torch.version.cuda, "host_cpus": os.cpu_count()}
        machine["device"] = torch.cuda.get_device_name(DEVICE) if CUDA else "cpu"
        found: Row = {"question": "tiled-training", "date": datetime.date.today().isoformat(), "machine": machine}
        found |= {"shapes": vars(self.shapes), "rows": self.rows, "notes": self.notes}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(found, indent=1, default=str) + "\n")


def sync() -> None:
    if CUDA:
        torch.cuda.synchronize(DEVICE)


def peak_gib() -> float | None:
    return torch.cuda.max_memory_allocated(DEVICE) / GIB if CUDA else None


def activations(shapes: Shapes) -> tuple[torch.Tensor, torch.Tensor]:
    """Input, which needs a gradient as in the middle of a network, and the gradient of the output."""
    torch.manual_seed(0)
    size = shapes.num_tokens, shapes.features
    x = torch.randn(size, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    return x, torch.randn(size, device=DEVICE, dtype=torch.bfloat16) / shapes.num_tokens


def first_weight(shapes: Shapes, device: str | torch.device) -> torch.Tensor:
    """The same numbers on any device, made by rows."""
    weight = torch.empty(shapes.features, shapes.features, dtype=torch.bfloat16, device=device)
    step = max(1, 2**27 // shapes.features)
    for row in range(0, shapes.features, step):
        part = weight[row : row + step]
        torch.manual_seed(row)
        part.copy_(torch.randn(part.shape, device=DEVICE) / shapes.features**0.5)
    return weight


def timed(step: Callable[[], None], num_steps: int = NUM_STEPS) -> list[float]:
    seconds = []
    for _ in range(num_steps):
        sync()
        started_s = time.perf_counter()
        step()
        sync()
        seconds.append(time.perf_counter() - started_s)
    return seconds


def step_of(
    layer: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, dy: torch.Tensor
) -> Callable[[], None]:
    def step() -> None:
        x.grad = None
        layer(x).backward(dy)
        optimizer.step()
        optimizer.zero_grad()

    return step


def some_rows(weight: torch.Tensor) -> torch.Tensor:
    picked = torch.linspace(0, weight.shape[0] - 1, 8, device=weight.device).long()
    return weight.detach()[picked].float().cpu()


def in_core(bench: Bench) -> None:
    """Everything on the device: what no tiled step can beat."""
    x, dy = activations(bench.shapes)
    layer = nn.Linear(1, 1, bias=False)
    layer.weight = nn.Parameter(first_weight(bench.shapes, DEVICE))
    optimizer = torch.optim.AdamW(layer.parameters(), fused=True, **SETTINGS)
    row = bench.row("in-core", timed(step_of(layer, optimizer, x, dy)))
    row["weight"] = some_rows(layer.weight).flatten()[:64].tolist()


def tiled_layer(shapes: Shapes) -> TiledLinear:
    layer = TiledLinear(1, 1, bias=False, memory=shapes.memory, dtype=torch.bfloat16)
    layer.in_features = layer.out_features = shapes.features
    layer.weight = nn.Parameter(first_weight(shapes, "cpu"))
    return layer


def link_rates(shapes: Shapes) -> Rates:
    return measure_rates(make_lane(DEVICE), torch.bfloat16, parse_bytes(shapes.memory))


def tiled(bench: Bench, method: str, make: Callable[[TiledLinear], torch.optim.Optimizer]) -> None:
    rates, layer = link_rates(bench.shapes), tiled_layer(bench.shapes)
    x, dy = activations(bench.shapes)
    if CUDA:
        torch.cuda.reset_peak_memory_stats(DEVICE)
    seconds = timed(step_of(layer, make(layer), x, dy))
    bytes_in = sum(report.bytes_in for _, report in layer.reports)
    bytes_out = sum(report.bytes_out for _, report in layer.reports)
    link_s = max(bytes_in / rates.in_bytes_per_s, bytes_out / rates.out_bytes_per_s)
    row = bench.row(method, seconds, bytes_in=bytes_in, bytes_out=bytes_out, link_s=link_s)
    row["rates"] = [rates.flop_per_s, rates.in_bytes_per_s, rates.out_bytes_per_s]
    row["products"] = {name: [report.seconds, report.prediction.seconds] for name, report in layer.reports}
    row["weight"] = some_rows(layer.weight).flatten()[:64].tolist()
    _compare(bench, row)


def _compare(bench: Bench, row: Row) -> None:
    """With the bound by compute and link, and with the weights of the step that has everything on the device."""
    whole = next((other for other in bench.rows if other["method"] == "in-core"), None)
    if whole is None:
        return
    bound_s = max(whole["seconds"], row["link_s"])
    ours, theirs = torch.tensor(row["weight"]), torch.tensor(whole["weight"])
    row |= {"bound_s": bound_s, "over_bound": row["seconds"] / bound_s - 1}
    row["weight_difference"] = float((ours - theirs).norm() / theirs.norm())
    print(f"    {100 * row['over_bound']:+.1f} % over the bound of {bound_s:.3f} s", flush=True)


def in_backward(bench: Bench) -> None:
    tiled(bench, "TiledLinear, TiledAdamW", lambda layer: TiledAdamW(layer, **SETTINGS))


def on_host(bench: Bench) -> None:
    def make(layer: TiledLinear) -> torch.optim.Optimizer:
        return torch.optim.AdamW(layer.parameters(), fused=True, **SETTINGS)

    tiled(bench, "TiledLinear, fused AdamW on the host", make)


def moved(bench: Bench) -> None:
    """What one writes first: weight and state to the device and back in every step."""
    shapes = bench.shapes
    x, dy = activations(shapes)
    averages = [torch.zeros(shapes.features, shapes.features, dtype=torch.bfloat16) for _ in range(2)]
    home = [first_weight(shapes, "cpu"), *averages]
    home = [tensor.pin_memory() if CUDA else tensor for tensor in home]
    num_done = 0

    def step() -> None:
        nonlocal num_done
        num_done += 1
        weight, mean, square = (tensor.to(DEVICE, non_blocking=True) for tensor in home)
        x.grad = None
        weight.requires_grad_()
        nn.functional.linear(x, weight).backward(dy)
        assert weight.grad is not None
        with torch.no_grad():
            steps = [torch.full((), float(num_done), device=DEVICE)]
            settings = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "amsgrad": False, "maximize": False, **SETTINGS}
            torch._fused_adamw_([weight.detach()], [weight.grad], [mean], [square], [], steps, **settings)
            for tensor, there in zip(home, (weight.detach(), mean, square)):
                tensor.copy_(there, non_blocking=True)

    bench.row("weight and state moved in and out", timed(step, 3))


PARTS: dict[str, Callable[[Bench], None]] = {
    "in-core": in_core,
    "in backward": in_backward,
    "on host": on_host,
    "moved": moved,
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    hardware = torch.cuda.get_device_name(0).split()[-1].lower() if CUDA else "cpu"
    default = Path(__file__).parent / "results" / f"tiled-training_{hardware}_{datetime.date.today():%Y%m%d}.json"
    parser.add_argument("--out", type=Path, default=default, help="where the JSON goes")
    parser.add_argument("--only", default=",".join(PARTS), help="parts, comma-separated: " + ", ".join(PARTS))
    parser.add_argument("--limit-s", type=float, default=230.0, help="no part starts after this many seconds")
    parser.add_argument("--features", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--memory", default="8GiB", help="device memory for tiles")
    parser.add_argument("--small", action="store_true", help="small shapes, to try the script")
    options = parser.parse_args(arguments)
    shapes = Shapes(options.features, options.tokens, options.memory)
    if options.small:
        shapes = Shapes(2048, 512, "300MiB") if CUDA else Shapes(256, 32, "300KiB")
    bench = Bench(shapes, options.limit_s, options.out)
    for name in options.only.split(","):
        if name not in PARTS:
            parser.error(f"no part {name!r}; there are {', '.join(PARTS)}")
        bench.attempt(name, PARTS[name])
    bench.save()
    print(f"results in {options.out}")


if __name__ == "__main__":
    main()
