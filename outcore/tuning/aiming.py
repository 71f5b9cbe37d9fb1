"""Advice + a target -> the same advice with the time to it, or a better one that a search found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from outcore.limit import limit
from outcore.tuning.advice import Advice
from outcore.tuning.batches import LossFn
from outcore.tuning.choosing import ways_to
from outcore.tuning.probing import Tell
from outcore.tuning.samples import Samples
from outcore.tuning.search import Tried, search
from outcore.tuning.state import as_made
from outcore.tuning.targets import Setting, Target, Trial
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

    def predict(self, advice: Advice) -> Advice:
        """Trains at the advised setting until the target or for `trial_s` seconds, and says how long it takes."""
        found: list[Trial] = []
        for train_s, metric in self._looks(advice, found):
            self.tell(f"training towards {self.target.name}", min(1.0, train_s / self.trial_s))
            if self.target.reached(metric):
                break
        target_s, why = found[0].verdict()
        said = f"{self.target.name} takes about {format_seconds(target_s)}: {why}" if target_s is not None else why
        return replace(advice, target=self.target.name, target_s=target_s, why=(*advice.why, said))

    def search(self, advice: Advice, num_trials: int, study: str | Path | None) -> Advice:
        """Runs at other batches and rates; the first to the target takes the advice's place."""
        ways = ways_to(advice.curve, self.samples.num or advice.effective_batch * SPREAD)
        near = [batch for batch in ways if 1 / SPREAD <= batch / advice.effective_batch <= SPREAD]
        ways, rate = ways | {advice.effective_batch: advice.micro_batch}, advice.learning_rate or 1e-3

        def train(batch: int, lr: float) -> Iterator[tuple[float, float]]:
            return self._looks(_at(advice, batch, ways[batch], lr), [])

        def told(run: Tried, num_done: int, num_all: int) -> None:
            self.tell(f"searching: run {num_done} of {num_all}", num_done / num_all)

        found = search(
            train,
            batches=sorted({*near, advice.effective_batch}),
            lrs=(rate / RATE_SPREAD, rate * RATE_SPREAD),
            target=self.target.value,
            maximise=self.target.grows,
            num_trials=num_trials,
            start=[(advice.effective_batch, rate)],
            storage=study,
            tell=told,
        )
        best = found.fastest or found.best
        if best is None or (best.batch, best.lr) == (advice.effective_batch, rate):
            return replace(advice, why=(*advice.why, f"none of {num_trials} runs of a search was better"))
        better = _at(advice, best.batch, ways[best.batch], best.lr)
        reached = "did not reach the target either" if best.to_target_s is None else "was the first to the target"
        said = f"of {num_trials} runs of a search, a batch of {best.batch} at a rate of {best.lr:.3g} {reached}"
        return replace(better, why=(*advice.why, said))

    def _looks(self, advice: Advice, made: list[Trial]) -> Iterator[tuple[float, float]]:
        """Training at a setting; the trial is put into `made`."""
        with self.model() as model, as_made(self.make_optimizer, model.parameters()) as optimizer:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0 + (advice.learning_rate or group["lr"])
                if advice.beta2 is not None:
                    group["betas"] = (group["betas"][0], advice.beta2)
            ooc = None if advice.curve.point(advice.micro_batch).in_core else limit(model, **self.limits)
            around: Callable[[], Any] = nullcontext if ooc is None else ooc.step
            setting = Setting(advice.micro_batch, advice.accumulation, advice.num_warm_up_steps)
            made.append(
                Trial(model, self.loss_fn, self.samples, optimizer, setting, self.target, validation=self.validation)
            )
            try:
                yield from made[-1].looks(around, self.trial_s)
            finally:
                if ooc is not None:
                    ooc.close()


def _at(advice: Advice, batch: int, micro_batch: int, lr: float) -> Advice:
    """The same advice for another batch and rate."""
    accumulation, curve = batch // micro_batch, advice.curve
    return replace(
        advice,
        micro_batch=micro_batch,
        accumulation=accumulation,
        learning_rate=lr,
        samples_per_s=curve.rate(micro_batch, accumulation),
        step_s=curve.seconds(micro_batch, accumulation),
        peak_bytes=curve.point(micro_batch).peak_bytes,
        num_steps=0,
    )
