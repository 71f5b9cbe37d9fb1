"""The tensors that autograd saves in a recorded step: the step's ticks, and the cells of its values.

Saved tensors leave the device at once. On a GPU a value is dropped if a few ops make it again from swapped values, and
otherwise swapped: rerunning ops costs less than touching new host memory for the first time. When the host has no more
room, every value that can be dropped is.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import torch

from outcore.eager.cells import (
    SMALL_BYTES,
    Cell,
    Handle,
    Kept,
    MakesAgain,
    bring,
    cells_on,
    kept,
    shape_of,
    swap_out_now,
    version_of,
)
from outcore.eager.intercept import called_by_function
from outcore.eager.overwriting import Contents
from outcore.eager.recorded_ops import RecordedOps
from outcore.eager.recorded_storages import RecordedStorages
from outcore.eager.remaking import has_same_bytes, let_go_all, quickly_made, rerunnable
from outcore.eager.replay import Held, below_everything
from outcore.eager.replay_safety import ReplaySafety
from outcore.eager.settings import EAGER
from outcore.eager.signatures import UNFILLED
from outcore.errors import ReplayError
from outcore.memory.meter import see_brought
from outcore.memory.store import Store
from outcore.memory.tensors import source_of
from outcore.values import Storage, Tick

H = TypeVar("H", Handle, Kept)


class RecordedCells:
    """The cells of one recorded step, by value. `reset_peak` is called after using memory that is not the step's."""

    def __init__(
        self,
        storages: RecordedStorages,
        contents: Contents,
        safety: ReplaySafety,
        budget_bytes: int,
        reset_peak: Callable[[], None],
        on_refused: Callable[[], None],
    ) -> None:
        self._storages, self._contents, self._safety = storages, contents, safety
        self._budget_bytes = budget_bytes
        self._reset_peak, self._on_refused = reset_peak, on_refused
        self._cells: dict[int, weakref.ref[Cell]] = {}

    def own(
        self,
        recipe: MakesAgain,
        writes: Sequence[int],
        made: Sequence[torch.Tensor],
        *,
        overwritten: bool = False,
    ) -> list[weakref.ref[Cell]]:
        """Adds cells for the results of an op, with its recipe."""
        marks = []
        for value, tensor in zip(writes, made):
            if self._storages.storage_of(value).external:
                continue  # a buffer or parameter, whose mark would outlive the step
            cell = Cell(value, tensor, overwritten=overwritten)
            cell.recipe = recipe
            marks.append(self._name(cell, tensor))
        return marks

    def source_of(self, index: int, tensor: torch.Tensor) -> Cell | Held:
        """Returns the cell or held tensor for a tensor that op `index` reads."""
        source = source_of(tensor)
        if source is None:
            return self.cell_of(tensor)
        away = self._contents.will_bring(source, tensor)
        self._safety.reads_away(index, away)
        return away

    def cell_of(self, tensor: torch.Tensor) -> Cell:
        """Returns the cell of a tensor that an op reads or autograd saves."""
        value = self._storages.value_of(tensor)
        mark = self._cells.get(value)
        cell = mark() if mark is not None else None
        if cell is not None and cell.version != version_of(tensor) and not self.can_be_made(cell, tensor):
            self._safety.rewritten.add(value)  # written by a custom function's kernel, as the function declared
            cell = None
        if cell is None:
            cell = Cell(value, tensor)
            if self._storages.storage_of(value).external:
                cell.hold(tensor, self._contents.marks)
                self._cells[value] = weakref.ref(cell)
            else:  # it cannot be recomputed, but brought back once it is swapped
                self._name(cell, tensor)
        return cell

    def replace(self, value: int, tensor: torch.Tensor) -> Cell:
        """Replaces a cell, because a custom function saves other content than the ops of the step made."""
        self._safety.rewritten.add(value)
        cell = Cell(value, tensor)
        self._name(cell, tensor)
        return cell

    def can_be_made(self, cell: Cell, tensor: torch.Tensor) -> bool:
        """Whether making the cell again gives the content of `tensor`. Checked for tensors that custom functions save
        or declare as changed, because a kernel that is no op may have written into them: Liger's cross entropy stores
        the gradient in place of the logits."""
        if cell.data is not None or (cell.parcel is None and cell.recipe is None):
            return True  # it refers to the live memory
        if cell.parcel is None and not quickly_made(cell, 2 * self._budget_bytes, EAGER.few_ops):
            return False  # cannot be checked
        try:
            with below_everything():
                same = has_same_bytes(bring(cell), tensor)
        except (torch.OutOfMemoryError, ReplayError) as error:  # or the function was called under other switches
            if isinstance(error, torch.OutOfMemoryError):
                self._on_refused()
            same = False
        let_go_all(cell)
        self._reset_peak()
        return same

    def _name(self, cell: Cell, tensor: torch.Tensor) -> weakref.ref[Cell]:
        cell.name(tensor, self._contents.marks)
        mark = self._cells[cell.value] = weakref.ref(cell)
        return mark


