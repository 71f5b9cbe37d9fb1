"""Eight small networks of eight kinds, each with a function that makes its loss: a step's forward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from tests.cpu.zoo import ZOO

Build = Callable[[], tuple[nn.Module, Callable[[], torch.Tensor]]]


def conv_net() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    convolutions = (
        nn.Conv2d(3, 16, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3),
    )
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32 * 11 * 11, 10))
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    return model, lambda: F.cross_entropy(model(x), y)


def mlp() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.1))]
    model, x = nn.Sequential(*layers), torch.randn(512, 128)
    return model, lambda: model(x).square().mean()


def encoder() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8, 64, 64)
    return model, lambda: model(x).square().mean()


def of_zoo(name: str) -> Build:
    def build() -> tuple[nn.Module, Callable[[], torch.Tensor]]:
        model, loss_of = ZOO[name]()
        return model.train(), lambda: loss_of(model, 0)

    return build


NETWORKS: dict[str, Build] = {"conv net": conv_net, "MLP": mlp, "transformer encoder": encoder}
NETWORKS |= {"GPT-like": of_zoo("transformer"), "ResNet with batch normalisation": of_zoo("resnet")}
NETWORKS |= {name: of_zoo(name) for name in ("lstm", "unet", "vit")}
