"""Records and times training steps of any micro-batch, with the user's model, loss, data and optimizer.

`record` runs a batch with the leanest schedule and then times it. `run_planned` runs real steps of a batch that was
never recorded, under the plan predicted for it; if everything is kept, its ops are timed one by one too. No limit is
found by running out of memory.

The learning rate is zero during trial steps, so weights do not change and no step is slowed down by overflows.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outcore.errors import BudgetTooSmall, TuningError
from outcore.memory.cuda_allocator import count_restarts
from outcore.planning.families.scaling import Family, fastest, stretched
from outcore.tuning.data.batches import LossFn, loss_of
from outcore.tuning.data.samples import Samples
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.limited_steps import LimitedSteps
from outcore.tuning.throughput.prediction import BatchPlanner, PredictedBatch
from outcore.tuning.throughput.timing import in_proportion, seconds_of_rounds, spread, undecided
from outcore.values import Budget, Machine, Plan, Trace

TIMING = SETTINGS.timing
Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class Measurement:
    """Real steps of one micro-batch."""

    batch: int
    step_s: float  # including the optimizer
    peak_bytes: int
    trace: Trace  # its op seconds add up to a step with everything kept
    followed: bool = True  # whether the steps ran the ops of the trace
    num_restarts: int = 0  # of the allocator during the steps that were timed

    def with_seconds(self, step_s: float, optimizer_s: float) -> Measurement:
        """Returns a copy with other seconds, and op seconds that agree with them."""
        before_s = max(self.step_s - optimizer_s, 0.05 * self.step_s)
        factor = max(step_s - optimizer_s, 0.05 * step_s) / before_s
        trace = replace(self.trace, ops=tuple(stretched(self.trace.ops, factor)))
        return replace(self, step_s=step_s, trace=trace)


@dataclass(frozen=True)
class Timing:
    """Seconds of a step that ran alternately with those of other batches."""

    step_s: float
    peak_bytes: int
    spread: float = 0.0  # of the repeated timings, as a share of their median


class Bench:
    """Runs trial steps of one model with one optimizer under one memory budget."""

    clock = staticmethod(time.perf_counter)  # tests and benchmarks on shared cores may inject another

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
        self.steps = LimitedSteps(model, memory, **self._options)  # recorded ones; planned ones get their own
        self.machine: Machine = self.steps.machine
        self.device, self.budget = self.steps.device, self.steps.budget
        self.optimizer_s = 0.0
        self.out_of_memory: dict[int, str] = {}  # error messages of batches that a plan wrongly said would fit

    @property
    def planning_budget(self) -> Budget:
        return self.steps.planning_budget

    def planner(self, family: Family, *, accumulating: bool = False) -> BatchPlanner:
        """Returns a planner; with `accumulating` the gradients of earlier micro-batches count as resident."""
        gradient_bytes = sum(p.nbytes for p in self.model.parameters() if p.requires_grad) if accumulating else 0
        return BatchPlanner(family, self.machine, self.planning_budget, self.optimizer_s, gradient_bytes)

    # -- one batch ----------------------------------------------------------------------------------------------------

    def record(self, batch: int) -> Measurement:
        """Records a step of `batch` samples, then times real steps under a plan."""
        data = self.samples.any_batch(batch)
        traces: list[Trace] = []
        for again in range(TIMING.num_cpu_recordings if self.device.type == "cpu" else 1):
            if again:
                self.steps.record_again()
            self.run_step(self.steps, data)
            trace = self.steps.trace
            if trace is None or not any(tick.kind == "unpack" for tick in trace.ticks):
                raise TuningError(
                    "the backward pass never came to the model, so there is nothing to plan or train; make the loss "
                    "from the model's output"
                )
            traces.append(trace)
            if sum(op.seconds for op in traces[0].ops) < TIMING.busy_step_s:
                break
        self.steps.replace_trace(fastest(traces))
        return self._measure_and_time(self.steps, batch, data, brief=self.device.type == "cpu")

    def run_planned(
        self, predicted: PredictedBatch, reference: tuple[PredictedBatch, float] | None = None, *, brief: bool = False
    ) -> Measurement:
        """Runs real steps that follow a predicted plan from the first step on.

        `reference` is a batch with its seconds: on a CPU, whose speed changes within seconds, steps of both alternate
        and their ratio counts. `brief` times only one turn, for batches that `retime_interleaved` times again.

        If the allocator restarts during these steps, a training would not stay with this plan, because `limit` changes
        plans until it has settled. Then steps under the settled plan are timed too, and the faster result is returned.
        """
        first = self.run_under(predicted, predicted.plan, reference, brief=brief and self.device.type == "cpu")
        if predicted.point.in_core or not first.num_restarts:
            return first
        try:
            return min(first, self.run_under(predicted, None), key=lambda measured: measured.step_s)
        except (torch.OutOfMemoryError, BudgetTooSmall):
            return first

    def run_under(
        self,
        predicted: PredictedBatch,
        plan: Plan | None,
        reference: tuple[PredictedBatch, float] | None = None,
        *,
        brief: bool = False,
    ) -> Measurement:
        """Runs real steps under `plan`. With `plan=None`, `limit` plans by itself until it has settled."""
        batch = predicted.point.micro_batch
        steps = self._limited_steps(plan=plan)
        steps.expect(predicted.trace)
        self.advance()  # without gradients; tells `limit` whose optimizer state to count
        try:
            data, end_s = self.samples.any_batch(batch), time.perf_counter() + TIMING.settle_s
            while plan is None and not steps.is_settled and time.perf_counter() < end_s:
                self.run_step(steps, data)
            times_ops = predicted.point.in_core and self.device.type == "cuda"
            brief = brief or reference is not None
            measured = self._measure_and_time(steps, batch, data, times_ops=times_ops, brief=brief)
            return measured if reference is None else self._relative_to(steps, measured, *reference)
        except torch.OutOfMemoryError as error:
            self.out_of_memory[batch] = str(error)
            traceback.clear_frames(error.__traceback__)  # the frames hold the step's graph and its swapped values
            gc.collect()
            raise
        finally:
            steps.close()
            self._clean_up()

    def _relative_to(
        self, steps: LimitedSteps, measured: Measurement, reference: PredictedBatch, reference_s: float
    ) -> Measurement:
        """Returns the measurement scaled to the reference's seconds, by the ratio of alternating steps."""
        batch, ratios = reference.point.micro_batch, list[float]()
        steps.expect(reference.trace)
        try:
            self._peak_bytes(steps, self.samples.any_batch(batch))
            while len(ratios) < TIMING.min_reference_rounds or (
                len(ratios) < TIMING.max_reference_rounds
                and max(ratios) - min(ratios) > TIMING.agreeing_share * statistics.median(ratios)
            ):
                step_s, beside_s = (
                    self._turn(steps, self.samples.any_batch(size), is_short=False) for size in (measured.batch, batch)
                )
                ratios.append(step_s / beside_s)
        except (BudgetTooSmall, TuningError):
            return measured
        if not steps.all_followed:
            return measured
        return measured.with_seconds(statistics.median(ratios) * reference_s, self.optimizer_s)

    def loop_step_s(self, batch: int) -> float:
        """Returns the seconds of a step with everything kept, in a loop that never waits for the device.

        In such a loop the host runs ahead of a GPU. Steps that are synchronized and metered one by one take up to half
        as long again, those of a small batch more than those of a large one. The median is the host's usual speed.
        """
        data, times = self.samples.any_batch(batch), list[float]()
        for _ in range(1 + TIMING.num_loop_windows):  # the first one warms up
            start_s = self._now()
            for _ in range(TIMING.steps_per_window):
                loss_of(self.model, self.loss_fn, data).backward()
                self.advance()
            times.append((self._now() - start_s) / TIMING.steps_per_window)
        return statistics.median(times[1:])

    @contextmanager
    def stepping(self, predicted: PredictedBatch | None) -> Iterator[Callable[[], float] | None]:
        """Yields a function that runs one step of a planned batch and returns its seconds; None if `predicted` is."""
        if predicted is None:
            yield None
            return
        steps = self._limited_steps(plan=predicted.plan)
        try:
            steps.expect(predicted.trace)
            self.advance()
            data = self.samples.any_batch(predicted.point.micro_batch)
            self._peak_bytes(steps, data)
            is_short = predicted.point.step_s < TIMING.short_step_s
            yield partial(self._turn, steps, data, is_short=is_short)
        finally:
            steps.close()
            self._clean_up()

    # -- several batches ----------------------------------------------------------------------------------------------

    def run_interleaved(self, predicted: Sequence[PredictedBatch]) -> list[Timing]:
        """Runs real steps of several batches alternately.

        The speed of a shared CPU changes within seconds, and batches differ by a few percent. Means over the same
        rounds tell them apart, while the minimum of a few steps depends on chance.
        """
        steps, peaks = self._limited_steps(), list[int]()
        batches = [one.point.micro_batch for one in predicted]
        times: dict[int, list[float]] = {batch: [] for batch in batches}
        self.advance()
        try:
            for one, batch in zip(predicted, batches):
                steps.expect(one.trace)
                peaks.append(self._peak_bytes(steps, self.samples.any_batch(batch)))
            while (candidates := undecided(times)) and len(times[candidates[0]]) < TIMING.max_rounds:
                for one, batch in zip(predicted, batches):
                    if batch in candidates:
                        is_short = one.point.step_s < TIMING.short_step_s
                        times[batch].append(self._turn(steps, self.samples.any_batch(batch), is_short=is_short))
        finally:
            steps.close()
            self._clean_up()
        return [
            Timing(step_s, peak_bytes, spread(times[batch]))
            for batch, step_s, peak_bytes in zip(batches, seconds_of_rounds(times), peaks)
        ]

    def retime(self, measured: Sequence[Measurement], *, for_s: float = 0.0) -> list[Measurement]:
        """Times recorded batches alternately, several times, on CUDA: a machine that is busy for a while slows down all
        of them alike. On a CPU `retime_interleaved` does this."""
        if self.device.type == "cpu":
            return list(measured)
        best_s = [one.step_s for one in measured]
        for _ in range(TIMING.num_retiming_rounds):
            for at, one in enumerate(measured):
                data = self.samples.any_batch(one.batch)
                best_s[at] = min(best_s[at], self._time(self.steps, data, for_s=for_s))
        return [one.with_seconds(step_s, self.optimizer_s) for one, step_s in zip(measured, best_s)]

    def retime_interleaved(self, measured: Sequence[Measurement]) -> list[Measurement]:
        """Times batches that were measured one after the other on a CPU again, alternately, and scales their seconds to
        the ratios within the same rounds. Returns them unchanged if a step left its plan, because then the timings are
        those of a recording."""
        if self.device.type != "cpu" or not measured:
            return list(measured)
        if len(measured) == 1:
            (alone,) = measured
            timed_s = self._time(self.steps, self.samples.any_batch(alone.batch), for_s=TIMING.timed_s)
            return [alone.with_seconds(min(timed_s, alone.step_s), self.optimizer_s)]
        steps = self._limited_steps()
        times: dict[int, list[float]] = {one.batch: [] for one in measured}
        self.advance()
        try:
            for one in measured:
                steps.expect(one.trace)
                self._peak_bytes(steps, self.samples.any_batch(one.batch))
            for _ in range(TIMING.num_levelling_rounds):
                for one in measured:
                    data, is_short = self.samples.any_batch(one.batch), one.step_s < TIMING.short_step_s
                    times[one.batch].append(self._turn(steps, data, is_short=is_short, for_s=TIMING.short_turn_s))
                    del data
            if not steps.all_followed:
                return list(measured)
        except (BudgetTooSmall, TuningError):  # the earlier measurements stay valid
            return list(measured)
        finally:
            steps.close()
            self._clean_up()
        least_s = [min(one.step_s, *times[one.batch]) for one in measured]
        levelled = in_proportion([*times.values()], least_s)
        return [one.with_seconds(step_s, self.optimizer_s) for one, step_s in zip(measured, levelled)]

    # -- steps --------------------------------------------------------------------------------------------------------

    def _measure_and_time(
        self, steps: LimitedSteps, batch: int, data: Any, *, times_ops: bool = False, brief: bool = False
    ) -> Measurement:
        """Meters one step under a plan, for the peak, and times the others."""
        timeline, step_s, trace = steps.measure(lambda: self.run_step(steps, data))
        if times_ops and steps.followed:
            trace = steps.time_ops(lambda: self.run_step(steps, data))
            step_s = sum(op.seconds for op in trace.ops)
        num_restarts = count_restarts(self.device)
        brief = brief or (self.device.type == "cpu" and timeline.step_s < TIMING.busy_step_s)
        if brief:
            is_short = timeline.step_s < TIMING.short_step_s
            timed_s = self._turn(steps, data, is_short=is_short, for_s=TIMING.short_turn_s)
        else:
            timed_s = self._time(steps, data, for_s=TIMING.timed_s)
        num_restarts = count_restarts(self.device) - num_restarts
        measured = Measurement(
            batch, step_s + self.optimizer_s, timeline.peak_bytes, trace, steps.followed, num_restarts
        )
        return measured.with_seconds(timed_s, self.optimizer_s)

    def _peak_bytes(self, steps: LimitedSteps, data: Any) -> int:
        return steps.measure(lambda: self.run_step(steps, data))[0].peak_bytes

    def _turn(self, steps: LimitedSteps, data: Any, *, is_short: bool, for_s: float = 0.0) -> float:
        """Returns the seconds of one step. A short step finds another batch's data in the caches, so one runs before
        it, and the minimum within `for_s` counts, because a disturbance may last as long as the step."""
        if is_short:
            self.run_step(steps, data)
        least_s, end_s = math.inf, time.perf_counter() + (for_s if is_short else 0.0)
        while least_s == math.inf or time.perf_counter() < end_s:
            start_s = self._now()
            self.run_step(steps, data)
            least_s = min(least_s, self._now() - start_s)
        return least_s

    def _time(self, steps: LimitedSteps, data: Any, for_s: float) -> float:
        """Returns the minimum seconds of several steps, because other load on the machine only adds time."""
        least_s, num, began_s = math.inf, 0, time.perf_counter()
        while time.perf_counter() - began_s < for_s or num < (
            TIMING.min_steps if least_s < TIMING.timed_s else TIMING.min_long_steps
        ):
            start_s = self._now()
            self.run_step(steps, data)
            least_s, num = min(least_s, self._now() - start_s), num + 1
            if for_s and self.device.type == "cuda" and least_s < TIMING.short_step_s:
                for_s = TIMING.short_timed_s
        return least_s

    def run_step(self, steps: LimitedSteps, data: Any) -> None:
        with steps.step():
            loss_of(self.model, self.loss_fn, data).backward()
        self.advance()

    def advance(self) -> None:
        """Runs the optimizer at a learning rate of zero."""
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
        """Runs one step and forgets it, to create the optimizer's state and to pay one-time costs."""
        self.run_step(self.steps, self.samples.any_batch(batch))
        self.steps.forget()
        self.time_optimizer()

    def time_optimizer(self) -> None:
        """Measures the seconds of the optimizer, which do not depend on the batch."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        times = []
        for _ in range(4):
            gradients = [parameter.grad for parameter in self.model.parameters()]
            start_s = self._now()
            self.advance()
            times.append(self._now() - start_s)
            for parameter, gradient in zip(self.model.parameters(), gradients):
                parameter.grad = gradient
        self.model.zero_grad()
        self.optimizer_s = min(times)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.clock()

    def _limited_steps(self, **options: Any) -> LimitedSteps:
        return LimitedSteps(self.model, self.budget.device_bytes, **self._options, **options)

    def _clean_up(self) -> None:
        self.model.zero_grad()
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Removes every hook from the model."""
        self.steps.close()
        self._clean_up()
