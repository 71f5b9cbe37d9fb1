"""Replaces an optimizer's `step()`, `state` and `load_state_dict()`, and restores them on `close`.

`step()` is replaced on the object, as learning-rate schedulers do; its hooks run as before. `state` becomes a
dictionary that runs due updates before it is read. When a state dictionary is loaded, its large tensors are moved home
one by one, because the optimizer would put all of them on the device first.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol

import torch
from torch.optim import optimizer as torch_optimizer

from outcore.state.optimizers import Optimizer
from outcore.state.unit import SMALL_BYTES, Unit, is_dense
from outcore.state.watched import WatchedState
from outcore.state.window import Item


class StepRunner(Protocol):
    """Runs the steps of the optimizer whose `step()` is replaced (`outcore.state.updates.Updates`)."""

    def step(self, original_step: Callable[..., Any], closure: Callable[[], Any] | None) -> Any: ...
    def flush(self) -> None: ...
    def unit_of(self, parameter: torch.Tensor) -> Unit | None: ...


class Takeover:
    """Replaces the methods of an optimizer from construction to `close`."""

    def __init__(self, optimizer: Any, updates: StepRunner) -> None:
        self._optimizer = optimizer
        self._updates: StepRunner | None = updates
        self._before = optimizer.__dict__.get("step")  # the `step` that a scheduler put on this object
        self._original_step: Callable[..., Any] = optimizer.step
        self._step = types.MethodType(self._make_step(), optimizer)
        optimizer.step = self._step
        optimizer.state = WatchedState(optimizer.state, updates.flush)
        self._loading: list[tuple[Unit, str, torch.Tensor]] = []
        self._hooks = [
            optimizer.register_load_state_dict_pre_hook(self._before_load),
            optimizer.register_load_state_dict_post_hook(self._after_load),
        ]

    def _make_step(self) -> Callable[..., Any]:
        def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
            if self._updates is None:
                return self._original_step() if closure is None else self._original_step(closure)
            optimizer._opt_called = True  # schedulers check it
            return self._updates.step(self._original_step, closure)

        if hasattr(self._original_step, "_wrapped_by_lr_sched"):
            step.__dict__["_wrapped_by_lr_sched"] = True
        return step

    def close(self) -> None:
        optimizer, self._updates = self._optimizer, None
        for hook in self._hooks:
            hook.remove()
        if optimizer.__dict__.get("step") is self._step:  # otherwise a scheduler has wrapped it, and it only forwards
            del optimizer.step
            if self._before is not None:
                optimizer.step = self._before
        if isinstance(optimizer.state, WatchedState):
            optimizer.state = optimizer.state.plain()

    # -- loading ------------------------------------------------------------------------------------------------------

    def _before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replaces each large tensor by a placeholder while the optimizer loads the rest."""
        assert self._updates is not None
        self._updates.flush()
        self._loading = []
        numbers = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
        units = {number: self._updates.unit_of(parameter) for number, parameter in zip(numbers, parameters)}
        state = dict(state_dict["state"])
        for number, unit in units.items():
            if unit is not None and isinstance(state.get(number), dict):
                state[number] = dict(state[number])
                for name, kept in state[number].items():
                    if isinstance(kept, torch.Tensor) and kept.nbytes >= SMALL_BYTES and is_dense(kept):
                        self._loading.append((unit, name, kept))
                        state[number][name] = torch.empty(0)
        return {**state_dict, "state": state}

    def _after_load(self, optimizer: Optimizer) -> None:
        assert self._updates is not None
        loaded: Any = optimizer.state
        for unit, name, kept in self._loading:
            window, parameter = unit.window, unit.parameter
            dtype = parameter.dtype if parameter.is_floating_point() else kept.dtype  # the optimizer's own cast
            home = window.homes.empty_like(kept, dtype, unit.tier)
            window.homes.fill(home, kept)
            unit.kept[name] = Item(window, home)
            loaded[parameter][name] = home
        self._loading = []
        optimizer.state = WatchedState(loaded, self._updates.flush)


def call_pre_hooks(optimizer: Optimizer, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Runs the hooks that every call of `step()` runs before it."""
    before: Any = torch_optimizer._global_optimizer_pre_hooks
    for hook in chain(before.values(), optimizer._optimizer_step_pre_hooks.values()):
        result: Any = hook(optimizer, (optimizer, *args), {})
        if result is not None:
            args = tuple(result[0])[1:]
    return args


def call_post_hooks(optimizer: Optimizer, args: tuple[Any, ...]) -> None:
    after: Any = torch_optimizer._global_optimizer_post_hooks
    for hook in chain(optimizer._optimizer_step_post_hooks.values(), after.values()):
        hook(optimizer, (optimizer, *args), {})
