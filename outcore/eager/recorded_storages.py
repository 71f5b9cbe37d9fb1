"""The storages and values of a recorded step, numbered, with their lifetimes in slots.

A storage carries a mark with its number. Storages that exist before the step are marked in advance, without a number; a
storage without a mark, when the recorder first sees it, was made by something other than an op.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from outcore.memory.device import DeviceMemory
from outcore.memory.tensors import Source, is_plain, source_of
from outcore.values import Storage, Value

_MARK, _WATCH = "_outcore_recorded", "_outcore_watched"


class RecordedStorage:
    """A storage being recorded."""

    __slots__ = ("born", "bytes", "current", "dies", "external", "movable", "num_versions")

    def __init__(self, num_bytes: int, born: int, *, external: bool, movable: bool) -> None:
        self.bytes = num_bytes
        self.born = born
        self.dies = -1
        self.external = external
        self.movable = movable
        self.current = -1  # the value of its newest version
        self.num_versions = 0


class RecordedStorages:
    """The storages and values of one recorded step. `slot` is the step's clock: the running op or tick."""

    def __init__(
        self,
        there: Iterable[torch.UntypedStorage],
        memory: DeviceMemory,
        is_exposed: Callable[[torch.Tensor], bool],
        beside: Callable[[], int],
    ) -> None:
        """`there`: the storages that exist before the step. `is_exposed`: whether a tensor's memory may be written
        without any op. `beside`: bytes on the device that others account for."""
        self.slot = -1
        self._beside = beside
        self._watched: dict[int, int] = {}  # storage -> the number of its reference
        self._of_sources: dict[Source, int] = {}  # source of tensors that come and go -> number of the storage
        self.values: list[Value] = []
        self._own_bytes = 0
        self.exposed: set[int] = set()  # storages that may be written without any op
        self._memory, self._device_type = memory, memory.device.type
        self._is_exposed = is_exposed
        self._storages: list[RecordedStorage] = []
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next_ref = 0
        self._serial = object()
        for storage in there:
            storage.__dict__[_MARK] = (self._serial, None)

    @property
    def live_bytes(self) -> int:
        """The bytes on the device beyond those of before the step."""
        return self._own_bytes + self._beside()

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether its storage is one of the step's, or existed before."""
        mark = tensor.untyped_storage().__dict__.get(_MARK)
        return mark is not None and mark[0] is self._serial

    def number_of(self, tensor: torch.Tensor) -> int:
        """Returns the number of a tensor's storage; an unknown storage gets the next number."""
        known = self.knows(tensor)
        if known and (number := tensor.untyped_storage().__dict__[_MARK][1]) is not None:
            return int(number)
        if (source := source_of(tensor)) is not None:
            return self._number_from(source, tensor)
        here = tensor.device.type == self._device_type
        return self._add(tensor, external=known or not here, producer=-1)

    def number_all(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is torch.strided:
                self.number_of(tensor)

    def _number_from(self, source: Source, tensor: torch.Tensor) -> int:
        """Returns the number of a weight, which is the same wherever it is; it existed before the step."""
        number = self._of_sources.get(source)
        if number is None:
            number = self._of_sources[source] = len(self._storages)
            num_bytes = tensor.untyped_storage().nbytes()
            self._storages.append(RecordedStorage(num_bytes, max(self.slot, 0), external=True, movable=False))
            self._add_value(number, -1)
        tensor.untyped_storage().__dict__[_MARK] = (self._serial, number)
        return number

    def value_of(self, tensor: torch.Tensor) -> int:
        """Returns the value that a tensor is a view of."""
        return self._storages[self.number_of(tensor)].current

    def storage_of(self, value: int) -> RecordedStorage:
        return self._storages[self.values[value].storage]

    def count_bytes(self, tensor: torch.Tensor) -> int:
        """Returns the bytes of its storage, as the allocator counts them."""
        if tensor.device.type != self._device_type or tensor._is_zerotensor():  # a zero tensor has bytes but no memory
            return 0
        return self._memory.block_bytes(tensor.untyped_storage().nbytes())

    # -- new storages, and new versions of known ones -----------------------------------------------------------------

    def add_made(self, tensor: torch.Tensor, producer: int) -> int:
        """Returns the value of a tensor that an op made, on a new storage."""
        return self._storages[self._add(tensor, external=False, producer=producer)].current

    def add_version(self, tensor: torch.Tensor, producer: int) -> int:
        """Returns the value of the next version of a tensor's storage, which was written into."""
        return self._add_value(self.number_of(tensor), producer)

    def add_without_storage(self) -> int:
        """Returns a value for a tensor without storage, such as a sparse one, which is never moved."""
        self._storages.append(RecordedStorage(0, self.slot, external=True, movable=False))
        return self._add_value(len(self._storages) - 1, -1)

    def _add(self, tensor: torch.Tensor, *, external: bool, producer: int) -> int:
        storage = tensor.untyped_storage()
        number = len(self._storages)
        movable = is_plain(tensor) and tensor.device.type == self._device_type
        added = RecordedStorage(self.count_bytes(tensor), max(self.slot, 0), external=external, movable=movable)
        self._storages.append(added)
        storage.__dict__[_MARK] = (self._serial, number)
        if self._is_exposed(tensor) or not storage.resizable():
            added.movable = False
            self.exposed.add(number)
        if not external:
            self._watched[number] = self._watch(storage, added.bytes, partial(self._ended, added))
        self._add_value(number, producer)
        return number

    def _add_value(self, number: int, producer: int) -> int:
        storage = self._storages[number]
        self.values.append(Value(number, storage.num_versions, producer))
        storage.num_versions += 1
        storage.current = len(self.values) - 1
        return storage.current

    # -- lifetimes -------------------------------------------------------------------------------------------

    def _watch(self, storage: torch.UntypedStorage, num_bytes: int, on_death: Callable[[], None]) -> int:
        number, self._next_ref = self._next_ref, self._next_ref + 1
        self._own_bytes += num_bytes
        self._refs[number] = weakref.ref(storage, partial(self._died, number, num_bytes, on_death))
        return number

    def _died(self, number: int, num_bytes: int, on_death: Callable[[], None], _: object) -> None:
        if self._refs.pop(number, None) is not None:
            self._own_bytes -= num_bytes
            on_death()

    def _ended(self, storage: RecordedStorage) -> None:
        storage.dies = self.slot

    def watch_brought(self, storage: torch.UntypedStorage, value: int, on_death: Callable[[int], None]) -> None:
        """Tracks the data of a value that is on the device again, in another storage. `on_death` receives the last slot
        in which it exists."""
        number = self.values[value].storage
        storage.__dict__[_MARK] = (self._serial, number)
        num_bytes = self._storages[number].bytes
        watched = self._watch(storage, num_bytes, lambda: on_death(self.slot))
        storage.__dict__[_WATCH] = watched, num_bytes, on_death

    def give_over(self, tensor: torch.Tensor) -> None:
        """Assigns the memory of a value that was brought back to the value that a launch is about to make."""
        marks = tensor.untyped_storage().__dict__
        marks.pop(_MARK, None)
        number, num_bytes, on_death = marks.pop(_WATCH, (-1, 0, None))
        if self._refs.pop(number, None) is not None:
            self._own_bytes -= num_bytes
            on_death(self.slot - 1)  # the new value begins with the launch

    def take(self, tensor: torch.Tensor) -> int:
        """Stops counting a tensor's memory, which others account for from now on. Returns the number of its storage, or
        -1 if the step did not make it."""
        mark: Any = tensor.untyped_storage().__dict__.get(_MARK)
        number = mark[1] if mark is not None and mark[0] is self._serial and mark[1] is not None else -1
        if self._refs.pop(self._watched.pop(number, -1), None) is not None:
            self._own_bytes -= self._storages[number].bytes
            self._storages[number].dies = self.slot
        return int(number)

    def expose(self, storage: torch.UntypedStorage) -> None:
        """Makes a storage immovable, because it may be written without any op from now on."""
        mark: Any = storage.__dict__.get(_MARK)
        if mark is not None and mark[0] is self._serial and mark[1] is not None:
            self._storages[mark[1]].movable = False
            self.exposed.add(mark[1])

    def close(self) -> None:
        self._refs.clear()

    def finish(self, last_slot: int) -> tuple[Storage, ...]:
        return tuple(
            Storage(s.bytes, s.born, last_slot if s.dies < 0 else s.dies, s.external, s.movable) for s in self._storages
        )
