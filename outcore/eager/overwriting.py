"""A tensor that is about to change -> what somebody still needs of it is put away first.

Readers of four kinds come back to memory that the program can change, and each must find what plain PyTorch would use:

- A rerun needs what was there when its op ran. Before a tensor that it reads is written into, the content goes to the
  store, and the rerun reads that. Whether the write moves a version counter does not matter.
- Autograd sees a saved tensor as it is when the backward asks for it. What was swapped out or dropped is a copy of what
  was there when it was saved. A write that moves the tensor's version counter makes plain PyTorch refuse the backward,
  and the copy is as good as that; one that does not, through `x.data`, is seen. So handles of a tensor that was opened
  in this way are given the tensor itself before it changes, and no copy.
- What a custom function gets back it may hand on as the gradient of a parameter, and autograd takes that over without a
  copy where nobody else refers to the same tensor object. In plain PyTorch whoever saved it does; here every unpacked
  tensor is an object of its own. So before such memory is written into, what was saved of it is copied.
- Memory that was handed to somebody who writes without any op (NumPy, DLPack, a pointer) may change at any time from
  then on: it counts as written at once, and what is saved of it later is kept as it is.

Storages are told apart by their address, together with a weak reference to the storage that lay there: to ask a tensor
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
    """What a step will read again, by where it lies."""

    def __init__(
        self,
        store: Store,
        run: Any,
        on_copy: Callable[[torch.Tensor], None] = see_brought,
        on_taken: Callable[[torch.Tensor], None] = lambda tensor: None,
    ) -> None:
        """`on_copy` is told of each copy on the device. `on_taken`: of memory that a custom function got back and that
        is about to be written into by others, where nothing saved lies in it."""
        self.marks = Marks()
        self._store = store
        self._run = weakref.ref(run)  # of which handles are: it refers to this
        self._on_copy, self._on_taken = on_copy, on_taken
        self.held: dict[int, list[weakref.ref[Held]]] = {}
        self._away: dict[int, list[weakref.ref[Away]]] = {}  # by the id of who brings them
        self._opened: Places = {}  # there are tensors on these storages that have version counters of their own
        self.exposed: Places = {}  # somebody may write into these without any op
        self._lent: dict[int, weakref.ref[Cell]] = {}  # where autograd may have the content of a cell at the moment
        self.replaced = Replaced()
        self._handed: Places = {}  # custom functions got these back, and may have made gradients of them

    def clear(self) -> None:
        self.marks.clear()
        self.held.clear()
        self._away.clear()
        self._opened.clear()
        self.exposed.clear()
        self._handed.clear()
        self._lent.clear()

    def tell_left(self) -> None:
        """The step has left its plan."""
        if (run := self._run()) is not None:
            run.was_left()

    def will_read(self, held: Held) -> bool:
        """A rerun will read a tensor that was there before the step. False: it must not, because somebody may write
        into it without any op: NumPy, say, or whoever the memory is from."""
        address = storage_ptr(held.storage)
        self.held.setdefault(address, []).append(weakref.ref(held))
        return address not in self.exposed and held.storage.resizable()

    def will_bring(self, source: Source, tensor: torch.Tensor) -> Away:
        """A rerun will read a weight that is not on the device all the time."""
        away = Away(source.pack(tensor), tensor)
        self._away.setdefault(id(source), []).append(weakref.ref(away))
        return away

    # -- what can happen to a tensor ----------------------------------------------------------------------------------

    def before_write(self, tensors: Iterable[torch.Tensor], *, silent: bool = False) -> bool:
        """These are about to be written into, without moving their version counters if the write is silent. True:
        somebody needed what was there, and it was put away."""
        needed = False
        for tensor in tensors:
            if type(tensor) not in PLAIN or tensor.layout is not torch.strided or tensor.is_nested:
                continue
            if not (address := address_of(tensor)):
                continue  # it has no bytes
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
        """Somebody gets a tensor on it with a version counter of its own."""
        self._opened[storage_ptr(storage)] = weakref.ref(storage)

    def hand(self, tensor: torch.Tensor) -> None:
        """It is unpacked. Who asks for it is looked up here."""
        if asked_by_function() and is_plain(tensor):
            self._handed[address_of(tensor)] = weakref.ref(tensor.untyped_storage())

    def lend(self, cell: Cell) -> None:
        """What was brought for one node of the graph goes with it, and until then another one may have it, too. A
        custom function has its own: it may write into that."""
        if not asked_by_function():
            assert cell.data is not None
            storage = cell.data.untyped_storage()
            cell.lent = weakref.ref(storage)
            self._lent[storage_ptr(storage)] = weakref.ref(cell)
        cell.let_go()

    def expose(self, storage: torch.UntypedStorage) -> bool:
        """Somebody may write into it without any op, from now on. True: something was put away for that."""
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
        """A tensor is about to get another storage (`x.data = ...`). Reruns go on reading the one it has. Autograd
        saved the tensor itself where it was the input of an op, and sees the other one then; of an op's output it saved
        what lay below. What is returned is called when the tensor has the other one. True: handles follow it."""
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

    # -- what is done about it ----------------------------------------------------------------------------------------

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
        """A weight is about to change, wherever it is at the moment."""
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
        """The handles of what stays, found by looking through all that Python holds, as below."""
        return [one for one in gc.get_referrers(self._run()) if type(one) is Kept]

    def _kept_at(self, address: int) -> list[Kept]:
        return [one for one in self.kept() if is_plain(one.tensor) and address_of(one.tensor) == address]

    def _copy_kept(self, address: int, written: torch.Tensor) -> None:
        """What a function does to the memory it gets back is its own affair: plain PyTorch's check of versions decides
        about that. What is done to a gradient is not. No plan is left for it: plain PyTorch has copied by now, too."""
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
        """A storage stops standing for its cells, which are what was there. Handles follow the storage if they shall,
        and see what is written."""
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
        """Its data is about to change. Where autograd alone asks for it, plain PyTorch's check of versions decides; but
        in a backward it may be what autograd made a gradient of without copying it, as it would in plain PyTorch."""
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
        """A copy in the store, or beside it where there is no room."""
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
    """The handles that a node of autograd's graph saved, by their ids."""
    names = [name for name in dir(node) if name.startswith("_raw_saved_")] if node is not None else []
    found: list[Any] = []
    for name in names:
        saved = getattr(node, name)
        found += saved if isinstance(saved, list | tuple) else [saved]
    return {id(one.data) for one in found if one is not None}


def _handles_of(cell: Cell, storage: torch.UntypedStorage | None, written: View | None) -> list[Handle]:
    """Those that were packed from this storage, and see what is about to be written. Found by looking through all that
    Python holds: a list of them would cost every step, and this happens in few."""
    return [
        handle
        for handle in gc.get_referrers(cell)
        if type(handle) is Handle
        and (handle.home is None or handle.home() is storage)
        and (written is None or may_overlap(handle, written))
    ]


def may_overlap(one: View, other: View) -> bool:
    """May two views of a storage share a byte? The chunks of one tensor do not, though each spans nearly all of it."""
    first, second = sorted((one, other), key=lambda view: view.offset * view.dtype.itemsize)
    if first.end_bytes <= second.offset * second.dtype.itemsize:
        return False
    if one.dtype is not other.dtype or one.size != other.size or one.stride != other.stride:
        return True
    axes = sorted((stride, size) for size, stride in zip(one.size, one.stride) if size > 1)
    return _is_sum(int(second.offset - first.offset), axes)


def _is_sum(distance: int, axes: Sequence[tuple[int, int]]) -> bool:
    """Is it a sum of strides, each taken less often (forwards or backwards) than there are numbers along it? Then two
    views that lie alike, so far apart, share a number."""
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
