"""Trains candidates from one of several starts, and restores everything afterwards.

`Trainer` owns the model and the optimizer, which are restored after every run; `TrainingRuns` counts the cost of runs,
stops those that cannot win, and stores all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator
from contextlib import closing, nullcontext
from dataclasses import dataclass, field

import torch

from outcore.tuning.data.batches import LossFn
from outcore.tuning.data.restore import untouched
from outcore.tuning.data.samples import Samples
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.bench import Progress
from outcore.tuning.trainings.runs import Candidate, Run, is_beaten, is_hopeless
from outcore.tuning.trainings.target import NO_TARGET, Target
from outcore.tuning.trainings.trial import Trial, TrialSetting

COMPARISON = SETTINGS.comparison


@dataclass
class Trainer:
    """One model and one optimizer, restored after every run."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    samples: Samples
    validation: Samples | None
    in_core: int  # the largest in-core micro-batch
    accumulating: int | None = None  # the largest beside accumulated gradients; None: the same
    load_start: Callable[[int], bool] = lambda start: False  # loads weights; returns whether they differ
    starts_differ: bool = False  # whether any start had its own initial weights

    def train(
        self, candidate: Candidate, run_s: float, target: Target, num_warm_up_steps: int, start: int, split: int
    ) -> Generator[tuple[float, float], None, None]:
        """Trains for `run_s` seconds of the curve; yields seconds and the metric after every eighth of them.

        Closing the generator ends the training early. Everything is restored in either case.
        """
        with untouched(self.model, self.optimizer):
            self.starts_differ = self.load_start(start) or self.starts_differ
            torch.manual_seed(start)
            trial = self._trial(candidate, run_s, target, num_warm_up_steps, start, split)
            num_done = 0
            for evaluation in range(1, COMPARISON.num_evaluations + 1):
                while num_done < round(trial.setting.num_steps * evaluation / COMPARISON.num_evaluations):
                    trial.step(nullcontext)
                    num_done += 1
                yield num_done * candidate.step_s, trial.evaluate()

    def _trial(
        self, candidate: Candidate, run_s: float, target: Target, num_warm_up_steps: int, start: int, split: int
    ) -> Trial:
        first_rate = float(self.optimizer.param_groups[0]["lr"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * (candidate.lr / first_rate) if first_rate else candidate.lr
            if candidate.beta2 is not None:
                group["betas"] = (group["betas"][0], candidate.beta2)
        micro_batch, num_steps = self._micro_batch(candidate.batch), max(1, round(run_s / candidate.step_s))
        return Trial(
            self.model,
            self.loss_fn,
            self.samples,
            self.optimizer,
            TrialSetting(micro_batch, candidate.batch // micro_batch, num_warm_up_steps, num_steps),
            target,
            validation=self.validation,
            evaluation_batch=min(COMPARISON.evaluation_batch, self.in_core),
            start=start,
            split=split,
        )

    def _micro_batch(self, batch: int) -> int:
        """Returns the largest divisor of the batch that is in-core, at once or beside accumulated gradients."""
        whole = batch <= self.in_core or self.accumulating is None
        most = self.in_core if whole else self.accumulating or 0
        return max(size for size in range(1, min(batch, most) + 1) if batch % size == 0)

    def num_warm_up_steps(self, candidate: Candidate, run_s: float) -> int:
        """Returns a tenth of an epoch, or of the run if that is shorter, so that the run shows the rate itself."""
        if not candidate.warms_up:
            return 0
        num_steps = min((self.samples.num or math.inf) / candidate.batch, run_s / candidate.step_s)
        return int(COMPARISON.warm_up_share * num_steps)

    def starts_description(self, num: int) -> str:
        """Returns how the runs' starts differed: in weights, or in the order of the data only."""
        return f"{num} start{'s' * (num > 1)}" if self.starts_differ else f"{num} order{'s' * (num > 1)} of the data"


@dataclass
class TrainingRuns:
    """The runs of one trainer, judged by one target, with their cost."""

    trainer: Trainer
    progress: Progress
    target: Target = NO_TARGET
    give_up_excess_share: float = COMPARISON.give_up_excess_share
    little_remaining: float = -math.inf  # runs with less remaining error are not stopped
    new_split_per_start: bool = False  # whether each start holds out other samples
    clock: Callable[[], float] = time.monotonic
    spent_s: float = 0.0  # seconds of compute
    runs: list[Run] = field(default_factory=list)
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    def run(
        self, candidate: Candidate, run_s: float, limit_s: float, *, leader: Run | None = None, start: int = 0
    ) -> Run:
        """Runs one training, which stops early if it cannot win against the leader."""
        self.progress(f"racing {candidate.description}", min(1.0, self.spent_s / limit_s))
        evaluations: list[tuple[float, float]] = []
        gave_up, num_warm_up_steps = False, self.trainer.num_warm_up_steps(candidate, run_s)
        split = start if self.new_split_per_start else 0
        with closing(self.trainer.train(candidate, run_s, self.target, num_warm_up_steps, start, split)) as training:
            for second, metric in training:
                evaluations.append((second, metric))
                so_far = Run(candidate, run_s, self.target, tuple(evaluations))
                hopeless = is_hopeless(so_far, leader, self.give_up_excess_share)
                gave_up = not math.isfinite(metric) or (so_far.remaining > self.little_remaining and hopeless)
                if gave_up or is_beaten(so_far, leader):
                    break
        self.spent_s += evaluations[-1][0]
        self.runs.append(Run(candidate, run_s, self.target, tuple(evaluations), num_warm_up_steps, gave_up, start))
        return self.runs[-1]

    def known(self, candidate: Candidate, run_s: float, start: int = 0) -> Run | None:
        wanted = candidate, run_s, start
        return next((run for run in self.runs if (run.candidate, run.run_s, run.start) == wanted), None)

    def has_time(self, run_s: float, limit_s: float) -> bool:
        """Whether further runs of `run_s` seconds in total fit a limit for all runs."""
        return self.spent_s + run_s <= 1.001 * limit_s and not self.is_late(limit_s)

    def is_late(self, limit_s: float) -> bool:
        """Whether the elapsed time forbids a new run: reading and evaluating may take longer than the compute."""
        spent_s = self.clock() - self.began_s
        return spent_s > max(COMPARISON.max_clock_factor * limit_s, COMPARISON.min_clock_s)

    def is_below_a_failure(self, candidate: Candidate) -> bool:
        """Whether the next higher rate stopped or ended worse than it began: another start may fail at this rate."""
        highest = COMPARISON.same_rate_factor * math.sqrt(COMPARISON.rate_step) * candidate.lr
        above = [
            run
            for run in self.runs
            if run.candidate.batch == candidate.batch and candidate.lr < run.candidate.lr <= highest
        ]
        return any(run.gave_up or run.remaining > _first(run).remaining for run in above)


def _first(run: Run) -> Run:
    return Run(run.candidate, run.run_s, run.target, run.evaluations[:1])
