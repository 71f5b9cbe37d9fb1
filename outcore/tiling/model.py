"""Replaces the large Linear and Embedding layers of a model by tiled ones, and restores them.

Parameters are shared, not copied, and keep their names: an optimizer made before remains valid, and a state dictionary
of one form loads into the other. Layers that share a weight (an embedding and the output layer) still share it.
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

LARGE_SHARE = 0.25  # of `memory`; larger weights are tiled by default (guessed)


def tile(
    model: nn.Module,
    *,
    memory: int | str,
    larger_than: int | str | None = None,
    devices: Sequence[str] | None = None,
) -> nn.Module:
    """Replaces large `nn.Linear` and `nn.Embedding` layers of `model` by tiled ones, whose weights stay on the host.

    `memory` limits the device bytes that the tiles of a product use, such as `"2GiB"`. Layers whose weight has more
    bytes than `larger_than` are replaced (default: a quarter of `memory`). Call it before the model is moved to its
    device; `.to()` and `.cuda()` then leave those weights on the host. Returns the model, changed in place, or the
    replacement if the model is such a layer itself. `untile` undoes it.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 8))
    model = outcore.tile(model, memory="512KiB")  # then .to("cuda"), if there is one
    print(type(model[0]).__name__, type(model[2]).__name__)  # TiledLinear Linear
    ```

    It is meant for a single layer that, with its gradient and optimizer state, is too large for the device. If each
    layer fits and only the whole step does not, use `outcore.limit`: it does not change the layers, and the numbers are
    bitwise those of plain PyTorch. Tiled products are summed in blocks, so the last bits differ.

    Subclasses of these layers are not replaced, because they may use their weights in another way.
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
    """Replaces tiled layers by torch's own, which share their parameters. The parameters are still on the host; move
    the model with `.to()` if its weights fit the device. Returns the model, changed in place.

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
    """Replaces every module that has a replacement, also if several parents share it; returns the number of them."""
    done: dict[nn.Module, nn.Module] = {}

    def visit(module: nn.Module) -> nn.Module:
        if module in done:
            return done[module]
        other = replacement(module)
        done[module] = module if other is None else _take_over(module, other)
        if other is None:
            for name, child in list(module._modules.items()):  # including one child under two names
                if child is not None and (new := visit(child)) is not child:
                    setattr(module, name, new)
                    _leave_fast_path(module, tiled=isinstance(new, TiledLinear))
        return done[module]

    changed = visit(model)
    return changed, sum(old is not new for old, new in done.items())


def _take_over(old: nn.Module, new: nn.Module) -> nn.Module:
    """Copies the training mode and the hooks of a module to its replacement."""
    new.training = old.training
    for name, hooks in vars(old).items():
        if name.startswith("_") and "hooks" in name and isinstance(hooks, dict):
            getattr(new, name).update(hooks)
    return new


def _leave_fast_path(module: nn.Module, *, tiled: bool) -> None:
    """Disables the fast path of torch's encoder layers, which passes weights to one kernel that cannot use the
    host's."""
    if isinstance(module, nn.TransformerEncoderLayer):
        layer: Any = module
        if tiled:
            layer._fast_path_before = getattr(layer, "_fast_path_before", layer.activation_relu_or_gelu)
            layer.activation_relu_or_gelu = 0
        elif hasattr(layer, "_fast_path_before"):
            layer.activation_relu_or_gelu = layer.__dict__.pop("_fast_path_before")
