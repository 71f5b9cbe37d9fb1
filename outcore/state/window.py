"""Copies of the training state on the device, limited to the size of the window.

An `Item` is one tensor of the training state: a weight, a gradient, or a tensor of the optimizer's state. It has a
permanent home, and `here` is its copy on the device while there is one. A changed copy departs: it is sent home, and
stays on the device until compute has waited for the transfer, so that one of the two always has the current bytes. A
released copy of which autograd, or anybody else, still holds a view counts until the view is released.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from outcore.memory.home import Done, Homes


class FetchedAhead(Protocol):
    """Copies on the device that nobody reads yet."""

    def give_up(self) -> None:
        """Releases the copies; they can be fetched again."""
        ...


class Watcher(Protocol):
    """Is informed of what happens to the state in a step."""

    def needs_weight(self, unit: int) -> None:
        """Called when a weight is needed on the device."""

    def takes_gradient(self, unit: int, gradient: torch.Tensor) -> None:
        """Called when a gradient is sent home; from then on its bytes count in the window."""


class Window:
    """The state's copies on the device, those on their way home, and those fetched ahead."""

    def __init__(self, homes: Homes, limit_bytes: int) -> None:
        self.homes = homes
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.is_lean = False  # whether nothing is fetched ahead
        self.watcher: Watcher | None = None  # of the step that is being recorded
        self._held_bytes = 0
        self._lingering: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.ahead: dict[FetchedAhead, None] = {}  # the last one fetched is needed last and given up first
        self._departures: deque[tuple[Item, Callable[[], None]]] = deque()

    @property
    def used_bytes(self) -> int:
        if self._lingering:
            self._lingering = [(storage, size) for storage, size in self._lingering if storage() is not None]
        return self._held_bytes + sum(size for _, size in self._lingering)

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.limit_bytes

    def has_room_ahead(self, num_bytes: int) -> bool:
        """Whether there is room for a copy that nobody reads yet."""
        return not self.is_lean and self.has_room(num_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Makes room for `num_bytes` more, as far as possible: first waits for departures, the oldest first, then gives
        up what was fetched ahead."""
        self.settle_over()
        while self._departures and not self.has_room(num_bytes):
            self._settle()
        while self.ahead and not self.has_room(num_bytes):
            self.ahead.popitem()[0].give_up()

    def clear(self) -> None:
        """Waits for all departures and gives up everything that was fetched ahead."""
        self.settle_all()
        while self.ahead:
            self.ahead.popitem()[0].give_up()

    def note(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def let_go(self, copy: torch.Tensor, num_bytes: int) -> None:
        """Releases a copy, of which others may still hold views."""
        storage = copy.untyped_storage()
        if num_users(storage) > 1:
            self._lingering.append((weakref.ref(storage), num_bytes))
        self._held_bytes -= num_bytes

    def depart(self, item: Item, then: Callable[[], None]) -> None:
        """Sends an item home. `then` runs after compute has waited for it, before the copy on the device is
        released."""
        item.send()
        self._departures.append((item, then))

    def settle_over(self) -> None:
        """Finishes departures that have reached home, without making compute wait."""
        while self._departures and self._departures[0][0].has_departed:
            self._settle()

    def settle_all(self) -> None:
        while self._departures:
            self._settle()

    def settle(self, item: Item) -> None:
        """Waits for one item, and for all that departed before it."""
        while any(departing is item for departing, _ in self._departures):
            self._settle()

    def call_back(self, item: Item) -> None:
        """Cancels the departure of an item whose copy stays on the device with its new owner; home is outdated."""
        self._departures = deque(departure for departure in self._departures if departure[0] is not item)
        item.finish()
        item.drop()

    def _settle(self) -> None:
        item, then = self._departures.popleft()
        item.finish()
        then()


def num_users(storage: torch.UntypedStorage) -> int:
    """Returns the number of tensors on a storage, without the tensor that was created for this call."""
    count: Any = torch._C._storage_Use_Count
    return int(count(storage._cdata)) - 1  # without the storage's Python object


class Item:
    """One tensor of the training state: at home, on the device, or in transfer."""

    __slots__ = ("_arrival", "_departure", "here", "home", "window")

    def __init__(self, window: Window, home: torch.Tensor) -> None:
        self.window = window
        self.home = home
        self.here: torch.Tensor | None = None
        self._arrival: Done | None = None
        self._departure: Done | None = None

    @property
    def num_bytes(self) -> int:
        return self.home.numel() * self.home.dtype.itemsize

    def fetch(self) -> None:
        """Starts the copy to the device, unless there is one."""
        if self.here is None:
            self.window.make_room(self.num_bytes)
            self.here, self._arrival = self.window.homes.fetch(self.home)
            self.window.note(self.num_bytes)

    def arrive(self) -> torch.Tensor:
        """Returns the copy on the device, ready to be read."""
        self.fetch()
        self._wait_for_arrival()
        assert self.here is not None
        return self.here

    def hold(self, tensor: torch.Tensor) -> None:
        """Makes `tensor`, which compute has just written, the copy on the device."""
        assert self.here is None, "a copy of it is on the device"
        self.here = tensor
        self.window.note(self.num_bytes)

    def send(self) -> None:
        assert self.here is not None
        self._wait_for_arrival()
        self._departure = self.window.homes.send(self.here, self.home)

    @property
    def is_departing(self) -> bool:
        return self._departure is not None

    @property
    def has_departed(self) -> bool:
        return self._departure is None or self.window.homes.is_over(self._departure)

    def hand_over(self, home: torch.Tensor) -> Item:
        """Moves the copy on the device to a new item, whose home is elsewhere."""
        self._wait_for_arrival()
        other = Item(self.window, home)
        other.here, self.here = self.here, None
        return other

    def finish(self) -> None:
        """Makes compute wait for the departure, so that later work finds the current bytes at home."""
        if self._departure is not None:
            self.window.homes.wait(self._departure)
            self.window.homes.forget(self._departure)
            self._departure = None

    def drop(self) -> None:
        """Releases the copy on the device; home has the current bytes."""
        assert self._departure is None, "it is on its way home"
        if self.here is not None:
            self._wait_for_arrival()
            self.window.let_go(self.here, self.num_bytes)
            self.here = None

    def _wait_for_arrival(self) -> None:
        if self._arrival is not None:
            self.window.homes.wait(self._arrival)
            self.window.homes.forget(self._arrival)
            self._arrival = None