@dataclass(slots=True)
class RecordedTick:
    """A tick being recorded: the fields of `outcore.values.Tick`. `dies` is -1 until autograd's reference dies."""

    slot: int
    kind: Literal["pack", "unpack"]
    value: int
    pack: int
    dies: int
    shape: tuple[int, ...]
    dtype: str

    def end(self, slot: int) -> None:
        self.dies = slot

    def finish(self, last_slot: int) -> Tick:
        """Returns the tick. References that outlive the step, such as a retained graph or a gradient, die with it."""
        dies = last_slot if self.dies < 0 else self.dies
        return Tick(self.slot, self.kind, self.value, self.pack, dies, self.shape, self.dtype)


@dataclass(frozen=True)
class Beside:
    """Where a recorded step puts saved values. `drops`: values that are quickly recomputed are not swapped. `reruns`:
    whether the user allows recomputation at all."""

    store: Store
    budget_bytes: int
    drops: bool
    reruns: bool

    def is_dropped(self, cell: Cell) -> bool:
        """Whether a value is dropped. Pinning new host memory takes half a second per GiB, in which many ops can run.
        So a value that needs more than a few ops is swapped only if as much is pinned already as a plan would use."""
        if not (self.drops and self.reruns):
            return False
        if quickly_made(cell, self.budget_bytes):
            return True
        is_pinned = self.store.pinned_bytes >= self.budget_bytes
        return not is_pinned and quickly_made(cell, self.budget_bytes, EAGER.many_products, EAGER.many_ops)


