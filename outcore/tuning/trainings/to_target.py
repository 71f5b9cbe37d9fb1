"""Predicts the time to a target for an advice, or replaces the advice by a better one from a search.

The best of many runs of a search may only be lucky. Therefore its setting and the advice both run from further starts,
and the advice is replaced only by a setting that is faster in the mean, as in a comparison (comparison.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from outcore.limit import limit
from outcore.tuning.advice import Advice
from outcore.tuning.data.restore import made_optimizer
from outcore.tuning.data.samples import Samples
from outcore.tuning.gradients.goodput import beta2_for
from outcore.tuning.options import Request
from outcore.tuning.reasons import why_last_batch, why_loading, why_micro_batch
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.bench import Progress
from outcore.tuning.throughput.builder import effective_batches
from outcore.tuning.throughput.prediction import Point
from outcore.tuning.trainings.initial_weights import seed_everything
from outcore.tuning.trainings.runs import Candidate, Run, mean_cost, mean_description
from outcore.tuning.trainings.search import SearchResult, SearchRun, search
from outcore.tuning.trainings.target import Target
from outcore.tuning.trainings.trial import Trial, TrialSetting, num_held_out
from outcore.units import format_seconds

COMPARISON, SEARCH = SETTINGS.comparison, SETTINGS.search


@dataclass(frozen=True)
class SearchFacts:
    """The facts of a training that a search needs."""

    about: Mapping[str, Any] = field(default_factory=dict)  # identifies the training in a study's file
    is_new: bool = True  # whether further models can be made
    normalises: bool = False  # whether the model has BatchNorm
    beta2: float | None = None  # the optimizer's; None: it has none
    accumulating: Point | None = None  # micro-batch of larger batches; None: they do not fit


@dataclass
class FreshTrainings:
    """Trains new models towards a target."""

    request: Request
    samples: Samples
    validation: Samples | None
    progress: Progress
    facts: SearchFacts = field(default_factory=SearchFacts)

    @property
    def target(self) -> Target:
        assert self.request.target is not None
        return self.request.target

    def with_target_time(self, advice: Advice) -> Advice:
        """Trains with the advice until the target is reached or for `trial_s` seconds; adds the measured or predicted
        time to it."""
        trials: list[Trial] = []
        self.progress(f"training towards {self.target.name}", 0.0)
        for train_s, metric in self._train(replace(advice, num_steps=0), trials):
            part = min(1.0, train_s / self.request.trial_s)
            self.progress(f"training towards {self.target.name}", part)
            if self.target.reached(metric):
                break
        target_s, why = trials[0].verdict()
        said = f"{self.target.name} takes about {format_seconds(target_s)}: {why}" if target_s is not None else why
        return replace(advice, target=self.target.name, target_s=target_s, why=(*advice.why, said))

    def search(self, advice: Advice) -> Advice:
        """Runs other batches and rates; a setting that is faster from further starts too replaces the advice."""
        batches, rate = self._batches(advice), advice.learning_rate or 1e-3

        def train(batch: int, lr: float) -> Iterator[tuple[float, float]]:
            return self._in_curve_seconds(replace(self._at(advice, batch, batches[batch], lr), num_steps=0))

        def on_run(run: SearchRun, num_done: int, num_all: int) -> None:
            self.progress(f"searching: run {num_done} of {num_all}: {_run_description(run)}", num_done / num_all)

        result = search(
            train,
            batches=sorted(batches),
            lrs=(rate / SEARCH.rate_spread, rate * SEARCH.rate_spread),
            target=self.target.value,
            maximise=self.target.grows,
            num_trials=self.request.effort.num_trials,
            start=[(advice.effective_batch, rate)],
            storage=self.request.effort.study,
            about=self.facts.about,
            on_run=on_run,
        )
        usable = replace(result, runs=tuple(run for run in result.runs if run.batch in batches))
        best, said = usable.fastest or usable.best, self._objectives(usable, len(result.runs))
        if best is None or (best.batch, best.lr) == (advice.effective_batch, rate):
            return replace(advice, why=(*advice.why, f"{said}; nothing was better than the advice"))
        return self._sooner(advice, self._at(advice, best.batch, batches[best.batch], best.lr), said)

    def _batches(self, advice: Advice) -> dict[int, int]:
        """Returns effective batches near the advice that fit memory and data, with their micro-batches."""
        spread, cut = SEARCH.batch_spread, self.facts.accumulating
        num = self.samples.num or advice.effective_batch * spread
        if self.samples.num is not None and self.validation is None:
            num -= num_held_out(num)
        batches = {
            batch: size
            for batch, size in effective_batches(advice.curve, num).items()
            if 1 / spread <= batch / advice.effective_batch <= spread
            and (batch == size or (cut is not None and size == cut.micro_batch))
        }
        return batches | {advice.effective_batch: advice.micro_batch}

    def _objectives(self, result: SearchResult, num_all: int) -> str:
        """Returns both results in words: the first run at the target, and the best final metric."""
        said = f"of {num_all} run{'s' * (num_all > 1)} of a search"
        if len(result.runs) < num_all:
            said += f" ({num_all - len(result.runs)} with batches that are not looked at now)"
        fastest, best = result.fastest, result.best
        if best is None:
            errors = [run.error for run in result.runs if run.error]
            return f"{said} none came to its end" + (f" ({errors[-1]})" if errors else "")
        first = "none came to the target"
        if fastest is not None and fastest.to_target_s is not None:
            first = f"{_description(fastest)} was the first to the target, after {format_seconds(fastest.to_target_s)}"
        end = f"{_description(best)} was the best in the end, with {self.target.metric_name} {best.metric:.4g}"
        return f"{said} {first}, and {end}"

    def _sooner(self, advice: Advice, other: Advice, said: str) -> Advice:
        """Returns the setting that is faster in the mean over further starts; the advice if neither clearly is."""
        num_starts = COMPARISON.num_starts
        ours: list[Run] = []
        others: list[Run] = []
        for start in range(1, num_starts + 1):
            progress = f"searching: what was found and the advice, start {start} of {num_starts}"
            self.progress(progress, start / num_starts)
            ours.append(self._run(advice, start))
            others.append(self._run(other, start))
        starts = "starts" if self.facts.is_new else "orders of the data"
        ended = (
            f"in the mean over {num_starts} further {starts}: {_description(others[0].candidate)}: "
            f"{mean_description(others)}; {_description(ours[0].candidate)}, advised before the search: "
            f"{mean_description(ours)}"
        )
        if mean_cost(others) < (1 - COMPARISON.clear_time_share) * mean_cost(ours):
            why = self._why(other, said, f"{ended}; what the search found is sooner")
            return self._with_time(replace(other, why=why, unchecked="", proposal=None), others)
        why = (*advice.why, said, f"{ended}, and stays: nothing was clearly sooner")
        return self._with_time(replace(advice, why=why), ours)

    def _run(self, advice: Advice, start: int) -> Run:
        """Trains from one start until the target is reached or for `trial_s` seconds."""
        evaluations: list[tuple[float, float]] = []
        gave_up = False
        try:
            for second, metric in self._in_curve_seconds(advice, start):
                evaluations.append((second, metric))
                gave_up = not math.isfinite(metric)
                if gave_up or self.target.reached(metric):
                    break
        except Exception:  # as in a study, a run that fails counts as stopped
            gave_up = True
        candidate = Candidate("", advice.effective_batch, advice.learning_rate or 0.0, advice.step_s, advice.beta2)
        gave_up = gave_up or not evaluations
        return Run(candidate, self.request.trial_s, self.target, tuple(evaluations), gave_up=gave_up, start=start)

    def _with_time(self, advice: Advice, runs: list[Run]) -> Advice:
        """Adds the time to the target if every start reached it and it was not known before."""
        seconds = [run.target_s for run in runs if not run.gave_up and run.target_s is not None]
        if advice.target_s is not None or len(seconds) < len(runs):
            return advice
        return replace(advice, target=self.target.name, target_s=sum(seconds) / len(seconds))

    def _why(self, advice: Advice, *said: str) -> tuple[str, ...]:
        """Returns the reasons for a setting that a search found, without those for other settings."""
        return (
            *why_micro_batch(advice.curve, advice.micro_batch, advice.accumulation),
            *said,
            *why_loading(advice.curve, advice.micro_batch, self.samples.load_s),
            *why_last_batch(self.samples.num, advice.micro_batch, self.facts.normalises),
        )

    def _at(self, advice: Advice, batch: int, micro_batch: int, lr: float) -> Advice:
        """Returns the advice with another batch and rate, and the values that depend on them."""
        accumulation, curve, cut = batch // micro_batch, advice.curve, self.facts.accumulating
        if batch == advice.effective_batch:
            if lr == advice.learning_rate:
                return advice
            peak_bytes = advice.peak_bytes
        elif accumulation > 1 and cut is not None:
            peak_bytes = cut.peak_bytes
        else:
            point = curve.point(micro_batch)
            peak_bytes = point.measured_peak_bytes or point.peak_bytes
        step_s = curve.seconds(micro_batch, accumulation)
        num_steps = min((self.samples.num or math.inf) / batch, self.request.trial_s / step_s)
        beta2 = self.facts.beta2 if batch != advice.first_batch else None
        return replace(
            advice,
            micro_batch=micro_batch,
            accumulation=accumulation,
            learning_rate=lr,
            samples_per_s=curve.rate(micro_batch, accumulation),
            step_s=step_s,
            peak_bytes=peak_bytes,
            rule="fixed",
            num_warm_up_steps=int(COMPARISON.warm_up_share * num_steps),
            beta2=beta2_for(beta2, batch, advice.first_batch) if beta2 is not None else None,
            target="",
            target_s=None,
            num_steps=0,
        )

    def _in_curve_seconds(self, advice: Advice, start: int = 0) -> Iterator[tuple[float, float]]:
        """Yields the seconds of the curve and the metric, so that load on the machine does not matter."""
        trials: list[Trial] = []
        for _, metric in self._train(advice, trials, start):
            yield trials[0].progress.num_samples / advice.effective_batch * advice.step_s, metric

    def _train(self, advice: Advice, trials: list[Trial], start: int = 0) -> Iterator[tuple[float, float]]:
        """Trains with a setting from one of several starts; appends the trial to `trials`."""

        make = self.request.make_optimizer
        assert make is not None
        seed_everything(start)
        with self.request.model() as model, made_optimizer(make, model.parameters()) as optimizer:
            first_rate = float(optimizer.param_groups[0]["lr"])
            rate = advice.learning_rate or first_rate
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (rate / first_rate) if first_rate else rate
                if advice.beta2 is not None:
                    group["betas"] = (group["betas"][0], advice.beta2)
            limited = None if self._is_in_core(advice) else limit(model, **self.request.memory.limits)
            around_step: Callable[[], Any] = nullcontext if limited is None else limited.step
            setting = TrialSetting(advice.micro_batch, advice.accumulation, advice.num_warm_up_steps, advice.num_steps)
            trial = Trial(
                model,
                self.request.loss_fn,
                self.samples,
                optimizer,
                setting,
                self.target,
                validation=self.validation,
                start=start,
            )
            trials.append(trial)
            try:
                yield from trial.train(around_step, self.request.trial_s)
            finally:
                if limited is not None:
                    limited.close()

    def _is_in_core(self, advice: Advice) -> bool:
        cut = self.facts.accumulating
        if advice.accumulation > 1 and cut is not None and cut.micro_batch == advice.micro_batch:
            return cut.in_core
        return advice.curve.point(advice.micro_batch).in_core


def _description(setting: SearchRun | Candidate) -> str:
    return f"a batch of {setting.batch} at a rate of {setting.lr:.3g}"


def _run_description(run: SearchRun) -> str:
    metric = math.nan if run.metric is None else run.metric
    ended = f"{metric:.4g}{', given up' if run.state == 'pruned' else ''}"
    return f"batch {run.batch}, rate {run.lr:.3g}: {f'failed ({run.error})' if run.state == 'failed' else ended}"
