"""Advice + a target -> the same advice with the time to it, or a better one that a search found.

Of many runs of a search the luckiest looks best. So what it found and the advice run from further starts, each as it is
advised, and the advice is left only for what is sooner in the mean, as in a race (race.py).
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outcore.limit import limit
from outcore.tuning.advice import Advice
from outcore.tuning.batches import LossFn
from outcore.tuning.choosing import ways_to
from outcore.tuning.curve import Point
from outcore.tuning.goodput import beta2_for
from outcore.tuning.probing import Tell
from outcore.tuning.race import NUM_STARTS, SOONER, WARM_UP, Finish, Runner, mean_told
from outcore.tuning.reasons import why_last_batch, why_loading, why_micro_batch
from outcore.tuning.samples import Samples
from outcore.tuning.search import Found, Tried, search
from outcore.tuning.starts import FIRST_SEED
from outcore.tuning.state import as_made
from outcore.tuning.targets import Setting, Target, Trial, num_held_out
from outcore.units import format_seconds

MakeOptimizer = Callable[[Any], torch.optim.Optimizer]
SPREAD = 8  # a search looks at batches from an eighth of the advised one to eight times it, and at rates so far
RATE_SPREAD = 30


@dataclass
class Aiming:
    """Trains fresh models towards a target."""

    model: Callable[[], AbstractContextManager[torch.nn.Module]]
    loss_fn: LossFn
    make_optimizer: MakeOptimizer
    samples: Samples
    validation: Samples | None
    target: Target
    trial_s: float
    limits: dict[str, Any]  # memory, host, disk
    tell: Tell
    about: Mapping[str, Any] = field(default_factory=dict)  # the training, for a study that goes on
    is_new: bool = True  # the model: others like it can be made
    normalises: bool = False
    beta2: float | None = None  # as the optimizer is made; None: it has none
    accumulating: Point | None = None  # what larger batches are cut into, gradients beside it; None: they have no room

    def predict(self, advice: Advice) -> Advice:
        """Trains at the advised setting until the target or for `trial_s` seconds, and says how long it takes."""
        found: list[Trial] = []
        for train_s, metric in self._looks(replace(advice, num_steps=0), found):
            self.tell(f"training towards {self.target.name}", min(1.0, train_s / self.trial_s))
            if self.target.reached(metric):
                break
        target_s, why = found[0].verdict()
        said = f"{self.target.name} takes about {format_seconds(target_s)}: {why}" if target_s is not None else why
        return replace(advice, target=self.target.name, target_s=target_s, why=(*advice.why, said))

    def search(self, advice: Advice, num_trials: int, study: str | Path | None) -> Advice:
        """Runs at other batches and rates; what is soonest from further starts, too, takes the advice's place."""
        ways, rate = self._ways(advice), advice.learning_rate or 1e-3

        def train(batch: int, lr: float) -> Iterator[tuple[float, float]]:
            return self._steps(replace(self._at(advice, batch, ways[batch], lr), num_steps=0))

        def told(run: Tried, num_done: int, num_all: int) -> None:
            self.tell(f"searching: run {num_done} of {num_all}: {_run_told(run)}", num_done / num_all)

        found = search(
            train,
            batches=sorted(ways),
            lrs=(rate / RATE_SPREAD, rate * RATE_SPREAD),
            target=self.target.value,
            maximise=self.target.grows,
            num_trials=num_trials,
            start=[(advice.effective_batch, rate)],
            storage=study,
            about=self.about,
            tell=told,
        )
        here = replace(found, tried=tuple(run for run in found.tried if run.batch in ways))
        best, said = here.fastest or here.best, self._objectives(here, len(found.tried))
        if best is None or (best.batch, best.lr) == (advice.effective_batch, rate):
            return replace(advice, why=(*advice.why, f"{said}; nothing was better than the advice"))
        return self._sooner(advice, self._at(advice, best.batch, ways[best.batch], best.lr), said)

    def _ways(self, advice: Advice) -> dict[int, int]:
        """Effective batch -> its micro-batch, near the advice, that can be trained in this memory with this data."""
        num, cut = self.samples.num or advice.effective_batch * SPREAD, self.accumulating
        if self.samples.num is not None and self.validation is None:
            num -= num_held_out(num)
        ways = {
            batch: size
            for batch, size in ways_to(advice.curve, num).items()
            if 1 / SPREAD <= batch / advice.effective_batch <= SPREAD
            and (batch == size or (cut is not None and size == cut.micro_batch))
        }
        return ways | {advice.effective_batch: advice.micro_batch}

    def _objectives(self, found: Found, num_all: int) -> str:
        """Both objectives: who was first, and who was best in the end."""
        said = f"of {num_all} run{'s' * (num_all > 1)} of a search"
        if len(found.tried) < num_all:
            said += f" ({num_all - len(found.tried)} with batches that are not looked at now)"
        fastest, best = found.fastest, found.best
        if best is None:
            errors = [run.error for run in found.tried if run.error]
            return f"{said} none came to its end" + (f" ({errors[-1]})" if errors else "")
        first = "none came to the target"
        if fastest is not None and fastest.to_target_s is not None:
            first = f"{_told(fastest)} was the first to the target, after {format_seconds(fastest.to_target_s)}"
        metric = self.target.name.split()[0]
        return f"{said} {first}, and {_told(best)} was the best in the end, with {metric} {best.metric:.4g}"

    def _sooner(self, advice: Advice, other: Advice, said: str) -> Advice:
        """The one that is sooner in the mean over further starts; the advice, unless the other one clearly is."""
        ours: list[Finish] = []
        others: list[Finish] = []
        for start in range(1, NUM_STARTS + 1):
            self.tell(f"searching: what was found and the advice, start {start} of {NUM_STARTS}", start / NUM_STARTS)
            ours.append(self._finish(advice, start))
            others.append(self._finish(other, start))
        cost_s, other_s = (statistics.fmean(found.cost for found in ran) for ran in (ours, others))
        starts = "starts" if self.is_new else "orders of the data"
        ended = (
            f"in the mean over {NUM_STARTS} further {starts}: {_told(others[0].runner)}: {mean_told(others)}; "
            f"{_told(ours[0].runner)}, advised before the search: {mean_told(ours)}"
        )
        if other_s < (1 - SOONER) * cost_s:
            why = self._why(other, said, f"{ended}; what the search found is sooner")
            return self._with_time(replace(other, why=why), others)
        why = (*advice.why, said, f"{ended}, and stays: nothing was clearly sooner")
        return self._with_time(replace(advice, why=why), ours)

    def _finish(self, advice: Advice, start: int) -> Finish:
        """A training from a start of its own, until the target or for `trial_s` seconds."""
        looks: list[tuple[float, float]] = []
        gave_up = False
        try:
            for second, metric in self._steps(advice, start):
                looks.append((second, metric))
                gave_up = not math.isfinite(metric)
                if gave_up or self.target.reached(metric):
                    break
        except Exception:  # as in a study: a run that fails has lost
            gave_up = True
        runner = Runner("", advice.effective_batch, advice.learning_rate or 0.0, advice.step_s, advice.beta2)
        return Finish(runner, self.trial_s, self.target, tuple(looks), gave_up=gave_up or not looks, order=start)

    def _with_time(self, advice: Advice, ran: list[Finish]) -> Advice:
        """To the target, where every start came to it and nobody knew before."""
        seconds = [found.target_s for found in ran if not found.gave_up and found.target_s is not None]
        if advice.target_s is not None or len(seconds) < len(ran):
            return advice
        return replace(advice, target=self.target.name, target_s=statistics.fmean(seconds))

    def _why(self, advice: Advice, *said: str) -> tuple[str, ...]:
        """For a setting that a search found: nothing of what was said about another."""
        return (
            *why_micro_batch(advice.curve, advice.micro_batch, advice.accumulation),
            *said,
            *why_loading(advice.curve, advice.micro_batch, self.samples.load_s),
            *why_last_batch(self.samples.num, advice.micro_batch, self.normalises),
        )

    def _at(self, advice: Advice, batch: int, micro_batch: int, lr: float) -> Advice:
        """The same advice for another batch and rate, with what belongs to them."""
        accumulation, curve, cut = batch // micro_batch, advice.curve, self.accumulating
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
        num_steps = min((self.samples.num or math.inf) / batch, self.trial_s / step_s)
        beta2 = self.beta2 if batch != advice.first_batch else None
        return replace(
            advice,
            micro_batch=micro_batch,
            accumulation=accumulation,
            learning_rate=lr,
            samples_per_s=curve.rate(micro_batch, accumulation),
            step_s=step_s,
            peak_bytes=peak_bytes,
            rule="fixed",
            num_warm_up_steps=int(WARM_UP * num_steps),
            beta2=beta2_for(beta2, batch, advice.first_batch) if beta2 is not None else None,
            target="",
            target_s=None,
            num_steps=0,
        )

    def _steps(self, advice: Advice, start: int = 0) -> Iterator[tuple[float, float]]:
        """Training at a setting, in the seconds of its curve: a machine that is busy meanwhile decides nothing."""
        made: list[Trial] = []
        for _, metric in self._looks(advice, made, start):
            yield made[0].training.num_samples / advice.effective_batch * advice.step_s, metric

    def _looks(self, advice: Advice, made: list[Trial], start: int = 0) -> Iterator[tuple[float, float]]:
        """Training at a setting, from one of several starts; the trial is put into `made`."""
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(FIRST_SEED + start)
        with self.model() as model, as_made(self.make_optimizer, model.parameters()) as optimizer:
            first_rate = float(optimizer.param_groups[0]["lr"])
            rate = advice.learning_rate or first_rate
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * (rate / first_rate) if first_rate else rate
                if advice.beta2 is not None:
                    group["betas"] = (group["betas"][0], advice.beta2)
            ooc = None if self._is_in_core(advice) else limit(model, **self.limits)
            around: Callable[[], Any] = nullcontext if ooc is None else ooc.step
            setting = Setting(advice.micro_batch, advice.accumulation, advice.num_warm_up_steps, advice.num_steps)
            made.append(
                Trial(
                    model,
                    self.loss_fn,
                    self.samples,
                    optimizer,
                    setting,
                    self.target,
                    validation=self.validation,
                    order=start,
                )
            )
            try:
                yield from made[-1].looks(around, self.trial_s)
            finally:
                if ooc is not None:
                    ooc.close()

    def _is_in_core(self, advice: Advice) -> bool:
        cut = self.accumulating
        if advice.accumulation > 1 and cut is not None and cut.micro_batch == advice.micro_batch:
            return cut.in_core
        return advice.curve.point(advice.micro_batch).in_core


def _told(setting: Tried | Runner) -> str:
    return f"a batch of {setting.batch} at a rate of {setting.lr:.3g}"


def _run_told(run: Tried) -> str:
    ended = f"{math.nan if run.metric is None else run.metric:.4g}{', given up' if run.state == 'pruned' else ''}"
    return f"batch {run.batch}, rate {run.lr:.3g}: {f'failed ({run.error})' if run.state == 'failed' else ended}"
