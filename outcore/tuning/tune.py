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
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from outcore.errors import TuningError
from outcore.tuning.advice import Advice, alone
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
from outcore.tuning.noise import Noise, noise_here
from outcore.tuning.probing import Bench, Tell, cannot_run_one, climb
from outcore.tuning.ranges import range_test
from outcore.tuning.ranks import Ranks, Workers, check_alike
from outcore.tuning.reasons import why_batch_kept, why_last_batch, why_loading, why_micro_batch, why_team
from outcore.tuning.samples import Collate, Samples
from outcore.tuning.state import keep_generators, untouched
from outcore.tuning.targets import Target
from outcore.tuning.team import Team, Way
from outcore.units import format_seconds

FIRST_BATCH = 32  # where no batch is given: noise and learning rate are looked at here
NUM_FIRST_STEPS = 20  # of training before noise is measured: the very first gradients are not typical
NUM_MICRO = 16
NUM_AGREED = 3  # times that workers choose together and try their parts
NEAR = 0.05  # a real step so close to a micro-batch tells enough about it
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
    workers: Workers | None = None,
    communication_s: float | None = None,
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

    Where several workers train together, batches are global ones, and the advice says how many samples each worker
    takes. In a process group of torch.distributed all ranks call this alike, with the model itself (not wrapped in
    DistributedDataParallel): each measures its own device, communication is measured unless `communication_s` gives the
    seconds to sum the gradients, and all return the same advice, each with its own micro-batch and curve. Outside,
    `workers=8`, or speeds relative to this device such as `workers=[1, 1, 0.5]`, with `communication_s` plans for
    workers that are not here; the advice's micro-batch is then the first one's.
    """
    began_s, back = time.perf_counter(), keep_generators()
    told: dict[str, Any] = {
        "batch": batch,
        "free": free,
        "learning_rate": learning_rate,
        "rule": rule,
        "largest": largest,
    }
    told |= {"workers": workers, "communication_s": communication_s, "num_trials": num_trials}
    check_alike(told | {"optimizer": optimizer is not None, "target": target is not None})
    ranks = Ranks.read(workers, communication_s)
    asked = _Asked(
        make_model, loss_fn, optimizer, memory, batch, batch is None if free is None else free, learning_rate, rule
    )
    asked.check()
    aim = Target.read(target) if target is not None else None
    if num_trials and (aim is None or optimizer is None):
        raise TuningError("a search needs target=... and optimizer=... to compare runs by; give both")
    if num_trials and ranks is not None:
        raise TuningError("a search trains on one device; search without workers, then keep the batch it found")
    limits: dict[str, Any] = {"memory": memory, "host": host, "disk": disk}
    tell = progress or (lambda what, part: None)
    try:
        with _tuner(asked, partial(Samples, dataset, collate=collate), limits, ranks, tell) as tuner:
            advice, samples = tuner.advise(largest), tuner.samples
        if aim is not None:
            if optimizer is None:
                raise TuningError(
                    "time to a target is found by training; give optimizer=..., such as torch.optim.AdamW"
                )
            held_out = Samples(validation, samples.device, collate) if validation is not None else None
            aiming = Aiming(asked.model, loss_fn, optimizer, samples, held_out, aim, trial_s, limits, tell)
            advice = aiming.search(advice, num_trials, study) if num_trials else advice
            advice = aiming.predict(advice) if ranks is None else _aim_together(aiming, advice, ranks)
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
        kept = self.asked.batch is not None and not self.asked.free
        curve, choosing, micro_batch = self._find_micro_batch(
            self._largest(largest), self.asked.batch if kept else None
        )
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

    def _find_micro_batch(self, largest: int, effective: int | None) -> tuple[Curve, Choosing | None, int]:
        """At the knee, or the best of those that divide an effective batch."""
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
        if effective is not None:
            batches = divisors(effective, smallest)
            choosing.lay_out(batches, self.tell)
            return self._settled(choosing, micro_batch_for(effective))
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
        return noise_here(self.model, self.asked.loss_fn, self.samples.shuffled(micro), num_micro=num_micro)

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


@contextmanager
def _tuner(
    asked: _Asked,
    samples_on: Callable[[torch.device], Samples],
    limits: dict[str, Any],
    ranks: Ranks | None,
    tell: Tell,
) -> Iterator[_Tuner]:
    """One that is ready to advise, for this device or for all ranks."""
    with ExitStack() as stack:
        with nullcontext() if ranks is None else ranks.all_or_none():
            model = stack.enter_context(asked.model())
            samples, make_optimizer = samples_on(_device_of(model)), asked.make_optimizer
            made = make_optimizer(model.parameters()) if make_optimizer is not None else None
            tuner = (_Tuner if ranks is None else _TeamTuner)(asked, samples, model, made, tell)
        if isinstance(tuner, _TeamTuner) and ranks is not None:
            tuner.join(ranks)
        with nullcontext() if ranks is None else ranks.all_or_none():
            tuner.bench = Bench(model, asked.loss_fn, samples, made, **limits)
            stack.callback(tuner.bench.close)
        yield tuner


class _TeamTuner(_Tuner):
    """The same for several workers: each finds its own curve, then all choose a global batch."""

    ranks: Ranks
    communication_s: float
    curve: Curve
    choosing: Choosing | None

    def join(self, ranks: Ranks) -> None:
        self.ranks, self.communication_s = ranks, ranks.communicating_s(self.model)

    def advise(self, largest: int | None) -> Advice:
        with self.ranks.all_or_none():
            self.curve, self.choosing, _ = self._find_micro_batch(self._largest(largest), None)
        first_batch = min(self.ranks.all(self.asked.batch or self._first_batch(self.curve)))
        noise = self._look_at_gradients(first_batch)
        team, way = self._agree(min(self.ranks.all(self._most())), first_batch, noise)
        micro_batch = way.sizes[self.ranks.rank]
        with self.ranks.all_or_none():
            peak_bytes = self._peak_of(micro_batch, way.accumulation)
        self.why = [
            *why_micro_batch(self.curve, micro_batch, way.accumulation),
            *self.why,
            *why_loading(self.curve, micro_batch, self.samples.load_s),
        ]
        advice = Advice(
            micro_batch=micro_batch,
            accumulation=way.accumulation,
            learning_rate=None,
            samples_per_s=team.rate(way),
            step_s=team.step_s(way),
            peak_bytes=peak_bytes,
            curve=self.curve,
            why=(),
            noise=noise,
            first_batch=first_batch,
            workers=self.ranks.num,
            shares=way.shares,
            communication_s=self.communication_s,
            scaling=team.scaling(way),
        )
        return replace(self._with_rate(advice), why=tuple(self.why))

    def _most(self) -> int:
        """No global batch beyond this; micro-batches have their own limit."""
        return self.samples.num or LARGEST * self.ranks.num

    def _look_at_gradients(self, first_batch: int) -> float | None:
        """Learning rate and noise, found by rank 0 for all; its reasons are everybody's."""
        noise: Noise | None = None
        with self.ranks.all_or_none():
            if self.ranks.rank == 0:
                self._find_rate(self.curve, first_batch)
                if self.asked.free and self.choosing is not None and self.optimizer is not None:
                    noise = self._measure_noise(self.curve, first_batch)
        rate = self.optimizer.param_groups[0]["lr"] if self.optimizer is not None else 0.0
        scale = noise.scale if noise is not None else None
        scale, rate, self.rate_batch, self.why = self.ranks.first((scale, float(rate), self.rate_batch, self.why))
        if self.optimizer is not None:
            self._set_rate(rate)
        return scale

    def _agree(self, most: int, first_batch: int, noise: float | None) -> tuple[Team, Way]:
        """Choose, try one's own part with real steps, tell; again where that changes the choice."""
        team = self._team()
        for at in range(NUM_AGREED):
            self.tell("choosing a batch for all workers", at / NUM_AGREED)
            way = self._choose(team, most, first_batch, noise)
            with self.ranks.all_or_none():
                tried = self._try(way.sizes[self.ranks.rank])
            team = self._team()
            if not any(self.ranks.all(tried)):
                break
        kept, silent = not self.asked.free, self._choose(team.silent(), most, first_batch, noise)
        self.why += why_team(team, way, silent, kept=kept, noise=noise)
        return team, way

    def _choose(self, team: Team, most: int, first_batch: int, noise: float | None) -> Way:
        if not self.asked.free:
            return team.keep(first_batch)
        return team.fastest(most) if noise is None else team.furthest(most, first_batch, noise)

    def _team(self) -> Team:
        with self.ranks.all_or_none():
            most_accumulating = self._most_accumulating()
        return self.ranks.team(self.curve, most_accumulating, self.communication_s)

    def _most_accumulating(self) -> int:
        """The largest micro-batch of the curve that fits besides the gradients of those before it."""
        sizes = [point.micro_batch for point in self.curve.fitting]
        if self.choosing is None:
            return sizes[-1]
        accumulating = self.bench.planned(self.choosing.planned.family, accumulating=True)
        return next((size for size in reversed(sizes) if accumulating.at(size).plan is not None), 0)

    def _try(self, micro_batch: int) -> bool:
        """Real steps of this worker's part, unless some of nearly that size ran."""
        if self.choosing is None:
            return False
        if micro_batch not in self.curve.batches:
            self.choosing.add(micro_batch)
        ran = [point.micro_batch for point in self.choosing.curve.points if point.measured_step_s is not None]
        near = any(abs(size / micro_batch - 1) <= NEAR for size in ran)
        if not near and self.choosing.curve.point(micro_batch).fits:
            self.tell(f"real steps with a batch of {micro_batch}", 0.9)
            self.choosing.confirm(micro_batch)
        self.curve = self.choosing.curve
        return not near

    def _peak_of(self, micro_batch: int, accumulation: int) -> int:
        point = self.curve.point(micro_batch)
        if self.choosing is None or accumulation == 1:
            return point.measured_peak_bytes or point.peak_bytes
        found = self.bench.planned(self.choosing.planned.family, accumulating=True).at(micro_batch)
        if found.plan is None:
            raise TuningError(f"gradients of {micro_batch} samples cannot be accumulated in this memory; raise it")
        return found.point.peak_bytes


def _aim_together(aiming: Aiming, advice: Advice, ranks: Ranks) -> Advice:
    """Rank 0 trains the global batch alone; the team takes the same steps, each in the time predicted for it."""
    found = advice
    with ranks.all_or_none():
        if ranks.rank == 0:
            found = aiming.predict(alone(advice))
    found = ranks.first(found)
    target_s = None if found.target_s is None else found.target_s * advice.step_s / found.step_s
    said = found.why[-1] + f"; that was one device, and {advice.workers} workers take the same steps"
    if target_s is not None:
        said += f" in {format_seconds(target_s)}"
    return replace(advice, target=found.target, target_s=target_s, why=(*advice.why, said))


def _device_of(model: torch.nn.Module) -> torch.device:
    for parameter in model.parameters():
        return parameter.device
    raise TuningError("this model has no parameters, so there is nothing to train")
