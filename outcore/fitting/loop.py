"""Model + device + budget -> Loop: the steps of one training loop. `outcore.limit` is a thin layer over it."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from outcore.eager.execution import Execution
from outcore.eager.intercept import Interception
from outcore.errors import OutcoreError, StoreError, warn
from outcore.fitting.beside import StateBeside
from outcore.fitting.cache import StepCache
from outcore.fitting.calls import Calls
from outcore.fitting.families import Families
from outcore.fitting.hooks import ACTIVE, ForwardHook, hook_of
from outcore.fitting.kinds import Kind, Kinds
from outcore.fitting.phases import GivenUp, Took
from outcore.fitting.planning_process import PlanningProcess
from outcore.fitting.preparing import Preparer
from outcore.fitting.remembering import Remembering
from outcore.fitting.running import RunningStep
from outcore.fitting.settings import FITTING, FittingSettings
from outcore.fitting.tally import Stats, Tally
from outcore.memory.device import DeviceMemory
from outcore.memory.store import Store
from outcore.state.state import State
from outcore.units import format_bytes
from outcore.values import Budget, Machine, Plan, Trace

T = TypeVar("T")


class Loop:
    """Runs the steps of one model. Hooks, threads, file descriptors and disk space are freed even without `close`."""

    def __init__(
        self,
        model: torch.nn.Module,
        memory: DeviceMemory,
        store: Store,
        machine: Machine,
        budget: Budget,
        *,
        planner: str = "hybrid",
        given: Plan | None = None,
        measure: bool = False,
        cache: Path | None = None,
        settings: FittingSettings = FITTING,
        state: State | None = None,
    ) -> None:
        self.model, self.memory, self.measure = model, memory, measure
        self.preparer = Preparer(machine, budget, planner, memory, store, given, settings, PlanningProcess())
        self.preparer.beside = StateBeside(state, self.preparer) if state is not None else None
        remembering = (
            Remembering(StepCache(cache), model, memory.device, budget, planner) if cache and not given else None
        )
        self.kinds = Kinds(self.preparer, remembering)
        self.families = Families(self.preparer)
        self.calls = Calls(model, memory.device.type)
        self.interception = Interception()
        self.last: Kind | None = None  # of the last step
        self.tally = Tally()
        self.warns_outside = False  # of trainings outside any step
        self.has_graphs: bool | None = None  # whether steps call compiled graphs; None: not known yet
        self._unread: Callable[[], None] | None = None
        self._hook = hook_of(model, settings.num_forgotten)
        self._hook.add(self, model, first=state is not None)
        self._detach = weakref.finalize(self, _detach, self._hook, memory)
        self._detach.atexit = False

    @property
    def store(self) -> Store:
        return self.preparer.store

    @contextmanager
    def step(self, target: T, name: str | None = None, batch: Any = None) -> Iterator[T]:
        """Runs one step: one or more forwards and backwards on `batch`. Steps with different names have their own
        plans.

        `leave` is called at two levels because an interrupt may end the inner call."""
        if self.is_closed:
            raise OutcoreError("this limit is closed; call outcore.limit() again for the model")
        self.read_measured()
        step = RunningStep(self, name, batch)
        counts, began_s = Counter(self.tally.counts), time.perf_counter()
        try:
            try:
                step.enter()
                with self.memory.refusals:
                    yield target
                step.complete()
            finally:
                step.leave()
            self._note(step, counts, time.perf_counter() - began_s)
        except Exception as error:
            said = str(error).strip().partition("\n")[0]
            self.tally.unplanned_because = f"it ended with {type(error).__name__}: {said}"
            if isinstance(error, torch.OutOfMemoryError):
                step.ran_out(error)
            raise
        finally:
            step.leave()
            # breaks the reference cycle step -> listener -> step, so no garbage collection is needed
            step.listener = None

    @property
    def beside(self) -> StateBeside | None:
        """The training state if it may leave the device, else None."""
        beside: StateBeside | None = self.preparer.beside
        return beside

    def expect(self, trace: Trace) -> None:
        """Plans the next new kind of step from `trace` instead of recording it.

        Cheaper ops that gave the same bits on the machine where `trace` was recorded may give other bits on this one,
        so they are not used.
        """
        ops = tuple(replace(op, norm_replay=False, norm_replay_s=0.0, fused=(), fused_s=0.0) for op in trace.ops)
        self.kinds.expect(replace(trace, ops=ops))

    def _note(self, step: RunningStep, before: Counter[str], seconds: float) -> None:
        """Notes how a complete step went, and why it followed no plan if it did not."""
        way = next(iter(self.tally.counts - before), "")
        ready = self.last.phase.ready if self.last is not None else None
        self.tally.note(way, seconds, ready.prepared.predicted if ready is not None else None)
        because, listener = "", step.listener
        if way == "planned" and self.last is not None and self.memory.counts_op_by_op and _is_as_usual(listener):
            self.last.take(Took(seconds))
        if not way:
            because = (
                "nothing in it was saved for a backward pass; call the model inside `with ooc.step():`, with gradients "
                "switched on"
            )
        elif way == "left" and isinstance(listener, Execution):
            because = (
                f"it left its plan ({listener.plan.left_because}); it ran on with the same numbers, and the next "
                "one like it is recorded"
            )
        elif self.last is not None and isinstance(self.last.phase, GivenUp):
            because = f"steps called alike keep doing different work ({self.last.phase.because})"
        self.tally.unplanned_because = because

    def stats(self) -> Stats:
        """Returns what the steps did and cost so far."""
        self.read_measured()
        return self.tally.stats() | (self.beside.stats() if self.beside is not None else {})

    def read_later(self, read: Callable[[], None]) -> None:
        self._unread = read

    def read_measured(self) -> None:
        """Reads the times of the last step if it was measured and they have not been read yet."""
        read, self._unread = self._unread, None
        if read is not None:
            read()

    # -- closing ------------------------------------------------------------------------------------------------------

    @property
    def is_running(self) -> bool:
        return any(step.owner is self for step in ACTIVE)

    @property
    def is_closed(self) -> bool:
        return not self._detach.alive

    def close(self) -> None:
        """Removes the hooks from the model and frees host memory and the swap file."""
        self.read_measured()
        self._hook.owners.discard(self)
        self.preparer.process.close()
        self._detach()
        if self.beside is not None:
            self.beside.state.close()
        self.store.close()

    def retire(self) -> None:
        """Closes the loop even if swapped values are in use. Host memory and the swap file are freed with the last of
        them."""
        try:
            self.close()
        except StoreError:
            self.store.forsake()


def _is_as_usual(listener: object) -> bool:
    """Whether a step was looked at no more than its plan needs."""
    return type(listener) is Execution and listener.meter is None and not listener.plan.has_switched


def _detach(hook: ForwardHook, memory: DeviceMemory) -> None:
    hook.remove_if_unused()
    memory.close()


def open_loops(model: torch.nn.Module) -> list[Loop]:
    """Returns the loops of a model that are not closed."""
    hooks = [hook for hook in model._forward_pre_hooks.values() if isinstance(hook, ForwardHook)]
    return [owner for hook in hooks for owner in list(hook.owners) if isinstance(owner, Loop)]


def give_way(earlier: list[Loop], budget: Budget) -> None:
    """Closes earlier loops of a model: it has one limit at a time."""
    for loop in earlier:
        warn(
            f"this model had a limit of {format_bytes(loop.preparer.budget.device_bytes)} already; it is closed, and "
            f"the one of {format_bytes(budget.device_bytes)} takes its place"
        )
        loop.retire()
