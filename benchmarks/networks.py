"""The networks of the benchmarks, as a user would build them, and one training step of each.

The first six are those of the README, with individual budgets. outcore was not tuned for the others; their budget is a
third of what they need in-core.

Names that end in `_nhwc` are three of them with channels last: cuDNN then makes no copies, which in VGG-16 and R3D-18
would exceed the budget.

`blocks` names what per-block checkpointing wraps: the residual block, the transformer layer, the group of convolutions.
"""

from __future__ import annotations

import itertools
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
OTHERS = {  # network: batch
    "bert_large": 64,
    "gpt2": 16,
    "efficientnet_v2_m": 96,
    "t5": 16,
    "swin_b": 128,
    "convnext_b": 128,
    "qwen2": 8,
    "unet3d": 2,
    "densenet201": 128,
    "mobilenet_v3_large": 512,
    "whisper": 16,
    "deeplabv3": 16,
}
BATCHES |= OTHERS
SHARE_OF_OTHERS = 1 / 3  # of in-core


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


def _autocast_loss(
    name: str, batch: int, model: Any, blocks: list[nn.Module], inputs: dict[str, Tensor], labels: Tensor
) -> Network:
    """A Transformers model whose forward computes its loss, under autocast to bfloat16, with its dropout."""

    def loss() -> Tensor:
        with torch.autocast(labels.device.type, dtype=torch.bfloat16):
            out: Tensor = model(**inputs, labels=labels).loss
            return out

    return Network(name, batch, model.train(), loss, blocks)


def _bert(name: str, batch: int) -> Network:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    model = BertForMaskedLM(BertConfig(**sizes))
    tokens = torch.randint(0, 30000, (batch, 512))
    return _autocast_loss(name, batch, model, list(model.bert.encoder.layer), {"input_ids": tokens}, tokens)


def _gpt2(name: str, batch: int) -> Network:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=24, n_embd=1280, n_head=20, use_cache=False))
    tokens = torch.randint(0, 30000, (batch, 1024))
    return _autocast_loss(name, batch, model, list(model.transformer.h), {"input_ids": tokens}, tokens)


def _t5(name: str, batch: int) -> Network:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024, d_ff=4096, d_kv=64, num_layers=12, num_heads=16, use_cache=False, decoder_start_token_id=0
    )
    model = T5ForConditionalGeneration(config)
    tokens, answers = torch.randint(0, 32000, (batch, 512)), torch.randint(0, 32000, (batch, 256))
    blocks = [*model.encoder.block, *model.decoder.block]
    return _autocast_loss(name, batch, model, blocks, {"input_ids": tokens}, answers)


def _qwen2(name: str, batch: int) -> Network:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=151936, num_key_value_heads=2, use_cache=False, **sizes))
    tokens = torch.randint(0, 151936, (batch, 1024))
    return _autocast_loss(name, batch, model, list(model.model.layers), {"input_ids": tokens}, tokens)


def _whisper(name: str, batch: int) -> Network:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sizes = {"d_model": 768, "encoder_layers": 12, "decoder_layers": 12, "encoder_ffn_dim": 3072}
    sizes |= {"decoder_ffn_dim": 3072, "encoder_attention_heads": 12, "decoder_attention_heads": 12}
    model = WhisperForConditionalGeneration(WhisperConfig(use_cache=False, dropout=0.1, **sizes))
    sounds, tokens = torch.randn(batch, 80, 3000), torch.randint(0, 50000, (batch, 256))
    blocks = [*model.model.encoder.layers, *model.model.decoder.layers]
    return _autocast_loss(name, batch, model, blocks, {"input_features": sounds}, tokens)


def _torchvision(name: str, batch: int) -> Network:
    """A classifier of torchvision; its blocks are the parts of its `features`, and the parts of its larger stages."""
    import torchvision

    model = getattr(torchvision.models, name)()
    parts = list(model.features)
    blocks = [
        block
        for part in parts
        for block in (part if isinstance(part, nn.Sequential) and len(part) > 3 else [part])
        if not isinstance(block, nn.BatchNorm2d | nn.ReLU)
    ]
    size = 288 if name == "efficientnet_v2_m" else 224
    return _classifier(name, batch, model, (3, size, size), blocks)


def _deeplab(name: str, batch: int) -> Network:
    import torchvision

    model = torchvision.models.segmentation.deeplabv3_resnet50(weights_backbone=None, num_classes=21).train()
    x, y = torch.randn(batch, 3, 513, 513), torch.randint(0, 21, (batch, 513, 513))
    backbone = model.backbone
    blocks = [
        block for stage in (backbone.layer1, backbone.layer2, backbone.layer3, backbone.layer4) for block in stage
    ]
    return Network(name, batch, model, lambda: F.cross_entropy(model(x)["out"], y), [*blocks, model.classifier])


class _UNet3d(nn.Module):
    """A U-Net of three-dimensional convolutions with instance normalization, as medical segmentation uses."""

    def __init__(self, widths: tuple[int, ...] = (32, 64, 128, 256, 320)) -> None:
        super().__init__()

        def block(num_in: int, num_out: int) -> nn.Module:
            layers = [
                layer
                for number in (num_in, num_out)
                for layer in (
                    nn.Conv3d(number, num_out, 3, padding=1, bias=False),
                    nn.InstanceNorm3d(num_out, affine=True),
                    nn.LeakyReLU(0.01, inplace=True),
                )
            ]
            return nn.Sequential(*layers)

        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList([block(1, widths[0]), *(block(one, other) for one, other in pairs)])
        self.up = nn.ModuleList(nn.ConvTranspose3d(other, one, 2, stride=2) for one, other in reversed(pairs))
        self.join = nn.ModuleList(block(2 * one, one) for one, _ in reversed(pairs))
        self.head = nn.Conv3d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        passed: list[Tensor] = []
        for number, block in enumerate(self.down):
            x = block(F.max_pool3d(x, 2) if number else x)
            passed.append(x)
        passed.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([up(x), passed.pop()], dim=1))
        out: Tensor = self.head(x)
        return out


def _unet3d(name: str, batch: int) -> Network:
    model = _UNet3d().train()
    x, y = torch.randn(batch, 1, 128, 128, 128), torch.randint(0, 3, (batch, 128, 128, 128))
    return Network(name, batch, model, lambda: F.cross_entropy(model(x), y), [*model.down, *model.join])


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
    "bert_large": _bert,
    "gpt2": _gpt2,
    "efficientnet_v2_m": _torchvision,
    "t5": _t5,
    "swin_b": _torchvision,
    "convnext_b": _torchvision,
    "qwen2": _qwen2,
    "unet3d": _unet3d,
    "densenet201": _torchvision,
    "mobilenet_v3_large": _torchvision,
    "whisper": _whisper,
    "deeplabv3": _deeplab,
}
