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

import math
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch

from outcore.errors import TuningError
from outcore.tuning.advice import Advice, alone
from outcore.tuning.aiming import Aiming, MakeOptimizer
from outcore.tuning.batches import LossFn
from outcore.tuning.choosing import ways_to
from outcore.tuning.curve import Curve, Point
from outcore.tuning.noise import Noise
from outcore.tuning.probing import Bench, Tell
from outcore.tuning.ranks import Ranks, Workers, check_alike
from outcore.tuning.reasons import why_loading, why_micro_batch, why_ran_out, why_team
from outcore.tuning.samples import Collate, Samples
from outcore.tuning.search import batches_of, open_study
from outcore.tuning.starts import MakeModel
from outcore.tuning.state import as_made, keep_generators, untouched
from outcore.tuning.targets import Target
from outcore.tuning.team import Team, Way
from outcore.tuning.tuner import LARGEST, Asked, Tuner
from outcore.units import format_seconds

NUM_AGREED = 3  # times that workers choose together and try their parts
NEAR = 0.05  # a real step so close to a micro-batch tells enough about it


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
    num_epochs: float | None = None,
    train_s: float | None = None,
    largest: int | None = None,
    host: int | str = "auto",
    disk: str | Path | None = None,
    collate: Collate | None = None,
    trial_s: float = 20.0,
    race: bool = True,
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
    range test; it is the default where no batch is given. `rule` says how it follows a freed batch. Before the rate or
    the batch is changed, settings race from the same starts: what is soonest at the target on held-out samples (without
    one, or with a function for its metric: at the least loss), in the mean over up to three starts (further models, as
    `make_model()` makes them), is the advice; `race=False` leaves that out. All that training takes about 1.4 `trial_s`
    seconds of compute at most (2.3 where the target is near but not reached); reading the data and looking at held-out
    samples come on top.

    `num_epochs`, or `train_s` in seconds, says how long you mean to train: then the advice is what is best at the end
    of such a training (as long as `num_epochs` take with the batch that won the race), and what is soonest at the
    target is in its `soonest`. What won and higher rates and the other batches train that long, six trainings in all
    (shorter ones, where six would take more than 1.5 `trial_s` of compute, which is said; where six take far less, each
    setting from up to three starts). With a target of val_accuracy their ends are compared by the
    probability of the right class, which tells more than who is right; else by the loss.

    `target`, such as `("val_accuracy", 0.97)` or `(function of the model, value)`, asks for the time to it, on
    `validation` or else on a tenth of `dataset` that is held out (of a small one up to a quarter). A race that comes
    near it tells that time, and over how many steps the rate is to fall (`advice.scheduler(optimizer)` does that); else
    training for at most `trial_s` seconds tells it. With `num_trials` an Optuna study of so many runs, each of
    `trial_s` seconds, begins at the advice and looks for a better batch and rate; what it found and the advice then run
    from three further starts, and the advice is replaced by what is sooner in the mean. `study` names a file from which
    it goes on when it was interrupted.

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
    _check_numbers(batch, largest, num_trials, learning_rate, trial_s)
    ranks = Ranks.read(workers, communication_s)
    aim = Target.read(target) if target is not None else None
    asked = Asked(
        make_model,
        loss_fn,
        optimizer,
        memory,
        batch,
        batch is None if free is None else free,
        learning_rate,
        rule,
        trial_s,
        race and ranks is None,
        aim,
        num_epochs,
        train_s,
    )
    asked.check()
    if num_trials and (aim is None or optimizer is None):
        raise TuningError("a search needs target=... and optimizer=... to compare runs by; give both")
    if aim is not None and optimizer is None:
        raise TuningError("time to a target is found by training; give optimizer=..., such as torch.optim.AdamW")
    if num_trials and asked.has_length:
        raise TuningError("a search looks for what is soonest at the target; leave out num_trials, or the length")
    if num_trials and ranks is not None:
        raise TuningError("a search trains on one device; search without workers, then keep the batch it found")
    limits: dict[str, Any] = {"memory": memory, "host": host, "disk": disk}
    tell = progress or (lambda what, part: None)
    try:
        with _tuner(asked, partial(Samples, dataset, collate=collate), limits, ranks, tell) as tuner:
            samples = tuner.samples
            held_out = Samples(validation, samples.device, collate) if validation is not None else None
            tuner.validation = held_out
            known, searching = _searching(tuner, aim, study) if num_trials and aim is not None else ([], {})
            advice = tuner.advise(largest)
            if searching:
                known = [batch for batch in known if largest is None or batch <= largest]
                advice, searching["accumulating"] = _laid_out(tuner, advice, known)
        if aim is not None and optimizer is not None:
            aiming = Aiming(asked.model, loss_fn, optimizer, samples, held_out, aim, trial_s, limits, tell, **searching)
            advice = aiming.search(advice, num_trials, study) if num_trials else advice
            if advice.target_s is None:  # else it was reached in the race, or by what a search found
                advice = aiming.predict(advice) if ranks is None else _aim_together(aiming, advice, ranks)
        return replace(advice, spent_s=time.perf_counter() - began_s)
    finally:
        back()


