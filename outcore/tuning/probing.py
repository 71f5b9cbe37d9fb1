"""The user's model, loss, data and optimizer -> recorded steps of a few small batches, and real steps of larger ones.

`climb` records batches from two samples upward and stops when the last one only confirmed what the two before it
predicted: from there on a step grows along a line, which is checked once, far up. `confirm` runs real steps at a batch
that a plan says fits, and they follow that plan from the first one on. Nothing here looks for memory by running out of
it.

While steps are tried the learning rate is zero: weights stay where they are, and no step slows down because numbers
overflow.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outcore.errors import BudgetTooSmall, TuningError
from outcore.limit import FIRST_MARGIN, NUM_MEASURED, Kind, Limited, limit
from outcore.tuning.batches import LossFn, loss_of
from outcore.tuning.curve import Planned, Predicted
from outcore.tuning.samples import Samples
from outcore.tuning.scaling import Family, Recorded, difference, fastest, stretched
from outcore.units import format_bytes
from outcore.values import Budget, Machine, Trace

Tell = Callable[[str, float], None]
BUSY_S = 0.02  # shorter steps are mostly overhead: their times tell little about larger batches
SETTLED = 0.03  # a batch whose seconds the two before it predicted this well ends the climb
CLIMB_S = 25.0  # no further batch is recorded when it would take longer than this in all
NUM_TIMED, TIMED_S = 3, 0.15  # real steps that are timed: at least so many, and for so long
MAX_TIMED = 12
REACH = 8  # times the last recorded batch: so far the line is trusted before real steps are run on it
NUM_TRIED = 6  # steps until one was watched under a plan
NUM_UNLIKE = 3  # batches whose steps do different work, before it is given up
NUM_ROUNDS = 2  # of timing recorded batches in turn
NUM_RECORDINGS = 2  # on the CPU, where the first one also pays for the first touch of memory


@dataclass(frozen=True)
class Measured:
    """Real steps of one batch."""

    batch: int
    step_s: float  # the optimizer's part included
    peak_bytes: int
    trace: Trace  # op seconds add up to what a step with everything kept takes
    followed: bool = True  # the steps did what the trace says

    def retimed(self, step_s: float, optimizer_s: float) -> Measured:
        """The same with other seconds, and the op seconds to go with them."""
        factor = max(step_s - optimizer_s, 0.05 * step_s) / (self.step_s - optimizer_s)
        trace = replace(self.trace, ops=tuple(stretched(self.trace.ops, factor)))
        return replace(self, step_s=step_s, trace=trace)


class Bench:
    """Where steps are tried: one model, one optimizer, one memory budget."""

    clock = staticmethod(time.perf_counter)  # a benchmark on a shared CPU may rather take process_time

    def __init__(
        self,
        model: torch.nn.Module,
        loss_fn: LossFn,
        samples: Samples,
        optimizer: torch.optim.Optimizer | None,
        memory: int | str,
        *,
        host: int | str = "auto",
        disk: str | Path | None = None,
    ) -> None:
        self.model, self.loss_fn, self.samples, self.optimizer = model, loss_fn, samples, optimizer
        self._options: dict[str, Any] = {"host": host, "disk": disk}
        self.ooc = limit(model, memory, **self._options)  # for what is recorded; a plan to confirm gets its own
        self.machine: Machine = self.ooc.machine
        self.device, self.budget = self.ooc.device, self.ooc.budget
        self.optimizer_s = 0.0

    @property
    def room(self) -> Budget:
        """What plans may use: on CUDA less than the budget, as in `limit`, for the allocator's holes."""
        on_cuda = self.device.type == "cuda"
        room_bytes = int(self.budget.device_bytes * (1 - FIRST_MARGIN)) if on_cuda else self.budget.device_bytes
        return replace(self.budget, device_bytes=room_bytes)

    def planned(self, family: Family, *, accumulating: bool = False) -> Planned:
        gradient_bytes = sum(p.nbytes for p in self.model.parameters() if p.requires_grad) if accumulating else 0
        return Planned(family, self.machine, self.room, self.optimizer_s, gradient_bytes)

    # -- steps --------------------------------------------------------------------------------------------------------

    def record(self, batch: int) -> Measured:
        """Records a step of `batch` samples, then times real ones under the plan that fits it."""
        data = self.samples.any_batch(batch)
        traces: list[Trace] = []
        for again in range(NUM_RECORDINGS if self.device.type == "cpu" else 1):
            if again:
                self._newest_kind.trace = None
            self._step(self.ooc, data)
            if self.ooc.trace is None or not any(tick.kind == "unpack" for tick in self.ooc.trace.ticks):
                raise TuningError(
                    "the backward pass never came to the model, so there is nothing to plan or train; make the loss "
                    "from the model's output"
                )
            traces.append(self.ooc.trace)
        self._newest_kind.trace = fastest(traces)
        return self._watched(self.ooc, batch, data)

    @property
    def _newest_kind(self) -> Kind:
        return next(reversed(self.ooc.kinds.values()))

    def confirm(self, predicted: Predicted) -> Measured:
        """Real steps that follow a predicted plan from the first one on."""
        batch = predicted.point.micro_batch
        ooc = self._limited(plan=predicted.plan)
        ooc.expect(predicted.trace)
        self._advance()  # there are no gradients, but whose state has to be counted is known from here on
        try:
            return self._watched(ooc, batch, self.samples.any_batch(batch))
        finally:
            ooc.close()
            self._tidy()

    def time_again(self, measured: Sequence[Measured]) -> list[Measured]:
        """Recorded batches in turn, several times: a machine that is busy for a while slows all of them alike."""
        best_s = [found.step_s for found in measured]
        for _ in range(NUM_ROUNDS):
            for at, found in enumerate(measured):
                data = self.samples.any_batch(found.batch)
                best_s[at] = min(best_s[at], self._time(self.ooc, data, for_s=0.0))
        return [found.retimed(step_s, self.optimizer_s) for found, step_s in zip(measured, best_s)]

    def _watched(self, ooc: Limited, batch: int, data: Any) -> Measured:
        """Steps under a plan: one is watched closely, for the peak, and the others are timed."""
        for _ in range(NUM_TRIED):  # more than once where a step left its plan and was recorded anew
            self._step(ooc, data)
            kind = next(reversed(ooc.kinds.values()))
            if ooc.timeline is not None:
                break
        kind.num_steps = max(kind.num_steps, NUM_MEASURED)  # one tells the peak; to watch more takes time
        measured, predicted, trace = ooc.timeline, ooc.predicted, ooc.trace
        if measured is None or predicted is None or trace is None:
            raise TuningError(
                "steps of the same batch keep doing different work, so none can be planned ahead; see the warning above"
            )
        found = Measured(batch, predicted.step_s + self.optimizer_s, measured.peak_bytes, trace, kind.num_left == 0)
        return found.retimed(self._time(ooc, data, for_s=TIMED_S), self.optimizer_s)

    def _time(self, ooc: Limited, data: Any, for_s: float) -> float:
        """Seconds of a step, the least of those tried: what else the machine does only ever adds."""
        tried: list[float] = []
        began_s = time.perf_counter()
        while len(tried) < NUM_TIMED or (time.perf_counter() - began_s < for_s and len(tried) < MAX_TIMED):
            start_s = self._now()
            self._step(ooc, data)
            tried.append(self._now() - start_s)
        return min(tried)

    def _step(self, ooc: Limited, data: Any) -> None:
        with ooc.step():
            loss_of(self.model, self.loss_fn, data).backward()
        self._advance()

    def _advance(self) -> None:
        if self.optimizer is None:
            self.model.zero_grad()
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group, lr in zip(self.optimizer.param_groups, rates):
            group["lr"] = lr * 0
        self.optimizer.step()
        self.optimizer.zero_grad()
        for group, lr in zip(self.optimizer.param_groups, rates):
            group["lr"] = lr

    def warm_up(self, batch: int) -> None:
        """One step, recorded and forgotten: for the optimizer's state, and for whatever is slow only once."""
        self._step(self.ooc, self.samples.any_batch(batch))
        self.ooc.kinds.clear()
        self.time_optimizer()

    def time_optimizer(self) -> None:
        """Seconds of the optimizer's part of a step, which does not depend on the batch."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        tried = []
        for _ in range(4):
            gradients = [parameter.grad for parameter in self.model.parameters()]
            start_s = self._now()
            self._advance()
            tried.append(self._now() - start_s)
            for parameter, gradient in zip(self.model.parameters(), gradients):
                parameter.grad = gradient
        self.model.zero_grad()
        self.optimizer_s = min(tried)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _limited(self, **options: Any) -> Limited:
        return limit(self.model, self.budget.device_bytes, **self._options, **options)

    def _tidy(self) -> None:
        self.model.zero_grad()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Takes every hook off the model again."""
        self.ooc.close()
        self._tidy()


