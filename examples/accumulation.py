"""Gradient accumulation, mixed precision and an evaluation in between, under one budget.

Each small batch is a step of its own: `with ooc.step()` goes around its forward and backward, the optimizer steps when
enough of them were added up. Evaluation needs nothing: it saves nothing.

    python examples/accumulation.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import outcore

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for channels_in, channels_out in ((3, 16), (16, 16), (16, 32), (32, 32)):
        layers += [nn.Conv2d(channels_in, channels_out, 3, padding=1), nn.BatchNorm2d(channels_out), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).to(device)


def batch(num_images: int) -> tuple[torch.Tensor, torch.Tensor]:
    labels = torch.randint(0, 10, (num_images,), device=device)
    return torch.randn(num_images, 3, 32, 32, device=device) + labels.view(-1, 1, 1, 1) / 5, labels


def main(memory: str = "6MiB", num_updates: int = 3, num_parts: int = 3) -> outcore.Limited:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ooc = outcore.limit(model, memory=memory)
    for update in range(num_updates):
        for _ in range(num_parts):
            x, y = batch(16)
            with ooc.step(), torch.autocast(device, dtype=torch.bfloat16):
                loss = F.cross_entropy(model(x).float(), y) / num_parts
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            x, y = batch(64)
            accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(f"update {update}: loss {num_parts * loss.item():.3f}, accuracy {accuracy:.2f}")
    print(ooc)
    return ooc


if __name__ == "__main__":
    main()
