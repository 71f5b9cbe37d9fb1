"""The front door: tune(make_model, loss_fn, dataset, memory=...) -> Advice.

Which batch and which learning rate train fastest in the memory there is? A few small batches are recorded; every other
one is predicted by scaling their traces, planning and simulating; the best few are confirmed with real steps. The
micro-batch is the knee of that curve. The effective batch is kept by accumulation or, where it is free, chosen by
goodput: samples per second times what a sample is worth at that batch, by the measured noise of the gradients.

After Guo et al. (AccUDNN, arXiv 1901.06773), who look for the efficiency-optimal minibatch once swapping has removed
the memory wall; the statistics are those of Pollux and AdaScale (see `goodput`). Nothing is found by running out of
memory, and nothing of the user's training is changed: not the model, not the random generators, not the data's order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from outcore.errors import TuningError
from outcore.tuning.advice import Advice
from outcore.tuning.aiming import Aiming, MakeOptimizer
from outcore.tuning.batches import LossFn, loss_of
from outcore.tuning.choosing import (
    Choosing,
    divisors,
    free_batches,
    micro_batch_for,
    refined,
    single_curve,
    ways_to,
)
from outcore.tuning.curve import Curve
from outcore.tuning.goodput import RULES, best_batch, beta2_for, lr_factor, num_warm_up_steps
from outcore.tuning.noise import Noise, measure_noise
from outcore.tuning.probing import Bench, Tell, cannot_run_one, climb
from outcore.tuning.ranges import range_test
from outcore.tuning.reasons import why_batch_kept, why_last_batch, why_loading, why_micro_batch
from outcore.tuning.samples import Collate, Samples
from outcore.tuning.state import keep_generators, untouched
from outcore.tuning.targets import Target

FIRST_BATCH = 32  # where no batch is given: noise and learning rate are looked at here
NUM_FIRST_STEPS = 20  # of training before noise is measured: the very first gradients are not typical
NUM_MICRO = 16
LARGEST = 1 << 16
MakeModel = Callable[[], torch.nn.Module] | torch.nn.Module


def tune(
    make_model: MakeModel,
    loss_fn: LossFn,
    dataset: Any,
    *,
    memory: int | str,
    optimizer: MakeOptimizer | None = None,
    batch: int | None = None,
    free: bool | None = None,
    learning_rate: float | str | None = None,
    rule: str = "adascale",
    target: tuple[Any, float] | None = None,
    validation: Any = None,
    largest: int | None = None,
    host: int | str = "auto",
    disk: str | Path | None = None,
    collate: Collate | None = None,
    trial_s: float = 20.0,
    num_trials: int = 0,
    study: str | Path | None = None,
    progress: Tell | None = None,
) -> Advice:
    """Advises micro-batch, accumulation and learning rate for training in `memory` bytes of the model's device.

    `make_model()` makes the model on its device (a model itself will do, and is not changed). `dataset` is a map-style
    data set or a function batch_size -> batch. A batch of `(x, y)` is trained by `loss_fn(model(x), y)`, a dictionary
    by `loss_fn(model(**batch), batch)`: any other step can be written as a model whose forward is that step.
    `optimizer(parameters)` makes the optimizer, for example `partial(torch.optim.AdamW, lr=1e-3)`; without it its state
    is not counted and no learning rate is advised.

    `batch` is the effective batch you train with today: it is kept by accumulation, unless `free=True`. Without it the
    batch is free. `learning_rate` is the rate that belongs to `batch` (the optimizer's, if not given), or "find" for a
    range test; it is the default where no batch is given. `rule` says how it follows a freed batch.

    `target`, such as `("val_accuracy", 0.97)` or `(function of the model, value)`, asks for the time to it, found by
    training for at most `trial_s` seconds, on `validation` or else on a tenth that is held out of `dataset`. With
    `num_trials` an Optuna study of so many runs, each of `trial_s` seconds, begins at the advice and looks for a better
    batch and rate; `study` names a file from which it goes on when it was interrupted.
    """
    began_s, back = time.perf_counter(), keep_generators()
    asked = _Asked(
        make_model, loss_fn, optimizer, memory, batch, batch is None if free is None else free, learning_rate, rule
    )
    asked.check()
    aim = Target.read(target) if target is not None else None
    if num_trials and (aim is None or optimizer is None):
        raise TuningError("a search needs target=... and optimizer=... to compare runs by; give both")
    try:
        with asked.model() as model:
            samples = Samples(dataset, _device_of(model), collate)
            made = optimizer(model.parameters()) if optimizer is not None else None
            tuner = _Tuner(asked, samples, model, made, progress or (lambda what, part: None))
            tuner.bench = Bench(model, loss_fn, samples, made, memory, host=host, disk=disk)
            try:
                advice = tuner.advise(largest)
            finally:
                tuner.bench.close()
        if aim is not None:
            if optimizer is None:
                raise TuningError(
                    "time to a target is found by training; give optimizer=..., such as torch.optim.AdamW"
                )
            held_out = Samples(validation, samples.device, collate) if validation is not None else None
            limits = {"memory": memory, "host": host, "disk": disk}
            aiming = Aiming(asked.model, loss_fn, optimizer, samples, held_out, aim, trial_s, limits, tuner.tell)
            advice = aiming.search(advice, num_trials, study) if num_trials else advice
            advice = aiming.predict(advice)
        return replace(advice, spent_s=time.perf_counter() - began_s)
    finally:
        back()


@dataclass(frozen=True)
class _Asked:
    """What the user wants."""

    make_model: MakeModel
    loss_fn: LossFn
    make_optimizer: MakeOptimizer | None
    memory: int | str
    batch: int | None
    free: bool
    learning_rate: float | str | None
    rule: str

    def check(self) -> None:
        if self.rule not in RULES:
            raise TuningError(f"there is no learning-rate rule {self.rule!r}; choose one of {', '.join(RULES)}")
        if self.batch is not None and (isinstance(self.batch, bool) or self.batch < 1):
            raise TuningError(f"a batch of {self.batch!r} cannot be trained; give a whole number above zero")
        if self.batch is None and not self.free:
            raise TuningError("no batch was given to keep; give batch=..., or leave it free")
        if isinstance(self.learning_rate, str) and self.learning_rate != "find":
            raise TuningError(f"{self.learning_rate!r} is no learning rate; give a number, or 'find'")
        if self.learning_rate is not None and self.make_optimizer is None:
            raise TuningError("a learning rate belongs to an optimizer; give optimizer=..., such as torch.optim.AdamW")

    @contextmanager
    def model(self) -> Iterator[torch.nn.Module]:
        """The model to try things on: a new one, or the user's own, put back afterwards."""
        if isinstance(self.make_model, torch.nn.Module):
            with untouched(self.make_model):
                yield self.make_model.train()
            return
        made = self.make_model()
        if not isinstance(made, torch.nn.Module):
            raise TuningError(f"make_model() returned a {type(made).__name__}; it must return a torch.nn.Module")
        yield made.train()

    @property
    def starts_anew(self) -> bool:
        return not isinstance(self.make_model, torch.nn.Module)


class _Tuner:
    """One call of `tune`, from the recording to the advice."""

    bench: Bench

    def __init__(
        self,
        asked: _Asked,
        samples: Samples,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        tell: Tell,
    ) -> None:
        self.asked, self.samples, self.model, self.optimizer, self.tell = asked, samples, model, optimizer, tell
        self.normalises = any(isinstance(module, _BatchNorm) for module in model.modules())
        self.why: list[str] = []
        self.rate_batch = 0  # the batch that the optimizer's learning rate belongs to
        if asked.batch is not None and samples.num is not None and samples.num < asked.batch:
            raise TuningError(
                f"the data set has {samples.num} samples, fewer than the batch of {asked.batch}; lower the batch or "
                "give more data"
            )

    def advise(self, largest: int | None) -> Advice:
        curve, choosing, micro_batch = self._find_micro_batch(self._largest(largest))
        kept = self.asked.batch is not None and not self.asked.free
        first_batch = self.asked.batch or self._first_batch(curve)
        self._find_rate(curve, first_batch)
        effective, noise = (first_batch if kept else micro_batch), None
        if not kept and choosing is not None and self.optimizer is not None:
            noise = self._measure_noise(curve, first_batch)
            if noise is not None:
                effective, micro_batch = self._by_goodput(choosing, noise.scale, first_batch)
                curve = choosing.curve
        micro_batch, peak_bytes = self._peak(choosing, curve, micro_batch, effective)
        accumulation = effective // micro_batch
        self.why = [
            *why_micro_batch(curve, micro_batch, accumulation),
            *(why_batch_kept(curve, micro_batch, effective) if kept else ()),
            *self.why,
            *why_loading(curve, micro_batch, self.samples.load_s),
            *why_last_batch(self.samples.num, micro_batch, self.normalises),
        ]
        advice = Advice(
            micro_batch=micro_batch,
            accumulation=accumulation,
            learning_rate=None,
            samples_per_s=curve.rate(micro_batch, accumulation),
            step_s=curve.seconds(micro_batch, accumulation),
            peak_bytes=peak_bytes,
            curve=curve,
            why=(),
            noise=noise.scale if noise is not None else None,
            first_batch=first_batch,
        )
        return replace(self._with_rate(advice), why=tuple(self.why))

    def _largest(self, largest: int | None) -> int:
        """No batch beyond this is looked at."""
        kept = self.asked.batch if not self.asked.free else None
        return max(1, min(limit for limit in (self.samples.num, largest, kept, LARGEST) if limit is not None))

    # -- the micro-batch ----------------------------------------------------------------------------------------------

    def _find_micro_batch(self, largest: int) -> tuple[Curve, Choosing | None, int]:
        found = climb(self.bench, largest, self.tell)
        if found.family is None:
            if len(found.measured) > 1:
                raise TuningError(
                    f"steps of {found.measured[-2].batch} and {found.measured[-1].batch} samples do different work, so "
                    "neither tells about the other; make every sample the same shape"
                )
            curve = single_curve(self.bench, found)
            self.why.append("there was room or data for this one batch size only, so there is no curve")
            return curve, None, curve.points[0].micro_batch
        choosing = Choosing.start(self.bench, found.family, found.measured)
        smallest = min(2 if self.normalises else 1, largest)
        batches = free_batches(choosing, largest, smallest)
        if self.asked.batch is not None and not self.asked.free:
            batches = divisors(self.asked.batch, smallest)
            choosing.lay_out(batches, self.tell)
            return self._settled(choosing, micro_batch_for(self.asked.batch))
        choosing.lay_out(batches, self.tell)
        if not choosing.curve.fitting and self.normalises:
            raise cannot_run_one(self.bench.budget.device_bytes)
        choosing.lay_out(refined(choosing.curve), self.tell)
        return self._settled(choosing, lambda curve: curve.knee.micro_batch)

    def _settled(self, choosing: Choosing, pick: Callable[[Curve], int]) -> tuple[Curve, Choosing, int]:
        micro_batch = choosing.settle(pick, self.tell)
        return choosing.curve, choosing, micro_batch

    def _peak(self, choosing: Choosing | None, curve: Curve, micro_batch: int, effective: int) -> tuple[int, int]:
        """While micro-batches are accumulated gradients are there all the time: then a smaller one may be needed."""
        point = curve.point(micro_batch)
        if choosing is None or effective == micro_batch:
            return micro_batch, point.measured_peak_bytes or point.peak_bytes
        accumulating = self.bench.planned(choosing.planned.family, accumulating=True)
        for size in sorted((p.micro_batch for p in curve.fitting if p.micro_batch <= micro_batch), reverse=True):
            found = accumulating.at(size)
            if effective % size == 0 and found.plan is not None:
                return size, found.point.peak_bytes
        raise TuningError(
            f"gradients of {effective} samples cannot be accumulated in this memory, whatever the micro-batch; raise it"
        )

    # -- the effective batch ------------------------------------------------------------------------------------------

    def _first_batch(self, curve: Curve) -> int:
        """Where nothing was given: a usual batch that is in-core."""
        return max(1, min(FIRST_BATCH, curve.largest_in_core or 1, (self.samples.num or LARGEST) // 2))

    def _measure_noise(self, curve: Curve, first_batch: int) -> Noise | None:
        num = self.samples.num or LARGEST
        micro = max(2, min(first_batch // 4 if first_batch >= 8 else first_batch, curve.largest_in_core, num // 4))
        if micro > curve.largest_in_core or num < 2 * micro:
            self.why.append("the noise of the gradients was not measured: two micro-batches in-core are needed for it")
            return None
        self.tell("measuring the noise of the gradients", 0.0)
        if self.asked.starts_anew:
            self._train_a_little(min(first_batch, curve.largest_in_core))
        num_micro = max(2, min(NUM_MICRO, num // micro))
        return measure_noise(self.model, self.asked.loss_fn, self.samples.shuffled(micro), num_micro=num_micro)

    def _train_a_little(self, batch: int) -> None:
        assert self.optimizer is not None
        batches = self.samples.shuffled(batch, seed=1)
        for _ in range(NUM_FIRST_STEPS):
            loss_of(self.model, self.asked.loss_fn, next(batches)).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    def _by_goodput(self, choosing: Choosing, noise: float, first_batch: int) -> tuple[int, int]:
        """The effective batch that gets furthest per second, and its micro-batch."""
        ways = ways_to(choosing.curve, self._largest(None))

        def seconds(batch: int) -> float:
            return choosing.curve.seconds(ways[batch], batch // ways[batch])

        def pick(_: Curve) -> int:
            return ways[best_batch(sorted(ways), seconds, first_batch, noise)[0]]

        choosing.settle(pick, self.tell)
        effective, _ = best_batch(sorted(ways), seconds, first_batch, noise)
        self.why.append(
            f"the noise scale is {noise:.3g} samples: of all batches, {effective} gets furthest per second; larger "
            "ones train samples that say little new, smaller ones waste the device"
        )
        return effective, ways[effective]

    # -- the learning rate --------------------------------------------------------------------------------------------

    def _find_rate(self, curve: Curve, first_batch: int) -> None:
        """The rate to begin with, and the batch it belongs to. Before any training: a trained model shows less."""
        self.rate_batch = first_batch
        asked = self.asked.learning_rate
        if self.optimizer is None:
            return
        if isinstance(asked, float | int):
            self._set_rate(float(asked))
        elif asked == "find" or (asked is None and self.asked.batch is None):
            self._test_range(min(first_batch, curve.largest_in_core, (self.samples.num or LARGEST) // 2))

    def _test_range(self, batch: int) -> None:
        """At a batch that is in-core."""
        assert self.optimizer is not None
        if batch < 2:
            self.why.append("the learning rate is the optimizer's: a range test needs two samples in-core")
            return
        self.tell("looking for a learning rate", 0.0)
        try:
            found = range_test(self.model, self.asked.loss_fn, self.samples.shuffled(batch, seed=2), self.optimizer)
        except TuningError as error:
            self.why.append(f"the learning rate is the optimizer's: in a range test {error}")
            return
        self.why.append(f"a range test with {batch} samples suggests a learning rate of {found.suggested_lr:.3g}")
        self.rate_batch = batch
        self._set_rate(float(found.suggested_lr))

    def _set_rate(self, rate: float) -> None:
        assert self.optimizer is not None
        first_rate = float(self.optimizer.param_groups[0]["lr"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * (rate / first_rate) if first_rate else rate

    def _with_rate(self, advice: Advice) -> Advice:
        if self.optimizer is None:
            return advice
        batch, first_batch, group = advice.effective_batch, self.rate_batch, self.optimizer.param_groups[0]
        rule = self.asked.rule if advice.noise is not None or self.asked.rule != "adascale" else "sqrt"
        normalised = "betas" in group
        factor = lr_factor(rule, batch, first_batch, advice.noise, normalised=normalised)
        rate = float(group["lr"])
        if batch != first_batch:
            self.why.append(
                f"the learning rate {rate:.3g} of a batch of {first_batch} is multiplied by {factor:.3g} (the rule "
                f"{rule!r})"
            )
        num_steps = (self.samples.num or 100 * batch) // (10 * first_batch)  # a tenth of an epoch
        return replace(
            advice,
            learning_rate=rate * factor,
            rule=rule if batch != first_batch else "fixed",
            num_warm_up_steps=num_warm_up_steps(rule, num_steps, batch, first_batch) if factor > 1.2 else 0,
            beta2=beta2_for(group["betas"][1], batch, first_batch) if normalised and batch != first_batch else None,
        )


def _device_of(model: torch.nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    raise TuningError("this model has no parameters, so there is nothing to train")
