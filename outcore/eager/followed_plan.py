"""The plan that a step follows: the cells of its values, their recipes, and the schedule's actions on both.

Leaving the plan is always safe, because every handle can bring its tensor back by itself.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from operator import length_hint
from typing import Any, Protocol

import torch

from outcore.eager.branching import Spare, Switch, find_switch, put_away
from outcore.eager.cells import Cell, Handle, MakesAgain, bring, cell_of, rerun
from outcore.eager.held_places import HeldPlaces
from outcore.eager.overwriting import Contents
from outcore.eager.program import PlannedTick, Program
from outcore.eager.replay import below_everything
from outcore.eager.signatures import OpOverload, signature_of
from outcore.memory.clock import Clock
from outcore.memory.meter import see_brought
from outcore.memory.store import Store
from outcore.units import format_bytes
from outcore.values import MADE_AGAIN, Action, Span

NOBODY: weakref.ref[Cell] = weakref.ref(Cell.__new__(Cell))  # the cell of a value that is never needed


class Position(Protocol):
    """The position of a step in its program. The C++ library has another class (`outcore.eager.fast_path`)."""

    num_ops: int  # ops that ran, as far as the program observes them
    looks_away: bool  # whether writes are not observed until a custom function saves a tensor

    def stop(self) -> None:
        """Lets Python follow every op and every saved tensor from now on."""


class _InPython:
    """The position of a step that is followed in Python."""

    __slots__ = ("looks_away", "num_ops")

    def __init__(self) -> None:
        self.num_ops, self.looks_away = 0, False

    def stop(self) -> None:
        pass


class FollowedPlan:
    """Where the values of a step are while it follows a program. `on_plan` becomes False when it does other work;
    `left_because` is the reason."""

    def __init__(
        self,
        program: Program,
        contents: Contents,
        places: HeldPlaces,
        spare: Spare,
        others: Callable[[], Iterable[Program]],
    ) -> None:
        """`others`: returns the programs that the step may change over to."""
        self.program, self.contents, self.places, self.spare = program, contents, places, spare
        self.ticks = iter(program.ticks)  # the next ticks
        self.position: Position = _InPython()
        self.has_switched = False
        self.resembled: Program | None = None  # a program that the step resembles but cannot change over to
        self._others = others
        self.on_plan = True
        self.left_because = ""
        self.cells: dict[int, weakref.ref[Cell]] = {}
        self.recipes: dict[int, weakref.ref[Any]] = {}  # of ops (Recipe) and launches (LaunchRecipe), by op
        # A handle may die before its value is saved for the last time, and before its copy out is waited for.
        self.packed_again: dict[int, Cell] = {}
        self.on_the_way_out: dict[int, Cell] = {}

    def leave(self, because: str) -> None:
        """Leaves the plan: the step continues unplanned. Transfers in progress are completed, and other values stay as
        far as they fit."""
        if not self.on_plan:
            return
        self.on_plan = False
        self.left_because = because
        self.position.stop()
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
                else:
                    self.spare.add(cell)
        self.packed_again.clear()
        self.on_the_way_out.clear()
        self.contents.tell_left()

    def switch_at_tick(self, tick: PlannedTick | None, is_next: Callable[[PlannedTick], bool]) -> Switch | None:
        """Changes over to a program that begins like this step, and whose tick in place of `tick` fits; returns None if
        there is none."""
        num_ticks = tick.number if tick is not None else len(self.program.ticks)
        switch = find_switch(self._others(), self.program, num_ticks, lambda other, at: is_next(other.ticks[at]))
        return self._go_over(switch, switch.num_ops) if switch is not None else None

    def switch_at_op(self, op: int, name: str) -> Switch | None:
        """Changes over to another program before an op."""
        num_ticks = len(self.program.ticks) - length_hint(self.ticks)
        switch = find_switch(self._others(), self.program, num_ticks, lambda other, at: other.has_op_at(op, name, at))
        return self._go_over(switch, op + 1) if switch is not None else None

    def _go_over(self, switch: Switch, num_ops: int) -> Switch | None:
        if not switch.is_exact:
            self.resembled = switch.program
            return None
        self.has_switched = True
        self.position.stop()
        self.program, self.position.num_ops = switch.program, num_ops
        self.ticks = iter(switch.program.ticks[switch.num_ticks :])
        self.cells = switch.renamed(self.cells)
        self.recipes = {op: recipe for op, recipe in self.recipes.items() if switch.has_op(op)}
        with below_everything():
            switch.put_away(self.cells, self.spare.store)
        self.packed_again.clear()
        self.on_the_way_out.clear()
        return switch

    @property
    def has_more(self) -> bool:
        """Whether the program does not end here."""
        self.position.stop()
        return self.on_plan and length_hint(self.ticks) > 0

    def close(self) -> None:
        """Ends the step. Handles that outlive it still work."""
        self.position.stop()
        self.packed_again.clear()
        self.on_the_way_out.clear()
        self.contents.clear()
        self.places.clear()

    # -- values and their cells ---------------------------------------------------------------------------------------

    def put_away_unforeseen(self, cell: Cell) -> None:
        """Swaps out a value that the program would recompute from ops that were not captured, because they ran before
        the step changed over to it."""
        if self.has_switched and self.on_plan:
            with below_everything():
                put_away(cell, self.spare.store)

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
        """Adds the cell of a value that an op or launch made, or wrote into an existing storage."""
        if value not in self.program.cells:
            return NOBODY
        cell = Cell(value, tensor, overwritten=overwritten)
        cell.recipe = recipe
        cell.name(tensor, self.contents.marks)
        return self.add(cell)

    def pack(self, tick: PlannedTick, tensor: torch.Tensor, run: Any) -> Handle | None:
        """Returns the handle of a value that is swapped, dropped or read again; None if the step has left the plan.
        `run`: the execution, which unpacks the handle."""
        value = tick.value
        cell = self.find(value)
        if cell is not None and cell_of(tensor) is not cell:
            self.leave(f"value {value} is another tensor than recorded")
            return None
        if self.contents.is_exposed(tensor):
            self.leave(f"value {value} lies in memory that somebody may write into")
            return None
        if cell is None:
            cell = Cell(value, tensor)
            self.cells[value] = weakref.ref(cell)
        if cell.parcel is None and cell.data is None and (tick.decision not in MADE_AGAIN or cell.recipe is None):
            cell.hold(tensor, self.contents.marks)
            cell.recipe = None
            if tick.decision in MADE_AGAIN:
                self.put_away_unforeseen(cell)
        if tick.packed_again:
            self.packed_again[value] = cell
        else:
            self.packed_again.pop(value, None)
        handle = Handle(cell, tensor, tick.pack, run)
        if tick.is_shared:
            handle.home = weakref.ref(tensor.untyped_storage())
        return handle

    # -- writes to tensors that were saved, or that are read again ----------------------------------------------

    def write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called before an op writes into its arguments."""
        signature = signature_of(func)
        if signature.sets:  # `x.set_(y)`: a tensor with its own version counter on the storage of another
            for source in args[1:2]:
                if isinstance(source, torch.UntypedStorage):
                    self.contents.open(source)
                elif isinstance(source, torch.Tensor):
                    self.contents.open(source.untyped_storage())
        for noise in signature.noise:  # if only writing ops are observed, noise is saved after this call and then drawn
            self.exposed(args[noise].untyped_storage())
        if silent := signature.changed_silently_by(args):
            self.changing(silent, func, silent=True)
        self.changing(signature.changed_by(args, kwargs), func)

    def changing(self, tensors: Iterable[torch.Tensor], because_of: object, *, silent: bool = False) -> None:
        """Called before tensors are written into. If content was needed, the step leaves the plan, which does not
        expect the content elsewhere."""
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


