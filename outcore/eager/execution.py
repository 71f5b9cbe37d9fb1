"""Schedule + the user's step -> the same step in less memory.

The hot path follows a schedule made ready (Program): packs count up the forward's clock, unpacks the backward's, and at
each tick the schedule's actions run. Only ops that the schedule reruns are looked at in the forward, and those before
which a placeholder is given back.

Leaving the plan is always safe. Every handle can bring its tensor back by itself, so when a step turns out to be
another one (a new branch, a new shape), the rest of it runs unplanned: what is saved is swapped at once, what is asked
for is brought back on the spot.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from threading import RLock
from typing import Any

import torch

from outcore.eager.cells import (
    Cell,
    Handle,
    Kept,
    View,
    cell_of,
    check_unchanged,
    shape_of,
    state_of,
)
from outcore.eager.intercept import watch
from outcore.eager.launches import Claim, Kernel, LaunchRecipe, PlannedLaunches
from outcore.eager.overwriting import Contents
from outcore.eager.program import Moves, PlannedTick, Program
from outcore.eager.replay import Call, Held, Recipe, Saved, below_everything, capture
from outcore.eager.signatures import OpOverload, outputs_of, signature_of, tensors_in
from outcore.eager.switches import changed, switches
from outcore.memory.clock import Clock
from outcore.memory.meter import LiveBytes, see_brought
from outcore.memory.store import Store
from outcore.memory.tensors import PLAIN, is_plain
from outcore.units import format_bytes
from outcore.values import MADE_AGAIN, Action

_NOBODY: weakref.ref[Cell] = weakref.ref(Cell.__new__(Cell))  # the cell of a value that nobody will ask for
_UNKNOWN = Cell.__new__(Cell)  # of one that is not looked at any more
SMALL_BYTES = 4096  # not worth a copy of its own: kept


def is_distributed() -> bool:
    """Collectives write into what they are given without saying so: where there may be any, every op is looked at."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


