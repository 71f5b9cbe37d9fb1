"""Computes an advice for one device.

The micro-batch comes from the throughput curve. Then, if they may change, the learning rate comes from a range test and
the effective batch from the noise of the gradients. This proposal becomes the advice if it wins a comparison with
today's setting (check.py). If nothing can be compared, or timings cannot be trusted, the advice is today's setting with
the reason. All trainings here restore the parameters.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.check import SettingCheck, Uncheckable
from outcore.tuning.data.batches import loss_of
from outcore.tuning.data.restore import untouched
from outcore.tuning.gradients.goodput import best_batch
from outcore.tuning.gradients.noise import Noise, capped, measure_noise_until
from outcore.tuning.gradients.range_test import range_test
from outcore.tuning.parts import Parts
from outcore.tuning.reasons import (
    BUSY,
    why_batch_kept,
    why_goodput,
    why_last_batch,
    why_loading,
    why_micro_batch,
    why_out_of_memory,
)
from outcore.tuning.setting_builder import SettingBuilder
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.builder import (
    CurveBuilder,
    divisors,
    effective_batches,
    free_batches,
    micro_batch_for,
    refined,
    single_point_curve,
)
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.throughput.probes import cannot_train_one, probe_batches, two_do_not_fit
from outcore.tuning.trainings.comparison import longest_step_s

TUNER, GRADIENTS, COMPARISON = SETTINGS.tuner, SETTINGS.gradients, SETTINGS.comparison


class Tuner:
    """One call of `tune`, from the recording to the advice."""

    settings: SettingBuilder

    def __init__(self, parts: Parts) -> None:
        self.parts, self.request = parts, parts.request
        self._num_before_goodput: int | None = None

    @property
    def curve(self) -> Curve:
        return self.settings.curve

    @property
    def curves(self) -> CurveBuilder | None:
        return self.settings.curves

    def advise(self) -> Advice:
        kept = self.request.batch.kept
        micro_batch = self.find_micro_batch(kept)
        self.settings.today_batch = self.request.batch.size or self.usual_batch()
        self._note_today_rate()
        try:
            proposal = self._propose(kept, micro_batch)
            advice = self._checked(proposal)
        except Uncheckable as error:
            advice = self._fall_back(str(error), None)
        return replace(advice, why=tuple(self._why(advice)))

    def _propose(self, kept: int | None, micro_batch: int) -> Advice:
        """Returns the setting that theory suggests; it has not been compared yet."""
        if not self.curve.is_trusted:
            raise Uncheckable(BUSY)
        batch, settings = kept or micro_batch, self.settings
        if self._may_change and self.parts.optimizer is not None:
            if self.parts.has_few_samples:
                raise Uncheckable(SettingCheck(self.parts, settings).reason_against())
            self.find_rate()
            if self.curves is not None and (kept is None or settings.rate_batch != settings.today_batch):
                settings.noise = self.measure_noise()
                if settings.noise is not None and kept is None:
                    batch, micro_batch = self._by_goodput(self.curves, settings.noise.scale)
        return settings.with_rate(settings.cut(batch, micro_batch))

    @property
    def _may_change(self) -> bool:
        """Whether the batch or the rate has to be found, which requires training."""
        rate, batch = self.request.rate.rate, self.request.batch
        return batch.is_free or rate == "find" or (rate is None and batch.size is None)

    def _checked(self, proposal: Advice) -> Advice:
        """Returns the proposal if it changes nothing or wins the comparison, otherwise today's setting."""
        settings = self.settings
        same_batch = proposal.effective_batch == settings.today_batch
        if same_batch and proposal.learning_rate in (None, settings.today_rate):
            if self.request.goal.has_length:
                self.parts.why.append("nothing was compared over your length: batch and rate stay as they are")
            return proposal
        if self.parts.optimizer is None and self.request.batch.size is None:
            return proposal  # no present training is known, so only speed matters
        try:
            if self.curves is None:
                raise Uncheckable("only one batch size could be run, so nothing can be compared")
            return SettingCheck(self.parts, settings).winner(proposal, settings.today())
        except Uncheckable as error:
            return self._fall_back(str(error), proposal)
        except TuningError as error:
            return self._fall_back(f"not compared with today's setting: {error}", proposal)

    def _fall_back(self, reason: str, proposal: Advice | None) -> Advice:
        """Returns today's setting with the reason, or the proposal if today's setting does not fit this memory."""
        self.settings.noise = None if proposal is None else self.settings.noise
        beside = None if proposal is None else proposal.setting
        try:
            today = self.settings.today()
        except TuningError as error:
            if proposal is None:
                raise
            return replace(proposal, unchecked=f"{reason}; today's setting cannot be kept either: {error}")
        return replace(today, unchecked=reason, proposal=beside)

    def _why(self, advice: Advice) -> list[str]:
        parts, curve, kept = self.parts, advice.curve, self.request.batch.kept
        sentences = list(parts.why)
        if self._num_before_goodput is not None:
            goodput = why_goodput(advice, parts.largest_batch())
            sentences[self._num_before_goodput : self._num_before_goodput] = goodput
        if advice.unchecked and self.request.batch.size is None:
            sentences.append(f"no batch was given: {self.settings.today_batch} is assumed as the one you train with")
        stays = partial(why_batch_kept, curve, advice.micro_batch, advice.effective_batch)
        return [
            *why_micro_batch(curve, advice.micro_batch, advice.accumulation),
            *(stays(rate_stays=self._rate_stays(advice)) if kept is not None else ()),
            *sentences,
            *why_out_of_memory(parts.bench.out_of_memory),
            *why_loading(curve, advice.micro_batch, parts.samples.load_s),
            *why_last_batch(parts.samples.num, advice.micro_batch, parts.normalises),
        ]

    def _rate_stays(self, advice: Advice) -> bool:
        return advice.learning_rate is None or math.isclose(advice.learning_rate, self.settings.today_rate)

    # -- the micro-batch ----------------------------------------------------------------------------------------------

    def find_micro_batch(self, effective: int | None) -> int:
        """Returns the knee of the curve, or the best micro-batch that divides an effective batch, and sets
        `settings`."""
        parts, bench = self.parts, self.parts.bench
        largest = parts.largest_batch(self.request.batch.largest)
        probes = probe_batches(bench, largest, parts.progress, parts.why_one() if largest == 1 else None)
        if probes.family is None:
            if len(probes.measured) > 1:
                raise TuningError(
                    f"steps of {probes.measured[-2].batch} and {probes.measured[-1].batch} samples do different work, "
                    "so neither tells about the other; make every sample the same shape"
                )
            curve = single_point_curve(bench, probes)
            self.settings = SettingBuilder(parts, None, curve)
            parts.why.append("there was memory or data for this one batch size only, so there is no curve")
            return curve.points[0].micro_batch
        curves = CurveBuilder.start(bench, probes.family, probes.measured)
        self.settings = SettingBuilder(parts, curves)
        smallest = min(parts.smallest_batch, largest)
        batches = free_batches(curves, largest, smallest)
        if effective is not None:
            curves.predict(divisors(effective, smallest), parts.progress)
            curves.find_accumulation_limits()
            return curves.measure_contenders(micro_batch_for(effective), parts.progress)
        curves.predict(batches, parts.progress)
        if not curves.curve.fitting and parts.normalises:
            raise cannot_train_one(two_do_not_fit(bench.budget.device_bytes, curves.curve.points[0].peak_bytes))
        curves.predict(refined(curves.curve), parts.progress)
        curves.find_accumulation_limits()
        return curves.measure_contenders(lambda curve: curve.knee.micro_batch, parts.progress)

    # -- the effective batch ------------------------------------------------------------------------------------------

    def usual_batch(self) -> int:
        """Returns a common batch that is in-core, for the case that no batch was given."""
        num = self.parts.samples.num or TUNER.largest_batch
        return max(1, min(TUNER.first_batch, self.curve.largest_in_core or 1, num // 2))

    def measure_noise(self) -> Noise | None:
        parts, curve = self.parts, self.curve
        num = parts.samples.num or TUNER.largest_batch
        micro_batch = max(2, min(GRADIENTS.batch, curve.in_core_accumulating, num // GRADIENTS.min_micro_batches))
        if micro_batch > curve.in_core_accumulating or num < 2 * micro_batch:
            parts.why.append("the noise of the gradients was not measured: two micro-batches in-core are needed for it")
            return None
        parts.progress("measuring the noise of the gradients", 0.0)
        with parts.without_momentum(), untouched(parts.model, parts.optimizer):
            if self.request.starts_anew:
                self._train_past_first_descent(min(self.settings.rate_batch, curve.largest_in_core, num // 2))
            noise = measure_noise_until(
                parts.model,
                self.request.loss_fn,
                parts.samples.drawn(micro_batch),
                num_micro=GRADIENTS.min_micro_batches,
                error=GRADIENTS.error,
                for_s=GRADIENTS.time_share * self.request.trial_s,
            )
        noise = capped(noise, parts.samples.num)
        parts.why.append(f"{noise.num_micro} micro-batches of {micro_batch} show a noise scale of {noise.description}")
        return noise

    def _train_past_first_descent(self, batch: int) -> None:
        """Trains until the loss has left its initial plateau. During this first descent the gradients of all samples
        agree, and the noise is far lower than at any later time."""
        parts = self.parts
        assert parts.optimizer is not None
        batches, first = parts.samples.shuffled(batch, seed=1), 0.0
        for _ in range(GRADIENTS.max_descent_steps):
            loss = loss_of(parts.model, self.request.loss_fn, next(batches))
            loss.backward()
            parts.optimizer.step()
            parts.optimizer.zero_grad()
            first = first or float(loss.detach())
            fallen = (1 - GRADIENTS.descent_share) * abs(first)  # the loss may lie below zero
            if not float(loss.detach()) >= first - fallen:
                return

    def _by_goodput(self, curves: CurveBuilder, noise: float) -> tuple[int, int]:
        """Returns the effective batch with the highest goodput, and its micro-batch."""
        batches, first_batch = effective_batches(curves.curve, self.parts.largest_batch()), self.settings.today_batch

        def seconds(batch: int) -> float:
            return curves.curve.seconds(batches[batch], batch // batches[batch])

        if self.request.effort.race:  # a batch whose steps are too long to be compared is not proposed
            longest_s = longest_step_s(COMPARISON.time_share * self.request.trial_s)
            batches = {batch: size for batch, size in batches.items() if seconds(batch) <= longest_s} or batches

        def pick(_: Curve) -> int:
            return batches[best_batch(sorted(batches), seconds, first_batch, noise)[0]]

        curves.measure_contenders(pick, self.parts.progress)
        effective, _ = best_batch(sorted(batches), seconds, first_batch, noise)
        self._num_before_goodput = len(self.parts.why)
        return effective, batches[effective]

    # -- the learning rate --------------------------------------------------------------------------------------------

    def _note_today_rate(self) -> None:
        settings, rate, optimizer = self.settings, self.request.rate.rate, self.parts.optimizer
        settings.rate_batch = settings.today_batch
        if optimizer is None:
            return
        if isinstance(rate, float | int):
            settings.set_rate(float(rate))
        settings.today_rate = float(optimizer.param_groups[0]["lr"])

    def find_rate(self) -> None:
        """Runs a range test if one is requested. It comes before any training, because on a trained model the loss
        falls less and shows less."""
        rate = self.request.rate.rate
        if rate == "find" or (rate is None and self.request.batch.size is None):
            self._test_range(*self._range_batch())

    def _range_batch(self) -> tuple[int, int]:
        """Returns a large in-core batch whose steps fit the time of the range test, and how many seeds fit too."""
        curve, num = self.curve, self.parts.samples.num or TUNER.largest_batch
        step_limit_s = GRADIENTS.range_time_share * self.request.trial_s / GRADIENTS.num_range_steps
        most = min(GRADIENTS.range_batch, curve.largest_in_core, max(num // 4, 2))
        sizes = [p.micro_batch for p in curve.fitting if p.micro_batch <= most]
        quick = [size for size in sizes if size <= TUNER.first_batch or curve.seconds(size) <= step_limit_s]
        batch = max(quick, default=0)
        num_seeds = int(step_limit_s / curve.seconds(batch)) if batch else 1
        return batch, max(1, min(GRADIENTS.num_range_seeds, num_seeds))

    def _test_range(self, batch: int, num_seeds: int) -> None:
        """Sets the learning rate that a range test with an in-core batch suggests."""
        parts = self.parts
        assert parts.optimizer is not None
        if batch < 2:
            parts.why.append("the learning rate is the optimizer's: a range test needs two samples in-core")
            return
        parts.progress("looking for a learning rate", 0.0)
        batches = parts.samples.shuffled(batch, seed=2)
        try:
            with parts.without_momentum():
                result = range_test(
                    parts.model,
                    self.request.loss_fn,
                    batches,
                    parts.optimizer,
                    num_steps=GRADIENTS.num_range_steps,
                    num_seeds=num_seeds,
                )
        except TuningError as error:
            parts.why.append(f"the learning rate is the optimizer's: in a range test {error}")
            return
        parts.why.append(f"a range test with {batch} samples suggests a learning rate of {result.suggested_lr:.3g}")
        self.settings.rate_batch = batch
        self.settings.set_rate(float(result.suggested_lr))
