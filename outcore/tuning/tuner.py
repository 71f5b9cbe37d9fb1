"""What the user wants + a bench -> Advice for one device.

The micro-batch comes from the curve; then, where they are free, the learning rate from a range test, the effective
batch from the noise of the gradients, and a race between that and what is trained with today. Whatever trains here
puts the parameters back.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from outcore.errors import TuningError
from outcore.tuning.advice import Advice, Soonest
from outcore.tuning.aiming import MakeOptimizer
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
from outcore.tuning.climbing import cannot_run_one, climb, two_do_not_fit
from outcore.tuning.curve import Curve
from outcore.tuning.ending import Ending
from outcore.tuning.goodput import RULES, best_batch, beta2_for, lr_factor, num_warm_up_steps
from outcore.tuning.noise import Noise, noise_here, visible
from outcore.tuning.probing import Bench, Tell
from outcore.tuning.race import LOSS, Finish, Race, Runner, longest_step_s
from outcore.tuning.ranges import range_test
from outcore.tuning.reasons import why_batch_kept, why_last_batch, why_loading, why_micro_batch, why_ran_out
from outcore.tuning.samples import Samples
from outcore.tuning.starts import MakeModel, Starts
from outcore.tuning.state import anew, untouched
from outcore.tuning.targets import Target, num_held_out
from outcore.units import format_bytes, format_seconds

FIRST_BATCH = 32  # where no batch is given: noise and learning rate are looked at here
RANGE_BATCH = 256  # for the range test: a large batch shows the rate, not the noise
NUM_RANGE_STEPS = 80
NUM_RANGE_SEEDS = 3
RANGE_SHARE = 0.3  # of `trial_s`
RACE_SHARE = 0.5
END_SHARE = 1.5  # for trainings as long as the user's, where they said how long that is
NOISE_BATCH, NUM_MICRO = 32, 64  # at least: fewer, or smaller, and the noise scale is off by a factor
NOISE_ERROR, NOISE_SHARE = 0.1, 0.1  # of the scale, its standard error; of `trial_s`, until that is reached
NUM_PLUNGE_STEPS = 60  # at most, before noise is measured
PLUNGED = 0.3  # of the loss at the start
LARGEST = 1 << 16
NAMES = ("today's setting", "the advice")  # in a race
SMALLER = {2: "half its batch", 4: "a quarter of its batch"}
LARGER = {2: "twice the soonest one's batch", 4: "four times the soonest one's batch"}  # in as long a training


@dataclass(frozen=True)
class Asked:
    """What the user wants."""

    make_model: MakeModel
    loss_fn: LossFn
    make_optimizer: MakeOptimizer | None
    memory: int | str
    batch: int | None
    free: bool
    learning_rate: float | str | None
    rule: str
    trial_s: float
    race: bool
    target: Target | None = None
    num_epochs: float | None = None  # that the user means to train, or
    train_s: float | None = None

    def check(self) -> None:
        if self.rule not in RULES:
            raise TuningError(f"there is no learning-rate rule {self.rule!r}; choose one of {', '.join(RULES)}")
        if self.batch is not None and (isinstance(self.batch, bool) or self.batch < 1):
            raise TuningError(f"a batch of {self.batch!r} cannot be trained; give a whole number above zero")
        if not 0 <= self.trial_s < math.inf:
            raise TuningError(f"a trial of {self.trial_s!r} seconds cannot be run; give a number that is not negative")
        if self.batch is None and not self.free:
            raise TuningError("no batch was given to keep; give batch=..., or leave it free")
        if isinstance(self.learning_rate, str) and self.learning_rate != "find":
            raise TuningError(f"{self.learning_rate!r} is no learning rate; give a number, or 'find'")
        if self.learning_rate is not None and self.make_optimizer is None:
            raise TuningError("a learning rate belongs to an optimizer; give optimizer=..., such as torch.optim.AdamW")
        self._check_length()

    def _check_length(self) -> None:
        given = [length for length in (self.num_epochs, self.train_s) if length is not None]
        if not all(isinstance(length, int | float) for length in given):
            raise TuningError(f"a training cannot be {given[0]!r} long; give a number")
        if len(given) > 1:
            raise TuningError("a training has one length; give num_epochs=... or train_s=..., not both")
        if not all(0 < length < math.inf for length in given):
            raise TuningError(f"a training cannot be {given[0]!r} long; give a number above zero")
        if given and self.make_optimizer is None:
            raise TuningError(
                "what is best in the end is found by training; give optimizer=..., such as torch.optim.SGD"
            )
        if given and not self.race:
            raise TuningError(
                "what is best in the end is found by a race on one device; leave race on and workers out, or leave out "
                "num_epochs and train_s"
            )

    @property
    def has_length(self) -> bool:
        return self.num_epochs is not None or self.train_s is not None

    def length_s(self, num_samples: int | None, runner: Runner) -> float | None:
        """Of the training that the user means, with this batch; None: they did not say."""
        if self.num_epochs is None or self.train_s is not None:
            return self.train_s
        return max(1.0, self.num_epochs * (num_samples or 0) / runner.batch) * runner.step_s

    def made(self) -> tuple[torch.nn.Module, bool]:
        """The model to try things on, and whether it is a new one: nobody else has it."""
        if isinstance(self.make_model, torch.nn.Module):
            return self.make_model, False
        made = self.make_model()
        if not isinstance(made, torch.nn.Module):
            raise TuningError(f"make_model() returned a {type(made).__name__}; it must return a torch.nn.Module")
        alone = object()
        is_new = sys.getrefcount(made) <= sys.getrefcount(alone)
        return made, is_new

    @contextmanager
    def model(self) -> Iterator[torch.nn.Module]:
        """The same; the user's own is put back afterwards."""
        made, is_new = self.made()
        with nullcontext() if is_new else untouched(made):
            yield made.train()

    @property
    def starts_anew(self) -> bool:
        return not isinstance(self.make_model, torch.nn.Module)


