"""Small networks with everything that has broken such code elsewhere. Each gives (model, batch -> loss)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[nn.Module, int], Tensor]
WHERE = {"device": "cpu"}  # the GPU tests point it elsewhere


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.first(x)))
        y = self.norm2(self.second(y))
        y += x
        out: Tensor = self.relu(y)
        return out


def resnet() -> tuple[nn.Module, Step]:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        *[Residual(8) for _ in range(3)],
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(model(_noise(step, 8, 3, 24, 24)), _labels(step, 8, 5))

    return model, loss


class TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, dropout=0.1, batch_first=True)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class TiedTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(TransformerBlock(32) for _ in range(3))
        self.head = nn.Linear(32, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.dropout(self.embed(tokens), 0.1, self.training)
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def transformer() -> tuple[nn.Module, Step]:
    def loss(model: nn.Module, step: int) -> Tensor:
        tokens = _labels(step, 4 * 24, 50).view(4, 24)
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return TiedTransformer(), loss


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList([nn.Conv2d(i, o, 3, padding=1) for i, o in ((2, 8), (8, 16), (16, 16))])
        self.ups = nn.ModuleList([nn.Conv2d(i, o, 3, padding=1) for i, o in ((32, 16), (32, 8), (16, 8))])
        self.out = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for down in self.downs:
            x = F.silu(down(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        for up in self.ups:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
            x = F.silu(up(torch.cat([x, skips.pop()], 1)))
        out: Tensor = self.out(x)
        return out


def unet() -> tuple[nn.Module, Step]:
    def loss(model: nn.Module, step: int) -> Tensor:
        x = _noise(step, 4, 2, 32, 32)
        out: Tensor = (model(x) - x).square().mean()
        return out

    return UNet(), loss


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(32, 7)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.lstm(x)[0])
        return out


def lstm() -> tuple[nn.Module, Step]:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(_noise(step, 8, 20, 16))
        return F.cross_entropy(out.flatten(0, 1), _labels(step, 160, 7))

    return Reader(), loss


class ViTBlock(nn.Module):
    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm2(x))
        out: Tensor = self.head(x.mean(1))
        return out


def vit() -> tuple[nn.Module, Step]:
    def loss(model: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(model(_noise(step, 8, 3, 32, 32)), _labels(step, 8, 4))

    return ViTBlock(), loss


def autocast() -> tuple[nn.Module, Step]:
    model = nn.Sequential(
        nn.Linear(32, 128),
        nn.GELU(),
        nn.LayerNorm(128),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(128, 9),
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        with torch.autocast(WHERE["device"], dtype=torch.bfloat16):
            out = model(_noise(step, 64, 32))
            out = out.float().log_softmax(-1)
            return F.nll_loss(out, _labels(step, 64, 9))

    return model, loss


def llama() -> tuple[nn.Module, Step]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        tokens = _labels(step, 4 * 24, 64).view(4, 24)
        out: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return out

    return LlamaForCausalLM(config), loss


def bert() -> tuple[nn.Module, Step]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, num_labels=3
    )

    def loss(model: nn.Module, step: int) -> Tensor:
        tokens = _labels(step, 8 * 16, 64).view(8, 16)
        out: Tensor = model(input_ids=tokens, labels=_labels(step, 8, 3)).loss
        return out

    return BertForSequenceClassification(config), loss


class Cube(torch.autograd.Function):
    """Saves an input, an output and something of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        square = x * x
        out = square * x
        ctx.save_for_backward(x, square, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, square, out = ctx.saved_tensors
        grad: Tensor = grads[0] * (2 * square + out / torch.where(x == 0, torch.ones_like(x), x))
        return grad


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(Cube.apply(torch.tanh(self.first(x)))))  # type: ignore[no-untyped-call]
        return out


def custom_function() -> tuple[nn.Module, Step]:
    def loss(model: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(model(_noise(step, 64, 32)), _labels(step, 64, 4))

    return Custom(), loss


class Views(nn.Module):
    """Saved tensors that are views, expanded, transposed, chunked, written into in part, and of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(24, 96)
        self.scale = nn.Parameter(torch.ones(1, 1, 32))
        self.down = nn.Linear(32, 6)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = self.up(x).chunk(3, -1)
        gate = a.sigmoid() * b.transpose(0, 1).contiguous().transpose(0, 1)
        gate = gate * self.scale.expand(gate.shape)
        padded = torch.zeros_like(gate)
        padded[:, 1:] = gate[:, :-1]
        mixed = torch.stack([padded, c.tanh()], 1).unbind(1)
        y = mixed[0] * mixed[1] + F.pad(gate, (0, 0, 1, 0))[:, :-1].exp()
        out: Tensor = self.down(y.double().square().float())
        return out


def views() -> tuple[nn.Module, Step]:
    def loss(model: nn.Module, step: int) -> Tensor:
        out = model(_noise(step, 8, 12, 24))
        return F.cross_entropy(out.flatten(0, 1), _labels(step, 96, 6))

    return Views(), loss


class SavedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).exp()  # exp saves its result
        y = h * h + h.sin() / math.pi + (h * x.sum()).cos()  # and h is saved again and again
        out: Tensor = self.last(y.tanh())
        return out


def saved_twice() -> tuple[nn.Module, Step]:
    def loss(model: nn.Module, step: int) -> Tensor:
        return F.cross_entropy(model(_noise(step, 64, 32) / 8), _labels(step, 64, 4))

    return SavedTwice(), loss


ZOO: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    make.__name__: make
    for make in (
        resnet,
        transformer,
        unet,
        lstm,
        vit,
        autocast,
        llama,
        bert,
        custom_function,
        views,
        saved_twice,
    )
}


def _noise(step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + step)).to(WHERE["device"])


def _labels(step: int, count: int, num_classes: int) -> Tensor:
    labels = torch.randint(0, num_classes, (count,), generator=torch.Generator().manual_seed(2000 + step))
    return labels.to(WHERE["device"])
