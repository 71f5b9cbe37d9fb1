"""A perceptron whose weights exceed the memory it may use on the device, on scikit-learn's handwritten digits.

    python examples/wide_mlp.py --width 16384 --memory 256MiB        # 16384 x 16384 fp32: 1 GiB of weights

The weights live on the host; every product of the step (forward, input gradient, weight gradient) streams them.
"""

from __future__ import annotations

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn

from outcore import TiledLinear
from outcore.units import format_bytes, format_seconds


def load(device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    x = (torch.tensor(pixels, dtype=torch.float32) / 16)[order].to(device)
    y = torch.tensor(labels)[order].to(device)
    return x[:1437], y[:1437], x[1437:], y[1437:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--memory", default="64MiB", help="device memory for the tiles of one product")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--in-core", action="store_true", help="plain nn.Linear on the device instead, to compare")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    def linear(num_in: int, num_out: int) -> nn.Module:
        if options.in_core:
            return nn.Linear(num_in, num_out).to(device)
        return TiledLinear(num_in, num_out, memory=options.memory)

    width = options.width
    model = nn.Sequential(linear(64, width), nn.ReLU(), linear(width, width), nn.ReLU(), linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    weight_bytes = sum(parameter.nbytes for parameter in model.parameters())
    print(f"{format_bytes(weight_bytes)} of weights, {options.memory} for tiles, activations on {device}")
    x, y, x_test, y_test = load(device)
    for epoch in range(options.epochs):
        started_s = time.perf_counter()
        for rows in torch.arange(len(y), device=device).split(options.batch):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (model(x_test).argmax(1) == y_test).float().mean().item()
        seconds = format_seconds(time.perf_counter() - started_s)
        print(f"epoch {epoch}: loss {loss.item():.6f}, accuracy {accuracy:.1%}, {seconds}")


if __name__ == "__main__":
    main()
