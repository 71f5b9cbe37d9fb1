"""Loop + one `with ooc.step():` -> RunningStep: everything that exists only while a step runs.

A step may end at any line, by an exception of the user's or by an interrupt. All changes to the process (the active
step, hooks, the garbage collector) are therefore made by `enter` and undone by `leave`. `leave` checks what is switched
on instead of relying on what `enter` did, and may run twice: `Loop.step` calls it at two levels, so an interrupt inside
it does no harm. What a step has shown is passed to its kind in one assignment, after everything was undone.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch

from outcore.compiled import graphs
from outcore.eager.execution import Execution
from outcore.eager.intercept import Interception, in_backward, in_transform
from outcore.eager.program import Program
from outcore.eager.recorder import Recorder
from outcore.eager.timed_execution import TimedExecution
from outcore.errors import OutcoreError, warn
from outcore.fitting.beside import StateBeside
from outcore.fitting.calls import Call, Calls, no_forward
from outcore.fitting.excess import warn_if_over
from outcore.fitting.families import Families
from outcore.fitting.hooks import ACTIVE
from outcore.fitting.host_costs import know_host
from outcore.fitting.kinds import Kind, Kinds
from outcore.fitting.least_budget import begin_with_all_kinds
from outcore.fitting.phases import Measured, New, Phase, RanOut, Settled, Shared, Timing
from outcore.fitting.preparing import Preparer
from outcore.fitting.retiming import TimedOps
from outcore.fitting.tally import Tally
from outcore.memory.clock import Clock
from outcore.memory.device import DeviceMemory, PeakWatch
from outcore.memory.meter import outside
from outcore.memory.store import Store
from outcore.planning import AS_IT_IS
from outcore.planning.allocator.model import asked_by_ops
from outcore.units import format_bytes
from outcore.values import Timeline

log = logging.getLogger("outcore")


class Owner(Protocol):
    """What a step uses of its loop."""

    model: torch.nn.Module
    memory: DeviceMemory
    preparer: Preparer
    kinds: Kinds
    families: Families
    calls: Calls
    interception: Interception
    measure: bool
    last: Kind | None
    has_graphs: bool | None  # whether steps call compiled graphs; None: not known yet
    tally: Tally

    @property
    def store(self) -> Store: ...
    def read_later(self, read: Callable[[], None]) -> None: ...
    @property
    def beside(self) -> StateBeside | None: ...


@dataclass(frozen=True)
class _Watch:
    """The measurement of a step."""

    peak: PeakWatch
    stopwatch: Clock
    started: Any
    num_restarts: int  # of the allocator, before the step
    log: list[str] = field(default_factory=list)  # the actions that were executed


class RunningStep:
    """A step of one loop while it runs."""

    def __init__(self, owner: Owner, name: str | None = None, batch: Any = None) -> None:
        self.owner, self.model, self._name, self._batch = owner, owner.model, name, batch
        self._thread = threading.get_ident()  # hooks and modes belong to a thread
        self._collects = gc.isenabled()
        self._call = no_forward(name, seen_from_the_start=False)
        self._kind: Kind | None = None
        self._is_transformed = False  # the model was called inside a transform of torch.func
        self._num_states = 0  # parameters with optimizer state when the recording began
        self.listener: Recorder | Execution | None = None
        self._watch: _Watch | None = None

    # -- entering and leaving -----------------------------------------------------------------------------------------

    def enter(self) -> None:
        if ACTIVE:
            raise OutcoreError("ooc.step() was entered inside ooc.step(); leave the first one before the next")
        ACTIVE.append(self)
        gc.disable()  # a step makes thousands of objects, and each collection would take a tenth of a second
        has_compiler = graphs.listen(self._graph_session)
        compiles = has_compiler and self.owner.has_graphs is not False
        if self.owner.beside is not None:
            self.owner.beside.enter()
        self.owner.interception.start(lambda: self._begin_alone(compiles), compiles=compiles)

    def leave(self) -> None:
        """Undoes `enter` and everything after it. A second call does nothing."""
        if self not in ACTIVE:
            return
        self.owner.interception.stop()
        graphs.stop_listening()
        if self._collects:
            gc.enable()
        if self.owner.beside is not None:
            self.owner.beside.leave()
        self.owner.memory.end_step()
        if self.listener is not None:
            self.listener.close()
        if self._watch is not None:
            self._watch.peak.stop()
        self.owner.has_graphs = bool(self.owner.has_graphs)
        ACTIVE.remove(self)

    # -- beginning ----------------------------------------------------------------------------------------------------

    def on_forward(self, args: Any, kwargs: Any) -> None:
        """Called before each forward of the model."""
        if self.listener is not None or not torch.is_grad_enabled():
            return
        if in_transform():  # the wrappers of a transform have no memory of their own
            self._is_transformed = True
            return
        if threading.get_ident() != self._thread:
            warn(
                "the model is called in another thread than ooc.step(); nothing of that is seen, and its memory not "
                "limited (enter the step in the thread that runs the forward)"
            )
            return
        self._begin(self.owner.calls.of(args, kwargs, self._name))

    def _begin_alone(self, compiles: bool) -> None:
        """Begins a step in which a tensor is saved before the model is called."""
        self._begin(self.owner.calls.of_parts(self._batch, self._name, seen_from_the_start=compiles))

    def _graph_session(self, first: Sequence[Any] | None) -> Recorder | Execution | None:
        """Returns the listener for launches of a compiled graph. The first graph may begin the step, because a model
        that is compiled as a whole calls no hook."""
        here = threading.get_ident() == self._thread
        self.owner.has_graphs = True
        if first is not None and self.listener is None and here:
            self._begin(self.owner.calls.of(first, {}, self._name))
        return self.listener if here or in_backward() else None

    def _begin(self, call: Call) -> None:
        """Finds the kind of the step from the model's arguments, plans if a plan is due, and starts listening."""
        owner, self._call = self.owner, call
        before_bytes = owner.memory.before_step_bytes(call.inputs)
        beside = owner.beside
        kind = self._kind = self._find_kind(call, before_bytes + self._reserved_bytes)
        if isinstance(kind.phase, New):
            owner.memory.before_recording()
            before_bytes = owner.memory.before_step_bytes(call.inputs)
        owner.kinds.tell_if_late(kind)
        if beside is None:
            phase = begin_with_all_kinds(kind, owner.kinds, owner.preparer, before_bytes)
        else:
            phase = beside.begin(kind, lambda: owner.memory.before_step_bytes(call.inputs))
            before_bytes = owner.memory.before_step_bytes(call.inputs)
        if isinstance(phase, New):
            self._record(before_bytes)
        else:
            self._follow(kind, phase, before_bytes)

    @property
    def _reserved_bytes(self) -> int:
        """Device memory that the training state may use, if it is moved."""
        return self.owner.beside.reserved_bytes if self.owner.beside is not None else 0

    def _find_kind(self, call: Call, before_bytes: int) -> Kind:
        """Returns the kind of the step: one that shares a plan if sizes vary and its own plan is not settled."""
        owner = self.owner
        known = owner.kinds.known(call.signature, call.scalars)
        if call.sizes and (known is None or not isinstance(known.phase, Settled)):
            input_bytes = sum(tensor.nbytes for tensor in call.inputs)
            shared = owner.families.find(call.structure, call.sizes, before_bytes, input_bytes)
            if shared is not None:
                return shared
        return owner.kinds.find(call.signature, call.scalars)

    def _record(self, before_bytes: int) -> None:
        owner, beside, self._num_states = self.owner, self.owner.beside, self.owner.memory.optimizers.num_states
        owner.calls.know_parameters()
        recorder = Recorder(
            owner.model,
            self._call.inputs,
            owner.store,
            owner.memory,
            before_bytes,
            owner.preparer.budget.device_bytes,
            reruns=owner.preparer.planner not in AS_IT_IS,
            state_bytes=(lambda: beside.state.window.used_bytes) if beside is not None else (lambda: 0),
        )
        if beside is not None:
            beside.watch(recorder)
        self._listen(recorder, ops=True)

    def _follow(self, kind: Kind, phase: Phase, before_bytes: int) -> None:
        owner, memory, settings = self.owner, self.owner.memory, self.owner.preparer.settings
        program = phase.ready.program if phase.ready is not None else Program.empty()
        if program.pools_gradients:
            memory.begin_gradient_pool()
        # a shared plan is not judged by its measurements
        num_measured = 1 if isinstance(phase, Shared) else settings.num_measured
        is_measured = phase.ready is not None and (owner.measure or kind.num_steps < num_measured)
        peak, clock = None, _clock_of(owner, self._call, phase)
        if is_measured:
            has_unseen = phase.trace is None or phase.trace.has_unseen
            peak = memory.watch_peak(before_bytes, self._call.inputs, has_unseen=has_unseen)
        fits = not is_measured and isinstance(phase, Settled) and phase.fits
        num_restarts = memory.begin_step(fits=fits)
        if peak is not None:
            stopwatch = Clock(memory.device, spin=False)
            self._watch = _Watch(peak, stopwatch, stopwatch.start(), num_restarts)
        # The execution must not refer to this step or to the loop, because handles keep it alive longer than both.
        model, inputs, watch = self.model, self._call.inputs, self._watch
        before_all_bytes, gradient_bytes = before_bytes + self._reserved_bytes, owner.calls.gradient_bytes
        execution = (Execution if clock is None else TimedExecution)(
            program,
            self.owner.store,
            meter=watch.peak.meter if watch is not None else None,
            log=watch.log if watch is not None else None,
            clock=clock,
            on_refused=memory.refusals.excuse,
            outside=lambda: outside(model, inputs),
            asked_late=kind.asked_late,
            others=partial(_other_programs, owner.kinds, kind, before_all_bytes),
            spare_bytes=partial(_spare_bytes, owner.preparer, owner.kinds, kind, before_all_bytes, gradient_bytes),
        )
        self._listen(execution, ops=bool(program.last_watched >= 0 or execution.meter or clock))
        execution.look_away()

    def _listen(self, listener: Recorder | Execution, *, ops: bool) -> None:
        self.listener = listener
        self.owner.interception.listen(listener, ops=ops)

    # -- its end ------------------------------------------------------------------------------------------------------

    def complete(self) -> None:
        """Called when the step has ended without an exception: passes what it has shown to its kind."""
        if isinstance(self.listener, Execution):
            self.listener.complete()
        self.leave()
        kind, listener, kinds = self._kind, self.listener, self.owner.kinds
        if kind is None:
            _warn_if_transformed(self._is_transformed)
        elif isinstance(listener, Recorder):
            self.owner.last = _was_recorded(self.owner, kind, self._call, listener, self._num_states)
        elif isinstance(listener, Execution):
            has_left = not listener.plan.on_plan
            self.owner.tally.counts["unplanned" if kind.is_given_up else "left" if has_left else "planned"] += 1
            _warn_if_over(self.owner, self._watch if has_left else None)
            if has_left and isinstance(kind.phase, Shared):
                self.owner.families.left(self._call.structure, self._call.sizes, listener.plan.left_because)
            elif has_left and not kind.is_given_up:
                kinds.left(kind, self._call.scalars, listener.plan.left_because, listener.plan.resembled)
            else:
                self._was_followed(kind, listener)

    def _was_followed(self, kind: Kind, execution: Execution) -> None:
        if execution.plan.has_switched:
            kind = next((one for one in self.owner.kinds.beside(kind) if one.has_program(execution.plan.program)), kind)
            execution.asked_late = kind.asked_late
        kind.num_steps += 1
        self.owner.last = kind
        self.owner.kinds.followed(kind, self._call.scalars)
        if (ready := kind.phase.ready) is None or execution.plan.has_switched:
            return
        kind.is_watched = kind.is_watched or (ready.sums_in_place and bool(execution.is_watched))
        if isinstance(execution, TimedExecution) and execution.times is not None:
            timed = TimedOps(*execution.timed(self.owner.preparer.looks))
            kind.take(timed)
            self.owner.families.was_timed(self._call.structure, self._call.sizes, timed)
        predicted = ready.prepared.predicted
        if self._watch is None:
            _note_unmeasured(self.owner, kind, execution, predicted)
        elif execution.times is None or self.owner.memory.counts_op_by_op:
            self.owner.read_later(self._reader(kind, predicted, execution, self._watch))

    def _reader(self, kind: Kind, predicted: Timeline, execution: Execution, watch: _Watch) -> Callable[[], None]:
        """Returns a function that reads the times, to be called later so that the host need not wait for the device."""
        watch.stopwatch.stop(watch.started)
        # the owner holds the reader, which must not refer to it
        tally, times = self.owner.tally, execution.actions.times
        peak, store = watch.peak.read(), self.owner.store
        num_restarts = self.owner.memory.num_restarts() - watch.num_restarts

        def read() -> None:
            stall_s, recompute_s = times.seconds()
            kind.measured = replace(
                predicted,
                measured=True,
                step_s=watch.stopwatch.seconds()[0],
                peak_bytes=peak.allocated_bytes,
                peak_at="",
                stall_s=stall_s,
                recompute_s=recompute_s,
                host_peak_bytes=store.peak_bytes["host"],
                disk_peak_bytes=store.peak_bytes["disk"],
                reserved_bytes=peak.reserved_bytes,
                actions=tuple(watch.log),
                spans=times.spans(watch.started),
                memory=(),
            )
            tally.note_measured(kind.measured)
            kind.take(Measured(kind.measured, num_restarts))

        return read

    def ran_out(self, error: torch.OutOfMemoryError) -> None:
        """Called when the step ran out of memory: no plan of this size is used again."""
        kind, preparer = self._kind, self.owner.preparer
        if kind is None or kind.trace is None:
            stuck_bytes = self.listener.saves.stuck_bytes if isinstance(self.listener, Recorder) else 0
            error.add_note(_why_not_recorded(preparer, stuck_bytes))
        if kind is not None and isinstance(kind.phase, Shared):
            self.owner.families.ran_out(self._call.structure)
        elif kind is not None:
            kind.take(RanOut())


