"""Today's setting and the advice -> the one that trains better, by training both for a while.

Noise scales and range tests are theory and a glance; before they change what a user trains with, the settings run
against each other: from the same parameters, through the data in the same order, for the same seconds of compute, and
judged by the loss on samples that none of them trains on. First today's setting, then the advice, then the advice with
a third of its rate; then the leader with three times its rate, again where that led, and 1.7 times where it did not.
A higher rate than the leader's comes with a warm-up: parameters that are still random bear less of it than later ones.
Whoever challenges the leader must be clearly better: of two that train alike the one known longer, or the lower rate,
is safer.

The seconds are those of the curve (a step of this batch takes so long), not of a clock: a machine that is busy during
one run and idle during the next decides nothing, and a batch that would swap can run in smaller micro-batches.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import torch

from outcore.tuning.batches import LossFn
from outcore.tuning.probing import Tell
from outcore.tuning.samples import Samples
from outcore.tuning.state import untouched
from outcore.tuning.targets import Setting, Target, Trial
from outcore.units import format_seconds

NUM_RUNNERS = 5
NUM_LOOKS = 8  # at the held-out loss, evenly over a run; their mean is its result
LEAST_STEPS = 16  # of the slowest runner: with fewer nothing shows
NUM_EPOCHS = 6  # at today's setting: a race need not be longer
CLEARLY = 0.03  # of the leader's loss that a challenger's must be lower
HOPELESS = 0.5  # of the leader's loss that another's is higher, halfway: it need not go on
WARM_UP = 0.1  # of an epoch
TIMES, LEAST_TIMES = 3.0, 1.5  # the rate; where so much was too much, its square root, and no less than this


def longest_step_s(limit_s: float) -> float:
    """Of a runner's effective batch, in a race of `limit_s` seconds for all runs."""
    return limit_s / NUM_RUNNERS / LEAST_STEPS


@dataclass(frozen=True)
class Runner:
    """A setting in the race; `step_s` are seconds of its effective batch as it would be trained."""

    name: str
    batch: int
    lr: float
    step_s: float
    num_warm_up_steps: int = 0
    beta2: float | None = None
    factor: float = 1.0  # of the rate that it has under its name

    def times(self, factor: float) -> Runner:
        return replace(self, lr=self.lr * factor, factor=self.factor * factor)

    @property
    def told(self) -> str:
        how = "" if self.factor == 1 else f" at {self.factor:.2g} times the rate"
        return f"{self.name}{how} (batch {self.batch}, rate {self.lr:.3g})"


@dataclass(frozen=True)
class Finish:
    """A runner and its held-out losses on the way."""

    runner: Runner
    losses: tuple[float, ...]
    gave_up: bool = False

    @property
    def loss(self) -> float:
        """The mean over the run: who is sooner at a low loss wins, also where all get there in the end."""
        return math.inf if self.gave_up else statistics.fmean(self.losses)


@dataclass
class Race:
    """One model and one optimizer, put back before every start and after the last."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: LossFn
    samples: Samples
    validation: Samples | None
    in_core: int  # the largest micro-batch to run with
    tell: Tell
    run_s: float = 0.0  # of compute, for each
    ran: list[Finish] = field(default_factory=list)

    def between(self, today: Runner, advice: Runner, limit_s: float) -> Finish | None:
        """The winner; None: `limit_s` seconds for all runs are too few to tell."""
        if not self._share_out(today, advice, limit_s):
            return None
        leader = self._run(today, None)
        for challenger in (advice, advice.times(1 / TIMES)):
            leader = self._challenge(leader, challenger)
        factor = TIMES
        while len(self.ran) < NUM_RUNNERS and factor > LEAST_TIMES:
            before, leader = leader, self._challenge(leader, self._warmed(leader.runner.times(factor)))
            factor = factor if leader is not before else math.sqrt(factor)
        return leader

    def _warmed(self, runner: Runner) -> Runner:
        """With a warm-up over a tenth of an epoch, or of the race where that is shorter: it must run at its rate."""
        whole = min(self.samples.num or math.inf, self.run_s / runner.step_s * runner.batch) / runner.batch
        return replace(runner, num_warm_up_steps=max(runner.num_warm_up_steps, int(WARM_UP * whole)))

    def _share_out(self, today: Runner, advice: Runner, limit_s: float) -> bool:
        """Finds the seconds for each run; False: too few."""
        epochs_s = NUM_EPOCHS * (self.samples.num or math.inf) / today.batch * today.step_s
        slowest_s = max(today.step_s, advice.step_s)
        self.run_s = max(min(limit_s / NUM_RUNNERS, epochs_s), LEAST_STEPS * slowest_s)
        return slowest_s <= longest_step_s(limit_s)

    def _tried(self, runner: Runner) -> bool:
        """This batch at a rate so near that it would only be run again."""
        same = [found.runner for found in self.ran if found.runner.batch == runner.batch]
        return any(abs(math.log(runner.lr / other.lr)) < math.log(TIMES) / 3 for other in same)

    def _challenge(self, leader: Finish, runner: Runner) -> Finish:
        if self._tried(runner):
            return leader
        found = self._run(runner, leader)
        if leader.gave_up:
            return leader if found.gave_up else found
        return found if found.loss < leader.loss - CLEARLY * abs(leader.loss) else leader

    def _run(self, runner: Runner, leader: Finish | None) -> Finish:
        self.tell(f"racing {runner.told}", len(self.ran) / NUM_RUNNERS)
        losses: list[float] = []
        gave_up = False
        with untouched(self.model, self.optimizer):
            torch.manual_seed(0)
            for loss in self._losses(runner):
                losses.append(loss)
                gave_up = not math.isfinite(loss) or _is_hopeless(losses, leader)
                if gave_up:
                    break
        self.ran.append(Finish(runner, tuple(losses), gave_up))
        return self.ran[-1]

    def _losses(self, runner: Runner) -> Iterator[float]:
        """Trains, and looks at the held-out loss after every eighth of the seconds."""
        first_rate = float(self.optimizer.param_groups[0]["lr"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * (runner.lr / first_rate) if first_rate else runner.lr
            if runner.beta2 is not None:
                group["betas"] = (group["betas"][0], runner.beta2)
        micro_batch = max(size for size in range(1, min(runner.batch, self.in_core) + 1) if runner.batch % size == 0)
        setting = Setting(micro_batch, runner.batch // micro_batch, runner.num_warm_up_steps)
        trial = Trial(
            self.model,
            self.loss_fn,
            self.samples,
            self.optimizer,
            setting,
            Target("val_loss", 0.0),
            validation=self.validation,
        )
        num_steps = 0
        for look in range(1, NUM_LOOKS + 1):
            while num_steps < round(self.run_s * look / NUM_LOOKS / runner.step_s):
                trial.step(nullcontext)
                num_steps += 1
            yield trial.look()

    def told(self, winner: Finish) -> str:
        """What was compared and how it ended."""
        ran = ", ".join(f"{found.runner.told} {_loss_of(found)}" for found in self.ran)
        return (
            f"raced from the same start, each with {format_seconds(self.run_s)} of compute, by the loss on held-out "
            f"samples: {ran}; the winner is {winner.runner.told}"
        )


def _is_hopeless(losses: list[float], leader: Finish | None) -> bool:
    """Halfway, and far behind where the leader was then."""
    if leader is None or leader.gave_up or len(losses) != NUM_LOOKS // 2:
        return False
    then = leader.losses[len(losses) - 1]
    return losses[-1] > then + HOPELESS * abs(then)


def _loss_of(found: Finish) -> str:
    return "gave up" if found.gave_up else f"{found.loss:.3g}"
