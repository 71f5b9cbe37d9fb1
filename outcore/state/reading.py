"""Brings weights to the device while modules read them.

Before a module runs, the weights it owns are copied to the device; afterwards the copies are released. Autograd saves
handles of them, and unpacking a handle in the backward brings the weight again. The order of the last step's reads
predicts the next ones, which are fetched ahead as far as the window has room.

A weight that is read in a module that does not own it (a function that uses another module's weight) is read from home,
which is slow but correct. From the next step on it is brought before that module runs.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from outcore.memory.tensors import below_everything, is_plain, unseen
from outcore.state.early import Early
from outcore.state.settings import STATE
from outcore.state.unit import Unit, unit_of
from outcore.state.watched import is_watched, unwatch
from outcore.state.window import Window
from outcore.units import format_bytes

LOOK_UNITS = STATE.look_units


class Updates(Protocol):
    """The part of the updates that reading uses."""

    def run_due(self, units: Sequence[Unit]) -> None:
        """Runs the updates of these units and leaves their weights on the device, or at home if the CPU runs them."""
        ...

    def flush(self) -> None:
        """Runs all updates that are due."""
        ...


class Handle:
    """The object that autograd holds in place of a weight or a view of it."""

    __slots__ = ("dtype", "offset", "run", "size", "stride", "unit", "version")

    def __init__(self, run: Reading, unit: Unit, tensor: torch.Tensor) -> None:
        self.run = run
        self.unit = unit
        self.version = unit.parameter._version
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()

    def of(self, data: torch.Tensor) -> torch.Tensor:
        """Returns the same view of the weight's copy."""
        with below_everything():
            if data.dtype is self.dtype:
                return data.as_strided(self.size, self.stride, self.offset)
            view = torch.empty(0, dtype=self.dtype, device=data.device)
            return view.set_(data.untyped_storage(), self.offset, self.size, self.stride)


class Order:
    """The order of weight reads, and of gradients that early updates follow, in the last step and so far in this
    one."""

    def __init__(self) -> None:
        self.known: list[Unit | Early] = []
        self._seen: list[Unit | Early] = []
        self._next = 0

    def begin(self) -> None:
        self.known = self._seen or self.known
        self._seen, self._next = [], 0

    def forget(self, unit: Unit) -> None:
        """Called between steps, when the unit stays on the device: nothing here keeps its home alive."""
        self.known = [need for need in self.known if need is not unit and need is not unit.early]
        self._seen = [need for need in self._seen if need is not unit and need is not unit.early]

    def reached(self, need: Unit | Early) -> Sequence[Unit | Early]:
        """Records a need and returns those expected after it, the nearest first."""
        self._seen.append(need)
        for at in range(self._next, min(self._next + LOOK_UNITS, len(self.known))):
            if self.known[at] is need:
                self._next = at + 1
                return self.known[at + 1 : at + 1 + LOOK_UNITS]
        return ()