class RecordedSaves:
    """The tensors that autograd saves in one recorded step, and needs again."""

    def __init__(
        self,
        storages: RecordedStorages,
        ops: RecordedOps,
        cells: RecordedCells,
        contents: Contents,
        safety: ReplaySafety,
        beside: Beside,
    ) -> None:
        self.ticks: list[RecordedTick] = []
        self.stuck_bytes = 0  # bytes that no tier had room for and that cannot be recomputed
        self.asked_late: set[int] = set()  # values that autograd needs after the step
        self._taken: list[
            tuple[int, int]
        ] = []  # (value, slot) at which an unpacked tensor of the value is written into
        self._is_over = False
        self._storages, self._ops, self._cells = storages, ops, cells
        self._contents, self._safety, self._beside = contents, safety, beside
        self._pack_values: list[int] = []
        self._handle_refs: list[weakref.ref[Handle] | weakref.ref[Kept]] = []

    def pack(self, tensor: torch.Tensor, run: Any) -> Handle | Kept:
        """Returns the handle of a saved tensor. `run`: the recorder, which unpacks the handle."""
        storages = self._storages
        storages.slot += 1
        strided = tensor.layout is torch.strided and not tensor.is_nested
        value = storages.value_of(tensor) if strided else storages.add_without_storage()
        pack = len(self._pack_values)
        self._pack_values.append(value)
        tick = self._add_tick("pack", value, pack, tensor)
        storage = storages.storage_of(value)
        if storage.external or not storage.movable or storage.bytes < SMALL_BYTES or self._is_unfilled(value):
            held = kept(tensor, pack, run) if storage.external and strided else Kept(tensor, pack, run)
            return self._watch_handle(held, tick)
        cell = self._cells.cell_of(tensor)
        if called_by_function() and not self._cells.can_be_made(cell, tensor):
            cell = self._cells.replace(value, tensor)
        if cell not in cells_on(tensor.untyped_storage()):  # brought back; the mark makes writes to it visible
            cell.name(tensor, self._contents.marks)
        handle = self._watch_handle(Handle(cell, tensor, pack, run), tick)
        if cell.parcel is None:
            with below_everything():
                self._put_away(cell, tensor)
        self._ops.reset_peak()
        return handle

    def _is_unfilled(self, value: int) -> bool:
        """Whether its content is written later: RReLU saves the noise before it draws it."""
        producer = self._storages.values[value].producer
        return producer >= 0 and "::".join(self._ops.ops[producer].name.split(".")[:2]) in UNFILLED

    def _watch_handle(self, handle: H, tick: RecordedTick) -> H:
        self._handle_refs.append(weakref.ref(handle, partial(self._let_go, tick)))
        return handle

    def _let_go(self, tick: RecordedTick, _: object) -> None:
        """Called when the handle that autograd held since this tick is gone."""
        tick.end(self._storages.slot)

    def _put_away(self, cell: Cell, tensor: torch.Tensor) -> None:
        if self._beside.is_dropped(cell):
            return
        cell.hold(tensor, self._contents.marks)
        if swap_out_now(cell, self._beside.store):
            cell.recipe = None
            cell.name(tensor, self._contents.marks)
        elif self._beside.reruns and rerunnable(cell):
            cell.data = None
            cell.name(tensor, self._contents.marks)
        else:
            self.stuck_bytes += tensor.untyped_storage().nbytes()

    def unpack(self, handle: Handle | Kept, function: Any = None) -> torch.Tensor:
        """Returns a saved tensor. `function`: the custom function that needs it, which may write into it silently."""
        self._storages.slot += 1
        value = self._pack_values[handle.pack]
        if self._is_over:
            self.asked_late.add(value)
            return _unpack_late(handle)
        if isinstance(handle, Kept):
            if function is not None:
                self._safety.written_into.add(value)
            found = handle.find()
            self._add_tick("unpack", value, handle.pack, found)
            self._contents.hand(found)
            return found
        with below_everything():
            present = handle.cell.data is not None
            data = bring(handle.cell)
            tensor = handle.of(data)
        tick = self._add_tick("unpack", value, handle.pack, tensor)
        if function is not None:
            self._safety.see_given(function, value, tensor)
        if not present:
            tick.dies = -1  # until it dies
            self._contents.hand(tensor)
            self._storages.watch_brought(data.untyped_storage(), value, tick.end)
            handle.cell.let_go()
        self._ops.reset_peak()
        return tensor

    def _add_tick(self, kind: Literal["pack", "unpack"], value: int, pack: int, tensor: torch.Tensor) -> RecordedTick:
        slot = self._storages.slot
        dies, dtype = -1 if kind == "pack" else slot, str(tensor.dtype).removeprefix("torch.")
        tick = RecordedTick(slot, kind, value, pack, dies, tuple(shape_of(tensor)), dtype)
        self.ticks.append(tick)
        return tick

    def was_taken(self, value: int) -> None:
        self._taken.append((value, self._storages.slot))

    def copies(self, last_slot: int) -> list[Storage]:
        """Returns the copies that are made when a value stays on the device and its unpacked tensor is written into.

        A copy lives as long as the value may be needed. Such a value stays (`planning.trace_index`).
        """
        found = []
        for value, slot in self._taken:
            ticks = [tick.finish(last_slot) for tick in self.ticks if tick.value == value]
            ends = [tick.dies for tick in ticks if tick.dies > slot and (tick.kind == "pack" or tick.slot > slot)]
            if ends:
                num_bytes = self._storages.storage_of(value).bytes
                found.append(Storage(num_bytes, slot, max(ends), external=False, movable=False))
        return found

    def close(self) -> None:
        """Ends the step: later unpacks are not part of its trace."""
        self._is_over = True
        self._handle_refs.clear()


def _unpack_late(handle: Handle | Kept) -> torch.Tensor:
    """Unpacks after the end of the step, when its trace is complete."""
    if isinstance(handle, Kept):
        return handle.find()
    with below_everything():
        is_absent = handle.cell.data is None
        tensor = handle.of(bring(handle.cell, see_brought))
        if is_absent:
            handle.cell.let_go()
    return tensor