class Execution:
    """One step that follows a program."""

    def __init__(
        self,
        program: Program,
        store: Store,
        *,
        meter: LiveBytes | None = None,
        log: list[str] | None = None,
        clock: Clock | None = None,
        on_refused: Callable[[], None] = lambda: None,
        outside: Callable[[], frozenset[int]] = frozenset,
        asked_late: set[int] | None = None,
    ) -> None:
        self.asked_late = set() if asked_late is None else asked_late  # values that autograd wants after the step
        self.is_over = False
        self._find_outside = outside  # storages that were there before the step: parameters, buffers, inputs
        self._outside: frozenset[int] | None = None
        self.program = program
        self.store = store
        self.meter = meter
        self.log = log
        self.clock = clock
        self._on_refused = on_refused  # memory, for a placeholder
        self.timed: list[str] = []  # names of the ops the clock timed
        self._stops_watching = meter is None and clock is None
        self.on_plan = True
        self.left_plan_because = ""
        self.is_watched = False  # somebody's mode looked at the backward
        self._has_unpacked = False
        self._ticks = iter(program.ticks)
        self._num_ops = 0
        self._cells: dict[int, weakref.ref[Cell]] = {}
        # A handle may die before its value is saved for the last time, and before its copy out is waited for.
        self._packed_again: dict[int, Cell] = {}
        self._on_the_way_out: dict[int, Cell] = {}
        self._recipes: dict[int, weakref.ref[Any]] = {}  # of ops (Recipe) and launches (LaunchRecipe)
        self._calls: dict[int, Call] = {}  # of ops that later ops repeat
        self.switches = switches()  # that the step began with
        self._contents = Contents(store, self)
        self._views: weakref.WeakKeyDictionary[Cell, Hashable] = weakref.WeakKeyDictionary()  # of cells without a plan
        kinds = ("wait_out", "wait_in", "rerun") if log is not None else ()
        self._stopwatches = {kind: Clock(store.device, spin=False) for kind in kinds}
        self._places: dict[int, torch.UntypedStorage] = {}
        self._keeps_places = True
        self._lock = RLock()
        self._move(([], [number for number, one in enumerate(program.placeholders) if one.since < 0]))

    def close(self) -> None:
        """The step is over. Handles that outlive it still work."""
        self.is_over = True
        self._packed_again.clear()
        self._on_the_way_out.clear()
        self._contents.clear()
        self._places.clear()

    # -- the forward's ops --------------------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        signature = signature_of(func)
        if self.clock is not None:
            self.timed.append(signature.name)
            started = self.clock.start()
        index, program = self._num_ops, self.program
        if index > program.last_watched or not self.on_plan:
            if self._stops_watching:  # again: what is switched off inside a vmap or a backward is on when that is over
                watch(ops=False, writes=True)
            if signature.writes:
                self.write(func, args, kwargs)
            result = signature.call(*args, **kwargs)
        else:
            self._num_ops = index + 1
            if signature.name != program.names[index]:
                self.leave_plan(f"op {index} is {func}, not {program.names[index]}")
            elif index in program.moves:
                self._move(program.moves[index])
            if signature.written and self._calls:
                self._forget_calls(signature.written_of(args, kwargs))
            if self.on_plan and (index in program.repeated or index in program.merged_ops):
                result = self._repeat(index, func, args, kwargs)
            elif self.on_plan and index in program.captured:
                result = self._capture(index, func, args, kwargs)
            else:
                if signature.writes:
                    self.write(func, args, kwargs)
                result = signature.call(*args, **kwargs)
            if index == program.last_watched and self._stops_watching:
                watch(ops=False, writes=True)
        if self.clock is not None:
            self.clock.stop(started)
        if self.meter is not None:
            everything = self.meter.knows_what_was_there
            made = tensors_in((result,)) if everything else outputs_of(func, args, kwargs, result)[0]
            for tensor in filter(is_plain, made):
                self.meter.see(tensor)
        return result

    def write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An op is about to write into what may have been saved or is to be read again. If the plan does not know of
        that, it cannot go on: what was needed is not where it was."""
        signature = signature_of(func)
        if signature.sets:
            self._open_source(args)
        if silent := signature.changed_silently_by(args):
            self.changing(silent, func, silent=True)
        self.changing(signature.changed_by(args, kwargs), func)

    def changing(self, tensors: Iterable[torch.Tensor], because_of: object, *, silent: bool = False) -> None:
        """These are about to be written into."""
        if self._contents.before_write(tensors, silent=silent):
            self.leave_plan(f"{because_of} wrote into a tensor that was saved, or that is read again")

    def _open_source(self, args: Sequence[Any]) -> None:
        """`x.set_(y)`: a tensor with its own version counter on the storage of another."""
        for source in args[1:2]:
            if isinstance(source, torch.Tensor | torch.UntypedStorage):
                self._contents.open(source if isinstance(source, torch.UntypedStorage) else source.untyped_storage())

    def opened(self, storage: torch.UntypedStorage) -> None:
        self._contents.open(storage)

    def exposed(self, storage: torch.UntypedStorage) -> None:
        if self._contents.expose(storage):
            self.leave_plan("memory of a tensor that was saved, or that is read again, was given to somebody")

    def replacing(self, tensor: torch.Tensor) -> Callable[[], None]:
        finish = self._contents.replacing(tensor)

        def done() -> None:
            if finish():
                self.leave_plan("a tensor that was saved got another storage")

        return done

    def _capture(self, index: int, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        op = self.program.captured[index]
        recipe = capture(index, func, args, kwargs, partial(self._source, iter(op.reads)))
        if changed(self.switches, recipe.switches):
            self.leave_plan(f"op {index} ({func}) runs under other switches than the step began with")
        if recipe.signature.writes:
            self.write(func, args, kwargs)
        result = recipe.signature.call(*args, **kwargs)
        if not self.on_plan:
            return result
        fresh, overwritten = outputs_of(func, args, kwargs, result, len(op.writes))
        if len(fresh) + len(overwritten) != len(op.writes):
            self.leave_plan(f"op {index} ({func}) made {len(fresh) + len(overwritten)} values, not {len(op.writes)}")
            return result
        if index in self.program.norm_replays:
            recipe.statistics = Saved(fresh[1]), Saved(fresh[2])
        if fresh:
            recipe.made = [self._output(value, tensor, recipe) for value, tensor in zip(op.writes, fresh)]
        if overwritten:
            changed_by_it = zip(op.writes[len(fresh) :], overwritten)
            recipe.overwrote = [self._overwritten(value, tensor, recipe) for value, tensor in changed_by_it]
        self._recipes[index] = weakref.ref(recipe)
        if op.fused and not recipe.fuse([self._recipe(inner) for inner in op.fused], (fresh or overwritten)[0]):
            self.leave_plan(f"op {index} ({func}) reads other tensors than recorded")
        return result

    def _repeat(self, index: int, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """A merged op, whose result an earlier op made, or the op that it repeats."""
        first = self.program.merged_ops.get(index, index)
        value, call = self.program.repeated[first], self._calls.get(first)
        if index != first:
            result = signature_of(func).call(*args, **kwargs)
            if call is None or not call.is_same(args, kwargs):
                self.leave_plan(f"op {index} ({func}) does not repeat op {first} any more")
            elif (cell := self._find(value)) is not None:
                cell.name(result, self._contents.marks)
            return result
        self._calls[index] = Call(func, args, kwargs)
        if index in self.program.captured:
            return self._capture(index, func, args, kwargs)
        result = signature_of(func).call(*args, **kwargs)
        cell = Cell(value, result)
        cell.name(result, self._contents.marks)
        self._cells[value] = weakref.ref(cell)
        return result

    def _forget_calls(self, written: Sequence[torch.Tensor]) -> None:
        """Who read these is not repeated any more. Versions do not always tell: `x.data` has a counter of its own."""
        storages = {state_of(tensor)[1] for tensor in written}
        self._calls = {first: call for first, call in self._calls.items() if not call.reads(storages)}

    def _recipe(self, op: int) -> Any:
        mark = self._recipes.get(op)
        return mark() if mark is not None else None

    def _source(self, reads: Iterator[int], tensor: torch.Tensor) -> Cell | Held:
        """What a captured op reads next. What is not known yet is held: it was made unseen, or will be saved later."""
        value = next(reads, -1)
        if type(tensor) not in PLAIN:  # whose alias may have a version counter of its own
            self.leave_plan(f"value {value} is a {type(tensor).__name__}, not a plain tensor as recorded")
            return _UNKNOWN
        if value in self.program.held:
            held = Held(tensor)
            if not self._contents.will_read(held):
                self.leave_plan(f"value {value} lies in memory that somebody else may write into")
            return held
        cell = self._find(value)
        if cell is not None and cell_of(tensor) is cell:
            return cell
        if cell is not None:
            self.leave_plan(f"value {value} is another tensor than recorded")
        cell = Cell(value, tensor)
        cell.hold(tensor, self._contents.marks)
        if self.on_plan:
            self._cells[value] = weakref.ref(cell)
        return cell

    def _overwritten(self, value: int, tensor: torch.Tensor, recipe: Recipe) -> weakref.ref[Cell]:
        if value in self.program.outside:
            return _NOBODY
        return self._output(value, tensor, recipe, overwritten=True)

    def _output(
        self, value: int, tensor: torch.Tensor, recipe: Recipe | LaunchRecipe, *, overwritten: bool = False
    ) -> weakref.ref[Cell]:
        if value not in self.program.cells:
            return _NOBODY
        cell = Cell(value, tensor, overwritten=overwritten)
        cell.recipe = recipe
        cell.name(tensor, self._contents.marks)
        mark = self._cells[value] = weakref.ref(cell)
        return mark

    # -- launches of compiled graphs -----------------------------------------------------------------------------------

    def enter_graph(self, kernels: Sequence[Kernel]) -> PlannedLaunches:
        return PlannedLaunches(self, kernels)

    def name_output(self, value: int, tensor: torch.Tensor, recipe: LaunchRecipe) -> weakref.ref[Cell]:
        return _NOBODY if value in self.program.outside else self._output(value, tensor, recipe)

    def open(self, handle: Handle | Kept) -> tuple[torch.Tensor, Claim]:
        """Unpacks for a compiled backward, which says itself what it overwrites."""
        return self.unpack(handle), Claim(handle.cell if isinstance(handle, Handle) else None)

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        tick = next(self._ticks, None)
        if tick is None or not tick.is_pack or tensor.dtype is not tick.dtype or not _has_shape(tensor, tick.shape):
            if self.on_plan:
                self.leave_plan(
                    f"autograd saved {tensor.dtype} {tuple(shape_of(tensor))} where the plan has another tensor"
                )
            return self._pack_unplanned(tensor)
        handle = self._pack_planned(tick, tensor) if tick.needs_cell else Kept(tensor, tick.pack, self)
        if tick.is_busy or self.log is not None:
            self._follow(tick)
        return handle

    def _follow(self, tick: PlannedTick) -> None:
        if tick.moves is not None and self.on_plan:
            self._move(tick.moves)
        if tick.actions and self.on_plan:
            with below_everything():
                for action in tick.actions:
                    self._act(action)

    def _pack_planned(self, tick: PlannedTick, tensor: torch.Tensor) -> Handle | Kept:
        cell = self._find(tick.value)
        if cell is not None and cell_of(tensor) is not cell:
            self.leave_plan(f"value {tick.value} is another tensor than recorded")
            return self._pack_unplanned(tensor)
        if self._contents.is_exposed(tensor):
            self.leave_plan(f"value {tick.value} lies in memory that somebody may write into")
            return self._pack_unplanned(tensor)
        if cell is None:
            cell = Cell(tick.value, tensor)
            self._cells[tick.value] = weakref.ref(cell)
        if cell.parcel is None and cell.data is None and (tick.decision not in MADE_AGAIN or cell.recipe is None):
            cell.hold(tensor, self._contents.marks)
            cell.recipe = None
        if tick.packed_again:
            self._packed_again[tick.value] = cell
        else:
            self._packed_again.pop(tick.value, None)
        handle = Handle(cell, tensor, tick.pack, self)
        if tick.is_shared:
            handle.home = weakref.ref(tensor.untyped_storage())
        return handle

    def _pack_unplanned(self, tensor: torch.Tensor) -> Handle | Kept:
        if not is_plain(tensor) or tensor.device.type != self.store.device.type or self._is_outside(tensor):
            return Kept(tensor, -1, self)
        if not tensor.requires_grad and tensor.is_floating_point():  # noise, say, that is saved before it is drawn
            return Kept(tensor, -1, self)
        if self._contents.is_exposed(tensor):
            return Kept(tensor, -1, self)
        # No cell of another view: those that share a storage may count versions for themselves (`unsafe_chunk`, of
        # which recurrent networks are made), and what was written through one since the cell was put away is not in it.
        cell, view = cell_of(tensor), View(tensor).key()
        if cell is None or self._views.get(cell) != view:
            cell = Cell(-1, tensor)
            cell.hold(tensor, self._contents.marks)
            self._views[cell] = view
        handle = Handle(cell, tensor, -1, self)
        if cell.data is not None and cell.parcel is None:
            with below_everything():
                swap_out_now(cell, self.store)
        return handle

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        """Too small to be worth it, or there before the step: nothing is won by swapping it."""
        if self._outside is None:
            self._outside = self._find_outside()
        storage = tensor.untyped_storage()
        return storage.nbytes() < SMALL_BYTES or storage._cdata in self._outside

    def unpack(self, handle: Handle | Kept) -> torch.Tensor:
        """Two threads may run backwards over one graph."""
        with self._lock:
            return self._unpack(handle)

    def _unpack(self, handle: Handle | Kept) -> torch.Tensor:
        if not self._has_unpacked:
            self._has_unpacked = True
            self.is_watched = torch._C._len_torch_dispatch_stack() > 0
        tick = next(self._ticks, None)
        if self.on_plan and (tick is None or tick.is_pack or tick.pack != handle.pack):
            self.leave_plan(f"autograd asked for saved tensor {handle.pack} out of the planned order")
        if self.is_over and not self.on_plan and handle.pack >= 0:
            self.asked_late.add(self.program.pack_values[handle.pack])
        if isinstance(handle, Kept):
            if tick is not None and tick.is_busy:
                self._follow(tick)
            check_unchanged(handle.version, handle.tensor)
            self._contents.hand(handle.tensor)
            return handle.tensor
        if tick is not None and tick.moves is not None and self.on_plan:
            self._move(tick.moves)
        with below_everything():
            return self._unpack_cell(handle, tick if self.on_plan else None)

    def _unpack_cell(self, handle: Handle, tick: PlannedTick | None) -> torch.Tensor:
        cell = handle.cell
        tensor: torch.Tensor | None = None
        if tick is not None:
            for at, action in enumerate(tick.actions):
                if at == tick.gives_at and cell.data is not None:
                    tensor = handle.of(cell.data)
                self._act(action)
        if tensor is None:
            absent = cell.data is None
            if absent and tick is not None:
                self._note_unplanned(cell, tick.number)
            data = bring(cell, self._see)
            if cell.parcel is None and cell.recipe is None and not cell.follows:
                check_unchanged(cell.held[0], data)
            if absent:
                tensor = handle.of(data)
                cell.let_go()
            else:
                tensor = handle.of(data)
                if not cell.follows:
                    # Autograd may take it over as a parameter's gradient, where plain PyTorch would copy it: what is
                    # done to that must not be done to what others ask for.
                    self._contents.marks.set(data.untyped_storage(), weakref.ref(cell))
                    self._contents.hand(tensor)
        return tensor

    def _move(self, moves: Moves) -> None:
        """Placeholders are given back, and taken."""
        given, taken = moves
        for number in given:
            self._places.pop(number, None)
        try:
            for number in taken if self._keeps_places else ():
                num_bytes = self.program.placeholders[number].num_bytes
                self._places[number] = torch.UntypedStorage(num_bytes, device=self.store.device)
        except torch.OutOfMemoryError:  # more lies around than was planned for: the step itself needs what there is
            self._on_refused()
            self._places.clear()
            self._keeps_places = False

    # -- the schedule's actions ---------------------------------------------------------------------------------------

    def _act(self, action: Action) -> None:
        if self.log is None:
            _ACTS[action.kind](self, action)
            return
        self.log.append(f"{action.tick} {action.kind} {action.op if action.kind == 'rerun' else action.value}")
        stopwatch = self._stopwatches.get(action.kind)
        started = stopwatch.start() if stopwatch is not None else None
        _ACTS[action.kind](self, action)
        if stopwatch is not None:
            stopwatch.stop(started)

    def _note_unplanned(self, cell: Cell, tick: int) -> None:
        """The schedule should have brought it: the log of what was done must not look like the plan then."""
        if self.log is not None:
            self.log.append(f"{tick} unplanned {cell.value}")

    def measured_s(self) -> tuple[float, float]:
        """Seconds the compute stream waited for copies, and seconds of reruns. Waits for the device."""
        waits = self._stopwatches["wait_out"].seconds() + self._stopwatches["wait_in"].seconds()
        return sum(waits), sum(self._stopwatches["rerun"].seconds())

    def _drop(self, action: Action) -> None:
        """Nothing to do: the pack did not hold it."""

    def _swap_out(self, action: Action) -> None:
        cell = self._find(action.value)
        if cell is None or cell.data is None or cell.parcel is not None:
            return
        self._on_the_way_out[action.value] = cell
        if not cell.swap_out(self.store, (action.tier,)) and not cell.swap_out(self.store):
            warnings.warn(
                f"outcore: no room to swap {format_bytes(cell.num_bytes)} out; it stays, and the step may need more "
                "memory than planned (raise host=..., or name a folder with disk=...)",
                stacklevel=2,
            )

    def _wait_out(self, action: Action) -> None:
        cell = self._find(action.value)
        if cell is not None and cell.parcel is not None:
            cell.parcel.wait_out()

    def _free(self, action: Action) -> None:
        cell = self._find(action.value)
        if cell is not None and (cell.parcel is not None or cell.recipe is not None):  # it can be brought back
            cell.let_go()
        self._on_the_way_out.pop(action.value, None)

    def _swap_in(self, action: Action) -> None:
        cell = self._find(action.value)
        if cell is not None and cell.data is None and cell.parcel is not None:
            cell.swap_in()
            self._see(cell.data)

    def _wait_in(self, action: Action) -> None:
        cell = self._find(action.value)
        if cell is not None:
            cell.arrive()

    def _rerun(self, action: Action) -> None:
        recipe = self._recipe(action.op)
        if recipe is None:
            return
        for cell in recipe.sources():
            if cell.data is None:
                self._note_unplanned(cell, action.tick)
                bring(cell, self._see)
            cell.arrive()
        rerun(recipe, action.values, in_place=action.in_place, see=self._see)

    def _find(self, value: int) -> Cell | None:
        mark = self._cells.get(value)
        return mark() if mark is not None else None

    # -- leaving the plan ---------------------------------------------------------------------------------------------

    def leave_plan(self, because: str) -> None:
        """From here on the step runs unplanned: whatever was on its way out has to get there."""
        if not self.on_plan:
            return
        self.on_plan = False
        self._places.clear()
        self._contents.marks.keep_saved()
        self._ticks = iter(())
        self.left_plan_because = because
        with below_everything():
            for mark in self._cells.values():
                cell = mark()
                if cell is not None and cell.parcel is not None and cell.data is not None:
                    cell.parcel.wait_out()
                    cell.let_go()
        self._packed_again.clear()
        self._on_the_way_out.clear()

    # -- measuring on the CPU -----------------------------------------------------------------------------------------

    def _see(self, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            see_brought(tensor)


_ACTS: dict[str, Callable[[Execution, Action], None]] = {
    "drop": Execution._drop,
    "swap_out": Execution._swap_out,
    "wait_out": Execution._wait_out,
    "free": Execution._free,
    "swap_in": Execution._swap_in,
    "wait_in": Execution._wait_in,
    "rerun": Execution._rerun,
}


def _has_shape(tensor: torch.Tensor, planned: tuple[int, ...] | None) -> bool:
    return planned is None or shape_of(tensor) == planned


def swap_out_now(cell: Cell, store: Store) -> bool:
    """Swaps out with nothing in flight afterwards; False when there is no room (the cell then keeps its data)."""
    if not cell.swap_out(store):
        return False
    assert cell.parcel is not None
    cell.parcel.wait_out()
    cell.data = None
    return True


def rerun(
    recipe: Recipe | LaunchRecipe, values: Sequence[int], *, in_place: bool, see: Callable[[torch.Tensor | None], None]
) -> None:
    """Runs an op again and hands the values wanted to their cells."""
    fresh, overwritten = recipe.run(in_place=in_place)
    for marks, tensors in ((recipe.made, fresh), (recipe.overwrote, overwritten)):
        for mark, tensor in zip(marks, tensors):
            see(tensor)
            cell = mark()
            if cell is not None and cell.value in values:
                cell.data = tensor


def bring(cell: Cell, see: Callable[[torch.Tensor | None], None] = lambda tensor: None) -> torch.Tensor:
    """The data of a cell, whatever it takes. What is brought along the way is let go after its last reader."""
    if cell.data is not None:
        cell.arrive()
        return cell.data
    order = _makers(cell)
    brought = {id(wanted) for wanted in order if wanted.data is None}
    num_readers: dict[int, int] = {}
    for wanted in order:
        for source in _sources(wanted):
            num_readers[id(source)] = num_readers.get(id(source), 0) + 1
    for wanted in order:
        sources = _sources(wanted)
        if wanted.data is None and wanted.parcel is not None:
            wanted.swap_in()
            see(wanted.data)
        elif wanted.data is None:
            _make(wanted, see)
        wanted.arrive()
        for source in sources:
            num_readers[id(source)] -= 1
            if not num_readers[id(source)] and id(source) in brought:
                source.let_go()
    assert cell.data is not None
    return cell.data


def _sources(cell: Cell) -> list[Cell]:
    """What a cell must be made from, if it must be made."""
    must = cell.data is None and cell.parcel is None and cell.recipe is not None
    return cell.recipe.sources() if must and cell.recipe is not None else []


def _makers(cell: Cell) -> list[Cell]:
    """The cells to bring for one, sources first. Without recursion: a chain may be as long as the network."""
    order: list[Cell] = []
    entered = {id(cell)}
    stack = [(cell, iter(_sources(cell)))]
    while stack:
        wanted, sources = stack[-1]
        for source in sources:
            if id(source) not in entered:
                entered.add(id(source))
                stack.append((source, iter(_sources(source))))
                break
        else:
            order.append(wanted)
            stack.pop()
    return order


def _make(wanted: Cell, see: Callable[[torch.Tensor | None], None]) -> None:
    recipe = wanted.recipe
    assert recipe is not None, "a saved value was lost"
    fresh, overwritten = recipe.run()
    for marks, tensors in ((recipe.made, fresh), (recipe.overwrote, overwritten)):
        for mark, tensor in zip(marks, tensors):
            if mark() is wanted:
                see(tensor)
                wanted.data = tensor
