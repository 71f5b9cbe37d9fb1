"""Saves tensors in a step without a plan: those that do not fit are swapped."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import torch

from outcore.eager.branching import Spare, put_away
from outcore.eager.cells import SMALL_BYTES, Cell, Handle, Kept, View, bring, cell_of, kept, swap_out_now, version_of
from outcore.eager.overwriting import Contents
from outcore.eager.replay import below_everything
from outcore.memory.meter import see_brought
from outcore.memory.store import Store
from outcore.memory.tensors import is_plain, source_of


class UnplannedSaves:
    """Returns handles for saved tensors. `find_outside`: returns the storages that exist before the step."""

    def __init__(
        self, store: Store, contents: Contents, spare: Spare, find_outside: Callable[[], frozenset[int]]
    ) -> None:
        self._store, self._contents, self._spare = store, contents, spare
        self._find_outside = find_outside
        self._outside: frozenset[int] | None = None
        self._views: weakref.WeakKeyDictionary[Cell, Hashable] = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakKeyDictionary[Kept, Handle] = weakref.WeakKeyDictionary()

    def take_over(self, run: Any, *, saw_writes: bool) -> None:
        """Swaps values that the plan kept, as far as there is no room for them. `saw_writes`: whether noise that is
        saved before it is drawn is known (`Contents.expose`)."""
        for one in sorted(self._contents.kept(), key=lambda one: one.pack):
            tensor, source = one.tensor, one.source()
            is_filled = saw_writes or source is None or source.requires_grad
            handle = self.pack(tensor, run, is_filled=is_filled) if version_of(tensor) == one.version else None
            if isinstance(handle, Handle):
                self._moved[one], one.tensor = handle, torch.empty(0)

    def put_away_all(self, run: Any, cells: Mapping[int, weakref.ref[Cell]], *, saw_writes: bool) -> None:
        """No plan of a later step knows of what is saved by now: all of it is put away, but for small tensors, which
        stay on the device as in recorded steps."""
        self._spare = Spare(int, self._store)
        with below_everything():
            for mark in list(cells.values()):
                cell = mark()
                if cell is not None and cell.is_saved and cell.recipe is not None and cell.parcel is None:
                    data = bring(cell, see_brought)  # nobody watches what a rerun would read once the step is over
                    if data.nbytes < SMALL_BYTES or swap_out_now(cell, self._store):
                        cell.recipe = None
                elif cell is not None and cell.data is not None and cell.data.nbytes >= SMALL_BYTES:
                    put_away(cell, self._store)
        self.take_over(run, saw_writes=saw_writes)

    def find(self, handle: Handle | Kept) -> Handle | Kept:
        """Returns the present handle of a tensor."""
        return self._moved.get(handle, handle) if isinstance(handle, Kept) else handle

    def pack(self, tensor: torch.Tensor, run: Any, *, is_filled: bool = False) -> Handle | Kept:
        """Returns a handle. `run`: the execution, which unpacks it. `is_filled`: whether its content is complete."""
        if not is_plain(tensor) or tensor.device.type != self._store.device.type or self._is_outside(tensor):
            return kept(tensor, -1, run) if is_plain(tensor) else Kept(tensor, -1, run)
        is_filled = is_filled or tensor.requires_grad or not tensor.is_floating_point()
        if not is_filled:  # for example noise that is saved before it is drawn
            return Kept(tensor, -1, run)
        if self._contents.is_exposed(tensor) or not tensor.untyped_storage().resizable():  # NumPy's own memory, say
            return Kept(tensor, -1, run)
        # Not the cell of another view: views of a storage may have their own version counters (`unsafe_chunk`, used by
        # recurrent networks), and writes through one since the cell was swapped are not in it.
        cell, view = cell_of(tensor), View(tensor).key()
        if cell is None or self._views.get(cell) != view:
            cell = Cell(-1, tensor)
            cell.hold(tensor, self._contents.marks)
            self._views[cell] = view
        handle = Handle(cell, tensor, -1, run)
        if cell.data is not None and cell.parcel is None:
            with below_everything():
                self._spare.add(cell)
        return handle

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        """Whether it is too small to be worth a copy, or existed before the step, where swapping gains nothing."""
        if self._outside is None:
            self._outside = self._find_outside()
        storage = tensor.untyped_storage()
        return storage.nbytes() < SMALL_BYTES or storage._cdata in self._outside or source_of(tensor) is not None
