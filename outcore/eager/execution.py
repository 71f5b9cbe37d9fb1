"""Runs a step that follows a schedule, and thus needs less memory.

The hot path follows a prepared schedule (Program): packs are the clock of the forward, unpacks that of the backward,
and the schedule's actions run at each tick. Ops are observed up to the last one that the schedule reruns, or before
which a placeholder is freed; those that will be rerun are captured.

Leaving the plan is always safe, because every handle can bring its tensor back by itself. If a step does other work (a
new branch, a new shape), it changes over to the program for that work, if there is one (`branching`). Otherwise the
rest of it runs unplanned: saved tensors that do not fit are swapped, and brought back when they are needed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from threading import RLock
from typing import Any

import torch

from outcore.eager import fast_path
from outcore.eager.branching import Spare, Switch
from outcore.eager.captures import Captures
from outcore.eager.cells import Handle, Kept, bring, check_unchanged, kept, shape_of
from outcore.eager.followed_plan import Actions, FollowedPlan
from outcore.eager.held_places import HeldPlaces
from outcore.eager.intercept import called_by_function, in_backward, watch
from outcore.eager.launches import Claim, Kernel
from outcore.eager.overwriting import Contents
from outcore.eager.planned_launches import PlannedLaunches
from outcore.eager.program import PlannedTick, Program
from outcore.eager.replay import below_everything
from outcore.eager.signatures import OpOverload, outputs_of, signature_of, tensors_in
from outcore.eager.switches import Switches
from outcore.eager.unplanned import UnplannedSaves
from outcore.memory.clock import Clock, OpTimes
from outcore.memory.meter import LiveBytes, see_brought
from outcore.memory.store import Store
from outcore.memory.tensors import has_memory


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
        others: Callable[[], Iterable[Program]] = tuple,
        spare_bytes: Callable[[], int] = int,
    ) -> None:
        """`meter` counts bytes where no allocator does. `log` receives the actions, which are then timed; `clock` times
        ops. `outside`: storages that exist before the step. `asked_late` collects values that autograd needs after it.
        `others`: programs to change over to. `spare_bytes`: of saved tensors that may stay without a program."""
        self.asked_late = set() if asked_late is None else asked_late
        self.is_over = False
        self.is_watched: bool | None = None  # a mode of the user was active in the backward; None: no backward yet
        self.meter = meter
        self.times = OpTimes(clock) if clock is not None else None
        places = HeldPlaces(program.placeholders, store.device, on_refused)
        self.plan = plan = FollowedPlan(program, Contents(store, self), places, Spare(spare_bytes, store), others)
        self.actions = Actions(plan, store, log)
        self.captures = Captures(plan)
        self._unplanned = UnplannedSaves(store, plan.contents, plan.spare, outside)
        self._follows_every_tick = log is not None
        self._stops_watching = meter is None and clock is None
        self._looks_away = False
        self._lock = RLock()
        if self._stops_watching and not self._follows_every_tick:
            fast_path.follow(self)
        plan.places.move(([], [number for number, one in enumerate(program.placeholders) if one.since < 0]))

    @property
    def switches(self) -> Switches:
        """The switches at the beginning of the step."""
        return self.captures.switches

    @switches.setter
    def switches(self, given: Switches) -> None:
        self.captures.switches = given

    def look_away(self) -> None:
        """Stops observing writes if none can affect the program, because it keeps everything in place. Observation
        continues when the step leaves the program, or when a custom function saves a tensor, which it may return as a
        gradient. It cannot begin later than in the forward, because autograd restores the state of its threads."""
        plan = self.plan
        if self._stops_watching and plan.program.keeps_everything:
            self._looks_away = plan.position.looks_away = True
            watch(ops=False, writes=False)

    def complete(self) -> None:
        """Called when the step ends. If its program continues, or backwards came after such steps before, moves off
        the device what they will ask for."""
        if self.plan.has_more or (self.plan.on_plan and self.asked_late):
            self._unplanned.put_away_all(self, self.plan.cells, saw_writes=not self._looks_away)

    def close(self) -> None:
        """Ends the step. Handles that outlive it still work."""
        self.is_over = True
        self.plan.close()

    def was_left(self) -> None:
        """Allows values that the plan kept to be swapped, except in the backward of a step without observed writes."""
        if not (self._looks_away and in_backward()):
            if self._stops_watching:
                watch(ops=False, writes=True)
            self._unplanned.take_over(self, saw_writes=not self._looks_away)

    # -- ops and launches ---------------------------------------------------------------------------------------------

    def op(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        signature = signature_of(func)
        times = self.times
        if times is not None:
            started = times.start(signature.name)
        plan = self.plan
        index, program = plan.position.num_ops, plan.program
        if index > program.last_watched or not plan.on_plan:
            if self._stops_watching:  # repeated, because a vmap or a backward restores the state at its end
                watch(ops=False, writes=True)
            if signature.writes:
                plan.write(func, args, kwargs)
            result = signature.call(*args, **kwargs)
        else:
            plan.position.num_ops = index + 1
            if signature.name != program.names[index]:
                if not self._has_switched(plan.switch_at_op(index, signature.name)):
                    plan.leave(f"op {index} is {func}, not {program.names[index]}")
                program = plan.program
            elif index in program.moves:
                plan.places.move(program.moves[index])
            captures = self.captures
            if signature.written and captures.calls:
                captures.forget(signature, args, kwargs)
            if plan.on_plan and index in program.looked_at:
                result = captures.run(index, func, args, kwargs)
            else:
                if signature.writes:
                    plan.write(func, args, kwargs)
                result = signature.call(*args, **kwargs)
            if index >= program.last_watched and self._stops_watching:
                watch(ops=False, writes=True)
        if times is not None:
            times.stop(started)
        if self.meter is not None:
            _count(self.meter, func, args, kwargs, result)
        return result

    def enter_graph(self, kernels: Sequence[Kernel]) -> PlannedLaunches:
        plan, first, names = self.plan, self.plan.position.num_ops, self.plan.program.names
        if plan.on_plan and first < len(names):
            plan.position.num_ops = first + len(kernels)
            expected = names[first : plan.position.num_ops]
            if [kernel.name for kernel in kernels[: len(expected)]] != expected:
                plan.leave(f"op {first} begins another compiled graph than recorded")
        return PlannedLaunches(plan, self.captures, self.times, self.meter, first, kernels)

    # -- changes of tensors -------------------------------------------------------------------------------------

    def write(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.plan.write(func, args, kwargs)

    def opened(self, storage: torch.UntypedStorage) -> None:
        self.plan.contents.open(storage)

    def exposed(self, storage: torch.UntypedStorage) -> None:
        self.plan.exposed(storage)

    def replacing(self, tensor: torch.Tensor) -> Callable[[], None]:
        return self.plan.replacing(tensor)

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> Handle | Kept:
        plan = self.plan
        tick = next(plan.ticks, None) if plan.on_plan else None
        if (
            tick is None
            or not tick.is_pack
            or tensor.dtype is not tick.dtype
            or (tick.shape is not None and shape_of(tensor) != tick.shape)
        ):
            if not plan.on_plan:
                return self._pack_unplanned(tensor)
            if not self._has_switched(plan.switch_at_tick(tick, lambda other: _is_saved_at(other, tensor))):
                shape = tuple(shape_of(tensor))
                plan.leave(f"autograd saved {tensor.dtype} {shape} where the plan has another tensor")
                return self._pack_unplanned(tensor)
            tick = next(plan.ticks)
        handle: Handle | Kept | None
        if tick.needs_cell:
            handle = plan.pack(tick, tensor, self)
        else:
            handle = kept(tensor, tick.pack, self) if tick.is_outside else Kept(tensor, tick.pack, self)
        if handle is None:
            return self._pack_unplanned(tensor)
        if self._looks_away and called_by_function():
            watch(ops=False, writes=True)
        if tick.is_busy or self._follows_every_tick:
            self.follow(tick)
        return handle

    def _pack_unplanned(self, tensor: torch.Tensor) -> Handle | Kept:
        if self._looks_away:
            if in_backward():
                return Kept(tensor, -1, self)
            watch(ops=False, writes=True)
        return self._unplanned.pack(tensor, self)

    def follow(self, tick: PlannedTick) -> None:
        """Performs the schedule's actions at a tick."""
        plan = self.plan
        if tick.moves is not None and plan.on_plan:
            plan.places.move(tick.moves)
        if tick.actions and plan.on_plan:
            with below_everything():
                for action in tick.actions:
                    self.actions.perform(action)

    def unpack(self, handle: Handle | Kept) -> torch.Tensor:
        """Returns a saved tensor. Locked, because two threads may run backwards over one graph."""
        with self._lock:
            return self._unpack(handle)

    def open(self, handle: Handle | Kept) -> tuple[torch.Tensor, Claim]:
        """Unpacks a value for a compiled backward, which declares what it overwrites."""
        return self.unpack(handle), Claim(handle.cell if isinstance(handle, Handle) else None)

    def _unpack(self, handle: Handle | Kept) -> torch.Tensor:
        plan, tick = self.plan, None
        if self.is_watched is None:
            self.is_watched = torch._C._len_torch_dispatch_stack() > 0
        if plan.on_plan and not self.is_over:  # fetched-ahead values of this step are unknown to a later step's plan
            tick = next(plan.ticks, None)
            if tick is None or tick.is_pack or tick.pack != handle.pack:
                switch = plan.switch_at_tick(tick, lambda other: not other.is_pack and other.pack == handle.pack)
                tick = next(plan.ticks) if self._has_switched(switch) else None
                if tick is None:
                    plan.leave(f"autograd asked for saved tensor {handle.pack} out of the planned order")
        if tick is None and self.is_over and handle.pack >= 0:
            self.asked_late.add(plan.program.pack_values[handle.pack])
        handle = handle if plan.on_plan and not self.is_over else self._unplanned.find(handle)
        if isinstance(handle, Kept):
            if tick is not None and tick.is_busy:
                self.follow(tick)
            plan.contents.hand(found := handle.find())
            return found
        if tick is not None and tick.moves is not None:
            plan.places.move(tick.moves)
        with below_everything():
            return self._unpack_cell(handle, tick)

    def _unpack_cell(self, handle: Handle, tick: PlannedTick | None) -> torch.Tensor:
        cell = handle.cell
        tensor: torch.Tensor | None = None
        if tick is not None:
            for at, action in enumerate(tick.actions):
                if at == tick.gives_at and cell.data is not None:
                    tensor = handle.of(cell.data)
                self.actions.perform(action)
        if tensor is None:
            absent = cell.data is None
            if absent and tick is not None:
                self.actions.note_unplanned(cell, tick.number)
            data = bring(cell, see_brought)
            if cell.parcel is None and cell.recipe is None and not cell.follows:
                check_unchanged(cell.held[0], data)
            tensor = handle.of(data)
            if absent:
                self.plan.contents.lend(cell)
            elif not cell.follows:
                # Autograd may make it a gradient and write into it, which must not affect others.
                self.plan.contents.marks.set(data.untyped_storage(), weakref.ref(cell))
                self.plan.contents.hand(tensor)
        return tensor

    def _has_switched(self, switch: Switch | None) -> bool:
        """Changes over to another program if there is one; returns whether it did."""
        if switch is None:
            return False
        self.captures.go_over(switch)
        if self._stops_watching:
            watch(ops=switch.program.last_watched >= self.plan.position.num_ops, writes=True)
        return True


def _count(meter: LiveBytes, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    made = tensors_in((result,)) if meter.knows_existing else outputs_of(func, args, kwargs, result)[0]
    for tensor in filter(has_memory, made):
        meter.see(tensor)


def _is_saved_at(tick: PlannedTick, tensor: torch.Tensor) -> bool:
    return tick.is_pack and tensor.dtype is tick.dtype and (tick.shape is None or shape_of(tensor) == tick.shape)