# --- which batches to record ------------------------------------------------------------------------------------------


@dataclass
class Climb:
    """What was recorded on the way up."""

    bench: Bench
    largest: int  # there are no more samples, or no more are wanted
    measured: list[Measured]

    @property
    def family(self) -> Family | None:
        """The batches that do the same work as the largest one; tiny ones may be wired differently."""
        if not self.measured:
            return None
        last = self.measured[-1]
        alike = [found for found in self.measured if not difference(found.trace, last.trace)]
        return Family(tuple(Recorded(m.batch, m.trace) for m in alike)) if len(alike) > 1 else None

    def settled(self) -> bool:
        """Would the batches before the last one have predicted it?"""
        family = self.family
        if family is None or len(family.recorded) < 3 or self.measured[-1].step_s < BUSY_S:
            return False
        self.measured[-3:] = self.bench.time_again(self.measured[-3:])
        family = self.family
        assert family is not None  # the same work, only other seconds
        before, last = Family(family.recorded[:-1]), family.recorded[-1]
        return abs(before.step_s(last.batch) / last.total_s - 1) < SETTLED

    def next(self) -> int:
        """Twice the last batch, or four times while steps are too short to tell anything.

        Once two are known, no further than everything can be kept: a step that swaps or recomputes says less about the
        seconds of its own ops.
        """
        last, family = self.measured[-1], self.family
        batch = min(self.largest, last.batch * (4 if last.step_s < BUSY_S / 2 else 2))
        if family is None:
            return batch
        return max(last.batch, self.bench.planned(family).largest_in_core(batch))


