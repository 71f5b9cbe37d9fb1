"""Comparisons whose trainings are given instead of run, so that no clock and no luck decides."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from outcore.tuning.data.samples import Samples
from outcore.tuning.trainings.comparison import Comparison
from outcore.tuning.trainings.runs import Candidate
from outcore.tuning.trainings.target import NO_TARGET, Target
from outcore.tuning.trainings.trainer import Trainer, TrainingRuns
from tests.cpu.tuning.nets import CPU, make_sgd, mlp, stripes

Evaluations = Sequence[tuple[float, float]]  # seconds, metric
Script = Callable[[Candidate, int, float], Evaluations]  # (candidate, start, seconds) -> what the run shows
DATA = stripes()


@dataclass
class ScriptedTrainer(Trainer):
    """Trains nothing: its runs show what the script says."""

    script: Script = lambda candidate, start, run_s: ()

    def train(
        self, candidate: Candidate, run_s: float, target: Target, num_warm_up_steps: int, start: int, split: int
    ) -> Generator[tuple[float, float], None, None]:
        yield from self.script(candidate, start, run_s)


def trainer_of(model: torch.nn.Module, in_core: int = 64) -> Trainer:
    return Trainer(model, make_sgd(model.parameters()), F.cross_entropy, Samples(DATA, CPU), None, in_core)


def comparison_of(model: torch.nn.Module, in_core: int = 64, target: Target = NO_TARGET) -> Comparison:
    """One that really trains."""
    return Comparison(TrainingRuns(trainer_of(model, in_core), print, target))


def scripted(script: Script, target: Target = NO_TARGET, run_s: float = 0.0) -> Comparison:
    model = mlp()
    trainer = ScriptedTrainer(
        model, make_sgd(model.parameters()), F.cross_entropy, Samples(DATA, CPU), None, 64, script=script
    )
    return Comparison(TrainingRuns(trainer, print, target), run_s)


def reaching(target_s: Callable[[Candidate, int, float], float]) -> Script:
    """Runs that come to an accuracy of 0.6 after so many seconds, if they last so long, and end at 0.7."""

    def script(candidate: Candidate, start: int, run_s: float) -> Evaluations:
        took_s = target_s(candidate, start, run_s)
        return ((took_s, 0.6), (run_s, 0.7)) if took_s <= run_s else ((run_s, 0.55),)

    return script
