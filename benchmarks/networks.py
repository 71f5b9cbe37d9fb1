"""The six networks of the benchmarks, as a user would build them, and one training step of each.

Names that end in `_nhwc` are three of them once more with channels last: cuDNN then makes no copies of its own, which
in VGG-16 and R3D-18 are larger than the budget otherwise.

`blocks` names what per-block checkpointing wraps: the residual block, the transformer layer, the group of convolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class Network:
    """A model on a device with its data: `loss()` runs the forward of one step."""

    name: str
    batch: int
    model: nn.Module
    loss: Callable[[], Tensor]
    blocks: list[nn.Module]


BUDGETS_GIB = {"resnet50": 16, "llama": 28, "vgg16": 6, "vit_l": 12, "r3d18": 6, "resnet152": 12}
BUDGETS_GIB |= {"vgg16_nhwc": 12, "r3d18_nhwc": 12, "resnet50_nhwc": 16}
CURVES_GIB: dict[str, tuple[float, ...]] = {
    "resnet50": (32, 24, 16, 12),
    "llama": (64, 48, 36, 28),
    "vit_l": (24, 16, 12, 8),
    "resnet152": (24, 16, 12, 8),
    "vgg16_nhwc": (16, 14, 12, 10),
    "r3d18_nhwc": (16, 14, 12, 10),
}
BATCHES = {"resnet50": 640, "llama": 24, "vgg16": 256, "vit_l": 128, "r3d18": 64, "resnet152": 256}
BATCHES |= {"vgg16_nhwc": 256, "r3d18_nhwc": 64, "resnet50_nhwc": 640}


def build(name: str, batch: int | None = None, device: str = "cuda") -> Network:
    torch.manual_seed(0)
    batch = batch or BATCHES[name]
    with torch.device(device):
        return _BUILDERS[name](name, batch)


def _classifier(name: str, batch: int, model: nn.Module, shape: tuple[int, ...], blocks: list[nn.Module]) -> Network:
    x, y = torch.randn(batch, *shape), torch.randint(0, 1000 if len(shape) == 3 else 400, (batch,))
    if name.endswith("_nhwc"):
        last = torch.channels_last if len(shape) == 3 else torch.channels_last_3d
        model, x = model.to(memory_format=last), x.to(memory_format=last)  # type: ignore[call-overload]
    return Network(name, batch, model.train(), lambda: F.cross_entropy(model(x), y), blocks)


def _resnet(name: str, batch: int) -> Network:
    import torchvision

    model = getattr(torchvision.models, name.removesuffix("_nhwc"))()
    blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
    return _classifier(name, batch, model, (3, 224, 224), blocks)


def deep_resnet(depth: int, batch: int, device: str = "cuda") -> Network:
    """A bottleneck ResNet of about this many layers: ResNet-152 with more blocks in its third stage."""
    from torchvision.models.resnet import Bottleneck, ResNet

    torch.manual_seed(0)
    num_blocks = max(1, round((depth - 2) / 3) - 14)
    with torch.device(device):
        model = ResNet(Bottleneck, [3, 8, num_blocks, 3])
        blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
        return _classifier(f"resnet{depth}", batch, model, (3, 224, 224), blocks)


def _vgg(name: str, batch: int) -> Network:
    import torchvision

    model = torchvision.models.vgg16()
    return _classifier(name, batch, model, (3, 224, 224), _split_at_pools(model))


def _split_at_pools(model: Any) -> list[nn.Module]:
    """VGG has no blocks: the layers up to each pooling are made one."""
    groups: list[list[nn.Module]] = [[]]
    for layer in model.features:
        groups[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d):
            groups.append([])
    blocks: list[nn.Module] = [nn.Sequential(*group) for group in groups if group]
    model.features = nn.Sequential(*blocks)
    return blocks


def _vit(name: str, batch: int) -> Network:
    import torchvision

    model = torchvision.models.vit_l_16()
    return _classifier(name, batch, model, (3, 224, 224), list(model.encoder.layers))


def _r3d(name: str, batch: int) -> Network:
    import torchvision

    model = torchvision.models.video.r3d_18()
    blocks = [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]
    return _classifier(name, batch, model, (3, 32, 112, 112), blocks)


def _llama(name: str, batch: int) -> Network:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=5504,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=16,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).train()
    tokens = torch.randint(0, 32000, (batch, 2048))

    def loss() -> Tensor:
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
            out: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            return out

    return Network(name, batch, model, loss, list(model.model.layers))


_BUILDERS: dict[str, Callable[[str, int], Network]] = {
    "resnet50": _resnet,
    "resnet50_nhwc": _resnet,
    "llama": _llama,
    "vgg16": _vgg,
    "vgg16_nhwc": _vgg,
    "vit_l": _vit,
    "r3d18": _r3d,
    "r3d18_nhwc": _r3d,
    "resnet152": _resnet,
}
