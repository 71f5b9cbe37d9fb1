"""Small networks and data for the tuner's tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from outcore.tuning.data.samples import Samples
from outcore.tuning.throughput.bench import Bench

CPU = torch.device("cpu")
make_sgd = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def convnet() -> nn.Module:
    """Convolutions, BatchNorm, in-place ReLU, dropout."""
    layers: list[nn.Module] = []
    for channels, width in ((1, 12), (12, 24), (24, 24)):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.Dropout(0.1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 4))


class Attention(nn.Module):
    """Rows as tokens; LayerNorm, attention and a wide MLP."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, dropout=0.1, batch_first=True)
        self.inside = nn.Sequential(nn.Linear(width, 8 * width), nn.GELU(), nn.Linear(8 * width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x.squeeze(1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        out: Tensor = self.head((x + self.inside(self.norm2(x))).mean(1))
        return out


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 4)
    )


NETS: dict[str, Callable[[], nn.Module]] = {"convnet": convnet, "attention": Attention, "mlp": mlp}


def stripes(num: int = 512) -> TensorDataset:
    """Noisy stripes in four directions, made without the global generator."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (num,), generator=generator)
    rows, columns = torch.meshgrid(torch.arange(16.0), torch.arange(16.0), indexing="ij")
    waves = torch.stack([torch.sin(w) for w in (rows, columns, rows + columns, rows - columns)])
    return TensorDataset(waves[labels][:, None] + torch.randn(num, 1, 16, 16, generator=generator), labels)


def bench_of(name: str, memory: str | int, disk: str) -> Bench:
    torch.manual_seed(0)
    model = NETS[name]().train()
    return Bench(model, F.cross_entropy, Samples(stripes(), CPU), make_sgd(model.parameters()), memory, disk=disk)
