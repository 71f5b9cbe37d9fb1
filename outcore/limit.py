"""The front door: limit(model, memory=...) -> the object a training loop holds.

The first step of a kind is recorded, in the leanest state. When a step of that kind comes again it is planned, and from
then on the plan is followed. Kinds are told apart by what the model is called with (shapes, types, modes) before the
first op runs; a step that turns out differently than its kind runs on safely, unplanned, and is recorded anew.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from outcore.errors import BudgetTooSmall, OutcoreError, PlanMismatch
from outcore.planning import AS_IT_IS, PLANNERS, lower, plans, simulate, verify
from outcore.planning.crowd import Crowd
from outcore.planning.echoes import step_of
from outcore.planning.holes import asked_by_ops
from outcore.planning.sums import sums_in_place
from outcore.planning.tidy import Tidied, tidy
from outcore.recording.intercept import Interception
from outcore.recording.machine import device_bytes, device_of, host_bytes_granted, measure_machine
from outcore.recording.record import Recorder
from outcore.reporting.text import report
from outcore.running import allocator
from outcore.running.aside import Aside
from outcore.running.clock import Clock
from outcore.running.execute import Execution, is_distributed
from outcore.running.kinds import Kind
from outcore.running.meter import LiveBytes, Optimizers, outside, resident_bytes, storages_there
from outcore.running.program import Program
from outcore.running.room import NUM_STEPS, Room
from outcore.running.store import Store
from outcore.units import MIB, format_bytes, parse_bytes
from outcore.values import Budget, Machine, Plan, Schedule, Timeline, Trace

log = logging.getLogger("outcore")

Key = tuple[Any, ...]
_ACTIVE: list[Limited] = []  # the one whose step is running: two would mark the same storages
LEAST_MARGIN = 0.015  # of a CUDA budget: pages that are used in part count whole
UNSPLIT_BYTES = 4 * MIB  # CUDA blocks count whole where their rest is too small to split: it varies from run to run
STALL_SHARE = 0.01  # of a step: waiting longer than predicted by this much, copies are slower than was measured
MOST_PACE = 1.1  # how much slower than its ops one by one a whole step may run
NUM_SLOWED = 2  # times copies are planned slower than measured
NUM_MEASURED = NUM_STEPS  # planned steps of a kind that are measured closely; later ones run without any meter
NUM_PLANS = 8  # for one room, from which tidying may begin
NUM_TRIES = 3  # recordings of a kind whose steps keep changing, before it is left unplanned


def limit(
    model: torch.nn.Module,
    memory: int | str,
    *,
    host: int | str = "auto",
    disk: str | Path | None = None,
    planner: str = "hybrid",
    plan: Plan | None = None,
    measure: bool = False,
) -> Limited:
    """Makes the training steps of `model` fit into `memory` bytes of its device, with the same numbers.

    `memory` is the peak of allocated bytes over the whole step, parameters, gradients and optimizer state included:
    `"16GiB"`, a number of bytes, or `"80%"` of the device. `host` limits pinned host memory, `disk` names a folder for
    a swap file that is used when the host's share is spent (on the CPU it is the only place to swap to, and defaults to
    the folder for temporary files). `plan` is used instead of planning if it was made for the same step. `measure`
    keeps measuring every step; without it only the first planned steps are measured closely.
    """
    return Limited(model, memory, host=host, disk=disk, planner=planner, plan=plan, measure=measure)


class Limited:
    """A model under a memory budget. Wrap each training step: `with ooc.step(): ...`."""

    def __init__(
        self,
        model: torch.nn.Module,
        memory: int | str,
        *,
        host: int | str = "auto",
        disk: str | Path | None = None,
        planner: str = "hybrid",
        plan: Plan | None = None,
        measure: bool = False,
    ) -> None:
        if planner not in PLANNERS:
            raise OutcoreError(f"there is no planner {planner!r}; choose one of {', '.join(PLANNERS)}")
        self.model = model
        self.device = device_of(model)
        memory_bytes = parse_bytes(memory, of_bytes=device_bytes(self.device))
        folder = str(disk) if disk is not None else (tempfile.gettempdir() if self.device.type == "cpu" else None)
        host_bytes = host_bytes_granted() if host == "auto" else parse_bytes(host, of_bytes=host_bytes_granted())
        self.machine: Machine = measure_machine(self.device, folder)
        on_cuda = self.device.type == "cuda"
        self.budget = Budget(memory_bytes, host_bytes if on_cuda else 0, self.machine.disk_bytes)
        self.planner = planner
        self.store = Store(self.device, self.budget.host_bytes, self.budget.disk_bytes, folder)
        self.measure = measure
        self._tries_rooms = on_cuda
        self._num_restarts, self._refusals = 0, allocator.Refusals(self.device)
        self.ahead = allocator.Ahead(self.device)
        allocator.make_ready(self.device)
        self.kinds: dict[Key, Kind] = {}
        self._given_plan = plan
        self._given_fits = False
        self._expected: Trace | None = None
        self._last: Kind | None = None
        self._run: Recorder | Execution | None = None
        self._kind: Kind | None = None
        self._meter: LiveBytes | None = None
        self._started: Any = None
        self._stopwatch = Clock(self.device, spin=False)  # of steps that are measured closely
        self._log: list[str] | None = None
        self._pending: Callable[[], None] | None = None
        self._interception = Interception(lambda: self._start(("no forward",), ()))
        self._active = False
        self._thread = 0  # the one that entered the step: hooks and modes are a thread's own
        # On CUDA the allocator knows what optimizers' state takes.
        self._optimizers = None if on_cuda else Optimizers(model)
        forward = model.register_forward_pre_hook(self._on_forward, with_kwargs=True)
        self._hooks = [hook for hook in (forward, self._optimizers) if hook is not None]
        self._know_parameters()
        self._aside = Aside(model.parameters(), memory_bytes, self.device, self._refusals.excuse) if on_cuda else None

    def expect(self, trace: Trace) -> None:
        """The next step of a new kind will do what `trace` says: it is planned at once, without recording it first.

        A step that turns out otherwise leaves the plan safely, like any other, and is recorded when it comes again.
        Cheaper ops that gave the same bits where `trace` was recorded may not give them here: they are not used.
        """
        ops = tuple(dataclasses.replace(op, twin=False, twin_s=0.0, fused=(), fused_s=0.0) for op in trace.ops)
        self._expected = dataclasses.replace(trace, ops=ops)

    # -- the step -----------------------------------------------------------------------------------------------------

    @contextmanager
    def step(self) -> Iterator[Limited]:
        """One training step: forward(s) and backward(s). The optimizer may step inside or after it."""
        if _ACTIVE:
            raise OutcoreError("ooc.step() was entered inside ooc.step(); leave the first one before the next")
        self._settle()
        _ACTIVE.append(self)
        self._active, self._thread = True, threading.get_ident()
        self._interception.start()
        collecting, failed = gc.isenabled(), True
        gc.disable()  # a step makes and frees thousands of objects: every look at them all takes a tenth of a second
        try:
            with self._refusals:
                yield self
            failed = False
        except torch.OutOfMemoryError as error:
            self._ran_out(self._kind, error)
            raise
        finally:
            if collecting:
                gc.enable()
            self._interception.stop()
            self._active = False
            if self._aside is not None:
                self._aside.end()
            _ACTIVE.remove(self)
            self._end(failed=failed)

    def _on_forward(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._active and self._run is None and torch.is_grad_enabled():
            if threading.get_ident() != self._thread:
                warnings.warn(
                    "outcore: the model is called in another thread than ooc.step(); nothing of that is seen, and its "
                    "memory not limited (enter the step in the thread that runs the forward)",
                    stacklevel=2,
                )
                return
            inputs = tuple(item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor))
            self._start(self._key(inputs, args, kwargs), inputs)

    def _key(self, inputs: tuple[torch.Tensor, ...], args: Any, kwargs: Any) -> Key:
        """What tells kinds of steps apart before the first op."""
        device_type = self.device.type
        return (
            tuple((tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for tensor in inputs),
            tuple(item for item in tree_leaves((args, kwargs)) if isinstance(item, bool | int | str | type(None))),
            self.model.training,
            torch.is_autocast_enabled(device_type) and torch.get_autocast_dtype(device_type),
            self._has_gradients(),
        )

    def _know_parameters(self) -> None:
        """Walking through the modules every step takes milliseconds. Weakly: what the user replaces may go."""
        self._parameters = tuple(weakref.ref(parameter) for parameter in self.model.parameters())

    def _has_gradients(self) -> bool:
        if any(known() is None for known in self._parameters):
            self._know_parameters()
        return any(getattr(known(), "grad", None) is not None for known in self._parameters)

    def _start(self, key: Key, inputs: tuple[torch.Tensor, ...]) -> None:
        if key not in self.kinds:
            self.kinds[key] = Kind(trace=self._expected, timed_again=self._expected is not None)
            self._expected = None
        kind = self._kind = self.kinds[key]
        if kind.trace is None and not kind.unplanned and self.device.type == "cuda":
            gc.collect()  # what nobody holds any more would count as there all along
        before_bytes = self._before_bytes(inputs)
        self._meter = self._log = None
        if not self._interception.can_see_ops():
            self._run = Execution(Program.empty(), self.store, outside=lambda: outside(self.model, inputs))
            self._interception.listen(self._run, ops=False)
            self._kind = Kind(unplanned=True)
            return
        if kind.trace is None and not kind.unplanned:
            self._know_parameters()
            where = self.model, inputs, self.store, self.device, before_bytes, self.budget.device_bytes
            self._run = Recorder(*where, on_refused=self._refusals.excuse, reruns=self.planner not in AS_IT_IS)
            self._interception.listen(self._run, ops=True)
            return
        grown = kind.has_grown(before_bytes)
        if kind.in_place and self._looks_at_all(kind):  # since the last step
            kind.room, kind.stale = None, True
        if kind.trace is not None and (kind.stale or grown):
            self._make_plan(kind, before_bytes)
        program = kind.program or Program.empty()
        if self._aside is not None and program.gradients_aside:
            self._aside.begin()
        closely = kind.program is not None and (self.measure or kind.num_steps < NUM_MEASURED)
        if closely:
            self._log = []
            self._watch_memory(before_bytes, kind.trace, inputs)
        time_again = self.device.type == "cuda" and not kind.timed_again
        clock = None
        if time_again and kind.trace is not None:
            clock = Clock(self.device, asks=asked_by_ops(kind.trace), on_refused=self._refusals.excuse)
        self._num_restarts = self.ahead.begin(fits=not closely and kind.room is not None and kind.room.fits)
        if closely:
            self._stopwatch = Clock(self.device, spin=False)
            self._started = self._stopwatch.start()
        self._run = Execution(
            program,
            self.store,
            meter=self._meter,
            log=self._log,
            clock=clock,
            on_refused=self._refusals.excuse,
            outside=lambda: outside(self.model, inputs),
        )
        self._interception.listen(self._run, ops=bool(program.last_watched >= 0 or self._meter or clock))

    def _end(self, *, failed: bool) -> None:
        run, kind, self._run, self._kind = self._run, self._kind, None, None
        if run is None or kind is None:
            return
        if isinstance(run, Recorder):
            if failed:
                run.close()
            else:
                kind.trace = run.finish()
                kind.stale = True
                # A given plan may leave no room for a step whose every op is looked at.
                given = self._given_plan
                kind.timed_again = given is not None and given.fingerprint == kind.trace.fingerprint
                self._last = kind
                if self.device.type == "cuda":  # the optimizer's state, made next, should not lie scattered among holes
                    torch.cuda.empty_cache()
            return
        run.close()
        if self._meter is not None:
            self._meter.stop()
        if failed:
            return
        if not run.on_plan and not kind.unplanned:
            self._on_left(kind, run)
            return
        kind.num_steps += 1
        self._last = kind
        kind.watched = kind.watched or (kind.in_place and run.is_watched)
        if run.clock is not None:
            self._correct_times(kind, run)
        elif self._log is not None:
            self._note_measured(kind, run)

    def _correct_times(self, kind: Kind, run: Execution) -> None:
        """The recorded step also paid for the allocator's first calls to the driver: the second time an op is timed
        the smaller figure counts, and the step is planned once more."""
        assert run.clock is not None
        kind.timed_again = True
        if not kind.take_times(run.timed, run.clock.seconds()):
            log.info("the first planned step ran other ops than recorded; its times were not used")

    def _on_left(self, kind: Kind, run: Execution) -> None:
        kind.num_left += 1
        log.info("a step left its plan: %s", run.left_plan_because)
        kind.trace = kind.plan = kind.program = kind.room = None
        kind.stale = True
        if kind.num_left >= NUM_TRIES:
            kind.unplanned = True
            warnings.warn(
                f"outcore: steps called alike keep doing different work ({run.left_plan_because}); they run unplanned "
                "from here on, everything swapped: correct, but slow",
                stacklevel=5,
            )

    # -- planning -----------------------------------------------------------------------------------------------------

    def _make_plan(self, kind: Kind, before_bytes: int) -> None:
        assert kind.trace is not None
        grown = kind.has_grown(before_bytes)
        if kind.plan is not None:  # what lies around between steps may come and go: plan for the most
            before_bytes = max(before_bytes, kind.plan.before_bytes)
        if self._tries_rooms:
            torch.cuda.empty_cache()  # what the allocator reserves from here on is the plan's own doing
            if kind.room is None or grown:
                kind.room = Room(self.budget.device_bytes)
                self.ahead = allocator.Ahead(self.device)  # another plan may bear a host that does not wait
            kind.room.begin()
        kind.trace = dataclasses.replace(kind.trace, before_bytes=before_bytes)
        trace = self._as_run(kind)
        try:
            made = self._plan_for(trace, kind)
        except BudgetTooSmall:
            if kind.timed_again or self.device.type != "cuda":
                raise
            kind.timed_again = True  # a step whose ops are timed may need more than those that follow
            trace = self._as_run(kind)
            made = self._plan_for(trace, kind)
        if made is None:
            self._go_back(kind)
            return
        kind.plan, in_place = made, trace is not kind.trace  # in place: nobody looks at its backward
        trace = step_of(trace, made)
        kind.schedule = lower(trace, kind.plan, self.machine)
        verify(trace, kind.schedule)
        kind.predicted = peak = simulate(trace, kind.schedule, self.machine)
        if peak.peak_bytes > self.budget.device_bytes:  # a plan that was given, for another budget
            kind.stale = True
            raise BudgetTooSmall(peak.peak_bytes, self.budget.device_bytes, peak.peak_at, where=str(self.device))
        kind.taken_bytes = before_bytes if made is self._given_plan else 0
        crowd = Crowd()
        if kind.room is not None and kind.room.crowded:
            crowd = kind.room.arrange(trace, kind.schedule, peak.peak_bytes, allocator.places(self.device))
        kind.in_place, kind.stale = in_place, False
        kind.program = Program(trace, kind.schedule, crowd.placeholders, gradients_aside=bool(crowd.aside))
        kind.num_steps = 0
        if kind.in_place and not kind.program.ends_in_forward:
            if kind.room is not None and kind.room.attempts:
                self._go_back(kind)
            else:
                kind.watched, kind.room = True, None  # what it looked at were plans for sums in place
                self._make_plan(kind, before_bytes)
            return
        if kind.room is not None and kind.room.is_hopeless(kind.predicted.step_s):
            self._go_back(kind)
        self.store.reserve(kind.predicted.host_peak_bytes)

    def _looks_at_all(self, kind: Kind) -> bool:
        """Python looks at the backward, too: on the CPU, among other workers, under another's mode, to time ops."""
        alone = self.device.type == "cuda" and not is_distributed() and self._interception.is_alone
        return not alone or not kind.timed_again or kind.watched

    def _as_run(self, kind: Kind) -> Trace:
        """The step to plan for."""
        assert kind.trace is not None
        return kind.trace if self._looks_at_all(kind) else sums_in_place(kind.trace)

    def _plan_for(self, trace: Trace, kind: Kind) -> Plan | None:
        """None: what was tried already is the best there is."""
        given, room = self._given_plan, kind.room
        brief = self.planner == "hybrid" and self.device.type == "cuda" and not kind.timed_again  # for one step
        if given is not None and given.fingerprint == trace.fingerprint:
            self._given_fits = True
            return given
        if given is not None and not self._given_fits:
            raise PlanMismatch(
                f"the plan was made for another step (fingerprint {given.fingerprint}, this step is "
                f"{trace.fingerprint}); plan this one anew: leave out plan=..."
            )
        margin, memory_bytes = (LEAST_MARGIN if room is not None else 0.0), self.budget.device_bytes
        known = [attempt.made[0] for attempt in room.attempts] if room is not None else []

        def plan_in(room_bytes: int, most: int = 1) -> list[Plan]:
            budget = dataclasses.replace(self.budget, device_bytes=room_bytes)
            planner = "market" if brief else self.planner
            return plans(trace, self.machine, budget, planner=planner, most=most, starts=known)

        if room is not None and room.crowded and not room.again:
            there = allocator.places(self.device)
            keeps = room.keeps_places

            def tidied(size: int) -> Tidied:
                made, *others = plan_in(size, NUM_PLANS)
                found = tidy(trace, self.machine, made, memory_bytes, there, others=others, keeps_places=keeps)
                known.append(found.plan)
                return found

            found = room.another(tidied)
            if found is not None or room.attempts:
                return found
        rooms = [room.room_bytes] if room is not None else []
        if room is None or not (room.attempts or room.crowded):
            rooms.append(int(memory_bytes * (1 - margin)))
        for room_bytes in rooms:
            try:
                made = plan_in(room_bytes)[0]
            except BudgetTooSmall as error:
                too_small = error
                continue
            if room is not None:
                room.room_bytes = room_bytes
            return made
        if room is not None and room.attempts:
            return None
        needed = int(too_small.needed_bytes / (1 - margin)) + 1 + (UNSPLIT_BYTES if room is not None else 0)
        raise BudgetTooSmall(needed, memory_bytes, too_small.at_op, where=str(self.device)) from None

    def _fit(self, kind: Kind, num_restarts: int) -> None:
        """A second look at the plan: was the room right, were the copies as fast as thought?"""
        room, plan, measured = kind.room, kind.plan, kind.measured
        if room is None or room.settled or kind.stale or plan is None or measured is None:
            return
        if self._given_fits or plan.count("keep") == len(plan.decisions):
            room.settle()
        elif room.note(measured.step_s, num_restarts, measured.reserved_bytes):
            kind.stale = room.judge(kind.made, again=not num_restarts and self._slow_down(kind))
            if room.settled:
                self._go_back(kind)

    def _slow_down(self, kind: Kind) -> bool:
        """Copies that compute had to wait for longer than predicted go slower beside compute than they went alone."""
        measured, predicted = kind.measured, kind.predicted
        if kind.num_slowed >= NUM_SLOWED or not (measured and predicted):
            return False
        if measured.stall_s <= predicted.stall_s + STALL_SHARE * measured.step_s:
            return False
        kind.num_slowed += 1
        self.machine = self.machine.with_copies_at(0.9)
        return True

    def _go_back(self, kind: Kind) -> None:
        """To the plan that was the fastest, measured; no other will be tried."""
        assert kind.room is not None
        kind.room.settle()
        kind.stale = False
        if kind.room.attempts and kind.room.best.made[0] is not kind.plan:
            kind.plan, kind.schedule, kind.predicted, kind.program = kind.room.best.made
            kind.num_steps = 0
            torch.cuda.empty_cache()
        self._correct_pace(kind)

    def _correct_pace(self, kind: Kind) -> None:
        """Ops timed one by one run at a better clock than a whole step of them: Llama's add up to 4 % less on an H200.
        What the plan's own steps took corrects them all by one factor, and so the prediction for the steps to come."""
        room = kind.room
        assert room is not None
        if room.is_paced or not room.attempts or room.best.num_restarts or kind.trace is None or kind.predicted is None:
            return
        room.is_paced = True
        waited_s = kind.predicted.stall_s
        pace = (room.best.step_s - waited_s) / max(kind.predicted.step_s - waited_s, 1e-9)
        if not 1 < pace < MOST_PACE:  # otherwise something else is wrong, and should be seen
            return
        kind.go_at(pace)
        assert kind.schedule is not None
        assert kind.plan is not None
        kind.predicted = simulate(self._as_run(kind), kind.schedule, self.machine)
        kind.plan = dataclasses.replace(
            kind.plan, predicted_step_s=kind.predicted.step_s, in_core_step_s=pace * kind.plan.in_core_step_s
        )
        room.keep_best(kind.made)

    def _ran_out(self, kind: Kind | None, error: torch.OutOfMemoryError) -> None:
        """A step ran out of memory: no plan of this size again."""
        if kind is None or kind.trace is None:
            memory = format_bytes(self.budget.device_bytes)
            stuck_bytes = self._run.stuck_bytes if isinstance(self._run, Recorder) else 0
            otherwise = ", or use planner='hybrid', which makes values again" if self.planner in AS_IT_IS else ""
            error.add_note(
                f"outcore: {format_bytes(stuck_bytes)} of what this first step saves found no room beside the device; "
                f"give it more with host=... or disk=...{otherwise}"
                if stuck_bytes
                else f"outcore: a step cannot even be recorded in {memory}; raise that or lower the batch size"
            )
        if kind is None or kind.room is None or kind.stale:
            return
        kind.stale = kind.room.ran_out()
        if not kind.stale:
            self._go_back(kind)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def _before_bytes(self, inputs: tuple[torch.Tensor, ...]) -> int:
        if self.device.type == "cuda":
            return allocator.allocated_bytes(self.device)
        resident = resident_bytes(self.model, self._optimizers or (), self.device)
        return resident + sum(tensor.nbytes for tensor in inputs if tensor.device.type == "cpu")

    def _watch_memory(self, before_bytes: int, trace: Trace | None, inputs: tuple[torch.Tensor, ...]) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        looks = trace is None or trace.has_unseen
        self._meter = LiveBytes(before_bytes, storages_there(self.model, inputs) if looks else None)

    def _note_measured(self, kind: Kind, run: Execution) -> None:
        """Times are read when somebody asks or the next step begins: the device is not made to wait for them."""
        clock, actions = self._stopwatch, tuple(self._log or ())
        clock.stop(self._started)
        peak, reserved = self._peak_bytes()
        num_restarts = allocator.count_restarts(self.device) - self._num_restarts

        def read() -> None:
            step_s, (stall_s, recompute_s) = clock.seconds()[0], run.measured_s()
            assert kind.predicted is not None
            kind.measured = dataclasses.replace(
                kind.predicted,
                measured=True,
                step_s=step_s,
                peak_bytes=peak,
                peak_at="",
                stall_s=stall_s,
                recompute_s=recompute_s,
                host_peak_bytes=self.store.peak_bytes["host"],
                disk_peak_bytes=self.store.peak_bytes["disk"],
                reserved_bytes=reserved,
                actions=actions,
                spans=(),
                memory=(),
            )
            self._fit(kind, num_restarts)

        self._pending = read

    def _peak_bytes(self) -> tuple[int, int]:
        """Allocated and reserved at the peak of the step that just ended."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device), torch.cuda.max_memory_reserved(self.device)
        return self._meter.peak_bytes if self._meter is not None else 0, 0

    def _settle(self) -> None:
        if (pending := self._pending) is not None:
            self._pending = None
            pending()

    # -- what a user looks at -----------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace | None:
        """The last step's recording."""
        return self._last.trace if self._last else None

    @property
    def plan(self) -> Plan | None:
        """The last step's plan, made when a recorded one comes again; on CUDA the first is a brief one (`market`)."""
        return self._last.plan if self._last else None

    @property
    def schedule(self) -> Schedule | None:
        return self._last.schedule if self._last else None

    @property
    def predicted(self) -> Timeline | None:
        """What the plan promised."""
        return self._last.predicted if self._last else None

    @property
    def timeline(self) -> Timeline | None:
        """What was measured on the last step that was measured closely."""
        self._settle()
        return self._last.measured if self._last else None

    @property
    def settled(self) -> bool:
        """Whether the last step followed a plan that will not change any more. On a GPU the first plans are tried."""
        self._settle()
        return self._last is not None and self._last.is_final

    def __str__(self) -> str:
        self._settle()
        return report(self.budget, self.trace, self.plan, self.predicted, self.timeline, where=str(self.device))

    def close(self) -> None:
        """Takes the hooks off the model and gives host memory and the swap file back."""
        self._settle()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self._aside is not None:
            self._aside.remove()
        self.store.close()
