"""Records a step as a trace.

The step runs on real data with the leanest schedule: tensors that autograd saves leave the device at once, so recording
needs the memory of only a few ops and their tensors. Because nothing is held for autograd, the observed lifetimes are
those of the program itself.

The recorder receives the events of the step and passes them on: `recorded_storages` tracks storages and versions,
`recorded_ops` ops and their times, `recorded_saves` what autograd saves and where the values are, and `replay_safety`
what must not be rerun.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import partial
from threading import RLock
from typing import Any

import torch

from outcore.eager.cells import Handle, Kept
from outcore.eager.intercept import called_by_engine, in_backward
from outcore.eager.launches import Claim, Kernel
from outcore.eager.overwriting import Contents
from outcore.eager.recorded_launches import RecordedLaunches
from outcore.eager.recorded_ops import RecordedOp, RecordedOps
from outcore.eager.recorded_saves import Beside, RecordedCells, RecordedSaves
from outcore.eager.recorded_storages import RecordedStorages
from outcore.eager.replay import capture
from outcore.eager.replay_safety import ReplaySafety
from outcore.eager.signatures import OpOverload, outputs_of, reads_of, replay_kind, signature_of, tensors_in
from outcore.eager.switches import changed, switches
from outcore.memory.clock import Looks
from outcore.memory.device import DeviceMemory
from outcore.memory.device_kind import name_of
from outcore.memory.meter import existing_storages
from outcore.memory.store import Store
from outcore.memory.tensors import is_plain
from outcore.values import Replay, StateUse, Trace


class Recorder:
    """Records one step."""

    def __init__(
        self,
        model: torch.nn.Module,
        inputs: Iterable[torch.Tensor],
        store: Store,
        memory: DeviceMemory,
        before_bytes: int,
        budget_bytes: int,
        *,
        reruns: bool = True,
        state_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """`reruns`: whether values may be recomputed while recording, which a user who disabled recomputation does not
        want. `state_bytes`: the training state's present bytes on the device, if it comes and goes."""
        self.before_bytes = before_bytes
        self.name = type(model).__name__
        self.device = memory.device
        self.switches = switches()  # the switches at the beginning of the step
        mark = weakref.ref(self)
        self._contents = contents = Contents(store, self, partial(_see_copy, mark), partial(_see_taken, mark))
        self.storages = storages = RecordedStorages(
            existing_storages(model, inputs), memory, contents.is_exposed, state_bytes
        )
        self.ops = ops = RecordedOps(model, storages, memory, before_bytes, budget_bytes)
        self.safety = safety = ReplaySafety(storages, ops.workspaces)
        excuse = memory.refusals.excuse
        self.cells = cells = RecordedCells(storages, contents, safety, budget_bytes, ops.reset_peak, excuse)
        beside = Beside(store, budget_bytes, memory.is_slow_to_pin, reruns)
        self.saves = RecordedSaves(storages, ops, cells, contents, safety, beside)
        self._state: list[StateUse] = []
        self._lock = RLock()

    # -- ops and launches ---------------------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an op and records it."""
        gaps = self.ops.gaps
        gaps.arrive()
        result = self._op(func, args, kwargs)
        gaps.leave()
        return result

    def _op(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        storages, ops, safety = self.storages, self.ops, self.safety
        storages.slot += 1
        signature = signature_of(func)
        read = [tensor for tensor in reads_of(func, args, kwargs) if tensor.layout is torch.strided]
        reads = tuple(storages.value_of(tensor) for tensor in read)
        forward = not in_backward()
        replay = self._replay_of(func, args, kwargs, forward=forward)
        recipe = None
        if forward and replay != "no":
            recipe = capture(len(ops.ops), func, args, kwargs, partial(self.cells.source_of, len(ops.ops)))
            safety.read_by_recipes.update(reads)
        if signature.writes:
            self.write(func, args, kwargs)
        running = ops.start()
        result = func(*args, **kwargs)
        ops.stop(running)
        if not all(is_plain(tensor) for tensor in tensors_in((result,))):
            replay, recipe = "no", None
        fresh, overwritten = outputs_of(func, args, kwargs, result)
        fresh = [tensor for tensor in fresh if tensor.layout is torch.strided]
        if signature.is_view and not read:  # the parts of a sparse tensor, which are seen here first
            storages.number_all(tensors_in((result,)))
        workspace_bytes = max(running.unseen_bytes, ops.workspace_bytes(running, fresh))
        if forward:
            ops.try_norm_replay(func, args, fresh)
        writes = ops.add_results(fresh, overwritten)
        repeats = -1
        if recipe is not None:
            recipe.made = self.cells.own(recipe, writes, fresh)
            recipe.overwrote = self.cells.own(recipe, writes[len(fresh) :], overwritten, overwritten=True)
            if recipe.outcome() is not None:  # not an external value
                ops.see_for_passes(recipe, args, (*fresh, *overwritten)[0])
            if replay == "pure" and len(writes) == len(fresh) == 1:
                repeats = ops.repeats.first(len(ops.ops), recipe, fresh[0])
        ops.ops.append(
            RecordedOp(
                slot=storages.slot,
                name=signature.name,
                phase="forward" if forward else "backward",
                reads=reads,
                writes=writes,
                workspace_bytes=workspace_bytes,
                replay=replay,
                module=ops.module,
                repeats=repeats,
                joins=not forward and ops.sums.joins(func, args, reads, writes) and called_by_engine(),
                gap=ops.gaps.take(),
            )
        )
        return result

    def _replay_of(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], *, forward: bool) -> Replay:
        """Returns whether an op may be rerun. Ops that a forward runs with gradients off may not: they are inside a
        custom function, where foreign kernels may write into their results without being observed."""
        if forward and not torch.is_grad_enabled():
            return "no"
        if not all(is_plain(tensor) for tensor in tensors_in((*args, *kwargs.values()))):
            return "no"
        replay = replay_kind(func, args, kwargs)
        return "no" if changed(self.switches, switches(few=signature_of(func).is_simple)) else replay

    def enter_graph(self, kernels: Sequence[Kernel]) -> RecordedLaunches:
        return RecordedLaunches(self.storages, self.ops, self.cells, self.safety, self.switches, self.changing)

    def open(self, handle: Handle | Kept) -> tuple[torch.Tensor, Claim]:
        """Unpacks a value for a compiled backward, which declares what it overwrites."""
        tensor = self.saves.unpack(handle)
        return tensor, Claim(handle.cell if isinstance(handle, Handle) else None, self.storages.give_over)

    # -- writes to tensors that were saved, or that are read again
    # ----------------------------------------------------------------

    def write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called before an op writes into its arguments."""
        signature = signature_of(func)
        if signature.sets and isinstance(args[1] if len(args) > 1 else None, torch.Tensor):
            self._contents.open(args[1].untyped_storage())
        if silent := signature.changed_silently_by(args):
            self.changing(silent, silent=True)
        self.changing(signature.changed_by(args, kwargs))
        for at in signature.unsaid or signature.scratch(args):
            if at < len(args) and isinstance(args[at], torch.Tensor):
                self.safety.unsaid.add(self.storages.value_of(args[at]))
                self.storages.add_version(args[at], -1)

    def changing(self, tensors: Iterable[torch.Tensor], *, silent: bool = False) -> None:
        """Called before these tensors are written into."""
        if self._contents.before_write(tensors, silent=silent):
            self.ops.reset_peak()  # this memory is not the step's

    def opened(self, storage: torch.UntypedStorage) -> None:
        self._contents.open(storage)

    def exposed(self, storage: torch.UntypedStorage) -> None:
        """Keeps the value of an exposed storage on the device, and excludes it as a source of reruns."""
        self._contents.expose(storage)
        self.storages.expose(storage)

    def replacing(self, tensor: torch.Tensor) -> Callable[[], None]:
        value, finish = self.storages.value_of(tensor), self._contents.replacing(tensor)

        def done() -> None:
            if finish():
                self.storages.storage_of(value).movable = False
                self.safety.rewritten.add(value)

        return done

    @property
    def replaced_bytes(self) -> int:
        """The bytes of storages that were still in use after their tensors had got other ones."""
        return self._contents.replaced.held_bytes

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        self.ops.gaps.arrive(1)
        handle = self.saves.pack(tensor, self)
        self.ops.gaps.leave()
        return handle

    def unpack(self, handle: Handle | Kept) -> torch.Tensor:
        """Returns a saved tensor. Locked, because two threads may run backwards over one graph."""
        self.ops.gaps.arrive(1)
        node = torch._C._current_autograd_node()
        function = node if isinstance(node, torch.autograd.function.BackwardCFunction) else None
        with self._lock:
            tensor = self.saves.unpack(handle, function)
        self.ops.gaps.leave()
        return tensor

    # -- training state that comes and goes (`outcore.state`) -----------------------------------------------

    def needs_weight(self, unit: int) -> None:
        self._state.append(StateUse(max(self.storages.slot, 0), "weight", unit))

    def takes_gradient(self, unit: int, gradient: torch.Tensor) -> None:
        """Records that a gradient is on its way home; from now on it is counted there."""
        storage = self.storages.take(gradient)
        self._state.append(StateUse(max(self.storages.slot, 0), "gradient", unit, storage))

    # -- the end ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stops observing. Also called if the step failed."""
        self.storages.close()
        self.saves.close()
        self._contents.clear()
        self.ops.close()

    def finish(self, looks: Looks | None = None) -> Trace:
        """Returns the trace. `looks` corrects the host's seconds for the time that observing took."""
        self.close()
        last_slot = max(self.storages.slot, 0)
        saved = {tick.value for tick in self.saves.ticks}
        return Trace(
            ops=self.ops.finish(saved, self.safety.written_into, self.safety.is_lost, self.safety.changed_away, looks),
            values=tuple(self.storages.values),
            storages=(*self.storages.finish(last_slot), *self.saves.copies(last_slot)),
            ticks=tuple(tick.finish(last_slot) for tick in self.saves.ticks),
            before_bytes=self.before_bytes,
            state=tuple(self._state),
            device=name_of(self.device),
            torch=torch.__version__,
            model=self.name,
            recorded_at=date.today().isoformat(),
        )


def _see_copy(mark: weakref.ref[Recorder], copy: torch.Tensor) -> None:
    """Adds the storage of a copy, which every step like this one makes without an op."""
    recorder = mark()
    if recorder is not None:
        recorder.storages.number_of(copy)


def _see_taken(mark: weakref.ref[Recorder], tensor: torch.Tensor) -> None:
    """Records that autograd used a tensor that it was given as a gradient, which is now written into."""
    recorder = mark()
    if recorder is not None:
        recorder.saves.was_taken(recorder.storages.value_of(tensor))
