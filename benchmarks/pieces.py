"""Tests whether an op that runs in pieces gives the same bits, for the largest convolutions of VGG-16 and R3D-18.

One of VGG-16's reads and writes 6.125 GiB, which exceeds a budget of 6 GiB. A forward and an input's gradient can be
divided by samples, a weight gradient by output or input channels, without dividing a sum. Whether the bits are the same
depends on cuDNN's algorithm for the smaller shape, and on its order of additions. H200, about 30 s;
on a CPU small shapes.

    python -m benchmarks.pieces --out benchmarks/results/pieces_h200_20261118.json
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

from benchmarks.slowdown import about, hardware

GIB = 1024**3
SHAPES = {"vgg16": (256, 64, 224, 224), "r3d18": (64, 64, 8, 112, 112)}
SMALL = {"vgg16": (8, 16, 24, 24), "r3d18": (4, 16, 4, 12, 12)}
LAYOUTS: dict[str, dict[int, torch.memory_format]] = {
    "channels last": {4: torch.channels_last, 5: torch.channels_last_3d},
    "channels first": dict.fromkeys((4, 5), torch.contiguous_format),
}
NUM_RUNS = 3


@dataclass
class Convolution:
    """As many output as input channels, three wide; every operand in one layout."""

    x: Tensor
    gradient: Tensor
    weight: Tensor

    @classmethod
    def drawn(cls, shape: tuple[int, ...], layout: torch.memory_format, device: str) -> Convolution:
        generator, kernel = torch.Generator(device).manual_seed(1), (shape[1], shape[1], *(3 for _ in shape[2:]))
        x, gradient, weight = (
            torch.randn(size, device=device, generator=generator).contiguous(memory_format=layout)
            for size in (shape, shape, kernel)
        )
        return cls(x, gradient, weight)

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        ones = [1] * (x.ndim - 2)
        made: Tensor = torch.ops.aten.convolution(x, weight, None, ones, ones, ones, False, [0] * len(ones), 1)
        return made

    def backward(self, gradient: Tensor, x: Tensor, weight: Tensor, *, of_weight: bool) -> Tensor:
        ones, wanted = [1] * (x.ndim - 2), [not of_weight, of_weight, False]
        made = torch.ops.aten.convolution_backward(
            gradient, x, weight, None, ones, ones, ones, False, [0] * len(ones), 1, wanted
        )
        found: Tensor = made[of_weight]
        return found

    def whole(self) -> dict[str, Callable[[], Tensor]]:
        return {
            "forward": lambda: self.forward(self.x, self.weight),
            "input's gradient": lambda: self.backward(self.gradient, self.x, self.weight, of_weight=False),
            "weight's gradient": lambda: self.backward(self.gradient, self.x, self.weight, of_weight=True),
        }

    def cuts(self, num: int) -> Iterator[tuple[str, str, Callable[[], Iterator[tuple[int, Tensor]]]]]:
        """What is made, by what it is cut, and its pieces, each with the dimension along which they lie."""
        xs, gradients = self.x.chunk(num), self.gradient.chunk(num)
        yield "forward", "samples", lambda: ((0, self.forward(x, self.weight)) for x in xs)
        yield "forward", "output channels", lambda: ((1, self.forward(self.x, w)) for w in self.weight.chunk(num))
        yield (
            "input's gradient",
            "samples",
            lambda: ((0, self.backward(g, x, self.weight, of_weight=False)) for g, x in zip(gradients, xs)),
        )
        yield (
            "weight's gradient",
            "output channels",
            lambda: (
                (0, self.backward(g, self.x, w, of_weight=True))
                for g, w in zip(self.gradient.chunk(num, 1), self.weight.chunk(num))
            ),
        )
        yield (
            "weight's gradient",
            "input channels",
            lambda: (
                (1, self.backward(self.gradient, x, w, of_weight=True))
                for x, w in zip(self.x.chunk(num, 1), self.weight.chunk(num, 1))
            ),
        )


def timed(run: Callable[[], Any], device: str) -> float:
    """The least of a few, pieces dropped as they come."""
    least_s = float("inf")
    for _ in range(1 + NUM_RUNS):
        began_s = _now_s(device)
        run()
        least_s = min(least_s, _now_s(device) - began_s)
    return least_s


def _now_s(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def same_bits(whole: Tensor, pieces: Iterator[tuple[int, Tensor]]) -> bool:
    """A piece at a time: all of them beside the whole take as much memory again."""
    at, same = 0, True
    for dimension, piece in pieces:
        size = piece.shape[dimension]
        same = same and torch.equal(whole.narrow(dimension, at, size), piece)
        at += size
    return same


def rows_of(network: str, layout: str, device: str, nums: list[int]) -> Iterator[dict[str, Any]]:
    shape = (SHAPES if device == "cuda" else SMALL)[network]
    drawn = Convolution.drawn(shape, LAYOUTS[layout][len(shape)], device)
    whole_s = {name: timed(make, device) for name, make in drawn.whole().items()}
    for num in nums:
        for made, cut, pieces in drawn.cuts(num):
            row: dict[str, Any] = {"network": network, "layout": layout, "made": made, "cut_by": cut, "num_pieces": num}
            row |= {"operand_gib": drawn.x.nbytes / GIB, "whole_s": whole_s[made]}
            try:
                row["same_bits"] = same_bits(drawn.whole()[made](), pieces())
                row["pieces_s"] = timed(lambda pieces=pieces: [None for _ in pieces()], device)  # type: ignore[misc]
            except RuntimeError as error:
                row["error"] = str(error)[:200]
            yield row


@click.command()
@click.option("--networks", default=",".join(SHAPES), show_default=True)
@click.option("--pieces", default="2,4,8", show_default=True, help="Into how many pieces ops are cut.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(networks: str, pieces: str, out: Path | None) -> None:
    """Bits and seconds of convolutions that run in pieces."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: list[dict[str, Any]] = []
    for network in networks.split(","):
        for layout in LAYOUTS:
            for row in rows_of(network, layout, device, [int(num) for num in pieces.split(",")]):
                rows.append(row)
                print(json.dumps(row), flush=True)
    out = out or Path(f"benchmarks/results/pieces_{hardware()}_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps({"question": "pieces", **about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
