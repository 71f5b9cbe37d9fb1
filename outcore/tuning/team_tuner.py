"""Computes one advice for all workers of a process group, each with its own micro-batch and curve.

Each worker measures its own curve. All exchange their curves, choose a global batch and the part of each worker, and
run their parts at the same time, so that differences between moments of measurement do not count. A changed batch or
rate is compared with today's by rank 0, which trains the global batch alone and counts the seconds of the group.
"""

from __future__ import annotations

import math
import statistics
from contextlib import ExitStack
from dataclasses import dataclass, replace

from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.check import SettingCheck, Uncheckable
from outcore.tuning.reasons import BUSY, why_loading, why_micro_batch, why_out_of_memory, why_split
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.prediction import PredictedBatch
from outcore.tuning.throughput.timing import spread
from outcore.tuning.tuner import Tuner
from outcore.tuning.workers.ranks import Ranks
from outcore.tuning.workers.split import Split, Worker, WorkerGroup

TUNER, WORKERS, TIMING = SETTINGS.tuner, SETTINGS.workers, SETTINGS.timing


@dataclass(frozen=True)
class GroupSetting:
    """The setting that all workers agreed on."""

    batch: int
    learning_rate: float | None
    num_warm_up_steps: int = 0
    beta2: float | None = None
    rule: str = "fixed"
    target: str = ""
    target_s: float | None = None
    num_steps: int = 0
    unchecked: str = ""


