"""A file that `outcore record examples/record_me.py:step` can record: it defines `model`, `step` and `optimizer`.

The trace it writes can be planned for any machine, here or elsewhere: see `outcore plan --help`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    *(part for _ in range(6) for part in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))),
    nn.Linear(256, 10),
).to(device)
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(2048, 256, device=device)
y = torch.randint(0, 10, (2048,), device=device)


def step() -> None:
    """What stands inside `with ooc.step():` in a training loop."""
    F.cross_entropy(model(x), y).backward()


if __name__ == "__main__":
    for _ in range(10):
        step()
        optimizer.step()
        optimizer.zero_grad()