class Tuner:
    """One call of `tune`, from the recording to the advice."""

    bench: Bench
    is_new = True  # the model: nobody else has it, and others like it can be made
    validation: Samples | None = None
    choosing: Choosing | None = None

    def __init__(
        self,
        asked: Asked,
        samples: Samples,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        tell: Tell,
    ) -> None:
        self.asked, self.samples, self.model, self.optimizer, self.tell = asked, samples, model, optimizer, tell
        self.normalises = any(isinstance(module, _BatchNorm) for module in model.modules())
        self.why: list[str] = []
        self.rate_batch = 0  # the batch that the optimizer's learning rate belongs to
        self.first_rate = 0.0  # what is trained with today
        self.has_state = optimizer is not None and bool(optimizer.state)  # before its first step
        if asked.num_epochs is not None and samples.num is None:
            raise TuningError("a function's samples have no epochs; give train_s=... instead of num_epochs=...")
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
        self.choosing = choosing
        first_batch = self.asked.batch or self._first_batch(curve)
        self._find_rate(curve, first_batch)
        effective, noise = (first_batch if kept else micro_batch), None
        if choosing is not None and self.optimizer is not None and (not kept or self.rate_batch != first_batch):
            noise = self._measure_noise(curve)
            if noise is not None and not kept:
                effective, micro_batch = self._by_goodput(choosing, noise.scale, first_batch)
                curve = choosing.curve
        micro_batch, peak_bytes = self._peak(choosing, curve, micro_batch, effective)
        accumulation = effective // micro_batch
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
            noise_told=noise.told if noise is not None else "",
            first_batch=first_batch,
        )
        advice = self._with_rate(advice)
        if self.asked.race and choosing is not None and advice.learning_rate is not None:
            advice = self._raced(advice, choosing)
        curve, micro_batch = advice.curve, advice.micro_batch
        why = [
            *why_micro_batch(curve, micro_batch, advice.accumulation),
            *(why_batch_kept(curve, micro_batch, effective, rate_stays=self._rate_stays(advice)) if kept else ()),
            *self.why,
            *why_ran_out(self.bench.ran_out),
            *why_loading(curve, micro_batch, self.samples.load_s),
            *why_last_batch(self.samples.num, micro_batch, self.normalises),
        ]
        return replace(advice, why=tuple(why))

    def _rate_stays(self, advice: Advice) -> bool:
        return advice.learning_rate is None or math.isclose(advice.learning_rate, self.first_rate)

    def _largest(self, largest: int | None) -> int:
        """No batch beyond this is looked at."""
        kept = self.asked.batch if not self.asked.free else None
        return max(1, min(limit for limit in (self._num_left(), largest, kept, LARGEST) if limit is not None))

    def _num_left(self) -> int | None:
        """Samples from which a batch is drawn to be trained; others may be held out."""
        num = self.samples.num
        trains = self.asked.target is not None or self.asked.has_length
        if num is not None and self.asked.free and trains and self.validation is None:
            num -= num_held_out(num)
        return num

    def _why_one(self) -> tuple[str, str]:
        """Where no batch beyond 1 is looked at: the reason, and what to change."""
        num, num_left = self.samples.num, self._num_left()
        if self.asked.batch == 1 and not self.asked.free:
            return "a batch of 1 is to be kept", "ask for a batch of 2 or more"
        if num == 1:
            return "the data set has one sample", "give more data"
        if num_left is not None and num_left <= 1:
            return f"of the data set's {num} samples one is left when others are held out", "give more data"
        return "the largest batch allowed is 1", "allow 2 or more"

    # -- the micro-batch ----------------------------------------------------------------------------------------------

    def _find_micro_batch(self, largest: int, effective: int | None) -> tuple[Curve, Choosing | None, int]:
        """At the knee, or the best of those that divide an effective batch."""
        found = climb(self.bench, largest, self.tell, self._why_one() if largest == 1 else None)
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
            choosing.look_at_accumulating()
            return self._settled(choosing, micro_batch_for(effective))
        choosing.lay_out(batches, self.tell)
        if not choosing.curve.fitting and self.normalises:
            raise cannot_run_one(two_do_not_fit(self.bench.budget.device_bytes, choosing.curve.points[0].peak_bytes))
        choosing.lay_out(refined(choosing.curve), self.tell)
        choosing.look_at_accumulating()
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
        smaller = [point.micro_batch for point in curve.fitting if point.micro_batch <= micro_batch]
        for size in [size for size in reversed(smaller) if effective % size == 0]:
            found = accumulating.at(size)
            if found.plan is not None:
                return size, found.point.peak_bytes
        budget, room = self.bench.budget.device_bytes, self.bench.room.device_bytes
        needed_bytes = found.point.peak_bytes * budget / room
        raise TuningError(
            f"a batch of {effective} does not fit at once, and while gradients of {size} samples at a time are "
            f"accumulated it needs {format_bytes(needed_bytes)}, where memory is {format_bytes(budget)}; raise it to "
            f"{format_bytes(1.02 * needed_bytes)} or lower the batch"
        )

    # -- the effective batch ------------------------------------------------------------------------------------------

    def _first_batch(self, curve: Curve) -> int:
        """Where nothing was given: a usual batch that is in-core."""
        return max(1, min(FIRST_BATCH, curve.largest_in_core or 1, (self.samples.num or LARGEST) // 2))

    def _measure_noise(self, curve: Curve) -> Noise | None:
        num = self.samples.num or LARGEST
        micro = max(2, min(NOISE_BATCH, curve.in_core_accumulating, num // NUM_MICRO))
        if micro > curve.in_core_accumulating or num < 2 * micro:
            self.why.append("the noise of the gradients was not measured: two micro-batches in-core are needed for it")
            return None
        self.tell("measuring the noise of the gradients", 0.0)
        with self._anew(), untouched(self.model, self.optimizer):
            if self.asked.starts_anew:
                self._train_past_the_plunge(min(self.rate_batch, curve.largest_in_core, num // 2))
            measured = partial(noise_here, num_micro=NUM_MICRO, error=NOISE_ERROR)
            for_s = NOISE_SHARE * self.asked.trial_s
            found = measured(self.model, self.asked.loss_fn, self.samples.drawn(micro), for_s=for_s)
        noise = visible(found, self.samples.num)
        self.why.append(f"{noise.num_micro} micro-batches of {micro} show a noise scale of {noise.told}")
        return noise

    def _train_past_the_plunge(self, batch: int) -> None:
        """While the loss falls from its plateau all gradients agree: noise is far lower there than ever after."""
        assert self.optimizer is not None
        batches, first = self.samples.shuffled(batch, seed=1), 0.0
        for _ in range(NUM_PLUNGE_STEPS):
            loss = loss_of(self.model, self.asked.loss_fn, next(batches))
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            first = first or float(loss.detach())
            if not float(loss.detach()) >= first - (1 - PLUNGED) * abs(first):  # which may lie below zero
                return

    def _by_goodput(self, choosing: Choosing, noise: float, first_batch: int) -> tuple[int, int]:
        """The effective batch that gets furthest per second, and its micro-batch."""
        ways = ways_to(choosing.curve, self._largest(None))

        def seconds(batch: int) -> float:
            return choosing.curve.seconds(ways[batch], batch // ways[batch])

        if self.asked.race:  # theory alone may be far off: a batch whose steps are too long to be raced is not taken
            longest_s = longest_step_s(RACE_SHARE * self.asked.trial_s)
            ways = {batch: size for batch, size in ways.items() if seconds(batch) <= longest_s} or ways

        def pick(_: Curve) -> int:
            return ways[best_batch(sorted(ways), seconds, first_batch, noise)[0]]

        choosing.settle(pick, self.tell)
        effective, _ = best_batch(sorted(ways), seconds, first_batch, noise)
        self.why.append(
            f"at this noise scale, of all batches, {effective} gets furthest per second; larger ones train samples "
            "that say little new, smaller ones waste the device"
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
        self.first_rate = float(self.optimizer.param_groups[0]["lr"])
        if asked == "find" or (asked is None and self.asked.batch is None):
            self._test_range(*self._range_batch(curve))

    def _range_batch(self, curve: Curve) -> tuple[int, int]:
        """A large batch that is in-core and takes its share of the time, and how many seeds it can be tested with."""
        num, run_s = (self.samples.num or LARGEST), RANGE_SHARE * self.asked.trial_s / NUM_RANGE_STEPS
        most = min(RANGE_BATCH, curve.largest_in_core, max(num // 4, 2))
        sizes = [p.micro_batch for p in curve.fitting if p.micro_batch <= most]
        quick = [size for size in sizes if size <= FIRST_BATCH or curve.seconds(size) <= run_s]
        batch = max(quick, default=0)
        return batch, max(1, min(NUM_RANGE_SEEDS, int(run_s / curve.seconds(batch)))) if batch else 1

    def _test_range(self, batch: int, num_seeds: int) -> None:
        """At a batch that is in-core."""
        assert self.optimizer is not None
        if batch < 2:
            self.why.append("the learning rate is the optimizer's: a range test needs two samples in-core")
            return
        self.tell("looking for a learning rate", 0.0)
        batches = self.samples.shuffled(batch, seed=2)
        test = partial(range_test, num_steps=NUM_RANGE_STEPS, num_seeds=num_seeds)
        try:
            with self._anew():
                found = test(self.model, self.asked.loss_fn, batches, self.optimizer)
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

    def _with_rate(self, advice: Advice, *, says_why: bool = True) -> Advice:
        if self.optimizer is None:
            return advice
        batch, first_batch, group = advice.effective_batch, self.rate_batch, self.optimizer.param_groups[0]
        rule = self.asked.rule if advice.noise is not None or self.asked.rule != "adascale" else "sqrt"
        normalised = "betas" in group
        betas_change = normalised and batch != advice.first_batch  # they belong to the batch that is trained today
        factor = lr_factor(rule, batch, first_batch, advice.noise, normalised=normalised)
        rate = float(group["lr"])
        if batch != first_batch and says_why:
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
            beta2=beta2_for(group["betas"][1], batch, advice.first_batch) if betas_change else None,
        )

    # -- the race -----------------------------------------------------------------------------------------------------

    def _raced(self, advice: Advice, choosing: Choosing) -> Advice:
        """Whichever trains best: today's setting, the advice, or the advice at another rate or a smaller batch."""
        assert self.optimizer is not None
        if (advice.effective_batch, advice.learning_rate) == (advice.first_batch, self.first_rate):
            if self.asked.has_length:
                self.why.append("nothing was compared over your length: batch and rate stay as they are")
            return advice
        if self.samples.num is None and self.validation is None:
            self.why.append("not compared with today's setting: a function's samples cannot be held out")
            return advice
        try:
            advice = self._timed(advice, choosing)
            today = self._like_today(advice, choosing)
            for way in (today, advice):
                _check_trains_in_core(way, choosing.curve)
            named = dict(zip(NAMES, (today, advice))) | self._smaller(advice, choosing)
            race = self._race(choosing)
            runners = [_runner(name, way) for name, way in named.items()]
            with self._anew():
                winner = race.between(replace(runners[0], warms_up=False), runners[1:], RACE_SHARE * self.asked.trial_s)
        except TuningError as error:
            self.why.append(f"not compared with today's setting: {error}")
            return advice
        if winner is None:
            self.why.append("not compared with today's setting: its steps take too long for a race; raise trial_s")
            return advice
        self.why.append(race.told(winner))
        taken = replace(
            named[winner.runner.name],
            learning_rate=winner.runner.lr,
            num_warm_up_steps=winner.num_warm_up_steps,
        )
        taken = self._with_length(taken, winner, race.length_s(winner))
        length_s = self.asked.length_s(self.samples.num, winner.runner)
        if length_s is None:
            return taken
        return self._in_the_end(taken, self._larger(taken, choosing, race) | named, race, winner, length_s)

    def _race(self, choosing: Choosing) -> Race:
        assert self.optimizer is not None
        make = self.asked.make_model if self.is_new else self.model
        return Race(
            self.model,
            self.optimizer,
            self.asked.loss_fn,
            self.samples,
            self.validation,
            choosing.curve.largest_in_core,
            self.tell,
            self.asked.target if self.asked.target is not None and self.asked.target.is_known else LOSS,
            start=Starts(make, self.model, self.optimizer, self.bench.budget.device_bytes).put,
            accumulating=choosing.curve.in_core_accumulating,
        )

    def _in_the_end(
        self, taken: Advice, named: dict[str, Advice], race: Race, winner: Finish, length_s: float
    ) -> Advice:
        """What is best after a training as long as the user's; what was soonest at the target stays beside it."""
        ending = Ending.after(race, length_s, END_SHARE * self.asked.trial_s)
        larger = [_runner(name, named[name]) for name in LARGER.values() if name in named]
        with self._anew():
            best = ending.best(winner.runner, [*larger, *race.best_of_other_batches(winner.runner)])
        found, soonest = taken, _soonest(taken) if taken.num_steps else None
        if best is None:
            self.why.append(
                "trainings as long as yours were not compared: they have too few steps, or none learnt; train longer, "
                "or raise trial_s"
            )
        else:
            self.why.append(ending.told(best))
            found = replace(
                named[best.runner.name],
                learning_rate=best.runner.lr,
                num_warm_up_steps=best.num_warm_up_steps,
                target=taken.target,
                target_s=taken.target_s,
            )
        return replace(found, num_steps=max(1, round(length_s / found.step_s)), soonest=soonest)

    def _with_length(self, advice: Advice, winner: Finish, length_s: float | None) -> Advice:
        """And how long to train to the target, by what the race told about it."""
        if length_s is None:
            return advice
        num_steps, goal = math.ceil(length_s / advice.step_s), winner.target.name
        how = (
            "was not reached in the race, and lies on the line of what was left after its runs, a rough guess"
            if winner.target_s is None
            else f"was reached in the race, in a run of {format_seconds(winner.run_s)}"
        )
        self.why.append(f"{goal} {how}: train {num_steps} steps, the rate falling to zero over the last third")
        return replace(advice, num_steps=num_steps, target=goal, target_s=num_steps * advice.step_s)

    def _smaller(self, advice: Advice, choosing: Choosing) -> dict[str, Advice]:
        """The advice with half and a quarter of its batch: goodput is a rule of thumb."""
        batch, least = advice.effective_batch, 2 if self.normalises else 1
        if not self.asked.free:
            return {}
        parts = [part for part in SMALLER if batch % part == 0 and batch // part >= least]
        return self._others(advice, choosing, {SMALLER[part]: batch // part for part in parts})

    def _larger(self, taken: Advice, choosing: Choosing, race: Race) -> dict[str, Advice]:
        """Twice and four times the batch that is soonest, where none larger raced: noise grows while a network learns,
        and the batch that gets furthest at first may be too small in the end."""
        batch, most = taken.effective_batch, self._largest(None) // 4
        if not self.asked.free or any(ran.runner.batch > batch for ran in race.ran):
            return {}
        larger = {name: times * batch for times, name in LARGER.items() if times * batch <= most}
        return self._others(taken, choosing, larger)

    def _others(self, advice: Advice, choosing: Choosing, batches: dict[str, int]) -> dict[str, Advice]:
        """The advice with other effective batches and their rates; those that do not fit are left out."""
        found: dict[str, Advice] = {}
        for name, batch in batches.items():
            with suppress(TuningError):
                other = self._at(advice, choosing, batch)
                _check_trains_in_core(other, choosing.curve)
                found[name] = self._with_rate(other, says_why=False)
        return found

    def _like_today(self, advice: Advice, choosing: Choosing) -> Advice:
        """The advice, if it were to train on as today."""
        found = self._at(advice, choosing, advice.first_batch)
        return replace(found, learning_rate=self.first_rate, rule="fixed", num_warm_up_steps=0, beta2=None)

    def _at(self, advice: Advice, choosing: Choosing, batch: int) -> Advice:
        """The advice with another effective batch, and the rate left as it is."""
        if batch <= choosing.curve.largest_in_core:
            choosing.lay_out([batch], self.tell)
            choosing.loop(batch)
        micro_batch, peak_bytes = self._peak(choosing, choosing.curve, micro_batch_for(batch)(choosing.curve), batch)
        found = replace(advice, micro_batch=micro_batch, accumulation=batch // micro_batch, peak_bytes=peak_bytes)
        return self._timed(found, choosing)

    def _timed(self, advice: Advice, choosing: Choosing) -> Advice:
        """With the seconds of a training's steps, whatever its batch was chosen by."""
        choosing.loop(advice.micro_batch)
        curve, way = choosing.curve, (advice.micro_batch, advice.accumulation)
        return replace(advice, samples_per_s=curve.rate(*way), step_s=curve.seconds(*way), curve=curve)

    def _anew(self) -> AbstractContextManager[None]:
        """Steps that were timed left momentum behind, at a rate of zero: what trains begins without."""
        return nullcontext() if self.optimizer is None or self.has_state else anew(self.optimizer)


def _check_trains_in_core(advice: Advice, curve: Curve) -> None:
    """As races do, in one go or in micro-batches beside their gradients."""
    if advice.effective_batch > curve.largest_in_core and not curve.in_core_accumulating:
        raise TuningError(
            f"a batch of {advice.effective_batch} is not in-core, nor is one sample beside accumulated gradients"
        )


def _soonest(advice: Advice) -> Soonest:
    return Soonest(
        advice.micro_batch,
        advice.accumulation,
        advice.learning_rate or 0.0,
        advice.num_steps,
        advice.num_warm_up_steps,
        advice.beta2,
    )


def _runner(name: str, advice: Advice) -> Runner:
    return Runner(name, advice.effective_batch, advice.learning_rate or 0.0, advice.step_s, advice.beta2)
