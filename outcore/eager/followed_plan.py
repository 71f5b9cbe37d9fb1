"""The plan that a step follows, for as long as it does: the cells of its values, and the recipes that make them again.

Leaving the plan is always safe: every handle can bring its tensor back by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from outcore.eager.branching import Spare, Switch
from outcore.eager.cells import Cell, MakesAgain
from outcore.eager.held_places import HeldPlaces
from outcore.eager.overwriting import Contents
from outcore.eager.program import Program
from outcore.eager.replay import below_everything
from outcore.eager.signatures import OpOverload, signature_of

NOBODY: weakref.ref[Cell] = weakref.ref(Cell.__new__(Cell))  # the cell of a value that nobody will ask for


class FollowedPlan:
    """Where the values of a step are while it follows a program. `on_plan` is False once it turned out to be another
    step; `left_because` says why."""

    def __init__(self, program: Program, contents: Contents, places: HeldPlaces, spare: Spare) -> None:
        self.program, self.contents, self.places, self.spare = program, contents, places, spare
        self.on_plan = True
        self.left_because = ""
        self.cells: dict[int, weakref.ref[Cell]] = {}
        self.recipes: dict[int, weakref.ref[Any]] = {}  # of ops (Recipe) and launches (LaunchRecipe), by op
        # A handle may die before its value is saved for the last time, and before its copy out is waited for.
        self.packed_again: dict[int, Cell] = {}
        self.on_the_way_out: dict[int, Cell] = {}

    def leave(self, because: str) -> None:
        """From here on the step runs unplanned: whatever was on its way out has to get there, and the rest stays as far
        as it fits."""
        if not self.on_plan:
            return
        self.on_plan = False
        self.left_because = because
        self.places.clear()
        self.contents.marks.keep_saved()
        with below_everything():
            for mark in self.cells.values():
                cell = mark()
                if cell is None or cell.data is None:
                    continue
                if cell.parcel is not None:
                    cell.parcel.wait_out()
                    cell.let_go()
                elif cell.is_saved:
                    self.spare.add(cell)
        self.packed_again.clear()
        self.on_the_way_out.clear()

    def go_over(self, switch: Switch) -> None:
        """From here on another program is followed. Call it below autograd."""
        self.program = switch.program
        self.cells = switch.renamed(self.cells)
        self.recipes = {op: recipe for op, recipe in self.recipes.items() if switch.has_op(op)}
        switch.put_away(self.cells, self.spare.store)
        self.packed_again.clear()
        self.on_the_way_out.clear()

    def close(self) -> None:
        """The step is over. Handles that outlive it still work."""
        self.packed_again.clear()
        self.on_the_way_out.clear()
        self.contents.clear()
        self.places.clear()

    # -- values and their cells ---------------------------------------------------------------------------------------

    def find(self, value: int) -> Cell | None:
        mark = self.cells.get(value)
        return mark() if mark is not None else None

    def recipe(self, op: int) -> Any:
        mark = self.recipes.get(op)
        return mark() if mark is not None else None

    def add(self, cell: Cell) -> weakref.ref[Cell]:
        mark = self.cells[cell.value] = weakref.ref(cell)
        return mark

    def add_output(
        self, value: int, tensor: torch.Tensor, recipe: MakesAgain, *, overwritten: bool = False
    ) -> weakref.ref[Cell]:
        """An op or launch made this value, or wrote it into a storage that was there."""
        if value not in self.program.cells:
            return NOBODY
        cell = Cell(value, tensor, overwritten=overwritten)
        cell.recipe = recipe
        cell.name(tensor, self.contents.marks)
        return self.add(cell)

    # -- what may change a tensor that was saved, or is to be read again ----------------------------------------------

    def write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An op is about to write into its arguments."""
        signature = signature_of(func)
        if signature.sets:  # `x.set_(y)`: a tensor with its own version counter on the storage of another
            for source in args[1:2]:
                if isinstance(source, torch.UntypedStorage):
                    self.contents.open(source)
                elif isinstance(source, torch.Tensor):
                    self.contents.open(source.untyped_storage())
        if silent := signature.changed_silently_by(args):
            self.changing(silent, func, silent=True)
        self.changing(signature.changed_by(args, kwargs), func)

    def changing(self, tensors: Iterable[torch.Tensor], because_of: object, *, silent: bool = False) -> None:
        """These are about to be written into. If the plan does not know of that, the step leaves it: what was needed is
        not where it was."""
        if self.contents.before_write(tensors, silent=silent):
            self.leave(f"{because_of} wrote into a tensor that was saved, or that is read again")

    def exposed(self, storage: torch.UntypedStorage) -> None:
        if self.contents.expose(storage):
            self.leave("memory of a tensor that was saved, or that is read again, was given to somebody")

    def replacing(self, tensor: torch.Tensor) -> Callable[[], None]:
        finish = self.contents.replacing(tensor)

        def done() -> None:
            if finish():
                self.leave("a tensor that was saved got another storage")

        return done
