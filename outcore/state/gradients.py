"""Sends the gradients that the backward makes home.

When autograd has accumulated the gradient of a parameter, it is sent home. `parameter.grad` stays the tensor on the
device until the transfer ends, and is the tensor at home afterwards; if it is accessed meanwhile, it stays on the
device. If there is a gradient already (several backwards for one update), the old one is brought to the device and the
new one is added to it, in the same order as autograd adds.

Gradients stay on the device if others write into them later (`torch.distributed`), if they are differentiated again,
or if they are not plain tensors with the layout of the weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from outcore.memory.home import is_at_home
from outcore.memory.tensors import below_everything, unseen
from outcore.state.early import EarlyUpdates
from outcore.state.gradient import Gradient, Norm
from outcore.state.unit import Unit, can_move
from outcore.state.window import Window


class Gradients:
    """Sends gradients home as the backward makes them."""

    def __init__(self, units: Sequence[Unit], window: Window, early: EarlyUpdates) -> None:
        self._window, self._early = window, early
        self._norms: dict[Norm, None] = {}  # the norms that steps ask for
        self._hooks: dict[Unit, list[Any]] = {}
        self._made: list[Unit] = []  # their gradients are not sent yet, because other hooks may change them
        self._taken: set[Unit] = set()  # their old gradients are at home while new ones are made
        for unit in units:
            self.add(unit)

    def add(self, unit: Unit) -> None:
        if unit.parameter.requires_grad:
            before = unit.parameter.register_hook(partial(self._before, unit))
            after = unit.parameter.register_post_accumulate_grad_hook(partial(self._after, unit))
            self._hooks[unit] = [before, after]

    def remove(self, unit: Unit) -> None:
        for hook in self._hooks.pop(unit, ()):
            hook.remove()

    def end(self) -> None:
        """Ends the step. If it failed between two hooks, the previous gradient is restored."""
        self._send_made()
        for unit in self._taken:
            if unit.parameter.grad is None:
                unit.show_gradient()
        self._taken.clear()

    def close(self) -> None:
        for unit in list(self._hooks):
            self.remove(unit)

    def _before(self, unit: Unit, new: torch.Tensor) -> None:
        """Called before autograd adds `new` to the gradient, if there is one."""
        with unseen():
            self._set_old_gradient_aside(unit, new)

    def _set_old_gradient_aside(self, unit: Unit, new: torch.Tensor) -> None:
        self._send_made()
        item = unit.gradient
        if item is None:
            return
        if item.is_departing:
            self._window.settle(item)
        if _stays(new) or not unit.has_gradient_at_home:
            return
        unit.parameter.grad = None
        self._taken.add(unit)

    def _after(self, unit: Unit, parameter: torch.Tensor) -> None:
        """Called after autograd has added it. Later hooks of others may still see and change the gradient."""
        with unseen():
            self._take(unit, parameter)

    def _take(self, unit: Unit, parameter: torch.Tensor) -> None:
        self._send_made()
        self._made.append(unit)
        hooks: Any = parameter._post_accumulate_grad_hooks
        if unit in self._taken:
            self._taken.remove(unit)
            self._add(unit)
        if len(hooks) == 1:
            self._send_made()

    def _add(self, unit: Unit) -> None:
        """Adds the new gradient to the previous one."""
        item, new = unit.gradient, unit.parameter.grad
        assert item is not None
        if new is None:
            unit.show_gradient()
            return
        total = item.arrive()
        item.scale(total)
        with below_everything():
            unit.parameter.grad = total.add_(new).detach()

    def _send_made(self) -> None:
        while self._made:
            self._send(self._made.pop())

    def _send(self, unit: Unit) -> None:
        new = unit.parameter.grad
        if new is None or is_at_home(new) or _stays(new) or not _lies_like(new, unit):
            if unit.gradient is not None and not unit.gradient.is_departing:
                unit.gradient.drop()
            return
        item = unit.gradient = self._home_of(unit)
        if (watcher := self._window.watcher) is not None:
            watcher.takes_gradient(unit.number, new)
        item.renew(new)
        self._window.depart(item, partial(self._arrived, unit, item))
        self._early.gradient_made(unit)

    def _home_of(self, unit: Unit) -> Gradient:
        """Returns a home for a new gradient. A home that somebody still holds is left to them."""
        known = unit.gradient
        if known is not None and known.here is not None:
            return known  # the new gradient was added to it
        if known is None or known.is_held(num_own=0):
            return Gradient(self._window, self._window.homes.empty_like(unit.weight.home), self._norms)
        return known

    @staticmethod
    def _arrived(unit: Unit, item: Gradient) -> None:
        if item.made is not None and unit.parameter.grad is item.made:
            unit.show_gradient()
        item.let_go_of_made()
        item.drop()


def _stays(gradient: torch.Tensor) -> bool:
    """Whether a gradient must stay: collectives write into it after this hook, or it belongs to a graph."""
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return distributed or torch.is_grad_enabled() or gradient.requires_grad


def _lies_like(gradient: torch.Tensor, unit: Unit) -> bool:
    home = unit.weight.home
    return (
        can_move(gradient, home.device)
        and gradient.dtype == home.dtype
        and gradient.size() == home.size()
        and gradient.stride() == home.stride()
    )
