"""A parameter with a home: its weight, its gradient and its optimizer state as items of the window.

While they are not used, `parameter.data`, `parameter.grad` and the tensors in `optimizer.state` are the tensors at
home. While a module reads the weight, `parameter.data` is the copy on the device. Either has the current bytes.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import nn

from outcore.memory.home import Tier, is_at_home, tier_of
from outcore.memory.tensors import data_of, is_plain, set_data, set_source, source_of
from outcore.state.gradient import Gradient
from outcore.state.settings import STATE
from outcore.state.watched import is_held, is_watched, num_users, observe, touch, unwatch, watch
from outcore.state.window import Item, Window

if TYPE_CHECKING:
    from outcore.state.optimizers import Substep

TEMPORARIES = 2  # tensors of the weight's size that an unfused update allocates (from torch's Adam)
SMALL_BYTES = STATE.small_bytes


class Due(NamedTuple):
    """An update that was requested and has not run yet."""

    substep: Substep
    group: int
    as_a_whole: bool  # not in spans of the parameter
    more_bytes: int  # bytes on the device while it runs, besides those fetched ahead
    by_cpu: bool = False  # the CPU runs it at home
    on_host: Future[dict[str, Any]] | None = None  # the optimizer's state afterwards, if the CPU has begun


class RanEarly(Protocol):
    """An update that has run, or may run, before it is requested (`outcore.state.early`)."""

    @property
    def is_pending(self) -> bool:
        """Whether it has run and was not requested yet."""
        ...

    def void(self) -> None:
        """Discards its results."""
        ...

    def give_up(self) -> None:
        """Releases what was fetched ahead for it."""
        ...


class Reader(Protocol):
    """Brings weights to the device when they are read."""

    def handle_of(self, unit: Unit, tensor: torch.Tensor) -> Any: ...


class Unit:
    """One parameter with its weight, gradient and optimizer state, on the device or at home."""

    __slots__ = (
        "__weakref__",
        "depth",
        "due",
        "early",
        "gradient",
        "kept",
        "name",
        "number",
        "owner",
        "parameter",
        "reading",
        "version",
        "was_at_home",
        "weight",
        "window",
        "written",
    )

    def __init__(
        self, name: str, parameter: nn.Parameter, window: Window, number: int = 0, tier: Tier | None = None
    ) -> None:
        self.name, self.number = name, number
        self.was_at_home = is_at_home(parameter)  # the user's own choice
        self.parameter = parameter
        self.window = window
        self.weight = Item(
            window, data_of(parameter) if is_at_home(parameter) else moved_home(window, data_of(parameter), tier)
        )
        set_data(parameter, self.weight.home)
        self.mark(self.weight.home)
        self.gradient: Gradient | None = None
        self.kept: dict[str, Item] = {}  # the large tensors of the optimizer's state
        self.due: Due | None = None  # the update that has not run yet
        self.early: RanEarly | None = None  # set if the plan has its updates in the backward
        self.owner: weakref.ref[nn.Module] | None = None  # the module that reads it
        self.reading: Reader | None = None  # brings it to the device
        self.depth = 0  # number of modules that are reading it
        self.version = 0  # the parameter's version when the copy was made
        self.written = False  # whether it may have been written since without a version change

    @property
    def tier(self) -> Tier | None:
        """Where its home is."""
        return tier_of(self.weight.home)

    def mark(self, data: torch.Tensor) -> None:
        """Marks a storage as the weight's, so that tensors saved by autograd are recognised."""
        set_source(data.untyped_storage(), self)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns the handle that replaces the weight, or a view of it, while the weight may be at home."""
        assert self.reading is not None
        return self.reading.handle_of(self, tensor)

    # -- the weight ---------------------------------------------------------------------------------------------------

    def bring(self) -> torch.Tensor:
        """Returns the weight's copy on the device."""
        self.window.ahead.pop(self, None)
        if self.weight.here is not None and not self.is_exposed and self.parameter._version != self.version:
            self.give_up()  # it was written into at home after it was fetched
        self.fetch_weight()
        data = self.weight.arrive()
        self.mark(data)
        return data

    def fetch_weight(self) -> None:
        """Starts the copy to the device. If the parameter is accessed at home meanwhile, the copy is discarded."""
        if self.weight.here is None:
            if self.is_training and not is_watched(self.parameter):
                watch(self.parameter, self.on_touch)
            self.version = self.parameter._version
            self.weight.fetch()

    @property
    def is_training(self) -> bool:
        """Whether the parameter may have another class: modules in eval mode have fast paths for plain ones only."""
        owner = self.owner() if self.owner is not None else None
        return owner is None or owner.training

    def on_touch(self) -> None:
        """Discards the copy and early results, because the weight at home may be written."""
        if self.early is not None:
            self.early.void()
        unwatch(self.parameter)
        self.weight.drop()

    def expose(self) -> None:
        """Makes the copy on the device the parameter's data."""
        data = self.bring()
        if self.early is not None:
            self.early.void()
        unwatch(self.parameter)
        self.version, self.written = self.parameter._version, False
        set_data(self.parameter, data)

    def observe(self) -> None:
        """Records writes to the exposed weight that its version counter misses."""
        if self.is_training:
            observe(self.parameter, self._on_hidden)

    def _on_hidden(self) -> None:
        self.written = True

    def conceal(self) -> None:
        """Makes home the parameter's data again and releases the copy."""
        if self.is_exposed:
            set_data(self.parameter, self.weight.home)
        elif not self.is_pending:
            unwatch(self.parameter)
        self.weight.drop()

    @property
    def is_pending(self) -> bool:
        """Whether the parameter is watched for an update that is due, or for one that has run early."""
        return self.due is not None or (self.early is not None and self.early.is_pending)

    def show_home(self) -> None:
        """Makes a new home the parameter's data."""
        set_data(self.parameter, self.weight.home)
        self.mark(self.weight.home)

    def adopt(self) -> bool:
        """Accepts other data that the parameter was given as the copy on the device.

        Returns False unless it has the weight's layout and is not shared.
        """
        data, home = data_of(self.parameter), self.weight.home
        alike = data.dtype == home.dtype and data.size() == home.size() and data.stride() == home.stride()
        if not alike or not can_move(data, home.device) or num_users(data) > 2:  # the parameter's and this one
            return False
        self.weight.drop()
        self.window.make_room(self.weight.num_bytes)
        self.weight.hold(data)
        self.version = -1
        return True

    @property
    def is_changed(self) -> bool:
        """Whether the copy may differ from home."""
        return self.is_exposed and (self.written or self.parameter._version != self.version)

    @property
    def is_exposed(self) -> bool:
        here = self.weight.here
        return here is not None and not is_watched(self.parameter) and _is_on(self.parameter, here)

    @property
    def is_itself(self) -> bool:
        """Whether the parameter still has its own data, and was not given other data (`p.data = ...`,
        `model.half()`)."""
        return is_watched(self.parameter) or _is_on(self.parameter, self.weight.home) or self.is_exposed

    @property
    def is_untouched(self) -> bool:
        """Whether the weight at home can only be written through the parameter."""
        return is_watched(self.parameter) or (
            _is_on(self.parameter, self.weight.home) and num_users(self.weight.home) <= 2  # the parameter and the item
        )

    # -- the gradient -------------------------------------------------------------------------------------------------

    @property
    def has_gradient_at_home(self) -> bool:
        """Whether the parameter's gradient is the one at home, and not one that the user assigned."""
        return self.gradient is not None and self.parameter.grad is self.gradient.shown

    def show_gradient(self) -> None:
        """Makes the gradient at home the parameter's gradient."""
        assert self.gradient is not None
        self.parameter.grad = self.gradient.shown
        self.gradient.watch()

    # -- everything ---------------------------------------------------------------------------------------------------

    def items(self) -> list[Item]:
        """Returns what is fetched ahead to read the weight: the weight, and the tensors of a due update."""
        if self.due is None or self.gradient is None or not self.due.as_a_whole:
            return [self.weight]
        return [self.weight, self.gradient, *self.kept.values()]

    def missing_bytes(self) -> int:
        """Returns the bytes needed to fetch the items ahead, and to run a due update."""
        more_bytes = self.due.more_bytes if self.due is not None else 0
        return more_bytes + sum(item.num_bytes for item in self.items() if item.here is None)

    def fetch(self) -> None:
        """Starts the copies of all items ahead of their use."""
        self.fetch_weight()
        for item in self.items():
            item.fetch()
        self.window.ahead[self] = None

    def give_up(self) -> None:
        if not self.is_exposed and not self.weight.is_departing:
            for item in self.items():
                item.drop()
            if not self.is_pending:
                unwatch(self.parameter)

    def is_held(self, state_of: Callable[[nn.Parameter], dict[str, Any]]) -> bool:
        """Whether somebody holds a view of a tensor that its updates change."""
        state = state_of(self.parameter)
        return (
            num_users(self.weight.home) > 2  # those of the parameter and the item
            or any(is_held(item.home, num_own=1) or num_users(item.home) > 1 for item in self.kept.values())  # state
            or sys.getrefcount(state) > 3  # the optimizer's, this one, and that of getrefcount
        )

    def temporary_bytes(self, settings: dict[str, Any]) -> int:
        """Returns the bytes that an update with these settings allocates and frees again."""
        return 0 if settings.get("fused") else TEMPORARIES * self.weight.num_bytes

    def take_over(self, state: dict[str, Any]) -> None:
        """Gives the large tensors in `state` a home if they have none, because they may have been loaded or replaced.
        `state` then holds the tensors at home."""
        for name in [name for name in self.kept if name not in state]:
            del self.kept[name]
        for name, kept in state.items():
            item = self.kept.get(name)
            if item is not None and kept is item.home:
                continue
            if can_move(kept, self.parameter.device):
                self.kept[name] = Item(
                    self.window, kept if is_at_home(kept) else moved_home(self.window, kept, self.tier)
                )
                state[name] = self.kept[name].home
            elif item is not None:
                del self.kept[name]

    def bring_back(self) -> None:
        """Makes weight and gradient ordinary tensors on the device again, which are no longer watched."""
        if self.is_itself:
            self.conceal()
            set_data(self.parameter, self.weight.home.clone())
        self.weight.drop()
        if self.has_gradient_at_home and self.gradient is not None:
            self.parameter.grad = self.gradient.shown.clone()

    def leave_at_home(self) -> None:
        """Leaves weight and gradient at home, where the user had put the weight, no longer watched."""
        if self.is_itself:
            self.conceal()
        self.weight.drop()
        if self.has_gradient_at_home and self.gradient is not None:
            touch(self.gradient.shown)  # applies scalings that were put off


