"""Which batch and learning rate train this network fastest in the memory there is?

python examples/tune_batch.py
outcore tune examples/tune_batch.py --memory 48MiB --curve curve.svg
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import outcore

device = "cuda" if torch.cuda.is_available() else "cpu"
loss_fn = F.cross_entropy
make_optimizer = partial(torch.optim.AdamW, lr=1e-3)


def make_model() -> nn.Module:
    """A small convolutional network, on its device."""
    layers = [
        part
        for channels, width in ((1, 16), (16, 32), (32, 32))
        for part in (nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True))
    ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 4)).to(device)


def make_stripes(num: int) -> TensorDataset:
    """Noisy stripes in four directions."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (num,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.stack([torch.sin(w) for w in (rows, columns, rows + columns, rows - columns)])
    return TensorDataset(waves[labels][:, None] + torch.randn(num, 1, 16, 16, generator=generator), labels)


dataset = make_stripes(1024)


def main(memory: str = "12MiB") -> outcore.Advice:
    advice = outcore.tune(
        make_model,
        loss_fn,
        dataset,
        optimizer=make_optimizer,
        memory=memory,
        batch=128,  # trained with today: it is kept, in micro-batches
        goal=("val_accuracy", 0.9),  # trained towards until it is reached, for 20 s (Effort.trial_s) at most
    )
    print(advice)
    return advice


if __name__ == "__main__":
    main()
