"""Model + optimizer -> the same training, with weights, gradients and optimizer state beside the device: State.

What has a home (`outcore.memory.home`) is on the device only while it is used:

    weight           a module reads it, or its backward asks for it          reading.py
    gradient         the backward has just made it                          gradients.py
    optimizer state  the parameter is being updated                         updates.py

At every moment `parameter.data`, `parameter.grad` and `optimizer.state` are tensors with the true bytes, at home or on
the device, so that whatever reads or writes them (a checkpoint, gradient clipping, a moving average, a deep copy) works
as without us. Hooks only make it fast: where one is missed, a kernel reads the bytes where they are.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from outcore.errors import OutcoreError
from outcore.memory.home import Homes, is_at_home
from outcore.state.gradients import Gradients
from outcore.state.optimizers import Splitting, splitting_of, unwrapped
from outcore.state.reading import Handle, Reading
from outcore.state.unit import Unit, can_move
from outcore.state.updates import Updates
from outcore.state.watched import num_users
from outcore.state.window import Window
from outcore.units import format_bytes


class State:
    """The training state of a model. Wrap each training step: `with state.step(): ...`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        window_bytes: int,
        home_bytes: int,
        folder: str | Path | None = None,
        later: bool = True,
    ) -> None:
        """`window_bytes` is what the state may take of the device at a time, `home_bytes` what it may take beside it,
        and `folder` where that is if the device is the CPU. With `later`, an update runs when its weight is read
        next."""
        self.model = model
        self.optimizer = unwrapped(optimizer)
        check_optimizer(model, self.optimizer)
        device = next(model.parameters()).device
        self.splitting: Splitting = splitting_of(self.optimizer)
        self.window = Window(Homes(device, home_bytes, folder), window_bytes)
        self.kept_for: dict[str, str] = {}  # parameter that stays on the device -> why
        chosen = self._choose(device)
        self._check_room(chosen)
        self.units = [Unit(name, parameter, self.window) for name, parameter in chosen.items()]
        self._updates = Updates(
            self.optimizer, self.units, self.window, self.splitting, later=later, order=lambda: self._reading.order
        )
        self._reading = Reading(model, self.units, self.window, self._updates)
        self._gradients = Gradients(self.units, self.window)
        self._is_open = True

    def _choose(self, device: torch.device) -> dict[str, nn.Parameter]:
        chosen: dict[str, nn.Parameter] = {}
        updated = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for name, parameter in self.model.named_parameters():
            why = _why_it_stays(parameter, device)
            if not why and id(parameter) in updated and not self.splitting.by_parameter:
                why = self.splitting.because
            if why:
                self.kept_for[name] = why
            else:
                chosen[name] = parameter
        if not self.splitting.by_parameter:
            warnings.warn(
                f"outcore: what {type(self.optimizer).__name__} updates stays on the device: {self.splitting.because}",
                stacklevel=4,
            )
        return chosen

    def _check_room(self, chosen: dict[str, nn.Parameter]) -> None:
        """Before anything is moved: everything that will need a home must find room there."""
        updated = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        needed_bytes = 0
        for parameter in chosen.values():
            needed_bytes += 0 if is_at_home(parameter) else parameter.nbytes
            if parameter.requires_grad:
                needed_bytes += parameter.nbytes
            if parameter.requires_grad and id(parameter) in updated:
                needed_bytes += self.splitting.state_bytes(parameter)
        self.window.homes.check_room(needed_bytes, "the training state")

    # -- the step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[State]:
        """One training step: forward(s) and backward(s)."""
        self.begin()
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield self
        finally:
            self.end()

    def begin(self) -> None:
        self._reading.begin()

    def end(self) -> None:
        """The step is over, also where it failed: everything is at home."""
        self.window.clear()
        self._reading.end()
        self._gradients.end()
        self.window.clear()

    def pack(self, tensor: torch.Tensor) -> Handle | None:
        """What autograd shall hold in place of a weight; None: `tensor` is none of ours."""
        return self._reading.pack(tensor)

    def _pack(self, tensor: torch.Tensor) -> Handle | torch.Tensor:
        return self.pack(tensor) or tensor

    def flush(self) -> None:
        """Runs every update that was put off."""
        self._updates.flush()

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leaves an ordinary model and an ordinary optimizer on the device."""
        if not self._is_open:
            return
        self._is_open = False
        self._updates.flush()
        self.end()
        self._reading.close()
        self._gradients.close()
        self._updates.close()
        for unit in self.units:
            unit.bring_back()
        self.window.homes.close()

    def __str__(self) -> str:
        streamed = sum(unit.weight.num_bytes for unit in self.units)
        lines = [f"{len(self.units)} parameters ({format_bytes(streamed)}) have a home beside the device"]
        lines += [f"{count} stay on it: {why}" for why, count in Counter(self.kept_for.values()).items()]
        return "\n".join(lines)


def _unpack(handle: Any) -> torch.Tensor:
    if isinstance(handle, Handle):
        return handle.run.unpack(handle)
    unpacked: torch.Tensor = handle
    return unpacked


def check_optimizer(model: nn.Module, optimizer: Any) -> None:
    """Raises OutcoreError for what is no optimizer of this model."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise OutcoreError(f"optimizer={type(optimizer).__name__} is no torch optimizer; pass the one that you step")
    own = {id(parameter) for parameter in model.parameters()}
    updated = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    num_own = sum(id(parameter) in own for parameter in updated)
    if not num_own:
        raise OutcoreError(
            f"none of the {len(updated)} parameters of this {type(optimizer).__name__} belongs to the model; pass the "
            "optimizer that updates it, made after the model was moved to its device"
        )


def _why_it_stays(parameter: nn.Parameter, device: torch.device) -> str:
    """Why a parameter cannot have a home; empty if it can."""
    if is_lazy(parameter):
        return "it is not initialised yet"
    if is_at_home(parameter):
        return ""
    if parameter.device != device:
        return f"it is on {parameter.device}"
    if type(parameter) is not nn.Parameter:
        return f"it is a {type(parameter).__name__}"
    if not can_move(parameter, device):
        return "it is small, or lies on a storage that others use too"
    if num_users(parameter) > 1:
        return "others hold a view of it"
    return ""
