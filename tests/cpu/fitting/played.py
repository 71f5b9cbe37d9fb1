"""The life of a kind of step, played: what its steps show is made up, and no step is run."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from outcore.errors import OutcoreError
from outcore.fitting import phases
from outcore.fitting.kinds import Kind
from outcore.fitting.phases import (
    LeftPlan,
    Measured,
    Phase,
    Settled,
    Timing,
    Trying,
    WasRecorded,
)
from outcore.fitting.planning_process import PlanningProcess
from outcore.fitting.preparing import Preparer
from outcore.fitting.retiming import TimedOps
from outcore.fitting.settings import FITTING
from outcore.limit import limit
from outcore.memory.device import CpuMemory
from outcore.memory.store import Store
from outcore.units import GIB, MIB
from outcore.values import Budget, Machine, Plan, Trace
from tests.cpu.fitting.pretended import PretendedGpu

MACHINE = Machine("pretend", GIB, 0, GIB, 1e9, 1e9, 1e9, 1e9)
BUDGET_BYTES = 64 * MIB
CPU = torch.device("cpu")


@functools.cache
def recorded() -> Trace:
    """Its peak is where gradients of three branches are added. Its ops take a millisecond each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            return (x * 2).add_(x * 3).add_(x * 5)

    model = nn.Sequential(*(Block() for _ in range(4)), nn.Linear(64, 4))
    with limit(model, "1GiB") as ooc, ooc.step():
        model(torch.randn(2048, 64)).square().mean().backward()
    assert ooc.trace is not None
    return replace(ooc.trace, ops=tuple(replace(op, seconds=1e-3, host_s=0.0) for op in ooc.trace.ops))


class Life:
    """A kind whose steps are played: `begin` and `show` as a running step calls them, with what happened noted."""

    def __init__(
        self,
        memory: type[CpuMemory] = PretendedGpu,
        *,
        planner: str = "swap-all",
        given: Plan | None = None,
        budget_bytes: int = BUDGET_BYTES,
        process: PlanningProcess | None = None,
    ) -> None:
        self.memory = memory(nn.Linear(2, 2), CPU)
        budget = Budget(budget_bytes, 0, GIB)
        store = Store(CPU, 0, GIB)
        process = process or PlanningProcess()
        self.preparer = Preparer(MACHINE, budget, planner, self.memory, store, given, FITTING, process)
        self.kind = Kind(self.preparer)
        self.walked: list[tuple[str, str]] = []

    @property
    def phase(self) -> Phase:
        return self.kind.phase

    def is_in(self, phase: type[Phase]) -> bool:
        return type(self.phase) is phase

    def begin(self, extra_bytes: int = 0) -> None:
        before = self.phase
        self.kind.begin(recorded().before_bytes + extra_bytes)
        self._note(before)

    def show(self, shown: phases.Shown) -> None:
        before = self.phase
        self.kind.take(shown)
        self._note(before)

    def _note(self, before: Phase) -> None:
        if before is not self.phase:
            self.walked.append((type(before).__name__, type(self.phase).__name__))

    # -- steps --------------------------------------------------------------------------------------------------------

    def record(self) -> None:
        self.show(WasRecorded(recorded()))

    def time(self, factor: float = 0.5) -> None:
        assert self.phase.trace is not None
        ops = self.phase.trace.ops
        self.show(TimedOps([op.name for op in ops], [factor * op.seconds for op in ops]))

    def measure(
        self, factor: float = 1.0, *, restarts: int = 0, stall: float = 0.0, num: int = 1, reserved: float = 0.0
    ) -> None:
        """`reserved`: what the allocator held, as a share of the budget."""
        for _ in range(num):
            assert self.phase.ready is not None
            predicted = self.phase.ready.prepared.predicted
            stall_s = predicted.stall_s + stall * predicted.step_s
            step_s = factor * predicted.step_s
            found = replace(predicted, measured=True, step_s=step_s, stall_s=stall_s)
            self.show(Measured(replace(found, reserved_bytes=int(reserved * BUDGET_BYTES)), restarts))

    def to_timing(self) -> Life:
        self.record()
        self.begin()
        assert self.is_in(Timing)
        return self

    def to_trying(self) -> Life:
        self.to_timing().time()
        self.begin()
        assert self.is_in(Trying)
        return self

    def to_settled(self) -> Life:
        self.to_trying().measure(1.02, num=3)
        assert self.is_in(Settled)
        return self

    def leave_once(self) -> None:
        self.show(LeftPlan("another op"))


class Held(PlanningProcess):
    """Answers when a test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[Callable[[], Any], Future[Any]]] = []
        self.is_open = False

    def submit(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.asked.append((partial(function, *args, **kwargs), future))
        if self.is_open:
            self.answer()
        return future

    def answer(self) -> None:
        for work, future in self.asked:
            try:
                future.set_result(work())
            except OutcoreError as error:
                future.set_exception(error)
        self.asked.clear()

    def open(self) -> None:
        self.is_open = True
        self.answer()

    def break_off(self) -> None:
        for _, future in self.asked:
            future.set_exception(OutcoreError("the planning process ended"))
        self.asked.clear()
