"""Eight networks of eight kinds that train on a CPU, each with a function that makes its loss: a step's forward.

`times` is how many times the smallest batch: with 1 a step takes milliseconds, for tests; with 16 a tenth of a second
or more, for measuring.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[], Tensor]
Build = Callable[[int], tuple[nn.Module, Loss]]


def _classified(model: nn.Module, x: Tensor) -> tuple[nn.Module, Loss]:
    labels = torch.arange(len(x)) % 10
    return model.train(), lambda: F.cross_entropy(model(x), labels)


def conv_net(times: int) -> tuple[nn.Module, Loss]:
    convolutions = [layer for i, o in ((3, 16), (16, 32), (32, 32)) for layer in (nn.Conv2d(i, o, 3), nn.ReLU())]
    model = nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 13 * 13, 10))
    return _classified(model, torch.randn(16 * times, 3, 32, 32))


def resnet(times: int) -> tuple[nn.Module, Loss]:
    from outcore.demo import DigitsResNet

    return _classified(DigitsResNet(), torch.randn(4 * times, 1, 64, 64))


def mlp(times: int) -> tuple[nn.Module, Loss]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU(), nn.LayerNorm(128), nn.Dropout(0.1))]
    return _classified(nn.Sequential(*layers), torch.randn(512 * times, 128))


def encoder(times: int) -> tuple[nn.Module, Loss]:
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False), torch.randn(8 * times, 64, 64)
    return model, lambda: model(x).square().mean()


class Writer(nn.Module):
    """A small GPT: causal attention, and a head that shares the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(128, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, activation="gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 128, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        logits: Tensor = self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))
        return logits


def gpt(times: int) -> tuple[nn.Module, Loss]:
    model, tokens = Writer(), (torch.arange(4 * times * 64) % 127).view(4 * times, 64)
    return model, lambda: F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.lstm(x)[0].mean(1))
        return logits


def lstm(times: int) -> tuple[nn.Module, Loss]:
    return _classified(Reader(), torch.randn(8 * times, 40, 32))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Conv2d(i, o, 3, padding=1) for i, o in ((2, 8), (8, 16), (16, 16))])
        self.ups = nn.ModuleList([nn.Conv2d(i, o, 3, padding=1) for i, o in ((32, 16), (32, 8), (16, 8))])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            skips.append(x := F.silu(down(x)))
            x = F.max_pool2d(x, 2)
        for up in self.ups:
            x = F.silu(up(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1)))
        out: Tensor = self.out(x)
        return out


def unet(times: int) -> tuple[nn.Module, Loss]:
    model, x = UNet(), torch.randn(4 * times, 2, 32, 32)
    return model, lambda: (model(x) - x).square().mean()


class Patches(nn.Module):
    """A small ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 64, 4, stride=4)
        layer = nn.TransformerEncoderLayer(
            64, 4, 256, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.patch(x).flatten(2).transpose(1, 2)).mean(1))
        return logits


def vit(times: int) -> tuple[nn.Module, Loss]:
    return _classified(Patches(), torch.randn(4 * times, 3, 32, 32))


NETWORKS: dict[str, Build] = {
    "conv net": conv_net,
    "ResNet": resnet,
    "transformer encoder": encoder,
    "GPT": gpt,
    "LSTM": lstm,
    "U-Net": unet,
    "MLP": mlp,
    "ViT": vit,
}
