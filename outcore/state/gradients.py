"""Gradients that the backward makes -> gradients at home.

When autograd has added up the gradient of a parameter, it is sent home. `parameter.grad` stays the tensor on the device
until it has arrived there, and is the tensor at home from then on; one that is touched on the way stays on the device.
Where there is a gradient already (several backwards for one update), the old one comes to the device and the new one is
added to it, in the order in which autograd adds.

Gradients stay on the device where others write into them later (`torch.distributed`), where they are differentiated
again, and where they are no plain tensors that lie as the weight does.
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
        self._norms: dict[Norm, None] = {}  # that steps ask for
        self._hooks: dict[Unit, list[Any]] = {}
        self._made: list[Unit] = []  # whose gradient is not on its way yet: other hooks may still change it
        self._taken: set[Unit] = set()  # whose old gradient waits at home while the new one is made
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
        """The step is over. Where it failed between two hooks, what was there before comes back."""
        self._send_made()
        for unit in self._taken:
            if unit.parameter.grad is None:
                unit.show_gradient()
        self._taken.clear()

    def close(self) -> None:
        for unit in list(self._hooks):
            self.remove(unit)

    def _before(self, unit: Unit, new: torch.Tensor) -> None:
        """Autograd is about to add `new` to the gradient, if there is one."""
        with unseen():
            self._make_way(unit, new)

    def _make_way(self, unit: Unit, new: torch.Tensor) -> None:
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
        """Autograd has added it. Hooks of others may come after ours and see, or change, what we do not hold yet."""
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
        """To the gradient that was there before."""
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
        """A home for a new gradient. One that somebody still holds is left to them: the old gradient is theirs."""
        known = unit.gradient
        if known is not None and known.here is not None:
            return known  # it was added to
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
    """Collectives write into gradients after our hook; a gradient that is differentiated again belongs to a graph."""
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