class TeamTuner(Tuner):
    """One call of `tune` on all workers."""

    ranks: Ranks
    communication_s: float
    is_trusted = True  # whether the timings of every worker can be trusted
    level = 1.0  # seconds while all workers run, relative to the curve's
    spread = 0.0  # of this worker's timings; infinite if no speed is known

    def join(self, ranks: Ranks, communication_s: float) -> None:
        self.ranks, self.communication_s = ranks, communication_s

    def advise(self) -> Advice:
        with self.ranks.all_or_none():
            self.find_micro_batch(None)
        settings = self.settings
        self.is_trusted = all(self.ranks.all(self.curve.is_trusted))
        self.spread = 0.0 if self.is_trusted else math.inf
        settings.today_batch = min(self.ranks.all(self.request.batch.size or self.usual_batch()))
        noise = self._look_at_gradients()
        largest = min(self.ranks.all(self.parts.samples.num or TUNER.largest_batch * self.ranks.num))
        group, split = self._agree(largest, noise)
        chosen = self._chosen(group, split, noise)
        if chosen.batch != split.batch:
            split = group.keep(chosen.batch)
        self._say_why(group, split, chosen, largest, noise)
        return self._advice(group, split, chosen, noise)

    def _advice(self, group: WorkerGroup, split: Split, chosen: GroupSetting, noise: float | None) -> Advice:
        micro_batch = split.sizes[self.ranks.rank]
        with self.ranks.all_or_none():
            peak_bytes = self._peak_bytes(micro_batch, split.accumulation)
        parts, curve = self.parts, self.curve
        why = [
            *why_micro_batch(curve, micro_batch, split.accumulation),
            *parts.why,
            *why_out_of_memory(parts.bench.out_of_memory),
            *why_loading(curve, micro_batch, parts.samples.load_s),
        ]
        return Advice(
            micro_batch=micro_batch,
            accumulation=split.accumulation,
            learning_rate=chosen.learning_rate,
            samples_per_s=group.rate(split),
            step_s=group.step_s(split),
            peak_bytes=peak_bytes,
            curve=curve,
            why=tuple(why),
            rule=chosen.rule,
            num_warm_up_steps=chosen.num_warm_up_steps,
            beta2=chosen.beta2,
            target=chosen.target,
            target_s=chosen.target_s,
            num_steps=chosen.num_steps,
            noise=noise,
            first_batch=self.settings.today_batch,
            unchecked=chosen.unchecked,
            workers=self.ranks.num,
            shares=split.shares,
            communication_s=self.communication_s,
            scaling=group.scaling(split),
        )

    def _say_why(
        self, group: WorkerGroup, split: Split, chosen: GroupSetting, largest: int, noise: float | None
    ) -> None:
        kept, stays = self.request.batch.kept is not None, split.batch == self.settings.today_batch
        silent = split if chosen.unchecked else self._choose(group.silent(), largest, noise)
        self.parts.why += why_split(
            group,
            split,
            silent,
            kept=kept or (stays and bool(chosen.unchecked)),
            noise=None if kept or chosen.batch != self._choose(group, largest, noise).batch else noise,
            rate_stays=chosen.learning_rate in (None, self.settings.today_rate),
        )

    def _look_at_gradients(self) -> float | None:
        """Returns the gradient noise. Rank 0 finds noise and learning rate for all, with reasons that all report."""
        settings, parts, kept = self.settings, self.parts, self.request.batch.kept
        with self.ranks.all_or_none():
            self._note_today_rate()
            if self.ranks.rank == 0 and parts.optimizer is not None and not parts.has_few_samples:
                self.find_rate()
                needed = kept is None or settings.rate_batch != settings.today_batch
                if needed and self.curves is not None:
                    settings.noise = self.measure_noise()
        rate = parts.optimizer.param_groups[0]["lr"] if parts.optimizer is not None else 0.0
        scale = settings.noise.scale if settings.noise is not None else None
        mine = scale, float(rate), settings.rate_batch, parts.why
        scale, rate, settings.rate_batch, parts.why = self.ranks.first(mine)
        if parts.optimizer is not None:
            settings.set_rate(rate)
        return scale

    # -- the split ----------------------------------------------------------------------------------------------------

    def _agree(self, largest: int, noise: float | None) -> tuple[WorkerGroup, Split]:
        """Chooses a split, runs all parts at the same time and exchanges the timings, until the choice is stable."""
        group, measured = self._group(), 0
        for at in range(WORKERS.num_agreements):
            self.parts.progress("choosing a batch for all workers", at / WORKERS.num_agreements)
            split = self._choose(group, largest, noise)
            mine = split.sizes[self.ranks.rank]
            is_near = measured > 0 and abs(mine / measured - 1) <= WORKERS.near_share
            if all(self.ranks.all(is_near)):
                break
            self._run_part(mine)
            measured = mine
            group = self._group()
        return group, self._choose(group, largest, noise)

    def _choose(self, group: WorkerGroup, largest: int, noise: float | None) -> Split:
        kept = self.request.batch.kept
        if kept is not None:
            return group.keep(self.settings.today_batch)
        return group.fastest(largest) if noise is None else group.furthest(largest, self.settings.today_batch, noise)

    def _group(self) -> WorkerGroup:
        with self.ranks.all_or_none():
            most_accumulating = self._most_accumulating()
        worker = Worker.of(self.curve, most_accumulating, 1 / self.level, self.spread)
        return self.ranks.worker_group(worker if self.is_trusted else worker.by_samples(), self.communication_s)

    def _most_accumulating(self) -> int:
        """Returns the largest micro-batch of the curve that fits beside accumulated gradients."""
        sizes = [point.micro_batch for point in self.curve.fitting]
        if self.curves is None:
            return sizes[-1]
        accumulating = self.parts.bench.planner(self.curves.planner.family, accumulating=True)
        return next((size for size in reversed(sizes) if accumulating.predict(size).plan is not None), 0)

    def _run_part(self, micro_batch: int) -> None:
        """Runs real steps of this worker's part, in rounds that all workers run at the same time."""
        curves = self.curves
        predicted: PredictedBatch | None = None
        with self.ranks.all_or_none():
            if curves is not None:
                if micro_batch not in self.curve.batches:
                    curves.predict_fully(micro_batch)
                predicted = curves.predicted[micro_batch] if self.curve.point(micro_batch).fits else None
        self.parts.progress(f"real steps with a batch of {micro_batch}", 0.9)
        times_s = self._rounds(predicted)
        if curves is not None and times_s and self.is_trusted:
            self.spread = spread(times_s)
            self.level = statistics.median(times_s) / curves.curve.seconds(micro_batch)

    def _rounds(self, predicted: PredictedBatch | None) -> list[float]:
        """Returns the seconds of a step in each round. Ranks communicate after every round: if one fails, all stop."""
        times_s: list[float] = []
        with ExitStack() as stack:
            with self.ranks.all_or_none():
                step = stack.enter_context(self.parts.bench.stepping(predicted))
            for _ in range(TIMING.max_rounds):
                with self.ranks.all_or_none():
                    if step is not None:
                        times_s.append(step())
        return times_s

    # -- the check ----------------------------------------------------------------------------------------------------

    def _chosen(self, group: WorkerGroup, split: Split, noise: float | None) -> GroupSetting:
        """Returns the batch and rate of the split if they change nothing or win on rank 0, otherwise today's."""
        parts, settings = self.parts, self.settings
        proposal = replace(self._one_device_setting(split), noise=noise)
        with self.ranks.all_or_none():
            proposal = settings.with_rate(proposal, says_why=self.ranks.rank == 0)
        rate = None if parts.optimizer is None else settings.today_rate
        today = GroupSetting(settings.today_batch, rate)
        offered = _group_setting(split.batch, proposal)
        same = (offered.batch, offered.learning_rate) == (today.batch, today.learning_rate)
        if same or (parts.optimizer is None and self.request.batch.size is None and self.is_trusted):
            return offered if self.is_trusted else replace(offered, unchecked=BUSY)
        chosen = today
        with self.ranks.all_or_none():
            if self.ranks.rank == 0:
                chosen = self._compared(group, split, proposal, today)
        chosen, parts.why = self.ranks.first((chosen, parts.why))
        return chosen

    def _compared(self, group: WorkerGroup, split: Split, proposal: Advice, today: GroupSetting) -> GroupSetting:
        """Trains with both settings on rank 0's device, counting the seconds that the group takes for a step."""
        try:
            if not self.is_trusted:
                raise Uncheckable(BUSY)
            if self.curves is None:
                raise Uncheckable("only one batch size could be run, so nothing can be compared")
            todays = group.keep(today.batch)
            advice = replace(self._one_device_setting(todays), learning_rate=today.learning_rate)
            by_group = GroupCheck(self.parts, self.settings)
            winner = by_group.winner(
                replace(proposal, step_s=group.step_s(split)), replace(advice, step_s=group.step_s(todays))
            )
        except Uncheckable as error:
            return replace(today, unchecked=str(error))
        except TuningError as error:
            return replace(today, unchecked=f"not compared with today's setting: {error}")
        return _group_setting(winner.effective_batch, winner)

    def _one_device_setting(self, split: Split) -> Advice:
        """Returns the setting that trains the global batch on one device."""
        micro_batch = split.sizes[self.ranks.rank]
        return Advice(
            micro_batch=split.batch,
            accumulation=1,
            learning_rate=None,
            samples_per_s=self.curve.rate(micro_batch) if micro_batch in self.curve.batches else 0.0,
            step_s=0.0,
            peak_bytes=0,
            curve=self.curve,
            why=(),
            first_batch=self.settings.today_batch,
        )

    def _peak_bytes(self, micro_batch: int, accumulation: int) -> int:
        if self.curves is not None and micro_batch not in self.curve.batches:
            self.curves.predict_fully(micro_batch)
        point = self.curve.point(micro_batch)
        if self.curves is None or accumulation == 1:
            return point.measured_peak_bytes or point.peak_bytes
        accumulating = self.parts.bench.planner(self.curves.planner.family, accumulating=True)
        predicted = accumulating.predict(micro_batch)
        if predicted.plan is None:
            raise TuningError(f"gradients of {micro_batch} samples cannot be accumulated in this memory; raise it")
        return predicted.point.peak_bytes


class GroupCheck(SettingCheck):
    """A check that counts the given seconds of the group instead of this device's, and tries no other batches."""

    def _timed(self, proposal: Advice) -> Advice:
        return proposal

    def _smaller(self, proposal: Advice) -> dict[str, Advice]:
        return {}


def _group_setting(batch: int, advice: Advice) -> GroupSetting:
    return GroupSetting(
        batch,
        advice.learning_rate,
        advice.num_warm_up_steps,
        advice.beta2,
        advice.rule,
        advice.target,
        advice.target_s,
        advice.num_steps,
    )
