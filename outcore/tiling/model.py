"""A model -> the same model with its large Linear and Embedding layers tiled, and back.

Parameters are shared, not copied, and keep their names: an optimizer made before goes on, and a state dictionary of one
form loads into the other. Layers that share a weight (an embedding and the output layer) still do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from outcore.errors import TilingError
from outcore.tiling.embedding import TiledEmbedding
from outcore.tiling.linear import TiledLinear
from outcore.units import format_bytes, parse_bytes

LARGE_SHARE = 0.25  # of `memory`; a weight above it is tiled, unless `larger_than` says otherwise (guessed)


def tile(
    model: nn.Module,
    *,
    memory: int | str,
    larger_than: int | str | None = None,
    devices: Sequence[str] | None = None,
) -> nn.Module:
    """Replaces large `nn.Linear` and `nn.Embedding` layers of `model` by tiled ones, whose weights stay on the host.

    `memory` bounds the device bytes that the tiles of a product use, such as `"2GiB"`. Layers whose weight has more
    bytes than `larger_than` are replaced (default: a quarter of `memory`). Call it before the model is moved to its
    device; `.to()` and `.cuda()` then leave those weights where they are. Returns the model, changed in place (a model
    that is such a layer itself is returned as its replacement). `untile` undoes it.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
    model = outcore.tile(model, memory="512KiB")  # then .to("cuda"), where there is one
    print(type(model[0]).__name__, type(model[2]).__name__)  # TiledLinear Linear
    ```

    It is for layers of which a single one, with its gradient and optimizer state, is too large for the device. Where
    each layer fits and only the step as a whole does not, use `outcore.limit`: it leaves the layers as they are, and
    the numbers are plain PyTorch's bit for bit. Tiled products add up in blocks, so the last bits differ.

    Subclasses of these layers are left alone: whoever made them may use their weights in another way.
    """
    memory_bytes = parse_bytes(memory)
    if larger_than is None:
        least = int(LARGE_SHARE * memory_bytes)
    else:
        least = parse_bytes(larger_than) if larger_than != 0 else 0

    def replacement(module: nn.Module) -> nn.Module | None:
        if type(module) not in (nn.Linear, nn.Embedding):
            return None
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        if weight.nbytes <= least:
            return None
        if isinstance(module, nn.Linear):
            return TiledLinear.from_linear(module, memory=memory, devices=devices)
        assert isinstance(module, nn.Embedding)
        return TiledEmbedding.from_embedding(module)

    tiled, num = _replaced(model, replacement)
    if not num:
        raise TilingError(
            f"no Linear or Embedding layer of this model has a weight of more than {format_bytes(least)}; lower "
            "larger_than=..., or use the model as it is"
        )
    return tiled


def untile(model: nn.Module) -> nn.Module:
    """Replaces tiled layers by torch's own, which share their parameters. Those are still on the host: move the model
    with `.to()` where its weights fit the device. Returns the model, changed in place.

    ```python
    import outcore
    import torch

    model = outcore.tile(torch.nn.Sequential(torch.nn.Linear(64, 1024)), memory="512KiB")
    model = outcore.untile(model)
    print(type(model[0]).__name__)  # Linear
    ```
    """

    def replacement(module: nn.Module) -> nn.Module | None:
        if isinstance(module, TiledLinear):
            return module.to_linear()
        return module.to_embedding() if isinstance(module, TiledEmbedding) else None

    return _replaced(model, replacement)[0]


def _replaced(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> tuple[nn.Module, int]:
    """Every module that has a replacement, also where several parents share it; how many there were."""
    done: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> nn.Module:
        if module in done:
            return done[module]
        other = replacement(module)
        done[module] = module if other is None else _take_over(module, other)
        if other is None:
            for name, child in list(module._modules.items()):  # also one child under two names
                if child is not None and (new := visit(child)) is not child:
                    setattr(module, name, new)
                    _leave_fast_path(module, tiled=isinstance(new, TiledLinear))
        return done[module]

    changed = visit(model)
    return changed, sum(old is not new for old, new in done.items())


def _take_over(old: nn.Module, new: nn.Module) -> nn.Module:
    """Mode and hooks."""
    new.training = old.training
    for name, hooks in vars(old).items():
        if name.startswith("_") and "hooks" in name and isinstance(hooks, dict):
            getattr(new, name).update(hooks)
    return new


def _leave_fast_path(module: nn.Module, *, tiled: bool) -> None:
    """torch's encoder layers hand their weights to one kernel when they only evaluate: not weights on the host."""
    if isinstance(module, nn.TransformerEncoderLayer):
        layer: Any = module
        if tiled:
            layer._fast_path_before = getattr(layer, "_fast_path_before", layer.activation_relu_or_gelu)
            layer.activation_relu_or_gelu = 0
        elif hasattr(layer, "_fast_path_before"):
            layer.activation_relu_or_gelu = layer.__dict__.pop("_fast_path_before")