def _clock_of(owner: Owner, call: Call, phase: Phase) -> Clock | None:
    """Returns the clock for a step whose ops are timed one by one, else None."""
    if isinstance(phase, Shared):
        trace = owner.families.to_be_timed(call.structure, call.sizes)
    else:
        trace = phase.trace if isinstance(phase, Timing) else None
    memory = owner.memory
    if trace is None:
        return None
    asks = asked_by_ops(trace) if memory.has_caching_allocator else None
    return Clock(memory.device, asks=asks, on_refused=memory.refusals.excuse)


def _why_not_recorded(preparer: Preparer, stuck_bytes: int) -> str:
    """Returns the note for the error of a first step that ran out of memory."""
    if stuck_bytes:
        otherwise = ", or use planner='hybrid', which makes values again" if preparer.planner in AS_IT_IS else ""
        return (
            f"outcore: {format_bytes(stuck_bytes)} of what this first step saves found no room beside the device; "
            f"give it more with host=... or disk=...{otherwise}"
        )
    memory = format_bytes(preparer.budget.device_bytes)
    return f"outcore: a step cannot even be recorded in {memory}; raise that or lower the batch size"


def _warn_if_transformed(is_transformed: object) -> None:
    if not is_transformed:
        return
    warn(
        "the model ran inside a transform of torch.func, which saves its tensors by itself, and nothing else of the "
        "step was saved: the step is not limited; call loss.backward() in its place, or use transforms for parts of "
        "the model"
    )


