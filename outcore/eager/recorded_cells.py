"""Tensors of a step that is being recorded -> the cells that stand for their values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from outcore.eager.cells import Cell, MakesAgain, version_of
from outcore.eager.overwriting import Contents
from outcore.eager.recorded_storages import RecordedStorages
from outcore.eager.remaking import has_same_bytes, let_go_all, quickly_made
from outcore.eager.replay import Held, below_everything
from outcore.eager.replay_safety import ReplaySafety
from outcore.eager.restoring import bring
from outcore.eager.settings import EAGER
from outcore.errors import ReplayError
from outcore.memory.tensors import source_of


class RecordedCells:
    """The cells of one recorded step, by value. `reset_peak` is called after memory was used that is not the step's."""

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
        """New cells for what an op made, whose recipe they refer to."""
        marks = []
        for value, tensor in zip(writes, made):
            if self._storages.storage_of(value).external:
                continue  # a buffer or parameter: its mark would outlive the step
            cell = Cell(value, tensor, overwritten=overwritten)
            cell.recipe = recipe
            marks.append(self._name(cell, tensor))
        return marks

    def source_of(self, index: int, tensor: torch.Tensor) -> Cell | Held:
        """What stands for a tensor that op `index` reads."""
        source = source_of(tensor)
        if source is None:
            return self.cell_of(tensor)
        away = self._contents.will_bring(source, tensor)
        self._safety.reads_away(index, away)
        return away

    def cell_of(self, tensor: torch.Tensor) -> Cell:
        """The cell of the value that a tensor is a view of, which an op reads or autograd saves."""
        value = self._storages.value_of(tensor)
        mark = self._cells.get(value)
        cell = mark() if mark is not None else None
        if cell is not None and cell.version != version_of(tensor) and not self.can_be_made(cell, tensor):
            self._safety.rewritten.add(value)  # a custom function's kernel wrote into it, and the function said so
            cell = None
        if cell is None:
            cell = Cell(value, tensor)
            if self._storages.storage_of(value).external:
                cell.hold(tensor, self._contents.marks)
                self._cells[value] = weakref.ref(cell)
            else:  # it cannot be made again; it can be brought back once it is swapped
                self._name(cell, tensor)
        return cell

    def replace(self, value: int, tensor: torch.Tensor) -> Cell:
        """A custom function saves something else than the ops of the step made."""
        self._safety.rewritten.add(value)
        cell = Cell(value, tensor)
        self._name(cell, tensor)
        return cell

    def can_be_made(self, cell: Cell, tensor: torch.Tensor) -> bool:
        """Whether the program would get back what it saves. A kernel that is no op may have written into it: Liger's
        cross entropy puts the gradient where the logits were. Asked of what custom functions save, or say they wrote
        into."""
        if cell.data is not None or (cell.parcel is None and cell.recipe is None):
            return True  # it is what is there
        if cell.parcel is None and not quickly_made(cell, 2 * self._budget_bytes, EAGER.few_ops):
            return False  # nobody can tell
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
