"""Compares a proposal with today's setting by training with both, and with others, for a while.

A setting is never changed on theory alone: a proposal that cannot be compared raises `Uncheckable` with the reason, and
today's setting stays.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace

from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.parts import Parts
from outcore.tuning.setting_builder import SettingBuilder
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.curve import Curve
from outcore.tuning.trainings.comparison import Comparison
from outcore.tuning.trainings.full_length import FullLengthComparison
from outcore.tuning.trainings.initial_weights import InitialWeights
from outcore.tuning.trainings.runs import Candidate, Run
from outcore.tuning.trainings.target import NO_TARGET
from outcore.tuning.trainings.trainer import Trainer, TrainingRuns
from outcore.units import format_seconds

COMPARISON, FULL_LENGTH, DATA = SETTINGS.comparison, SETTINGS.full_length, SETTINGS.data
TODAY, PROPOSAL = "today's setting", "the advice"  # names of candidates
SMALLER = {2: "half its batch", 4: "a quarter of its batch"}
LARGER = {2: "twice the soonest one's batch", 4: "four times the soonest one's batch"}  # in full-length trainings


class Uncheckable(TuningError):
    """A proposal cannot be compared with today's setting."""


@dataclass
class SettingCheck:
    parts: Parts
    settings: SettingBuilder

    def reason_against(self) -> str:
        """Returns why nothing can be compared, whatever is proposed; "" if comparing is possible."""
        parts = self.parts
        if parts.has_few_samples:
            few = f"the data set has {parts.samples.num} samples"
            return f"{few}, and noise, rates and trainings need {DATA.min_samples} or more to tell anything"
        if parts.optimizer is None:
            return "without an optimizer nothing can be trained to compare batches by"
        if not parts.request.effort.race:
            return "nothing was trained to compare it with, as race=False asks"
        if parts.samples.num is None and parts.validation is None:
            return "not compared with today's setting: a function's samples cannot be held out"
        return ""

    def winner(self, proposal: Advice, today: Advice) -> Advice:
        """Returns the setting that trains best: today's, the proposal, or the proposal at another rate or batch."""
        if reason := self.reason_against():
            raise Uncheckable(reason)
        try:
            settings = {TODAY: today, PROPOSAL: self._timed(proposal)}
            for setting in settings.values():
                check_trains_in_core(setting, self.settings.curve)
            settings |= self._smaller(proposal)
            comparison = Comparison(self._training_runs())
            candidates = [_candidate(name, setting) for name, setting in settings.items()]
            candidates[0] = replace(candidates[0], warms_up=False)
            with self.parts.without_momentum():
                run = comparison.winner(candidates[0], candidates[1:], self._limit_s(COMPARISON.time_share))
        except Uncheckable:
            raise
        except TuningError as error:
            raise Uncheckable(f"not compared with today's setting: {error}") from None
        if run is None:
            raise Uncheckable("not compared with today's setting: its steps take too long for a race; raise trial_s")
        self.parts.why.append(comparison.description(run))
        winner = _with_rate_of(settings[run.candidate.name], run)
        winner = self._with_length(winner, run, comparison.length_s(run))
        goal, candidate = self.parts.request.goal, run.candidate
        length_s = goal.length_s(self.parts.samples.num, candidate.batch, candidate.step_s)
        if length_s is None:
            return winner
        others = self._larger(winner, comparison) | settings
        return self._best_in_the_end(winner, others, comparison, run, length_s)

    def _timed(self, proposal: Advice) -> Advice:
        return self.settings.timed(proposal)

    def _limit_s(self, share: float) -> float:
        return share * self.parts.request.trial_s

    def _training_runs(self) -> TrainingRuns:
        parts, curve, target = self.parts, self.settings.curve, self.parts.request.target
        assert parts.optimizer is not None
        make = parts.request.make_model if parts.is_new else parts.model
        weights = InitialWeights(make, parts.model, parts.optimizer, parts.bench.budget.device_bytes)
        trainer = Trainer(
            parts.model,
            parts.optimizer,
            parts.request.loss_fn,
            parts.samples,
            parts.validation,
            curve.largest_in_core,
            curve.in_core_accumulating,
            weights.load,
        )
        return TrainingRuns(trainer, parts.progress, target if target is not None and target.is_builtin else NO_TARGET)

    def _best_in_the_end(
        self, soonest: Advice, settings: dict[str, Advice], comparison: Comparison, run: Run, length_s: float
    ) -> Advice:
        """Returns the setting that is best at the end of a training as long as the user's, with the one that reaches
        the target first in `soonest`."""
        trainings = FullLengthComparison.after(comparison, length_s, self._limit_s(FULL_LENGTH.time_share))
        larger = [_candidate(name, settings[name]) for name in LARGER.values() if name in settings]
        with self.parts.without_momentum():
            best = trainings.best(run.candidate, [*larger, *comparison.best_of_other_batches(run.candidate)])
        advice = soonest
        if best is None:
            self.parts.why.append(
                "trainings as long as yours were not compared: they have too few steps, or none learnt; train longer, "
                "or raise trial_s"
            )
        else:
            self.parts.why.append(trainings.description(best))
            advice = _with_rate_of(settings[best.candidate.name], best)
            advice = replace(advice, target=soonest.target, target_s=soonest.target_s)
        beside = soonest.setting if soonest.num_steps else None
        return replace(advice, num_steps=max(1, round(length_s / advice.step_s)), soonest=beside)

    def _with_length(self, advice: Advice, run: Run, length_s: float | None) -> Advice:
        """Sets the number of steps to the target, according to the comparison."""
        if length_s is None:
            return advice
        num_steps, target = math.ceil(length_s / advice.step_s), run.target.name
        how = (
            "was not reached in the race, and lies on the line of what was left after its runs, a rough guess"
            if run.target_s is None
            else f"was reached in the race, in a run of {format_seconds(run.run_s)}"
        )
        self.parts.why.append(f"{target} {how}: train {num_steps} steps, the rate falling to zero over the last third")
        return replace(advice, num_steps=num_steps, target=target, target_s=num_steps * advice.step_s)

    def _smaller(self, proposal: Advice) -> dict[str, Advice]:
        """Returns the proposal with half and a quarter of its batch, because goodput is only a rule of thumb."""
        batch, least = proposal.effective_batch, self.parts.smallest_batch
        if not self.parts.request.batch.is_free:
            return {}
        parts = [part for part in SMALLER if batch % part == 0 and batch // part >= least]
        return self._others({SMALLER[part]: batch // part for part in parts})

    def _larger(self, winner: Advice, comparison: Comparison) -> dict[str, Advice]:
        """Returns twice and four times the batch that reaches the target first, unless a larger one was compared.

        Gradient noise grows during training, so the batch with the best goodput at first may be too small at the end.
        """
        batch, most = winner.effective_batch, self.parts.largest_batch() // 4
        compared = any(run.candidate.batch > batch for run in comparison.history.runs)
        if not self.parts.request.batch.is_free or compared:
            return {}
        return self._others({name: times * batch for times, name in LARGER.items() if times * batch <= most})

    def _others(self, batches: dict[str, int]) -> dict[str, Advice]:
        """Returns settings with other effective batches and their rates; those that do not fit are left out."""
        settings: dict[str, Advice] = {}
        for name, batch in batches.items():
            with suppress(TuningError):
                setting = self.settings.at(batch)
                check_trains_in_core(setting, self.settings.curve)
                settings[name] = self.settings.with_rate(setting, says_why=False)
        return settings


def check_trains_in_core(advice: Advice, curve: Curve) -> None:
    """Raises `TuningError` unless the setting can be trained in-core, at once or in accumulated micro-batches, as the
    compared trainings do."""
    if advice.effective_batch > curve.largest_in_core and not curve.in_core_accumulating:
        raise TuningError(
            f"a batch of {advice.effective_batch} is not in-core, nor is one sample beside accumulated gradients"
        )


def _candidate(name: str, advice: Advice) -> Candidate:
    return Candidate(name, advice.effective_batch, advice.learning_rate or 0.0, advice.step_s, advice.beta2)


def _with_rate_of(advice: Advice, run: Run) -> Advice:
    return replace(advice, learning_rate=run.candidate.lr, num_warm_up_steps=run.num_warm_up_steps)