def climb(bench: Bench, largest: int, tell: Tell) -> Climb:
    """Records batches from two samples upward until the next one would teach nothing new."""
    began_s, found = time.perf_counter(), Climb(bench, largest, [])
    _first_step(bench, found, tell)
    while found.measured[-1].batch < found.largest and not found.settled():
        spent_s = time.perf_counter() - began_s
        if found.family is not None and len(found.measured) > 2 and 3 * spent_s > CLIMB_S:
            break
        batch = found.next()
        if batch == found.measured[-1].batch or (found.family is None and len(found.measured) >= NUM_UNLIKE):
            break
        tell(f"recording a batch of {batch}", min(0.9, spent_s / CLIMB_S))
        try:
            found.measured.append(bench.record(batch))
        except BudgetTooSmall:
            found.largest = batch - 1
    _reach(found, tell)
    return found


def _reach(found: Climb, tell: Tell) -> None:
    """Real steps far up the line, without recording them: where caches or kernels bend it, it is drawn anew."""
    family, last = found.family, found.measured[-1].batch
    if family is None:
        return
    planned = found.bench.planned(family)
    batch = planned.largest_in_core(min(found.largest, REACH * last))
    if batch < 1.5 * last:
        return
    tell(f"real steps with a batch of {batch}", 0.9)
    measured = found.bench.confirm(planned.at(batch))
    if measured.followed:
        found.measured.append(measured)


def _first_step(bench: Bench, found: Climb, tell: Tell) -> None:
    """Two samples; one where two do not fit. Optimizer state is there from here on."""
    for batch in (2, 1) if found.largest > 1 else (1,):
        tell(f"recording a batch of {batch}", 0.0)
        try:
            bench.warm_up(batch)
            found.measured.append(bench.record(batch))
            return
        except BudgetTooSmall as error:
            too_small, found.largest = error, batch - 1
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                raise cannot_run_one(bench.budget.device_bytes if found.largest == 1 else None) from None
            raise
    needed, enough = format_bytes(too_small.needed_bytes), format_bytes(1.02 * too_small.needed_bytes)
    raise TuningError(
        f"even one sample needs {needed} with everything swapped or recomputed, and memory is "
        f"{format_bytes(bench.budget.device_bytes)}; raise it to {enough} or make the model or its input smaller"
    )


def cannot_run_one(budget_bytes: int | None) -> TuningError:
    why = f"only one sample fits {format_bytes(budget_bytes)} and " if budget_bytes is not None else ""
    return TuningError(
        f"{why}this model cannot train on a batch of 1: its BatchNorm needs more than one value per channel; allow a "
        "batch of 2 or more, or use GroupNorm"
    )