class Reading:
    """Brings weights when they are read, and runs their due updates first."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], window: Window, updates: Updates) -> None:
        self._window = window
        self._updates = updates
        self._readers: dict[int, list[Unit]] = {}  # module, by id -> the units it reads
        self._running: list[int] = []
        self._in_step = False
        self._orders = {True: Order(), False: Order()}  # inside (True) and outside (False) training steps
        self._has_warned = False  # whether it warned that autocast keeps copies of weights
        self._last: Unit | None = None  # brought last by the backward; stays until the next one is read
        self._hooks: list[Any] = [model.register_forward_pre_hook(_Hook(self._before_model), prepend=True)]
        known = {id(unit.parameter) for unit in units}
        self._owners: dict[int, list[weakref.ref[nn.Module]]] = {}  # parameter, by id -> the modules that own it
        for module in model.modules():
            owned = [id(p) for p in module._parameters.values() if p is not None and id(p) in known]
            for parameter in owned:
                self._owners.setdefault(parameter, []).append(weakref.ref(module))
            if owned:
                before = module.register_forward_pre_hook(_Hook(self._enter), prepend=True)
                after = module.register_forward_hook(_Hook(self._leave), always_call=True)
                self._hooks += [before, after]
        for unit in units:
            self.add(unit)

    def add(self, unit: Unit) -> None:
        """Brings the unit's weight from now on whenever it is read."""
        unit.reading = self
        for mark in self._owners[id(unit.parameter)]:
            if (module := mark()) is not None:
                unit.owner = mark
                self._readers.setdefault(id(module), []).append(unit)

    def remove(self, unit: Unit) -> None:
        """Stops bringing the unit's weight, which stays on the device."""
        unit.reading = None
        for units in self._readers.values():
            units[:] = [other for other in units if other is not unit]
        for order in self._orders.values():
            order.forget(unit)

    @property
    def is_idle(self) -> bool:
        """Whether no module that reads a weight is running."""
        return not self._running

    @property
    def order(self) -> list[Unit]:
        """The order in which a step reads the units, each once."""
        return list(dict.fromkeys(need for need in self._orders[True].known if isinstance(need, Unit)))

    def begin(self) -> None:
        """Begins a training step."""
        self._in_step = True
        self._orders[True].begin()

    def end(self) -> None:
        """Ends a training step, also after an error: no copy of a weight is left on the device."""
        self._in_step, self._last = False, None
        self._orders[False].begin()
        self._running.clear()
        for units in self._readers.values():
            for unit in units:
                unit.depth = 0
                if unit.early is not None:
                    unit.early.give_up()
                self._conceal(unit)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    # -- the forward --------------------------------------------------------------------------------------------------

    def _before_model(self, model: nn.Module) -> None:
        if not self._in_step:
            self._updates.flush()  # fast paths of evaluation need ordinary parameters

    def _enter(self, module: nn.Module) -> None:
        units = self._readers.get(id(module), ())
        self._running.append(id(module))
        fresh = [unit for unit in units if unit.depth == 0 and unit.is_itself]
        for unit in units:
            unit.depth += 1
        with torch.inference_mode(False), unseen():
            due = [unit for unit in fresh if unit.due is not None]
            if due:
                self._updates.run_due(due)
            for unit in fresh:
                unit.expose()
                unit.observe()
                self._tell_watcher(unit)
            for unit in fresh:
                self._fetch_ahead(unit)
        if self._in_step and not self._has_warned and any(map(_keeps_cast, fresh)):
            self._has_warned = True
            self._warn_of_casts()

    def _warn_of_casts(self) -> None:
        units = {id(unit): unit for units in self._readers.values() for unit in units}.values()
        casts_bytes = sum(unit.weight.num_bytes // 2 for unit in units if _keeps_cast(unit))
        warnings.warn(
            f"outcore: autocast keeps copies of weights on the device until its block ends "
            f"({format_bytes(casts_bytes)}); pass cache_enabled=False to torch.autocast",
            stacklevel=2,
        )

    def _tell_watcher(self, unit: Unit) -> None:
        if (watcher := self._window.watcher) is not None:
            watcher.needs_weight(unit.number)

    def _leave(self, module: nn.Module) -> None:
        if not self._running or self._running[-1] != id(module):
            return  # its step has already ended
        self._running.pop()
        with unseen():
            for unit in self._readers.get(id(module), ()):
                unit.depth -= 1
                if unit.depth == 0:
                    self._conceal(unit)

    def _conceal(self, unit: Unit) -> None:
        """Releases the weight's copy, after sending it home if the module changed it."""
        if unit.due is not None or unit.weight.is_departing:
            return  # a departing weight is concealed when it has arrived
        if not is_watched(unit.parameter):
            unwatch(unit.parameter)
        if not unit.is_itself and not unit.adopt():
            unit.weight.drop()
        elif unit.is_changed:
            depart(unit)
        else:
            unit.conceal()

    def gradient_made(self, early: Early) -> None:
        """Fetches ahead after an early update, which no longer needs its tensors."""
        with unseen():
            self._fetch_ahead(early)

    def _fetch_ahead(self, need: Unit | Early) -> None:
        following = self._orders[self._in_step].reached(need)
        self._window.homes.pace()
        self._window.settle_over()
        is_backward = torch._C._current_autograd_node() is not None
        gradient_bytes = need.weight.num_bytes if isinstance(need, Unit) and is_backward else 0  # it is made next
        for other in following:
            unit = other if isinstance(other, Unit) else other.unit
            if unit.due is not None and unit.due.by_cpu:
                if unit.due.on_host is None or not unit.due.on_host.done():
                    break
                self._updates.run_due([unit])
            if not self._window.has_room_ahead(other.missing_bytes() + gradient_bytes):
                break
            if other.missing_bytes() and unit.reading is not None and unit.is_untouched:
                other.fetch()

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle | None:
        """Returns a handle if `tensor` is on a weight with a home."""
        unit = unit_of(tensor) if is_plain(tensor) else None
        return self.handle_of(unit, tensor) if unit is not None else None

    def handle_of(self, unit: Unit, tensor: torch.Tensor) -> Handle:
        if unit.depth == 0 and self._running:
            self._readers.setdefault(self._running[-1], []).append(unit)  # read by this module, which does not own it
            unit.depth += 1
        return Handle(self, unit, tensor)

    def unpack(self, handle: Handle) -> torch.Tensor:
        unit = handle.unit
        if unit.parameter._version != handle.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{unit.name} {tuple(unit.parameter.shape)} is at version {unit.parameter._version}; expected version "
                f"{handle.version}"
            )
        if not unit.is_itself:  # autograd would need the old data, which is gone
            raise RuntimeError(f"{unit.name} was given other data between forward and backward")
        with unseen():
            data = unit.bring()
            self._tell_watcher(unit)
            last, self._last = self._last, unit
            if last is not None and last is not unit:
                self._let_go(last)
            self._fetch_ahead(unit)
            return handle.of(data)

    def _let_go(self, unit: Unit) -> None:
        """Releases a weight; autograd holds the tensor it was given as long as it needs it."""
        if unit.depth == 0 and not unit.weight.is_departing and unit.due is None and unit.is_itself:
            unit.conceal()


def _keeps_cast(unit: Unit) -> bool:
    """Whether autocast, with its present settings, caches a cast of the weight."""
    is_on = torch.is_autocast_enabled(unit.weight.home.device.type) and torch.is_autocast_cache_enabled()
    return is_on and unit.parameter.requires_grad and unit.weight.home.dtype is torch.float32


def depart(unit: Unit) -> None:
    """Sends a weight that was changed on the device home. When it has arrived and no module reads it, it is concealed;
    if it was changed again meanwhile, it is sent again."""
    unit.version, unit.written = unit.parameter._version, False

    def arrived() -> None:
        if unit.is_changed:
            depart(unit)
        elif unit.depth == 0:
            unwatch(unit.parameter)
            unit.conceal()

    unit.window.depart(unit.weight, arrived)


class _Hook:
    """A module hook that copies and pickles of the module do not have."""

    def __init__(self, method: Callable[[nn.Module], None]) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, module: nn.Module, *args: Any) -> None:
        method = self._method()
        if method is not None:
            method(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _nothing

    def __reduce__(self) -> Any:
        return _get_nothing, ()


def _nothing(*args: Any) -> None:
    """Replaces the hook in copies of the module."""


def _get_nothing() -> Any:
    return _nothing
