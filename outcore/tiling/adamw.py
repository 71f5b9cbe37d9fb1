"""AdamW for a model with tiled layers, which updates their weights on the device during the backward.

The gradient of a weight on the host would be copied to the host, and come back together with the weight and the
optimizer's state. Here it never leaves the device: each of its tiles updates the corresponding tiles of weight and
state, which are streamed through the device. Only the state crosses the link, in both directions at once and in
parallel with the products. Everything else in the model is updated by `step()`, as in torch's AdamW.

Updating during the backward has limitations: a step has one backward (no accumulation), and nothing that needs all
gradients at once (clipping by their norm, a GradScaler) can be used. For these, use `torch.optim.AdamW(...,
fused=True)`, which updates tiled layers on the host.
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
    """torch's fused AdamW with the same settings, state and state dictionary, except that weights of `TiledLinear`
    layers are updated during the backward. Weights that several layers share are updated in `step()`.

    A tiled weight has no gradient after the backward, so `clip_grad_norm_` does not include it. A GradScaler raises an
    error; train in bfloat16 instead, which needs none.

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
        """Returns the update for tiles of this layer's gradient, in a step that begins now."""
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
        """Updates everything except the tiled weights, which the backward has updated."""
        if getattr(self, "found_inf", None) is not None:  # set by a GradScaler on a fused optimizer
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
    """Returns the layers whose weight no other module uses."""
    owners: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules:
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter, []).append(module)
    layers = [owner for found in owners.values() if len(found) == 1 for owner in found if isinstance(owner, HostWeight)]
    return [layer for layer in dict.fromkeys(layers) if isinstance(layer, TiledLinear) and layer.weight.requires_grad]


def _make_update(optimizer: weakref.ref[TiledAdamW], layer: TiledLinear) -> Update | None:
    """Returns the update, or None if the optimizer is gone; the layer then keeps a gradient."""
    own = optimizer()
    return None if own is None else own.update_of(layer)


def _settings(group: dict[str, Any]) -> dict[str, Any]:
    """Returns the present settings, because a scheduler may change them later."""
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
    """Runs torch's fused kernel on one tile."""
    weight, mean, square = tiles
    steps = [torch.full((), step, dtype=torch.float32, device=weight.device)]
    torch._fused_adamw_([weight], [gradient], [mean], [square], [], steps, **settings)
