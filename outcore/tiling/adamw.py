"""AdamW for a model with tiled layers -> their weights updated on the device while the backward runs.

The gradient of a weight that lives on the host would go out to it, and come back with the weight and the optimizer's
state to be used. Here it never leaves the device: each of its tiles updates the tiles of weight and state at the same
place, which stream past it. What crosses the link is the state, in both directions at once, beside the products.
Everything else of the model is stepped by `step()`, as torch's own AdamW does it.

Updating during the backward has its price: a step has one backward (no accumulation), and nothing that needs all
gradients at once (clipping by their norm, a GradScaler) can be used. Where that is needed, `torch.optim.AdamW(...,
fused=True)` steps tiled layers on the host.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from outcore.errors import TilingError
from outcore.tiling.host_weight import HostWeight
from outcore.tiling.linear import TiledLinear
from outcore.tiling.update import Update


class TiledAdamW(torch.optim.AdamW):
    """torch's fused AdamW, with the same settings, state and state dictionary; weights of `TiledLinear` layers are
    updated during the backward. Weights that several layers share are stepped with the others.

    A tiled weight has no gradient after the backward: `clip_grad_norm_` does not see it. A GradScaler is refused; train
    in bfloat16 instead, which needs none.

    ```python
    import outcore
    import torch

    model = torch.nn.Sequential(outcore.TiledLinear(64, 256, memory="1MiB"), torch.nn.Tanh(), torch.nn.Linear(256, 1))
    optimizer = outcore.TiledAdamW(model, lr=1e-4)
    model(torch.randn(32, 64)).square().mean().backward()  # updates the tiled weight
    optimizer.step()  # updates everything else
    optimizer.zero_grad()
    ```
    """

    def __init__(self, model: nn.Module, lr: float = 1e-3, **options: Any) -> None:
        if options.get("amsgrad") or options.get("maximize"):
            raise TilingError("TiledAdamW has neither amsgrad nor maximize; use torch.optim.AdamW for them")
        super().__init__(model.parameters(), lr=lr, fused=True, **options)
        self._updated: set[nn.Parameter] = set()  # since the last step
        own = weakref.ref(self)
        for layer in _updated_layers(model.modules()):
            layer.make_update = partial(_make_update, own)

    def update_of(self, layer: TiledLinear) -> Update:
        """What a tile of this layer's gradient does, in a step that begins now."""
        weight = layer.weight
        if weight in self._updated:
            raise TilingError(
                "a tiled weight got a second gradient before optimizer.step(): TiledAdamW updates it during the "
                "backward, once per step; to accumulate gradients, or to use a layer twice, step it on the host with "
                "torch.optim.AdamW(model.parameters(), fused=True)"
            )
        self._updated.add(weight)
        group = next(group for group in self.param_groups if any(p is weight for p in group["params"]))
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = (layer.empty_like_weight().zero_() for _ in range(2))
        state["step"] += 1
        updated = weight.detach(), state["exp_avg"], state["exp_avg_sq"]
        return Update(updated, partial(_adamw, float(state["step"]), _settings(group)), layer.cast_copies())

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Everything but the tiled weights, which the backward has updated."""
        if getattr(self, "found_inf", None) is not None:  # what a GradScaler leaves with a fused optimizer
            raise TilingError(
                "TiledAdamW has updated the tiled weights with gradients that a GradScaler scaled, infinite ones too: "
                "load the weights again, and train in bfloat16 without a GradScaler, or step tiled layers on the host "
                "with torch.optim.AdamW(model.parameters(), fused=True)"
            )
        if closure is not None:
            raise TilingError("TiledAdamW updates during the backward; run it before step(), without a closure")
        super().step()
        self._updated.clear()


def _updated_layers(modules: Iterable[nn.Module]) -> list[TiledLinear]:
    """Those whose weight nobody else uses."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(module)
    layers = [owner for found in owners.values() if len(found) == 1 for owner in found if isinstance(owner, HostWeight)]
    return [layer for layer in dict.fromkeys(layers) if isinstance(layer, TiledLinear) and layer.weight.requires_grad]


def _make_update(optimizer: weakref.ref[TiledAdamW], layer: TiledLinear) -> Update | None:
    """None where the optimizer is gone: then the layer keeps a gradient, as without one."""
    own = optimizer()
    return None if own is None else own.update_of(layer)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """As they are when the backward comes to the layer: a scheduler may change them later."""
    beta1, beta2 = group["betas"]
    return {
        "lr": float(group["lr"]),
        "beta1": beta1,
        "beta2": beta2,
        "weight_decay": group["weight_decay"],
        "eps": group["eps"],
        "amsgrad": False,
        "maximize": False,
    }


def _adamw(step: float, settings: dict[str, Any], gradient: torch.Tensor, tiles: Sequence[torch.Tensor]) -> None:
    """torch's fused kernel on one tile."""
    weight, mean, square = tiles
    steps = [torch.full((), step, dtype=torch.float32, device=weight.device)]
    torch._fused_adamw_([weight], [gradient], [mean], [square], [], steps, **settings)
