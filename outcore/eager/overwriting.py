"""Saves content that is still needed before a tensor changes.

Four kinds of readers return to memory that the program can change, and each must find what plain PyTorch would use:

- A rerun needs the content at the time of its op. Before a tensor that it reads is written into, the content goes to
the
  store, and the rerun reads it from there, whether or not the write moves a version counter.
- Autograd reads a saved tensor as it is when the backward needs it, while a swapped or dropped value has the content at
  the time when it was saved. If a write moves the tensor's version counter, plain PyTorch refuses the backward, so the
  old content is sufficient. If it does not (through `x.data`), plain PyTorch uses the new content. Therefore handles of
  a tensor that was accessed in this way refer to the tensor itself before it changes, and not to a copy.
- A custom function may return an unpacked tensor as the gradient of a parameter, which autograd takes over without a
copy
  if nobody else refers to the same tensor object. In plain PyTorch the function that saved it does; here every unpacked
  tensor is a new object. So before such memory is written into, the saved content is copied.
- Memory passed to others who write without any op (NumPy, DLPack, a pointer) may change at any time afterwards. It
counts
  as written immediately, and values saved on it later stay as they are.

Storages are identified by their address together with a weak reference to the storage that was there: asking a tensor
for its storage makes autograd add gradients out of place, and most tensors that are written into are gradients.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from outcore.eager.cells import (
    Cell,
    Handle,
    Kept,
    Marks,
    Places,
    View,
    address_of,
    cells_on,
    detached,
    is_packed_from,
    state_of,
    storage_at,
    unmark,
    version_of,
    whole,
)
from outcore.eager.intercept import asked_by_function, in_backward
from outcore.eager.replaced import Replaced
from outcore.eager.replay import Away, Held
from outcore.memory.meter import see_brought
from outcore.memory.store import Store
from outcore.memory.tensors import PLAIN, Source, as_bytes, below_everything, is_plain, source_at, storage_ptr


class Contents:
    """The content that a step will read again, by address."""

    def __init__(
        self,
        store: Store,
        run: Any,
        on_copy: Callable[[torch.Tensor], None] = see_brought,
        on_taken: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> None:
        """`on_copy` receives each copy on the device. `on_taken` receives memory that a custom function unpacked and
        that others are about to write into, without a saved value on it."""
        self.marks = Marks()
        self._store = store
        self._run = weakref.ref(run)  # the run of the handles; weak, because it refers to this object
        self._on_copy, self._on_taken = on_copy, on_taken
        self.held: dict[int, list[weakref.ref[Held]]] = {}
        self._away: dict[int, list[weakref.ref[Away]]] = {}  # by the id of their source
        self._opened: Places = {}  # storages with tensors that have version counters of their own
        self.exposed: Places = {}  # storages that may be written without any op
        self._lent: dict[int, weakref.ref[Cell]] = {}  # addresses at which autograd may hold the content of a cell
        self.replaced = Replaced()
        self._handed: Places = {}  # unpacked by custom functions, which may have returned them as gradients

    def clear(self) -> None:
        self.marks.clear()
        self.held.clear()
        self._away.clear()
        self._opened.clear()
        self.exposed.clear()
        self._handed.clear()
        self._lent.clear()

    def tell_left(self) -> None:
        """Informs the run that the step has left its plan."""
        if (run := self._run()) is not None:
            run.was_left()

    def will_read(self, held: Held) -> bool:
        """Registers an external tensor that a rerun will read; returns False if it must not, because the memory may be
        written without any op, for example by NumPy."""
        address = storage_ptr(held.storage)
        self.held.setdefault(address, []).append(weakref.ref(held))
        return address not in self.exposed and held.storage.resizable()

    def will_bring(self, source: Source, tensor: torch.Tensor) -> Away:
        """Registers a weight that is not always on the device and that a rerun will read."""
        away = Away(source.pack(tensor), tensor)
        self._away.setdefault(id(source), []).append(weakref.ref(away))
        return away

    # -- events ----------------------------------------------------------------------------------

    def before_write(self, tensors: Iterable[torch.Tensor], *, silent: bool = False) -> bool:
        """Called before tensors are written into; `silent` writes do not move their version counters. Returns whether
        content was saved because somebody needs it."""
        needed = False
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
                continue
            if not (address := address_of(tensor)):
                continue  # without bytes
            if address in self._lent and (cell := self._lent.pop(address)()) is not None:
                cell.lent = None
            if address in self.held:
                needed |= self._keep_for_reruns(address)
            if address in self._handed:
                self._copy_kept(address, tensor)
            if self._away:
                needed |= self._keep_away(address, tensor)
            storage = self.marks.find(address)
            if storage is not None:
                follow = silent or storage_at(self._opened, address) is not None
                needed |= self._part(storage, View(tensor), follow=follow)
        return needed

    def open(self, storage: torch.UntypedStorage) -> None:
        """Called when somebody gets a tensor on the storage with a version counter of its own."""
        self._opened[storage_ptr(storage)] = weakref.ref(storage)

    def hand(self, tensor: torch.Tensor) -> None:
        """Called when a tensor is unpacked; notes it if a custom function receives it."""
        if asked_by_function() and is_plain(tensor):
            self._handed[address_of(tensor)] = weakref.ref(tensor.untyped_storage())

    def lend(self, cell: Cell) -> None:
        """Releases a cell whose content was unpacked for one node of the graph; until that node releases it, other
        nodes may have it, too. Custom functions do not share it, because they may write into it."""
        if not asked_by_function():
            assert cell.data is not None
            storage = cell.data.untyped_storage()
            cell.lent = weakref.ref(storage)
            self._lent[storage_ptr(storage)] = weakref.ref(cell)
        cell.let_go()

    def expose(self, storage: torch.UntypedStorage) -> bool:
        """Called before a storage may be written without any op. Returns whether content was saved for that."""
        address = storage_ptr(storage)
        needed = address in self.held and self._keep_for_reruns(address)
        if self.marks.find(address) is not None:
            needed |= self._part(storage, None, follow=True)
        self.exposed[address] = weakref.ref(storage)
        return needed

    def is_exposed(self, tensor: torch.Tensor) -> bool:
        return bool(self.exposed) and storage_at(self.exposed, address_of(tensor)) is not None

    def _is_handed(self, tensor: torch.Tensor | None) -> bool:
        return tensor is not None and storage_at(self._handed, address_of(tensor)) is not None

    def replacing(self, tensor: torch.Tensor) -> Callable[[], bool]:
        """Called before a tensor gets another storage (`x.data = ...`); the returned function is called afterwards, and
        tells whether handles follow the tensor. Reruns still read the previous storage. Autograd saves the input of an
        op itself, and then reads the new storage; of an op's output it keeps the previous one."""
        self._keep_away(address_of(tensor), tensor)
        for mark in self.held.get(address_of(tensor), ()):
            held = mark()
            if held is not None and held.tensor is tensor:
                held.tensor = detached(tensor)
        own = _saved_by(tensor.grad_fn)
        storage = self.marks.find(address_of(tensor))
        cells = cells_on(storage) if storage is not None else []
        for cell in cells:
            if cell.data is tensor:
                cell.data = detached(tensor)
        saved = [handle for cell in cells if cell.is_saved for handle in _handles_of(cell, storage, None)]
        handles = [handle for handle in saved if is_packed_from(handle, tensor) and id(handle) not in own]
        kept = self._kept_at(address_of(tensor)) if tensor.grad_fn is not None else []
        kept = [one for one in kept if is_packed_from(one, tensor) and id(one) not in own]
        note_replaced = self.replaced.begin(tensor)

        def finish() -> bool:
            for one in kept:
                one.keep(tensor)
            cell = Cell(-1, tensor)
            for handle in handles:
                cell.hold(tensor, self.marks)
                View.__init__(handle, tensor)
                handle.cell, cell.is_saved = cell, True
            note_replaced()
            return bool(handles)

        return finish

    # -- saving content ----------------------------------------------------------------------------------------

    def _keep_for_reruns(self, address: int) -> bool:
        helds = [held for held in (mark() for mark in self.held.pop(address)) if held is not None]
        helds = [held for held in helds if held.cell is None and state_of(held.tensor) == held.state]
        if not helds:
            return False
        cell = Cell(-1, helds[0].tensor)
        cell.data = helds[0].tensor
        self._put_away(cell)
        for held in helds:
            held.put_away(cell)
        return True

    def _keep_away(self, address: int, tensor: torch.Tensor) -> bool:
        """Saves the content of a weight before it changes, wherever it is."""
        source = source_at(address)
        marks = self._away.pop(id(source), ()) if source is not None else ()
        aways = [away for away in (mark() for mark in marks) if away is not None]
        if not aways:
            return False
        cell = Cell(-1, tensor)
        cell.data = detached(tensor)
        self._put_away(cell)
        for away in aways:
            away.put_away(cell)
        return True

    def kept(self) -> list[Kept]:
        """Returns the handles of tensors that stay, found among all of Python's objects (as in `_handles_of`)."""
        return [one for one in gc.get_referrers(self._run()) if type(one) is Kept]

    def _kept_at(self, address: int) -> list[Kept]:
        return [one for one in self.kept() if is_plain(one.tensor) and address_of(one.tensor) == address]

    def _copy_kept(self, address: int, written: torch.Tensor) -> None:
        """Copies kept tensors before others write into memory that a custom function received. What the function itself
        does is decided by plain PyTorch's check of versions. The plan is not left, as plain PyTorch has copied, too."""
        if storage_at(self._handed, address) is None or asked_by_function():
            return
        del self._handed[address]
        kept = [one for one in self._kept_at(address) if version_of(one.tensor) == one.version]
        if not kept:
            self._on_taken(written)
        else:
            with below_everything():
                copy = as_bytes(kept[0].tensor).clone()
                self._on_copy(copy)
                for one in kept:
                    one.keep(View(one.tensor).of(copy))

    def _part(self, storage: torch.UntypedStorage, written: View | None, *, follow: bool) -> bool:
        """Detaches a storage from its cells, which have the content before a write. With `follow`, handles refer to the
        storage from now on, and see the write."""
        cells = cells_on(storage)
        unmark(storage)
        needed, following = False, []
        for cell in cells:
            if cell.data is None and not cell.is_saved:
                continue
            is_on_it = cell.data is not None and cell.data.untyped_storage()._cdata == storage._cdata
            if is_on_it and cell.follows and not cell.is_read:
                self.marks.set(storage, weakref.ref(cell))
                continue
            if cell.is_saved:
                self.marks.note(storage, cell)
            handles = _handles_of(cell, storage, written) if follow and cell.is_saved else []
            needed |= bool(handles)
            if is_on_it and (cell.is_read or not handles):
                needed |= self._keep_content(cell)
            following += handles
        if following:
            with below_everything():
                live = whole(storage)
            cell = Cell(following[0].cell.value, live)
            cell.hold(live, self.marks)
            cell.follows = True
            for handle in following:
                handle.cell, cell.is_saved = cell, True
        return needed

    def _keep_content(self, cell: Cell) -> bool:
        """Saves the content of a cell's data before it changes. If only autograd needs it, plain PyTorch's check of
        versions decides; but in a backward, autograd may have made it a gradient without a copy."""
        if cell.parcel is not None:
            cell.parcel.wait_out()
            cell.let_go()
        elif cell.recipe is not None:
            cell.let_go()
        elif cell.is_read or (cell.is_saved and (in_backward() or self._is_handed(cell.data))):
            self._put_away(cell)
        else:
            return False
        return True

    def _put_away(self, cell: Cell) -> None:
        """Copies a cell to the store, or on the device if the store has no room."""
        assert cell.data is not None
        with below_everything():
            if cell.swap_out(self._store):
                assert cell.parcel is not None
                cell.parcel.wait_out()
                cell.data = None
            else:
                copy = cell.data = as_bytes(cell.data).clone()
                cell.held = state_of(copy)


