"""An ordinary training loop in half the memory: the two marked lines are all that is added.

python examples/plain_loop.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

import outcore

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inside = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: torch.Tensor = x + self.inside(self.norm2(x))
        return out


def main(memory: str = "16MiB", num_steps: int = 6) -> outcore.Limited:
    model = nn.Sequential(nn.Linear(8, 64), *(Block(64) for _ in range(4)), nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    ooc = outcore.limit(model, memory=memory)  # added
    for step in range(num_steps):
        x = torch.randn(16, 64, 8, device=device)
        y = x.cumsum(1)[..., :1] / 8  # what it learns: a running sum
        with ooc.step():  # added
            loss = F.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}")

    print(ooc)
    return ooc


if __name__ == "__main__":
    main()
