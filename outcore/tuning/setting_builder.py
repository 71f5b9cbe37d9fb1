"""Builds a setting for an effective batch: micro-batch, accumulation, seconds, peak, and the matching learning rate."""

from __future__ import annotations

from dataclasses import dataclass, replace

from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.gradients.goodput import beta2_for, lr_factor, num_warm_up_steps
from outcore.tuning.gradients.noise import Noise
from outcore.tuning.parts import Parts
from outcore.tuning.throughput.builder import CurveBuilder, divisors, micro_batch_for
from outcore.tuning.throughput.curve import Curve
from outcore.units import format_bytes


@dataclass
class SettingBuilder:
    """Builds settings of one training on one device. `curves` is None if only a single batch size can be run."""

    parts: Parts
    curves: CurveBuilder | None
    only: Curve | None = None  # the curve of that single batch size
    today_batch: int = 0
    today_rate: float = 0.0
    rate_batch: int = 0  # the batch that the optimizer's present rate belongs to
    noise: Noise | None = None

    @property
    def curve(self) -> Curve:
        if self.curves is not None:
            return self.curves.curve
        assert self.only is not None
        return self.only

    def cut(self, batch: int, micro_batch: int) -> Advice:
        """Returns the batch split into micro-batches of at most this size, without a learning rate."""
        size, peak_bytes = self._peak(micro_batch, batch)
        accumulation = batch // size
        return Advice(
            micro_batch=size,
            accumulation=accumulation,
            learning_rate=None,
            samples_per_s=self.curve.rate(size, accumulation),
            step_s=self.curve.seconds(size, accumulation),
            peak_bytes=peak_bytes,
            curve=self.curve,
            why=(),
            noise=self.noise.scale if self.noise is not None else None,
            noise_told=self.noise.description if self.noise is not None else "",
            first_batch=self.today_batch,
        )

    def at(self, batch: int) -> Advice:
        """Returns the batch split in the fastest way, with the seconds that its steps take in a training."""
        curves = self.curves
        if curves is None:
            (size,) = self.curve.batches
            return self.cut(batch, size)
        if batch <= curves.curve.largest_in_core:
            curves.predict([batch], self.parts.progress)
            curves.time_in_loop(batch)
        return self.timed(self.cut(batch, micro_batch_for(batch)(curves.curve)))

    def timed(self, advice: Advice) -> Advice:
        """Returns the advice with the seconds that its steps take in a training, whatever timings chose its batch."""
        if self.curves is not None:
            self.curves.time_in_loop(advice.micro_batch)
        curve, cut = self.curve, (advice.micro_batch, advice.accumulation)
        return replace(advice, samples_per_s=curve.rate(*cut), step_s=curve.seconds(*cut), curve=curve)

    def today(self) -> Advice:
        """Returns today's setting. If timings cannot be trusted, it uses the largest micro-batch that is in-core."""
        curves, batch = self.curves, self.today_batch
        if curves is not None and batch not in curves.curve.batches:
            whole = batch <= curves.curve.largest_in_core
            sizes = [batch] if whole else divisors(batch, min(self.parts.smallest_batch, batch))
            curves.predict(sizes, self.parts.progress)
        advice = self.at(batch) if self.curve.is_trusted else self.cut(batch, self._largest_divisor(batch))
        rate = None if self.parts.optimizer is None else self.today_rate
        return replace(advice, learning_rate=rate, rule="fixed", num_warm_up_steps=0, beta2=None)

    def _largest_divisor(self, batch: int) -> int:
        """Returns the largest micro-batch that is in-core, or the largest that fits."""
        curve = self.curve
        points = [point for point in curve.fitting if batch % point.micro_batch == 0]
        whole = [point for point in points if point.micro_batch == batch or curve.accumulates(point.micro_batch)]
        if not whole:
            raise TuningError(f"no micro-batch that divides {batch} fits the memory; raise it or free the batch")
        return max(whole, key=lambda point: (point.in_core, point.micro_batch)).micro_batch

    def _peak(self, micro_batch: int, effective: int) -> tuple[int, int]:
        """Returns the micro-batch to use and its peak; under accumulation a smaller micro-batch may be needed."""
        point, curves, bench = self.curve.point(micro_batch), self.curves, self.parts.bench
        if effective == micro_batch or (curves is None and effective % micro_batch == 0):
            return micro_batch, point.measured_peak_bytes or point.peak_bytes
        if curves is None:
            raise TuningError(f"a batch of {effective} cannot be cut into micro-batches of {micro_batch}")
        accumulating = bench.planner(curves.planner.family, accumulating=True)
        smaller = [point.micro_batch for point in self.curve.fitting if point.micro_batch <= micro_batch]
        for size in [size for size in reversed(smaller) if effective % size == 0]:
            predicted = accumulating.predict(size)
            if predicted.plan is not None:
                return size, predicted.point.peak_bytes
        budget_bytes, planning_bytes = bench.budget.device_bytes, bench.planning_budget.device_bytes
        needed_bytes = predicted.point.peak_bytes * budget_bytes / planning_bytes
        raise TuningError(
            f"a batch of {effective} does not fit at once, and while gradients of {size} samples at a time are "
            f"accumulated it needs {format_bytes(needed_bytes)}, where memory is {format_bytes(budget_bytes)}; raise "
            f"it to {format_bytes(1.02 * needed_bytes)} or lower the batch"
        )

    # -- the learning rate --------------------------------------------------------------------------------------------

    def set_rate(self, rate: float) -> None:
        """Sets this rate in the optimizer's first group; the rates of the others keep their ratio to it."""
        optimizer = self.parts.optimizer
        assert optimizer is not None
        first_rate = float(optimizer.param_groups[0]["lr"])
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * (rate / first_rate) if first_rate else rate

    def with_rate(self, advice: Advice, *, says_why: bool = True) -> Advice:
        """Returns the advice with the rate that the rule gives for its batch, its warm-up and beta2."""

        optimizer, wanted_rule = self.parts.optimizer, self.parts.request.rate.rule
        if optimizer is None:
            return advice
        batch, rate_batch, group = advice.effective_batch, self.rate_batch, optimizer.param_groups[0]
        rule = wanted_rule if advice.noise is not None or wanted_rule != "adascale" else "sqrt"
        normalised = "betas" in group
        betas_change = normalised and batch != advice.first_batch  # they belong to the batch that is trained today
        factor = lr_factor(rule, batch, rate_batch, advice.noise, normalised=normalised)
        rate = float(group["lr"])
        if batch != rate_batch and says_why:
            self.parts.why.append(
                f"the learning rate {rate:.3g} of a batch of {rate_batch} is multiplied by {factor:.3g} (the rule "
                f"{rule!r})"
            )
        num_steps = (self.parts.samples.num or 100 * batch) // (10 * rate_batch)  # a tenth of an epoch
        return replace(
            advice,
            learning_rate=rate * factor,
            rule=rule if batch != rate_batch else "fixed",
            num_warm_up_steps=num_warm_up_steps(rule, num_steps, batch, rate_batch) if factor > 1.2 else 0,
            beta2=beta2_for(group["betas"][1], batch, advice.first_batch) if betas_change else None,
        )