def _saved_by(node: Any) -> set[int]:
    """Returns the ids of the handles that a node of autograd's graph saved."""
    names = [name for name in dir(node) if name.startswith("_raw_saved_")] if node is not None else []
    found: list[Any] = []
    for name in names:
        saved = getattr(node, name)
        found += saved if isinstance(saved, list | tuple) else [saved]
    return {id(one.data) for one in found if one is not None}


def _handles_of(cell: Cell, storage: torch.UntypedStorage | None, written: View | None) -> list[Handle]:
    """Returns the handles packed from this storage that the write affects. They are searched among all of Python's
    objects, because a list would cost time in every step, and this is rarely needed."""
    return [
        handle
        for handle in gc.get_referrers(cell)
        if type(handle) is Handle
        and (handle.home is None or handle.home() is storage)
        and (written is None or may_overlap(handle, written))
    ]


def may_overlap(one: View, other: View) -> bool:
    """Whether two views of a storage may share a byte. Chunks of one tensor do not, though each spans most of it."""
    first, second = sorted((one, other), key=lambda view: view.offset * view.dtype.itemsize)
    if first.end_bytes <= second.offset * second.dtype.itemsize:
        return False
    if one.dtype is not other.dtype or one.size != other.size or one.stride != other.stride:
        return True
    axes = sorted((stride, size) for size, stride in zip(one.size, one.stride) if size > 1)
    return _is_sum(int(second.offset - first.offset), axes)


def _is_sum(distance: int, axes: Sequence[tuple[int, int]]) -> bool:
    """Whether a distance is a sum of strides, each taken (forwards or backwards) less often than its axis is long. If
    so, two views with equal layouts at this distance share an element."""
    if not axes:
        return distance == 0
    *within, (stride, size) = axes
    reach = sum(step * (length - 1) for step, length in within)
    if stride <= reach:
        return True  # nobody can tell: its numbers overlap, or lie in an order of their own
    nearest = distance // stride
    return any(
        abs(times) < size and abs(distance - times * stride) <= reach and _is_sum(distance - times * stride, within)
        for times in (nearest, nearest + 1)
    )