class ActionTimes:
    """The times of actions of some kinds, which are read after the step."""

    def __init__(self, device: torch.device, kinds: Sequence[str]) -> None:
        self.stopwatches = {kind: Clock(device, spin=False) for kind in kinds}

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds that compute waited for copies, and those of reruns. Waits for the device."""
        waits = self.stopwatches["wait_out"].seconds() + self.stopwatches["wait_in"].seconds()
        return sum(waits), sum(self.stopwatches["rerun"].seconds())

    def spans(self, began: Any) -> tuple[Span, ...]:
        """Returns the waits and reruns on the clock of the step, which began with an event or at a time of that
        clock."""
        found = [
            Span("compute", start_s, end_s, "rerun" if kind == "rerun" else "stall")
            for kind, stopwatch in self.stopwatches.items()
            for start_s, end_s in stopwatch.spans(began)
        ]
        return tuple(sorted(found, key=lambda span: span.start_s))


class Actions:
    """Performs the actions of one step. If the step is measured, `log` receives each action, and waits and reruns are
    timed."""

    def __init__(self, plan: FollowedPlan, store: Store, log: list[str] | None) -> None:
        self._plan, self._store, self._log = plan, store, log
        self.times = ActionTimes(store.device, ("wait_out", "wait_in", "rerun") if log is not None else ())

    def perform(self, action: Action) -> None:
        if self._log is None:
            _BY_KIND[action.kind](self, action)
            return
        self._log.append(f"{action.tick} {action.kind} {action.op if action.kind == 'rerun' else action.value}")
        stopwatch = self.times.stopwatches.get(action.kind)
        started = stopwatch.start() if stopwatch is not None else None
        _BY_KIND[action.kind](self, action)
        if stopwatch is not None:
            stopwatch.stop(started)

    def note_unplanned(self, cell: Cell, tick: int) -> None:
        """Logs a value that the schedule should have brought, so that the log differs from the plan."""
        if self._log is not None:
            self._log.append(f"{tick} unplanned {cell.value}")

    def _drop(self, action: Action) -> None:
        """Does nothing: the pack did not hold the value."""

    def _swap_out(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is None or cell.data is None or cell.parcel is not None:
            return
        self._plan.on_the_way_out[action.value] = cell
        if not cell.swap_out(self._store, (action.tier,)) and not cell.swap_out(self._store):
            warnings.warn(
                f"outcore: no room to swap {format_bytes(cell.num_bytes)} out; it stays, and the step may need more "
                "memory than planned (raise host=..., or name a folder with disk=...)",
                stacklevel=2,
            )

    def _wait_out(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None and cell.parcel is not None:
            cell.parcel.wait_out()

    def _free(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None and (cell.parcel is not None or cell.recipe is not None):  # if it can be brought back
            cell.let_go()
        self._plan.on_the_way_out.pop(action.value, None)

    def _swap_in(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None and cell.data is None and cell.parcel is not None:
            cell.swap_in()
            see_brought(cell.data)

    def _wait_in(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None:
            cell.arrive()

    def _rerun(self, action: Action) -> None:
        recipe = self._plan.recipe(action.op)
        if recipe is None:
            return
        for cell in recipe.sources():
            if cell.data is None:
                self.note_unplanned(cell, action.tick)
                bring(cell, see_brought)
            cell.arrive()
        rerun(recipe, action.values, in_place=action.in_place, see=see_brought)


_BY_KIND: dict[str, Callable[[Actions, Action], None]] = {
    "drop": Actions._drop,
    "swap_out": Actions._swap_out,
    "wait_out": Actions._wait_out,
    "free": Actions._free,
    "swap_in": Actions._swap_in,
    "wait_in": Actions._wait_in,
    "rerun": Actions._rerun,
}
