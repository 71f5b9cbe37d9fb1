"""The user's step -> Trace.

The step runs for real, in the leanest state: what autograd saves leaves the device on the spot, so recording needs the
memory of no more than a few ops and their tensors. On a GPU a value is dropped if a handful of ops make it again from
what was swapped, else it is swapped: running ops again costs less than touching fresh host memory for the first time.
When the host has no more room, whatever can be dropped is.

Because nothing is held for autograd, the lifetimes seen are the program's own.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from datetime import date
from functools import partial
from threading import RLock
from typing import Any, TypeVar

import torch

from outcore.eager.cells import (
    Cell,
    Handle,
    Kept,
    View,
    cells_on,
    check_unchanged,
    shape_of,
    version_of,
)
from outcore.eager.execution import SMALL_BYTES, bring, swap_out_now
from outcore.eager.intercept import called_by_engine, called_by_function, in_backward
from outcore.eager.launches import Claim, Kernel, LaunchRecipe, RecordedLaunches
from outcore.eager.module_names import ModuleNames
from outcore.eager.norm_replay import NormReplay, Proofs
from outcore.eager.overwriting import Contents
from outcore.eager.passes import Passes
from outcore.eager.remaking import (
    HANDFUL,
    MANY,
    MANY_PRODUCTS,
    checksum,
    has_same_bytes,
    let_go_all,
    quickly_made,
    rerunnable,
)
from outcore.eager.replay import Recipe, below_everything, capture, has_norm_replay
from outcore.eager.signatures import (
    UNFILLED,
    OpOverload,
    outputs_of,
    reads_of,
    replay_kind,
    signature_of,
    tensors_in,
)
from outcore.eager.switches import changed, switches
from outcore.errors import ReplayError
from outcore.memory.clock import Clock
from outcore.memory.meter import see_brought, storages_there
from outcore.memory.store import Store
from outcore.memory.tensors import is_plain
from outcore.values import Op, Storage, Tick, Trace, Value

_MARK, _WATCH = "_outcore_recorded", "_outcore_watched"
_ROUND_BYTES = 512  # the CUDA allocator's grain
H = TypeVar("H", Handle, Kept)


class _Storage:
    """A storage as it is being recorded."""

    __slots__ = ("born", "bytes", "current", "dies", "external", "movable", "num_versions")

    def __init__(self, num_bytes: int, born: int, *, external: bool, movable: bool) -> None:
        self.bytes = num_bytes
        self.born = born
        self.dies = -1
        self.external = external
        self.movable = movable
        self.current = -1  # the value of its newest version
        self.num_versions = 0


class Recorder:
    """One step, recorded."""

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Iterable[torch.Tensor],
        store: Store,
        device: torch.device,
        before_bytes: int,
        budget_bytes: int = 0,
        *,
        name: str = "",
        on_refused: Callable[[], None] = lambda: None,
        reruns: bool = True,
    ) -> None:
        self._on_refused = on_refused  # memory, to what is no op of the step
        self.stuck_bytes = 0  # no tier had room for them, and they cannot be made again
        self._reruns = reruns  # False: the user asked that each bit be itself
        self.budget_bytes = budget_bytes
        self.store = store
        self.device = device
        self.before_bytes = before_bytes
        self.name = name or type(model).__name__
        self._slot = -1
        self._ops: list[dict[str, Any]] = []
        self._ticks: list[dict[str, Any]] = []
        self._values: list[Value] = []
        self._storages: list[_Storage] = []
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._handle_refs: list[weakref.ref[Handle] | weakref.ref[Kept]] = []
        self._next_ref = 0
        self._live_bytes = 0
        self._live_at_reset = 0
        self._num_packs = 0
        self._pack_values: list[int] = []
        self._cells: dict[int, weakref.ref[Cell]] = {}
        self._contents = Contents(store, self, on_copy=partial(_see_copy, weakref.ref(self)))
        self._lock = RLock()
        self._clock = Clock(device)
        self._drops = device.type == "cuda"  # what is quickly made again: to fill and pin host memory takes seconds
        self._norm_replays: dict[int, NormReplay] = {}
        self._proofs: Proofs = {}
        self._passes = Passes(device, on_refused)
        self.switches = switches()  # that the step began with
        self._calls: dict[Hashable, int] = {}  # what was called on which values -> the op that did it first
        self._written_into: set[int] = set()  # values that a function of somebody's own got back, and may write into
        self._rewritten: set[int] = set()  # values that changed in or after a custom function, and by no op
        self._read_by_recipes: set[int] = set()  # values
        self._unsaid: set[int] = set()  # values that were written into by what does not say so: running statistics
        self._exposed: set[int] = set()  # storages that somebody may write into without any op
        self._node = -1  # of autograd's graph, whose ops are running, by its number
        self._node_values: set[int] = set()  # what they read and made
        self._modules = ModuleNames(model)
        self.asked_late: set[int] = set()  # values that autograd wants after the step
        self._is_over = False
        self._serial = object()
        for storage in storages_there(model, inputs):  # whatever has no mark later was made by an op we did not see
            storage.__dict__[_MARK] = (self._serial, None)
        self._reset_peak()

    # -- storages and values ------------------------------------------------------------------------------------------

    def _storage_of(self, tensor: torch.Tensor) -> int:
        """The number of a tensor's storage; an unknown one gets the next number."""
        known = self.knows(tensor)
        if known and (number := tensor.untyped_storage().__dict__[_MARK][1]) is not None:
            return int(number)
        here = tensor.device.type == self.device.type
        return self._add_storage(tensor, external=known or not here, producer=-1)

    def _add_storage(self, tensor: torch.Tensor, *, external: bool, producer: int) -> int:
        storage = tensor.untyped_storage()
        number = len(self._storages)
        movable = is_plain(tensor) and tensor.device.type == self.device.type
        seen = _Storage(self._count(tensor), max(self._slot, 0), external=external, movable=movable)
        self._storages.append(seen)
        storage.__dict__[_MARK] = (self._serial, number)
        if self._contents.is_exposed(tensor) or not storage.resizable():
            seen.movable = False
            self._exposed.add(number)
        if not external:
            self._watch(storage, seen.bytes, partial(self._storage_died, seen))
        self._add_value(number, producer)
        return number

    def _count(self, tensor: torch.Tensor) -> int:
        if tensor.device.type != self.device.type or tensor._is_zerotensor():  # which has bytes and no memory
            return 0
        num_bytes = tensor.untyped_storage().nbytes()
        return -(-num_bytes // _ROUND_BYTES) * _ROUND_BYTES if self.device.type == "cuda" else num_bytes

    def _add_value(self, storage: int, producer: int) -> int:
        seen = self._storages[storage]
        self._values.append(Value(storage, seen.num_versions, producer))
        seen.num_versions += 1
        seen.current = len(self._values) - 1
        return seen.current

    def _value_of(self, tensor: torch.Tensor) -> int:
        return self._storages[self._storage_of(tensor)].current

    def _watch(self, storage: torch.UntypedStorage, num_bytes: int, on_death: Callable[[], None]) -> int:
        number, self._next_ref = self._next_ref, self._next_ref + 1
        self._live_bytes += num_bytes
        self._refs[number] = weakref.ref(storage, partial(self._died, number, num_bytes, on_death))
        return number

    def _died(self, number: int, num_bytes: int, on_death: Callable[[], None], _: object) -> None:
        if self._refs.pop(number, None) is not None:
            self._live_bytes -= num_bytes
            on_death()

    def _storage_died(self, storage: _Storage) -> None:
        storage.dies = self._slot

    # -- ops ----------------------------------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs and notes it. What a forward makes with gradients off is never made again: that is the inside of a
        custom function, where kernels of other makers write into what an op has just made, and nobody sees it."""
        self._slot += 1
        signature = signature_of(func)
        index = len(self._ops)
        read = [tensor for tensor in reads_of(func, args, kwargs) if tensor.layout is torch.strided]
        reads = tuple(self._value_of(tensor) for tensor in read)
        plain = all(is_plain(tensor) for tensor in tensors_in((*args, *kwargs.values())))
        forward = not in_backward()
        replay = replay_kind(func, args, kwargs) if plain and (torch.is_grad_enabled() or not forward) else "no"
        if changed(self.switches, switches(few=signature.is_simple)):
            replay = "no"
        recipe = capture(index, func, args, kwargs, self._cell_of) if forward and replay != "no" else None
        self._read_by_recipes.update(reads if recipe is not None else ())
        if signature.writes:
            self.write(func, args, kwargs)
        live_before = self._live_bytes
        unseen_bytes = self._unseen_bytes()
        started = self._clock.start()
        result = func(*args, **kwargs)
        self._clock.stop(started)
        if not all(is_plain(tensor) for tensor in tensors_in((result,))):
            replay, recipe = "no", None
        fresh, overwritten = outputs_of(func, args, kwargs, result)
        fresh = [tensor for tensor in fresh if tensor.layout is torch.strided]
        made = sum(self._count(tensor) for tensor in fresh)
        workspace_bytes = max(unseen_bytes, self._workspace(max(live_before, self._live_bytes) + made))
        if forward and has_norm_replay(func, args):
            self._norm_replays[index] = self._norm_replay(func, args, fresh)
            self._reset_peak()  # what the comparison took is not the step's
        writes = [self._storages[self._add_storage(t, external=False, producer=index)].current for t in fresh]
        writes += [self._add_value(self._storage_of(tensor), index) for tensor in overwritten]
        self._live_at_reset = self._live_bytes  # what was made is there since the peak was reset
        if recipe is not None:
            recipe.made = self._own(recipe, writes, fresh, overwritten=False)
            recipe.overwrote = self._own(recipe, writes[len(fresh) :], overwritten, overwritten=True)
        if recipe is not None and recipe.outcome() is not None:  # not what was there before the step
            self._passes.see(index, recipe, args, (*fresh, *overwritten)[0], is_norm=index in self._norm_replays)
        alone = recipe is not None and replay == "pure" and len(writes) == len(fresh) == 1
        repeats = self._first_call(index, recipe, fresh[0]) if recipe is not None and alone else -1
        self._ops.append(
            {
                "slot": self._slot,
                "name": signature.name,
                "phase": "forward" if forward else "backward",
                "reads": reads,
                "writes": tuple(writes),
                "workspace_bytes": workspace_bytes,
                "replay": replay,
                "module": self._modules.current,
                "repeats": repeats,
                "joins": not forward and self._joins(func, args, reads, writes),
            }
        )
        return result

    # -- launches of compiled graphs -----------------------------------------------------------------------------------

    def enter_graph(self, kernels: Sequence[Kernel]) -> RecordedLaunches:
        return RecordedLaunches(self)

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether its storage is one of the step's, or was there before."""
        mark = tensor.untyped_storage().__dict__.get(_MARK)
        return mark is not None and mark[0] is self._serial

    def see_unmade(self, tensor: torch.Tensor) -> None:
        """Its storage is one of the step's, though no op made it."""
        self._storage_of(tensor)

    def open(self, handle: Handle | Kept) -> tuple[torch.Tensor, Claim]:
        """Unpacks for a compiled backward, which says itself what it overwrites."""
        tensor = self._unpack(handle)
        return tensor, Claim(handle.cell if isinstance(handle, Handle) else None, self._given_over)

    def _given_over(self, tensor: torch.Tensor) -> None:
        """The memory of what was unpacked becomes that of another value."""
        marks = tensor.untyped_storage().__dict__
        marks.pop(_MARK, None)
        number, num_bytes, tick = marks.pop(_WATCH, (-1, 0, {}))
        if self._refs.pop(number, None) is not None:
            self._live_bytes -= num_bytes
            tick["dies"] = self._slot - 1  # that value begins with the launch

    def _first_call(self, index: int, recipe: Recipe, made: torch.Tensor) -> int:
        """The op that called the same on the same values, if any did; -1: this is the first, or nobody can tell. What
        was made is looked at because not all is said in a call: the default type, say."""
        try:
            first = self._calls.setdefault((recipe.call(), View(made).key()), index)
        except TypeError:  # an argument that has no hash
            return -1
        return first if first != index else -1

    def _forget_repeats(self) -> None:
        """Custom (and compiled) backwards may use what they saved as memory: no op that repeats it is merged."""
        for op in self._ops:
            if op["repeats"] >= 0:
                values = {op["writes"][0], self._ops[op["repeats"]]["writes"][0]}
                op["repeats"] = -1 if values & self._written_into else op["repeats"]

    def _norm_replay(self, func: OpOverload, args: Sequence[Any], fresh: list[torch.Tensor]) -> NormReplay:
        cuda = self.device.type == "cuda"
        return NormReplay(
            func,
            args,
            fresh,
            piece_bytes=self.budget_bytes // 64,
            room_bytes=self.budget_bytes - torch.cuda.memory_allocated(self.device) if cuda else math.inf,
            proofs=self._proofs,
            on_refused=self._on_refused,
        )

    def _joins(self, func: OpOverload, args: Sequence[Any], reads: Sequence[int], writes: Sequence[int]) -> bool:
        """Is this autograd's own sum, and one that it makes in place where nobody looks? The engine adds after its node
        is done: the first gradient came from another node, this one's formula has not looked at it, and no Python (a
        formula's or a hook's) is running. Into a view it never adds: the base holds the storage too."""
        node = torch._C._current_autograd_node()
        number = -1 if node is None else node._sequence_nr()
        if number != self._node:
            self._node, self._node_values = number, set()
        joins = func is torch.ops.aten.add.Tensor and len(reads) == 2 and reads[0] not in self._node_values
        self._node_values.update(reads, writes)
        return joins and not args[0]._is_view() and called_by_engine()

    def _own(
        self,
        recipe: Recipe | LaunchRecipe,
        writes: Sequence[int],
        made: Sequence[torch.Tensor],
        *,
        overwritten: bool = False,
    ) -> list[weakref.ref[Cell]]:
        """The cells of what an op made, marked."""
        marks = []
        for value, tensor in zip(writes, made):
            if self._storages[self._values[value].storage].external:
                continue  # a buffer or parameter: its mark would outlive the step
            cell = Cell(value, tensor, overwritten=overwritten)
            cell.recipe = recipe
            cell.name(tensor, self._contents.marks)
            self._cells[value] = weakref.ref(cell)
            marks.append(self._cells[value])
        return marks

    def _cell_of(self, tensor: torch.Tensor) -> Cell:
        value = self._value_of(tensor)
        mark = self._cells.get(value)
        cell = mark() if mark is not None else None
        if cell is not None and cell.version != version_of(tensor) and not self._can_be_made(cell, tensor):
            self._rewritten.add(value)  # a custom function's kernel wrote into it, and the function said so
            cell = None
        if cell is None:
            cell = Cell(value, tensor)
            if self._storages[self._values[value].storage].external:
                cell.hold(tensor, self._contents.marks)
            else:
                cell.name(
                    tensor, self._contents.marks
                )  # cannot be made again; it can be brought back once it is swapped
            self._cells[value] = weakref.ref(cell)
        return cell

    def _workspace(self, live_bytes: int) -> int:
        """Bytes allocated at the peak since the last reset beyond `live_bytes` of storages we know."""
        if self.device.type != "cuda":
            return 0
        peak = torch._C._cuda_memoryStats(self.device.index)["allocated_bytes"]["all"]["peak"]
        self._reset_peak()
        return max(0, int(peak) - self.before_bytes - live_bytes)

    def _unseen_bytes(self) -> int:
        """The same since the last op or tick: what a compiled function did in between."""
        return self._workspace(max(self._live_at_reset, self._live_bytes))

    def _reset_peak(self) -> None:
        self._live_at_reset = self._live_bytes
        if self.device.type == "cuda":
            torch._C._cuda_resetPeakMemoryStats(self.device.index)

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        self._slot += 1
        strided = tensor.layout is torch.strided and not tensor.is_nested
        value = self._value_of(tensor) if strided else self._odd_value(tensor)
        pack, self._num_packs = self._num_packs, self._num_packs + 1
        self._pack_values.append(value)
        tick = self._add_tick("pack", value, pack, tensor)
        storage = self._storages[self._values[value].storage]
        if storage.external or not storage.movable or storage.bytes < SMALL_BYTES or self._is_unfilled(value):
            return self._watch_handle(Kept(tensor, pack, self), tick)
        cell = self._cell_of(tensor)
        if called_by_function() and not self._can_be_made(cell, tensor):
            self._rewritten.add(value)
            cell = Cell(value, tensor)
            cell.name(tensor, self._contents.marks)
            self._cells[value] = weakref.ref(cell)
        if cell not in cells_on(tensor.untyped_storage()):  # which was brought back: what is written into it is seen
            cell.name(tensor, self._contents.marks)
        handle = self._watch_handle(Handle(cell, tensor, pack, self), tick)
        if cell.parcel is None:
            with below_everything():
                self._put_away(cell, tensor)
        self._reset_peak()
        return handle

    def _is_unfilled(self, value: int) -> bool:
        """Its content comes later: RReLU saves the noise that it is about to draw."""
        producer = self._values[value].producer
        return producer >= 0 and "::".join(self._ops[producer]["name"].split(".")[:2]) in UNFILLED

    def _watch_handle(self, handle: H, tick: dict[str, Any]) -> H:
        self._handle_refs.append(weakref.ref(handle, partial(self._let_go, tick)))
        return handle

    def _odd_value(self, tensor: torch.Tensor) -> int:
        """A sparse or otherwise storage-less tensor: a value of its own that nobody touches."""
        self._storages.append(_Storage(0, self._slot, external=True, movable=False))
        return self._add_value(len(self._storages) - 1, -1)

    def _put_away(self, cell: Cell, tensor: torch.Tensor) -> None:
        if self._drops and self._reruns and self._is_dropped(cell):
            return
        cell.hold(tensor, self._contents.marks)
        if swap_out_now(cell, self.store):
            cell.recipe = None
            cell.name(tensor, self._contents.marks)
        elif self._reruns and rerunnable(cell):
            cell.data = None
            cell.name(tensor, self._contents.marks)
        else:
            self.stuck_bytes += tensor.untyped_storage().nbytes()

    def _is_dropped(self, cell: Cell) -> bool:
        """To pin fresh host memory takes half a second per GiB, in which many ops run again. So a value that more than
        a few ops would make is swapped only where about as much is pinned already as a plan would use."""
        if quickly_made(cell, self.budget_bytes):
            return True
        is_pinned = self.store.pinned_bytes >= self.budget_bytes
        return not is_pinned and quickly_made(cell, self.budget_bytes, MANY_PRODUCTS, MANY)

    # -- what changes what was saved, or is read again ----------------------------------------------------------------

    def write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An op is about to write into its arguments."""
        signature = signature_of(func)
        if signature.sets and isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
            self._contents.open(args[1].untyped_storage())
        if silent := signature.changed_silently_by(args):
            self.changing(silent, silent=True)
        self.changing(signature.changed_by(args, kwargs))
        for at in signature.unsaid or signature.scratch(args):
            if at < len(args) and isinstance(args[at], torch.Tensor):
                storage = self._storage_of(args[at])
                self._unsaid.add(self._storages[storage].current)
                self._add_value(storage, -1)

    def changing(self, tensors: Iterable[torch.Tensor], *, silent: bool = False) -> None:
        """These are about to be written into."""
        if self._contents.before_write(tensors, silent=silent):
            self._reset_peak()  # what this took is not the step's

    def opened(self, storage: torch.UntypedStorage) -> None:
        self._contents.open(storage)

    def exposed(self, storage: torch.UntypedStorage) -> None:
        """What lies there is kept, and nobody makes anything from it again."""
        self._contents.expose(storage)
        mark = storage.__dict__.get(_MARK)
        if mark is not None and mark[0] is self._serial and mark[1] is not None:
            self._storages[mark[1]].movable = False
            self._exposed.add(mark[1])

    def replacing(self, tensor: torch.Tensor) -> Callable[[], None]:
        value, finish = self._value_of(tensor), self._contents.replacing(tensor)

        def done() -> None:
            if finish():
                self._storages[self._values[value].storage].movable = False
                self._rewritten.add(value)

        return done

    def _can_be_made(self, cell: Cell, tensor: torch.Tensor) -> bool:
        """Would the program get back what it saves? A kernel that is no op may have written into it: Liger's cross
        entropy puts the gradient where the logits were. Asked of what custom functions save, or say they wrote into."""
        if cell.data is not None or (cell.parcel is None and cell.recipe is None):
            return True  # it is what is there
        if cell.parcel is None and not quickly_made(cell, 2 * self.budget_bytes, HANDFUL):
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

    def _unpack_late(self, handle: Handle | Kept) -> torch.Tensor:
        """The step is over, and its trace is made."""
        if isinstance(handle, Kept):
            check_unchanged(handle.version, handle.tensor)
            return handle.tensor
        with below_everything():
            is_absent = handle.cell.data is None
            tensor = handle.of(
                bring(handle.cell, lambda brought: see_brought(brought) if brought is not None else None)
            )
            if is_absent:
                handle.cell.let_go()
        return tensor

    def unpack(self, handle: Handle | Kept) -> torch.Tensor:
        node = torch._C._current_autograd_node()
        with self._lock:  # two threads may run backwards over one graph
            return self._unpack(handle, node if isinstance(node, torch.autograd.function.BackwardCFunction) else None)

    def _unpack(self, handle: Handle | Kept, function: Any = None) -> torch.Tensor:
        """`function`: the custom function that asks, which may write into what it gets without saying so."""
        self._slot += 1
        value = self._pack_values[handle.pack]
        if self._is_over:
            self.asked_late.add(value)
            return self._unpack_late(handle)
        if function is not None:
            self._written_into.add(value)
        if isinstance(handle, Kept):
            self._add_tick("unpack", value, handle.pack, handle.tensor)
            check_unchanged(handle.version, handle.tensor)
            self._contents.hand(handle.tensor)
            return handle.tensor
        with below_everything():
            present = handle.cell.data is not None
            data = bring(handle.cell)
            tensor = handle.of(data)
        tick = self._add_tick("unpack", value, handle.pack, tensor)
        if function is not None and value in self._read_by_recipes:
            self._see_whether_it_changes(function, value, tensor)
        if not present:
            storage, tick["dies"] = self._values[value].storage, -1  # until it is seen to die
            data.untyped_storage().__dict__[_MARK] = (self._serial, storage)
            num_bytes = self._storages[storage].bytes
            number = self._watch(data.untyped_storage(), num_bytes, partial(self._let_go, tick))
            data.untyped_storage().__dict__[_WATCH] = number, num_bytes, tick
            handle.cell.let_go()
        self._reset_peak()
        return tensor

    def _see_whether_it_changes(self, node: Any, value: int, tensor: torch.Tensor) -> None:
        """Until its backward is over: kernels of others use what they saved as memory, and no version tells. Asked only
        where a rerun might read it: it is held for as long."""
        given, before = [tensor.untyped_storage()], checksum(tensor.untyped_storage())
        self._reset_peak()

        def compare(*_: Any) -> None:
            hook.remove()
            if checksum(given.pop()) != before:
                self._rewritten.add(value)
            self._reset_peak()

        hook = node.register_hook(compare)

    def _let_go(self, tick: dict[str, Any], *_: object) -> None:
        """What autograd held since this tick, a handle or a tensor, is gone."""
        tick["dies"] = self._slot

    def _add_tick(self, kind: str, value: int, pack: int, tensor: torch.Tensor) -> dict[str, Any]:
        dies = -1 if kind == "pack" else self._slot
        tick = {
            "slot": self._slot,
            "kind": kind,
            "value": value,
            "pack": pack,
            "dies": dies,
            "shape": tuple(shape_of(tensor)),
            "dtype": str(tensor.dtype).removeprefix("torch."),
        }
        self._ticks.append(tick)
        return tick

    # -- the end ------------------------------------------------------------------------------------------------------

    def _find_passes(self, seconds: Sequence[float]) -> None:
        saved = {tick["value"] for tick in self._ticks}
        for index, (before, took_s) in self._passes.find(
            self._ops, self._values, saved, seconds, self._norm_replays
        ).items():
            self._ops[index] |= {"fused": before, "fused_s": took_s}

    def close(self) -> None:
        """Stops watching. Called also when the step failed."""
        self._is_over = True
        self._refs.clear()
        self._handle_refs.clear()
        self._contents.clear()
        self._modules.close()

    def _is_lost(self, reads: Sequence[int], writes: Sequence[int]) -> bool:
        """Was what an op read or made written into by what is no op, or does not say so?"""
        values = (*reads, *writes)
        exposed = self._exposed and not self._exposed.isdisjoint(self._values[value].storage for value in values)
        return bool(exposed) or not self._unsaid.isdisjoint(reads) or not self._rewritten.isdisjoint(values)

    def finish(self) -> Trace:
        self.close()
        last = max(self._slot, 0)
        seconds = self._clock.seconds()
        for index, norm_replay in self._norm_replays.items():
            self._ops[index] |= norm_replay.verdict()
        for op in self._ops:
            if self._is_lost(op["reads"], op["writes"]):
                op |= {"replay": "no", "repeats": -1}
        self._find_passes(seconds)
        self._forget_repeats()
        for tick in self._ticks:
            if tick["dies"] < 0:
                tick["dies"] = last  # its graph outlives the step, or what it gave does: as a gradient, say
        return Trace(
            ops=tuple(Op(seconds=took, **op) for took, op in zip(seconds, self._ops, strict=True)),
            values=tuple(self._values),
            storages=tuple(
                Storage(s.bytes, s.born, last if s.dies < 0 else s.dies, s.external, s.movable) for s in self._storages
            ),
            ticks=tuple(Tick(**tick) for tick in self._ticks),
            before_bytes=self.before_bytes,
            device=self.device.type if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            torch=torch.__version__,
            model=self.name,
            recorded_at=date.today().isoformat(),
        )


def _see_copy(mark: weakref.ref[Recorder], copy: torch.Tensor) -> None:
    """A copy that every step like this one makes, and no op: it is a storage of the step."""
    recorder = mark()
    if recorder is not None:
        recorder.see_unmade(copy)
