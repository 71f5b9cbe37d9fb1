"""Tensors at home -> copies on the device, no more of them at once than the window has room for.

An `Item` is one tensor of the training state: a weight, a gradient, or what an optimizer keeps of a parameter. It has a
home for good. `here` is its copy on the device while there is one. A copy that was changed departs: it is sent home,
and stays on the device until compute has waited for that, so that at every moment one of the two has the true bytes.
What we let go of while autograd, or anybody else, still holds a view of it counts until they let go, too.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch

from outcore.memory.home import Done, Homes


class FetchedAhead(Protocol):
    """Copies that nobody reads yet."""

    def give_up(self) -> None:
        """Lets go of them: they can be fetched again."""
        ...


class Watcher(Protocol):
    """Who wants to know what becomes of the state in a step."""

    def needs_weight(self, unit: int) -> None:
        """A weight is needed on the device."""

    def takes_gradient(self, unit: int, gradient: torch.Tensor) -> None:
        """A gradient that the step has made is on its way home, and counts here from now on."""


class Window:
    """What the state holds on the device, what of it is on its way home, and what was fetched ahead."""

    def __init__(self, homes: Homes, limit_bytes: int) -> None:
        self.homes = homes
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self.is_lean = False  # nothing is fetched ahead
        self.watcher: Watcher | None = None  # of the step that is being recorded
        self._held_bytes = 0
        self._lingering: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.ahead: dict[FetchedAhead, None] = {}  # what was fetched last is needed last, and given up first
        self._departures: deque[tuple[Item, Callable[[], None]]] = deque()

    @property
    def used_bytes(self) -> int:
        if self._lingering:
            self._lingering = [(storage, size) for storage, size in self._lingering if storage() is not None]
        return self._held_bytes + sum(size for _, size in self._lingering)

    def has_room(self, num_bytes: int) -> bool:
        return self.used_bytes + num_bytes <= self.limit_bytes

    def has_room_ahead(self, num_bytes: int) -> bool:
        """For what nobody reads yet."""
        return not self.is_lean and self.has_room(num_bytes)

    def make_room(self, num_bytes: int) -> None:
        """Waits for departures, the oldest first, and then gives up what was fetched ahead, until `num_bytes` more find
        room, or nothing is left."""
        self.settle_over()
        while self._departures and not self.has_room(num_bytes):
            self._settle()
        while self.ahead and not self.has_room(num_bytes):
            self.ahead.popitem()[0].give_up()

    def clear(self) -> None:
        """Nothing is on its way any more, and nothing fetched ahead."""
        self.settle_all()
        while self.ahead:
            self.ahead.popitem()[0].give_up()

    def note(self, num_bytes: int) -> None:
        self._held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)

    def let_go(self, copy: torch.Tensor, num_bytes: int) -> None:
        """Of a copy, which others may hold."""
        storage = copy.untyped_storage()
        if num_users(storage) > 1:
            self._lingering.append((weakref.ref(storage), num_bytes))
        self._held_bytes -= num_bytes

    def depart(self, item: Item, then: Callable[[], None]) -> None:
        """Sends an item home. `then` runs when compute has waited for it, before the copy on the device goes."""
        item.send()
        self._departures.append((item, then))

    def settle_over(self) -> None:
        """Lets go of what has arrived at home. Compute does not wait for it."""
        while self._departures and self._departures[0][0].has_departed:
            self._settle()

    def settle_all(self) -> None:
        while self._departures:
            self._settle()

    def settle(self, item: Item) -> None:
        """Waits for one item, and for what departed before it."""
        while any(departing is item for departing, _ in self._departures):
            self._settle()

    def call_back(self, item: Item) -> None:
        """An item on its way home stays on the device: it is not ours any more, and what is at home is worthless."""
        self._departures = deque(departure for departure in self._departures if departure[0] is not item)
        item.finish()
        item.drop()

    def _settle(self) -> None:
        item, then = self._departures.popleft()
        item.finish()
        then()


def num_users(storage: torch.UntypedStorage) -> int:
    """Tensors on a storage, one that was just made for the question not counted."""
    count: Any = torch._C._storage_Use_Count
    return int(count(storage._cdata)) - 1  # less the storage's Python object


class Item:
    """One tensor of the training state: at home, on the device, or on its way."""

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
        """Starts the copy to the device, unless one is there."""
        if self.here is None:
            self.window.make_room(self.num_bytes)
            self.here, self._arrival = self.window.homes.fetch(self.home)
            self.window.note(self.num_bytes)

    def arrive(self) -> torch.Tensor:
        """The copy on the device, ready to be read."""
        self.fetch()
        self._wait_for_arrival()
        assert self.here is not None
        return self.here

    def hold(self, tensor: torch.Tensor) -> None:
        """Takes a tensor of the device as the copy: what compute has just made."""
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
        """The copy on the device is that of another item from now on, which has its home elsewhere."""
        self._wait_for_arrival()
        other = Item(self.window, home)
        other.here, self.here = self.here, None
        return other

    def finish(self) -> None:
        """What compute does from here on finds the true bytes at home."""
        if self._departure is not None:
            self.window.homes.wait(self._departure)
            self.window.homes.forget(self._departure)
            self._departure = None

    def drop(self) -> None:
        """Lets go of the copy on the device. Home has the true bytes."""
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
