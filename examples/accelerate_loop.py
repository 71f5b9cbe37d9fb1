"""Accelerate under a budget: the unwrapped model is limited, everything else stays as it is.

python examples/accelerate_loop.py
accelerate launch --num_processes 2 examples/accelerate_loop.py     # a budget for each process
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import outcore

MEMORY = "300MiB" if torch.cuda.is_available() else "3MiB"  # cuBLAS alone takes some 64 MiB


def main(memory: str = MEMORY) -> outcore.Limited:
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4)]
    model = nn.Sequential(*layers, nn.Linear(64, 10))
    data = TensorDataset(torch.randn(2048, 64), torch.randint(0, 10, (2048,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=256))

    ooc = outcore.limit(accelerator.unwrap_model(model), memory=memory)  # added
    for x, y in loader:
        with accelerator.accumulate(model):
            with ooc.step():  # added
                loss = F.cross_entropy(model(x), y)
                accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(ooc)
    return ooc


if __name__ == "__main__":
    main()
