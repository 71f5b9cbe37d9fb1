"""A batch that grows with the gradient noise, and a learning rate that follows it, in an ordinary loop.

Two lines of the loop change: `adaptive.batches(...)` around the loader, and `adaptive.step()` in place of the
optimizer's step and zero_grad. Under a memory budget a step stays what it was: `with ooc.step()` around its forward and
backward.

    python examples/adaptive_batch.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import outcore
from outcore.tuning import Adaptive

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


def data(num_images: int) -> TensorDataset:
    labels = torch.randint(0, 10, (num_images,))
    patterns = torch.randn(10, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    return TensorDataset(patterns[labels] + 2 * torch.randn(num_images, 1, 16, 16), labels)


def main(memory: str = "64MiB", num_epochs: int = 4) -> Adaptive:
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16 * 16, 64), nn.ReLU(), nn.Linear(64, 10)
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    ooc = outcore.limit(model, memory=memory)
    adaptive = Adaptive(model, optimizer, batch=32, micro_batch=64, largest_batch=256)
    loader = DataLoader(data(4096), batch_size=64, shuffle=True)
    for epoch in range(num_epochs):
        for x, y in adaptive.batches(loader):
            with ooc.step():
                loss = F.cross_entropy(model(x.to(device)), y.to(device))
                loss.backward()
            adaptive.step()
        noise = f"{adaptive.noise.scale:.0f} samples" if adaptive.noise else "not measured"
        print(f"epoch {epoch}: loss {loss.item():.3f}, batch {adaptive.batch}, noise scale {noise}")
    print(adaptive)
    ooc.close()
    return adaptive


if __name__ == "__main__":
    main()