def unit_of(tensor: torch.Tensor) -> Unit | None:
    """Returns the unit whose weight a tensor is on, or None."""
    unit: Unit | None = source_of(tensor)
    return unit


def can_move(tensor: Any, device: torch.device) -> bool:
    """Whether a tensor of the device is large enough for a home, and dense on a storage of its own."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.device == device
        and is_plain(tensor)
        and tensor.numel() * tensor.dtype.itemsize >= SMALL_BYTES
        and is_dense(tensor)
        and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.dtype.itemsize
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps and overlaps."""
    expected = 1
    for stride, side in sorted(zip(tensor.stride(), tensor.shape)):
        if side != 1:
            if stride != expected:
                return False
            expected *= side
    return True


def rehome(unit: Unit, tier: Tier) -> None:
    """Moves the bytes of a unit, of which nothing is on the device, to another tier. Its tensors stay the objects they
    are."""
    homes = unit.window.homes
    gradient = unit.gradient
    for item in (unit.weight, *unit.kept.values(), *([gradient] if gradient is not None else [])):
        new = homes.empty_like(item.home, tier=tier)
        homes.fill(new, item.home)
        set_data(item.home, data_of(new))
    if gradient is not None:
        set_data(gradient.shown, data_of(gradient.home))
    unit.show_home()


def moved_home(window: Window, tensor: torch.Tensor, tier: Tier | None = None) -> torch.Tensor:
    """Returns a tensor at home with the content of `tensor`."""
    home = window.homes.empty_like(tensor, tier=tier)
    done = window.homes.send(tensor.detach(), home)
    window.homes.wait(done)
    window.homes.forget(done)
    return home


def _is_on(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are on the same storage, without reporting an access."""
    with torch._C.DisableTorchFunctionSubclass():
        return bool(tensor.untyped_storage()._cdata == other.untyped_storage()._cdata)