def _was_recorded(owner: Owner, kind: Kind, call: Call, recorder: Recorder, num_states: int) -> Kind:
    """Stores a recording and returns the kind that the step belongs to. `num_states`: the number of parameters with
    optimizer state when the step began."""
    owner.tally.counts["recorded"] += 1
    trace = recorder.finish(know_host(owner.preparer))
    kind = owner.kinds.was_recorded(kind, call.scalars, trace, recorder.saves.asked_late)
    kind.excess.replaced_bytes = recorder.replaced_bytes
    if owner.memory.optimizers.num_states > num_states:
        log.info("the step made the optimizer's state, which no later step does: the next one is recorded, too")
        kind.record_again()
    else:
        owner.families.note_recorded(call.structure, call.sizes, trace)
    owner.memory.after_recording()
    if trace.ticks and not any(op.phase == "forward" for op in trace.ops):
        warn(
            "a step saved tensors for a backward, but nothing of its forward was seen: the step is not limited, and on "
            "a CPU its memory is not counted (a model that is compiled as a whole needs the backend Inductor; with "
            "another one, compile its parts)"
        )
    return kind


def _warn_if_over(owner: Owner, watch: _Watch | None) -> None:
    """Warns of a measured step that left its plan and exceeded the budget."""
    if watch is not None:
        peak_bytes = watch.peak.read().allocated_bytes
        owner.tally.note_peak(peak_bytes)
        warn_if_over(peak_bytes, owner.preparer.budget.device_bytes)


def _note_unmeasured(owner: Owner, kind: Kind, execution: Execution, predicted: Timeline) -> None:
    """Notes what is known of the memory of a step that followed its plan and was not measured."""
    replaced_bytes = execution.plan.contents.replaced.held_bytes
    kind.excess.note_replaced(replaced_bytes, predicted.peak_bytes, owner.preparer.budget.device_bytes)


def _other_programs(kinds: Kinds, kind: Kind, before_bytes: int) -> list[Program]:
    """Returns the programs of the other kinds that the step may turn out to be of."""
    programs = [other.program_beside(before_bytes) for other in kinds.beside(kind)]
    return [program for program in programs if program is not None]


def _spare_bytes(preparer: Preparer, kinds: Kinds, kind: Kind, before_bytes: int, gradient_bytes: int) -> int:
    """Returns how many bytes of saved tensors may stay on the device if the step turns out to be of no known kind."""
    traces = [kind.trace, *(other.trace for other in kinds.beside(kind))]
    known = [trace for trace in traces if trace is not None]
    return min((preparer.spare_bytes(trace, before_bytes, gradient_bytes) for trace in known), default=0)