def _check_numbers(batch: Any, largest: Any, num_trials: Any, learning_rate: Any, trial_s: Any) -> None:
    """Before anything is paid for."""
    for given, least, why in (
        (batch, 1, f"a batch of {batch!r} cannot be trained; give a whole number above zero"),
        (largest, 1, f"no batch is as small as largest={largest!r}; give a whole number above zero"),
        (num_trials, 0, f"a search cannot have num_trials={num_trials!r} runs; give a whole number, 0 for no search"),
    ):
        is_whole = isinstance(given, Integral) and not isinstance(given, bool)
        if given is not None and not (is_whole and given >= least):
            raise TuningError(why)
    is_number = isinstance(learning_rate, Real) and not isinstance(learning_rate, bool)
    if not (learning_rate is None or isinstance(learning_rate, str) or (is_number and 0 < learning_rate < math.inf)):
        raise TuningError(f"{learning_rate!r} is no learning rate; give a number above zero, or 'find'")
    if not isinstance(trial_s, Real):
        raise TuningError(f"a trial of {trial_s!r} seconds cannot be run; give a number that is not negative")


@contextmanager
def _tuner(
    asked: Asked,
    samples_on: Callable[[torch.device], Samples],
    limits: dict[str, Any],
    ranks: Ranks | None,
    tell: Tell,
) -> Iterator[Tuner]:
    """One that is ready to advise, for this device or for all ranks."""
    with ExitStack() as stack:
        with nullcontext() if ranks is None else ranks.all_or_none():
            model, is_new = asked.made()
            stack.enter_context(nullcontext() if is_new else untouched(model))
            model.train()
            samples, make = samples_on(_device_of(model)), asked.make_optimizer
            made = stack.enter_context(as_made(make, model.parameters())) if make is not None else None
            tuner = (Tuner if ranks is None else _TeamTuner)(asked, samples, model, made, tell)
            tuner.is_new = is_new
        if isinstance(tuner, _TeamTuner) and ranks is not None:
            tuner.join(ranks)
        with nullcontext() if ranks is None else ranks.all_or_none():
            tuner.bench = Bench(model, asked.loss_fn, samples, made, **limits)
            stack.callback(tuner.bench.close)
        yield tuner


def _searching(tuner: Tuner, aim: Target, study: str | Path | None) -> tuple[list[int], dict[str, Any]]:
    """Batches that a study ran, and what a search is to know of the training. A study that cannot be gone on with is
    refused before any work."""
    assert tuner.optimizer is not None
    about = {
        "metric": aim.name.split()[0],
        "samples": tuner.samples.num,
        "parameters": sum(parameter.numel() for parameter in tuner.model.parameters()),
        "optimizer": type(tuner.optimizer).__name__,
    }
    known = batches_of(open_study(study, aim.grows, about))
    betas = tuner.optimizer.param_groups[0].get("betas")
    return known, {
        "about": about,
        "is_new": tuner.is_new,
        "normalises": tuner.normalises,
        "beta2": betas[1] if betas is not None else None,
    }


def _laid_out(tuner: Tuner, advice: Advice, known: list[int]) -> tuple[Advice, Point | None]:
    """With the batches that a study ran on its curve, too. And the micro-batch that larger ones are cut into, while
    gradients wait beside it; None: they have no room."""
    if tuner.choosing is None:
        return advice, None
    tuner.choosing.lay_out(known, tuner.tell)
    advice = replace(advice, curve=tuner.choosing.curve)
    cut = next((size for batch, size in ways_to(advice.curve, LARGEST).items() if batch != size), 0)
    if not cut:
        return advice, None
    found = tuner.bench.planned(tuner.choosing.planned.family, accumulating=True).at(cut)
    return advice, found.point if found.plan is not None else None


class _TeamTuner(Tuner):
    """The same for several workers: each finds its own curve, then all choose a global batch."""

    ranks: Ranks
    communication_s: float
    curve: Curve

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
            *why_ran_out(self.bench.ran_out),
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
                needed = self.asked.free or self.rate_batch != first_batch
                if needed and self.choosing is not None and self.optimizer is not None:
                    noise = self._measure_noise(self.curve)
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
        rate_stays = self.asked.learning_rate != "find"
        self.why += why_team(team, way, silent, kept=kept, noise=None if kept else noise, rate_stays=rate_stays)
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
