"""The user's model, loss, data and optimizer -> recorded steps of a few small batches, and real steps of larger ones.

`record` runs a batch in the leanest state and then times it. `confirm` runs real steps at a batch that a plan says
fits, and they follow that plan from the first one on; where everything is kept, their ops are timed one by one too.
Nothing here looks for memory by running out of it.

While steps are tried the learning rate is zero: weights stay where they are, and no step slows down because numbers
overflow.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outcore.errors import BudgetTooSmall, TuningError
from outcore.limit import NUM_MEASURED, Limited, limit
from outcore.running.allocator import count_restarts
from outcore.running.kinds import Kind
from outcore.running.room import FIRST_SHARE
from outcore.tuning.batches import LossFn, loss_of
from outcore.tuning.curve import Planned, Predicted
from outcore.tuning.samples import Samples
from outcore.tuning.scaling import Family, fastest, stretched
from outcore.values import Budget, Machine, Plan, Timeline, Trace

Tell = Callable[[str, float], None]
BUSY_S = 0.02  # shorter steps are mostly overhead: their times tell little about larger batches
NUM_TIMED, TIMED_S = 3, 0.2  # real steps that are timed: at least so many, and for so long
NUM_LONG_TIMED = 2  # of steps that take as long each
SHORT_S, SHORT_TIMED_S = 0.05, 0.5  # on CUDA such a step waits for its host, whom much else disturbs: timed so long
NUM_LOOPS, NUM_IN_LOOP = 9, 12  # times that steps in a loop are timed, and how many of them at a time
NUM_TRIED = 6  # steps until one was watched under a plan
NUM_ROUNDS = 2  # of timing recorded batches in turn
NUM_IN_TURN = 4, 8  # rounds of timing those from which one is chosen, at least and at most
QUICK_S = 0.04  # for a turn of short ones
NUM_LEVEL = 3  # rounds of timing those from which others follow
NUM_BESIDE = 3, 5  # rounds of a batch that swaps beside one that does not, at least and at most
ALIKE = 0.03  # of their median: such rounds that differ by less are enough
KNOWN = 0.01  # of the fastest one's seconds a sample: two that are compared so closely need no further round
NUM_RECORDINGS = 2  # on the CPU, where the first one also pays for the first touch of memory
SETTLE_S = 12.0  # for `limit` to find a room in which the allocator does not start over
UNTIMED_S = 1e3  # of an op, until it is timed: longer than any


@dataclass(frozen=True)
class Measured:
    """Real steps of one batch."""

    batch: int
    step_s: float  # the optimizer's part included
    peak_bytes: int
    trace: Trace  # op seconds add up to what a step with everything kept takes
    followed: bool = True  # the steps did what the trace says
    num_restarts: int = 0  # of the allocator, in the steps that were timed

    def retimed(self, step_s: float, optimizer_s: float) -> Measured:
        """The same with other seconds, and the op seconds to go with them."""
        before_s = max(self.step_s - optimizer_s, 0.05 * self.step_s)
        factor = max(step_s - optimizer_s, 0.05 * step_s) / before_s
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
        self.ran_out: dict[int, str] = {}  # batches that a plan said fit and that ran out of memory: the error's words

    @property
    def room(self) -> Budget:
        """What plans may use: on CUDA less than the budget, as in `limit`, for the allocator's holes."""
        on_cuda = self.device.type == "cuda"
        room_bytes = int(self.budget.device_bytes * FIRST_SHARE) if on_cuda else self.budget.device_bytes
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
                _newest_kind(self.ooc).trace = None
            self._step(self.ooc, data)
            if self.ooc.trace is None or not any(tick.kind == "unpack" for tick in self.ooc.trace.ticks):
                raise TuningError(
                    "the backward pass never came to the model, so there is nothing to plan or train; make the loss "
                    "from the model's output"
                )
            traces.append(self.ooc.trace)
            if sum(op.seconds for op in traces[0].ops) < BUSY_S:
                break
        _newest_kind(self.ooc).trace = fastest(traces)
        return self._watched(self.ooc, batch, data, brief=self.device.type == "cpu")

    def confirm(
        self, predicted: Predicted, beside: tuple[Predicted, float] | None = None, *, levelled: bool = False
    ) -> Measured:
        """Real steps that follow a predicted plan from the first one on. `beside`: a batch to compare it with, and its
        seconds: on a CPU, whose speed is another a second later, they take turns. `levelled`: as it will with others,
        in `level`.

        Where the allocator starts over in them, a training would not stay with that plan: `limit` goes on to the room
        it settles on, and the faster of the two is what a training gets.
        """
        found = self._confirmed(predicted, predicted.plan, beside, brief=levelled and self.device.type == "cpu")
        if predicted.point.in_core or not found.num_restarts:
            return found
        try:
            return min(found, self._confirmed(predicted, None), key=lambda measured: measured.step_s)
        except (torch.OutOfMemoryError, BudgetTooSmall):
            return found

    def _confirmed(
        self,
        predicted: Predicted,
        plan: Plan | None,
        beside: tuple[Predicted, float] | None = None,
        *,
        brief: bool = False,
    ) -> Measured:
        batch = predicted.point.micro_batch
        ooc = self._limited(plan=plan)
        ooc.expect(predicted.trace)
        self._advance()  # there are no gradients, but whose state has to be counted is known from here on
        try:
            data, end_s = self.samples.any_batch(batch), time.perf_counter() + SETTLE_S
            while plan is None and not ooc.settled and time.perf_counter() < end_s:
                self._step(ooc, data)
            times_ops = predicted.point.in_core and self.device.type == "cuda"
            found = self._watched(ooc, batch, data, times_ops=times_ops, brief=brief or beside is not None)
            return self._compared(ooc, found, *beside) if beside is not None else found
        except torch.OutOfMemoryError as error:
            self.ran_out[batch] = str(error)
            traceback.clear_frames(error.__traceback__)  # they hold the step's graph, and that what was swapped
            gc.collect()
            raise
        finally:
            ooc.close()
            self._tidy()

    def _compared(self, ooc: Limited, found: Measured, other: Predicted, other_s: float) -> Measured:
        """In proportion to the other's seconds, by steps of both in turn."""
        batch, shares = other.point.micro_batch, list[float]()
        ooc.expect(other.trace)
        try:
            self._watch(ooc, self.samples.any_batch(batch))
            while len(shares) < NUM_BESIDE[0] or (
                len(shares) < NUM_BESIDE[1] and max(shares) - min(shares) > ALIKE * statistics.median(shares)
            ):
                took_s = [self._turn(ooc, self.samples.any_batch(num), is_short=False) for num in (found.batch, batch)]
                shares.append(took_s[0] / took_s[1])
        except (BudgetTooSmall, TuningError):
            return found
        if any(kind.num_left or kind.unplanned for kind in ooc.kinds.values()):
            return found
        return found.retimed(statistics.median(shares) * other_s, self.optimizer_s)

    def in_turn(self, predicted: Sequence[Predicted]) -> list[tuple[float, int]]:
        """Real steps of several batches, one of each after the other: seconds of each, and its peak. A shared CPU is
        not the same machine a second later, and batches are told apart by a few percent: their means over the same
        rounds tell them apart, of few steps the least is luck. How fast they all are, left alone, the least say."""
        ooc, peaks = self._limited(), list[int]()
        batches = [found.point.micro_batch for found in predicted]
        times: dict[int, list[float]] = {batch: [] for batch in batches}
        self._advance()
        try:
            for found, batch in zip(predicted, batches):
                ooc.expect(found.trace)
                peaks.append(self._watch(ooc, self.samples.any_batch(batch))[0].peak_bytes)
            while (going := _undecided(times)) and len(times[going[0]]) < NUM_IN_TURN[1]:
                for found, batch in zip(predicted, batches):
                    if batch in going:
                        is_short = found.point.step_s < SHORT_S
                        times[batch].append(self._turn(ooc, self.samples.any_batch(batch), is_short=is_short))
        finally:
            ooc.close()
            self._tidy()
        return list(zip(_seconds_of(times), peaks))

    def _turn(self, ooc: Limited, data: Any, *, is_short: bool, for_s: float = 0.0) -> float:
        """What a step takes. A short one finds the caches full of another batch, and is run once before; what disturbs
        it may last as long as it does: the least of those within `for_s`."""
        if is_short:
            self._step(ooc, data)
        least_s, end_s = math.inf, time.perf_counter() + (for_s if is_short else 0.0)
        while least_s == math.inf or time.perf_counter() < end_s:
            start_s = self._now()
            self._step(ooc, data)
            least_s = min(least_s, self._now() - start_s)
        return least_s

    def loop_s(self, batch: int) -> float:
        """Seconds of a step with everything kept, in a loop that waits for nothing, as a user's does: there the host
        goes ahead of a GPU. Waited for one by one, and looked at, short steps take up to half as long again, those of
        a small batch more than those of a large one. The median: a host's usual speed, rather than its best."""
        data, times = self.samples.any_batch(batch), list[float]()
        for _ in range(1 + NUM_LOOPS):  # the first one is not counted
            start_s = self._now()
            for _ in range(NUM_IN_LOOP):
                loss_of(self.model, self.loss_fn, data).backward()
                self._advance()
            times.append((self._now() - start_s) / NUM_IN_LOOP)
        return statistics.median(times[1:])

    def time_again(self, measured: Sequence[Measured], *, for_s: float = 0.0) -> list[Measured]:
        """Recorded batches in turn, several times: a machine that is busy for a while slows all of them alike. On a CPU
        that is for `level` to do."""
        if self.device.type == "cpu":
            return list(measured)
        best_s = [found.step_s for found in measured]
        for _ in range(NUM_ROUNDS):
            for at, found in enumerate(measured):
                data = self.samples.any_batch(found.batch)
                best_s[at] = min(best_s[at], self._time(self.ooc, data, for_s=for_s))
        return [found.retimed(step_s, self.optimizer_s) for found, step_s in zip(measured, best_s)]

    def level(self, measured: Sequence[Measured]) -> list[Measured]:
        """Batches that were measured one after the other on a CPU, whose speed is another a second later: once more, a
        step in turn, and their seconds in proportion to what each took of the same rounds. As they are where a step
        leaves its plan: what is timed then is a recording."""
        if self.device.type != "cpu" or not measured:
            return list(measured)
        if len(measured) == 1:  # with nobody to take turns with
            found = measured[0]
            timed_s = self._time(self.ooc, self.samples.any_batch(found.batch), for_s=TIMED_S)
            return [found.retimed(min(timed_s, found.step_s), self.optimizer_s)]
        ooc = self._limited()
        times: dict[int, list[float]] = {found.batch: [] for found in measured}
        self._advance()
        try:
            for found in measured:
                ooc.expect(found.trace)
                self._watch(ooc, self.samples.any_batch(found.batch))
            for _ in range(NUM_LEVEL):
                for found in measured:
                    data, is_short = self.samples.any_batch(found.batch), found.step_s < SHORT_S
                    times[found.batch].append(self._turn(ooc, data, is_short=is_short, for_s=QUICK_S))
                    del data
            if any(kind.num_left or kind.unplanned for kind in ooc.kinds.values()):
                return list(measured)
        except (BudgetTooSmall, TuningError):  # what was measured so far is known
            return list(measured)
        finally:
            ooc.close()
            self._tidy()
        least_s = [min(found.step_s, *times[found.batch]) for found in measured]
        levelled = in_proportion([*times.values()], least_s)
        return [found.retimed(step_s, self.optimizer_s) for found, step_s in zip(measured, levelled)]

    def _watched(
        self, ooc: Limited, batch: int, data: Any, *, times_ops: bool = False, brief: bool = False
    ) -> Measured:
        """Steps under a plan: one is watched closely, for the peak, and the others are timed."""
        measured, step_s, trace = self._watch(ooc, data)
        kind = _newest_kind(ooc)
        if times_ops and kind.num_left == 0:
            trace = self._timed(ooc, kind, data)
            step_s = sum(op.seconds for op in trace.ops)
        num_restarts = count_restarts(self.device)
        brief = brief or (self.device.type == "cpu" and measured.step_s < BUSY_S)
        if brief:
            timed_s = self._turn(ooc, data, is_short=measured.step_s < SHORT_S, for_s=QUICK_S)
        else:
            timed_s = self._time(ooc, data, for_s=TIMED_S)
        num_restarts = count_restarts(self.device) - num_restarts
        followed = kind.num_left == 0
        found = Measured(batch, step_s + self.optimizer_s, measured.peak_bytes, trace, followed, num_restarts)
        return found.retimed(timed_s, self.optimizer_s)

    def _watch(self, ooc: Limited, data: Any) -> tuple[Timeline, float, Trace]:
        """What a step under a plan came to, what the plan had promised, and of which step."""
        for _ in range(NUM_TRIED):  # more than once where a step left its plan and was recorded anew
            self._step(ooc, data)
            kind = _newest_kind(ooc)
            measured = ooc.timeline if ooc.timeline is kind.measured else None  # and not another batch's
            if measured is not None:
                break
        kind.num_steps = max(kind.num_steps, NUM_MEASURED)  # one tells the peak; to watch more takes time
        predicted, trace = ooc.predicted, ooc.trace
        if measured is None or predicted is None or trace is None:
            raise TuningError(
                "steps of the same batch keep doing different work, so none can be planned ahead; see the warning above"
            )
        return measured, predicted.step_s, trace

    def _timed(self, ooc: Limited, kind: Kind, data: Any) -> Trace:
        """The trace of steps that keep everything, with seconds of this batch: on a GPU those of small batches say
        little about an op, whose launch takes longer than its work."""
        assert kind.trace is not None
        expected, kind.timed_again = kind.trace, False
        kind.trace = replace(expected, ops=tuple(replace(op, seconds=UNTIMED_S) for op in expected.ops))
        with suppress(BudgetTooSmall):  # to look at ops takes memory too
            self._step(ooc, data)
        if kind.trace is None or any(op.seconds == UNTIMED_S for op in kind.trace.ops):
            kind.trace = expected  # it ran other ops than expected
        kind.timed_again = kind.stale = True  # its plan was for a step that is looked at
        return kind.trace

    def _time(self, ooc: Limited, data: Any, for_s: float) -> float:
        """Seconds of a step, the least of those tried: what else the machine does only ever adds."""
        least_s, num, began_s = math.inf, 0, time.perf_counter()
        while time.perf_counter() - began_s < for_s or num < (NUM_TIMED if least_s < TIMED_S else NUM_LONG_TIMED):
            start_s = self._now()
            self._step(ooc, data)
            least_s, num = min(least_s, self._now() - start_s), num + 1
            if for_s and self.device.type == "cuda" and least_s < SHORT_S:
                for_s = SHORT_TIMED_S
        return least_s

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
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Takes every hook off the model again."""
        self.ooc.close()
        self._tidy()


def _undecided(times: Mapping[int, Sequence[float]]) -> list[int]:
    """The batches that may still take the fewest seconds a sample; none where that is known well enough."""
    if min(map(len, times.values())) < NUM_IN_TURN[0]:
        return [*times]
    longest = [batch for batch in times if len(times[batch]) == max(map(len, times.values()))]
    best = min(longest, key=lambda batch: statistics.fmean(times[batch]) / batch)
    least = statistics.fmean(times[best]) / best
    going, is_known = [best], True
    for batch in longest:
        behind = [theirs / batch - ours / best for theirs, ours in zip(times[batch], times[best])]
        error = statistics.stdev(behind) / math.sqrt(len(behind))
        if batch != best and statistics.fmean(behind) < 2 * error:
            going.append(batch)
            is_known = is_known and error < KNOWN * least
    return [] if is_known else going


def _seconds_of(times: Mapping[int, Sequence[float]]) -> list[float]:
    """Each batch by the rounds that it shares with the one that went on longest; how fast they all are, the least."""
    first = max(times.values(), key=len)
    undisturbed = statistics.fmean(min(taken) / statistics.fmean(taken) for taken in times.values())
    share = undisturbed * statistics.fmean(first)
    return [share * statistics.fmean(taken) / statistics.fmean(first[: len(taken)]) for taken in times.values()]


def in_proportion(times: Sequence[Sequence[float]], least_s: Sequence[float]) -> list[float]:
    """Seconds of several from rounds that they share: what all of a round were slowed down by is not theirs. As fast in
    all as the least that each of them ever took."""
    rounds = [statistics.geometric_mean(taken) for taken in zip(*times)]
    shares = [statistics.median(one / all_s for one, all_s in zip(taken, rounds)) for taken in times]
    whole = statistics.geometric_mean(least_s) / statistics.geometric_mean(shares)
    return [whole * share for share in shares]


def _newest_kind(ooc: Limited) -> Kind:
    return next(reversed(ooc.kinds.values()))
