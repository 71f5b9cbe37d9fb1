"""Today's setting and the advice -> the one that trains fastest to the target, by training several for a while.

Noise scales and range tests are theory and a glance; before they change what a user trains with, settings run against
each other: from the same weights, through the data in the same order, for the same seconds of compute, and judged on
samples that none of them trains on, by the target's own metric (the loss, where there is no target). The field is
today's setting, the advice at several rates, today's batch at a higher rate, and the advice with half and a quarter of
its batch at the best of its rates.

A run is a small training of its own: its rate falls to zero over its last third. At a constant rate a look shows the
noise that a high rate makes rather than what it has learnt, and short races went to rates that were too low. And the
field thins out while its runs grow: the better half goes on to twice the seconds, together with rates between those
that ran. Once the target is reached runs are no longer than that takes, and the first at the target wins (of those
that come together, the best in the end); else who is nearest to it when the seconds are spent.

Successive halving is Jamieson and Talwalkar, arXiv 1502.07943; here runs begin anew, since one that goes on cannot end
twice, and each round brings new runners. One start tells little (on MNIST the same setting came to 93 % after 1.6 and
after 3.6 s), and of many runners the luckiest looks best. So runs stop growing only when the leader comes to the target
from other starts, too: other weights, and the data in another order (starts.py); the best few and today's setting run
from these; and what a user trains with is changed only for what is sooner from every one of them and by a tenth in the
mean. The length that is advised goes by the worst start: one that is too short costs another round (annealing.py), one
that is too long costs little.

The seconds are those of the curve (a step of this batch takes so long), not of a clock: a machine that is busy during
one run and idle during the next decides nothing, and a batch that would swap can run in smaller micro-batches.
"""

from __future__ import annotations

import math
import operator
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from outcore.tuning.batches import LossFn
from outcore.tuning.probing import Tell
from outcore.tuning.samples import Samples
from outcore.tuning.state import untouched
from outcore.tuning.targets import LEAST_SLOPE, Setting, Target, Trial, num_looked_at
from outcore.units import format_seconds

MOST_RUNS = 40
NUM_SHARES = 32  # of the seconds for all runs, that one run of the first round takes
LEAST_RUNNERS = 5  # in the first round, however long their steps take
LEAST_STEPS = 16  # of the slowest runner: with fewer nothing shows
NUM_LOOKS = 8  # evenly over a run
NUM_EPOCHS = 6  # at today's setting: no run need be longer
GOES_ON = 1 / 2  # of a round's runners
CLEARLY = 0.05  # less loss than today's setting over all starts, where there is no target: or that one stays
SOONER = 0.1  # at the target, or nearer to it, likewise; three times as much where there was time for one start only
NUM_FINALISTS, NUM_STARTS = 3, 3  # today's setting besides
NOT_REACHED = 1.25  # times the seconds of a run in which the target was not reached, at least
HOPELESS = 1.0  # of the leader's error that another's is higher, halfway: it need not go on
TOGETHER = 0.15  # of the seconds to the target: another start differs by more
BEHIND = 0.15  # of the leader's error: so far behind, today's setting need not run once more
FAR = 4  # times the winner's run: a target beyond that is not predicted
SHORTER = 1.25  # times the seconds to the target: so long are runs once it was reached
LONGER = 1.25, 1.5  # times a run that reached the target, at least and at most: so long is the training advised
BEYOND = 0.1  # of the error at the target, to end below it
WARM_UP = 0.1  # of an epoch
TIMES = 3.0  # the rate, from one runner to the next; between them the square root of it
NEAR = 1.2  # times a rate that ran: nothing new
LATER = 2  # times the seconds for all runs, where the target is near and was not reached
MOST_TIMES, LEAST_CLOCK_S = 3.0, 20.0  # of a clock's seconds to those of compute; a race that is over sooner is not cut
LOOK_BATCH = 256  # samples at a time, in-core
LOSS = Target("val_loss", 0.0)


def longest_step_s(limit_s: float) -> float:
    """Of a runner's effective batch, in a race of `limit_s` seconds for all runs."""
    return limit_s / LEAST_RUNNERS / LEAST_STEPS


@dataclass(frozen=True)
class Runner:
    """A setting in the race; `step_s` are seconds of its effective batch as it would be trained."""

    name: str
    batch: int
    lr: float
    step_s: float
    beta2: float | None = None
    warms_up: bool = True  # parameters that are still random bear less of a rate than later ones
    factor: float = 1.0  # of the rate that it has under its name

    def times(self, factor: float) -> Runner:
        return replace(self, lr=self.lr * factor, factor=self.factor * factor)

    @property
    def told(self) -> str:
        how = "" if math.isclose(self.factor, 1) else f" at {self.factor:.2g} times the rate"
        return f"{self.name}{how} (batch {self.batch}, rate {self.lr:.3g})"


@dataclass(frozen=True)
class Finish:
    """A runner, and the metric on the way through a run of `run_s` seconds."""

    runner: Runner
    run_s: float
    target: Target
    looks: tuple[tuple[float, float], ...]  # seconds, metric
    num_warm_up_steps: int = 0
    gave_up: bool = False
    order: int = 0  # of the data, and which weights it began with

    @property
    def metric(self) -> float:
        return self.looks[-1][1]

    @property
    def left(self) -> float:
        """Of the way to the best there is; smaller is better."""
        left = self.target.left(self.metric)
        return -self.metric if left is None else left

    @property
    def target_s(self) -> float | None:
        """Seconds to the target, between two looks; None: it was not reached, or there is none."""
        if self.target is LOSS:
            return None
        before_s, before = 0.0, self.looks[0][1]
        for second, found in self.looks:
            if self.target.reached(found):
                part = 1.0 if found == before else (self.target.value - before) / (found - before)
                return before_s + min(max(part, 0.0), 1.0) * (second - before_s)
            before_s, before = second, found
        return None

    @property
    def place(self) -> tuple[int, float]:
        """To sort by: who reached the target, by the seconds to it; then by what is left; then who gave up."""
        if self.gave_up:
            return 2, 0.0
        return (1, self.left) if self.target_s is None else (0, self.target_s)

    @property
    def wanted(self) -> float:
        """What is left at the target; without one, nothing is known that would do."""
        return -math.inf if self.target is LOSS else self.target.left(self.target.value) or 0.0

    def left_and(self, share: float) -> float:
        """What is left, and so much more. Less than at the target need not be told apart."""
        least = max(self.left, self.wanted)
        return least + share * abs(least)

    @property
    def cost(self) -> float:
        """What the mean over starts is taken of: seconds to the target; without one, what is left."""
        if self.gave_up:
            return math.inf
        if self.target is LOSS:
            return self.left
        if self.target_s is not None:
            return self.target_s
        further = self.left / max(self.wanted, 1e-9)
        return max(NOT_REACHED, further) * self.looks[-1][0]


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
    target: Target = LOSS
    run_s: float = 0.0  # of compute, for each run of this round
    spent_s: float = 0.0  # by all runs
    ran: list[Finish] = field(default_factory=list)
    final: dict[Runner, list[Finish]] = field(default_factory=dict)
    today: Runner | None = None
    began_s: float = field(default_factory=time.monotonic)
    holds_out_anew: bool = False  # other samples for every order of the data
    hopeless: float = HOPELESS
    little: float = -math.inf  # left: nobody gives up who is so near
    start: Callable[[int], bool] = lambda order: False  # puts an order's weights into the model: are they others?
    starts_differ: bool = False
    accumulating: int | None = None  # the largest micro-batch where gradients are accumulated; None: `in_core`, too

    def between(self, today: Runner, advised: Sequence[Runner], limit_s: float) -> Finish | None:
        """The winner; `advised` begins with the advice. None: `limit_s` seconds for all runs are too few to tell.

        Where they are over before the target is reached, but a run that reaches it is not far longer, there are as many
        again: the highest rates are nearest to a target that nobody reaches, and then are late at it."""
        slowest_s = max(today.step_s, *(runner.step_s for runner in advised))
        if slowest_s > longest_step_s(limit_s):
            return None
        longest_s = max(NUM_EPOCHS * (self.samples.num or math.inf) / today.batch * today.step_s, slowest_s)
        self.run_s = max(min(limit_s / NUM_SHARES, longest_s), LEAST_STEPS * slowest_s)
        done = ranked = self._round(self._first(today, advised), limit_s)
        most_s = limit_s
        while done and len(self.ran) < MOST_RUNS:
            target_s = self._surely_s(done[0], most_s)
            guess_s, before = self.length_s(done[0]), len(self.ran)
            run_s = self._next_run_s(target_s, guess_s, longest_s, LEAST_STEPS * slowest_s)
            if target_s is None:
                has_time = self.has_time(run_s, most_s) and run_s <= _longest_of_final_s(most_s)
                enough_s = math.inf if guess_s is None else guess_s / LONGER[0]
                is_near = enough_s <= min(longest_s, _longest_of_final_s(LATER * limit_s))
                most_s = LATER * limit_s if is_near and not has_time and not self._is_late(most_s) else most_s
                run_s = max(self.run_s, min(run_s, _longest_of_final_s(most_s)))
            self.run_s = run_s
            found = self._round(self._next(done, today), most_s)
            if len(self.ran) == before or (target_s is not None and found[0].target_s is None):
                break
            done, ranked = found, [*found, *ranked]
        self.run_s = ranked[0].run_s if ranked else self.run_s  # shorter ones did not come to the target
        return self._final(ranked, today, self.spent_s + most_s)

    def _surely_s(self, leader: Finish, limit_s: float) -> float | None:
        """To the target from the slowest start, None: not from all. Of many runs one is lucky, and all would be as
        short as it."""
        slowest_s = leader.target_s
        for order in range(1, NUM_STARTS):
            known = self._known(leader.runner, order)
            if slowest_s is None or (known is None and not self.has_time(self.run_s, limit_s)):
                break
            found_s = (known or self.run(leader.runner, None, limit_s, order)).target_s
            slowest_s = None if found_s is None else max(slowest_s, found_s)
        return slowest_s

    def _final(self, ranked: Sequence[Finish], today: Runner, limit_s: float) -> Finish:
        """The best few and today's setting from further starts; fewer of them where time is short, and one start each
        if there is none."""
        going = list(dict.fromkeys(found.runner for found in ranked if not found.gave_up))
        best = sorted(going, key=self.is_at_the_edge)[:NUM_FINALISTS]
        if self.spent_s + NUM_STARTS * len({*best, today}) * self.run_s > limit_s:  # further starts are worth more
            others = [runner for runner in best if runner != today]
            known = [one for one in others if (seen := self._known(one)) is not None and not seen.gave_up]
            best = known or others[:1]
        starts: dict[Runner, list[Finish]] = {runner: [] for runner in dict.fromkeys([*best, today])}
        self.final, self.today = dict(starts), today
        for order in range(NUM_STARTS):
            num = (limit_s - self.spent_s) / ((NUM_STARTS - order) * self.run_s)
            starts = _first_of(starts, today, max(2, int(num))) if order else starts
            over = self.spent_s + len(starts) * self.run_s > limit_s or self._is_late(limit_s)
            if len(starts) == 1 or (order and over):
                break
            for runner, ran in starts.items():
                ran.append(self._known(runner, order) or self.run(runner, None, limit_s, order))
        ran = sorted(starts[_best_of(starts, today)], key=lambda found: found.cost)
        return ran[len(ran) // 2] if ran else ranked[0]

    def is_at_the_edge(self, runner: Runner) -> bool:
        """The next higher rate gave up or ended worse than it began: another start may not bear this one."""
        highest = NEAR * math.sqrt(TIMES) * runner.lr
        beside = [ran for ran in self.ran if ran.runner.batch == runner.batch and runner.lr < ran.runner.lr <= highest]
        return any(ran.gave_up or ran.left > replace(ran, looks=ran.looks[:1]).left for ran in beside)

    def _starts_of(self, found: Finish) -> list[Finish]:
        """The same from every start that it ran from."""
        ran = [one for one in self.ran if (one.runner, one.run_s) == (found.runner, found.run_s)]
        return ran or [found]

    def _known(self, runner: Runner, order: int = 0) -> Finish | None:
        wanted = runner, self.run_s, order
        return next((found for found in self.ran if (found.runner, found.run_s, found.order) == wanted), None)

    def _is_late(self, limit_s: float) -> bool:
        """Reading data and looking may take far longer than the compute that is counted: no run begins then."""
        return time.monotonic() - self.began_s > max(MOST_TIMES * limit_s, LEAST_CLOCK_S)

    def _next_run_s(self, target_s: float | None, guess_s: float | None, longest_s: float, least_s: float) -> float:
        """Twice as long, or less where less should do; once the target was reached no longer than that takes, or as
        before where that is about it."""
        if target_s is None:
            enough_s = max(guess_s or math.inf, SHORTER * self.run_s)
            return max(self.run_s, min(2 * self.run_s, enough_s, longest_s))
        shorter_s = max(SHORTER * target_s, least_s)
        return shorter_s if SHORTER * shorter_s < self.run_s else self.run_s

    def length_s(self, winner: Finish) -> float | None:
        """Of a training that ends beyond the target: another start may do worse. None: not known.

        What the winner had left in the worst of its starts is continued, not too far, along the line of the least that
        was left after runs of each length. A run that reached the target is stretched by a quarter at least, by half at
        most, and a guess along the line by a quarter. All this by held-out samples: the fewer they are, the longer.
        """
        ended = self.final.get(winner.runner) or self._starts_of(winner)
        if any(found.gave_up for found in ended):
            return None
        worst = max(ended, key=lambda found: found.left)
        lengths = sorted({found.run_s for found in self.ran})
        left = [min((f.left for f in self.ran if f.run_s == run_s and not f.gave_up), default=0.0) for run_s in lengths]
        unsure = self.target.unsure(num_looked_at(self.samples, self.validation))
        wanted = (1 - BEYOND) * (self.target.left(self.target.value) or 0.0)
        reached = self.target is not LOSS and self.target.reached(worst.metric)
        times = LONGER[0] if reached and worst.left <= 0 else math.inf
        if len(lengths) > 1 and min(wanted, worst.left, *left) > 0:
            slope, _ = np.polyfit(np.log(lengths), np.log(left), 1)
            times = (wanted / worst.left) ** (1 / slope) if slope < -LEAST_SLOPE else math.inf
        if not reached and not times < FAR:
            return None
        times = min(max(times, LONGER[0]), LONGER[1]) if reached else LONGER[0] * max(times, 1.0)
        return (1 + unsure) * times * winner.run_s

    def best_of_other_batches(self, winner: Runner) -> list[Runner]:
        """One of each, as it did best in its longest runs; who was least behind the best of those runs comes first."""
        ended = [ran for ran in self.ran if not ran.gave_up]
        least = {ran.run_s: min(one.left for one in ended if one.run_s == ran.run_s) for ran in ended}
        found: dict[int, Finish] = {}
        for ran in sorted(ended, key=lambda ran: (-ran.run_s, ran.left)):
            if ran.runner.batch != winner.batch:
                found.setdefault(ran.runner.batch, ran)
        return [ran.runner for ran in sorted(found.values(), key=lambda ran: ran.left - least[ran.run_s])]

    def _first(self, today: Runner, advised: Sequence[Runner]) -> Iterator[Runner]:
        """What is most likely to win comes first: where steps are long, the seconds do not suffice for all."""
        yield today
        advice, *others = advised
        for factor in (1.0, TIMES, 1 / TIMES, TIMES**2):
            if not _is_near(advice.times(factor), [today]):
                yield advice.times(factor)
        higher = replace(today.times(math.sqrt(TIMES)), warms_up=True)
        if not _is_near(higher, [found.runner for found in self.ran]):
            yield higher
        at_rates = sorted((ran for ran in self.ran if ran.runner.name == advice.name), key=lambda ran: ran.place)
        factor = at_rates[0].runner.factor if at_rates else 1.0
        for other in others:
            if not _is_near(other.times(factor), [today]):
                yield other.times(factor)

    def _round(self, runners: Iterable[Runner], limit_s: float) -> list[Finish]:
        """All that there is time for, the best one first; runs of as many seconds are not run again."""
        done: list[Finish] = []
        for runner in runners:
            known = self._known(runner)
            if known is None and not self.has_time(self.run_s, limit_s):
                continue
            done.append(known or self.run(runner, min(done, key=lambda found: found.place, default=None), limit_s))
        return _in_order(done)

    def _next(self, done: Sequence[Finish], today: Runner) -> list[Runner]:
        """The better half, today's setting while it is not far behind, and rates beside the leader's."""
        going = [found.runner for found in done[: math.ceil(GOES_ON * len(done))]]
        leader = done[0]
        far = leader.left_and(BEHIND)
        still_in = [found.runner for found in done if found.runner == today and found.left <= far]
        highest = max(found.runner.lr for found in self.ran if found.runner.batch == leader.runner.batch)
        up = TIMES if leader.runner.lr >= highest else math.sqrt(TIMES)
        beside = [leader.runner.times(factor) for factor in (up, 1 / math.sqrt(TIMES)) if leader.runner != today]
        new = [runner for runner in beside if not _is_near(runner, [found.runner for found in self.ran])]
        return list(dict.fromkeys([leader.runner, *still_in, *new, *going]))

    def has_time(self, run_s: float, limit_s: float) -> bool:
        """For further runs of so many seconds in all, within a limit for all runs."""
        return self.spent_s + run_s <= 1.001 * limit_s and not self._is_late(limit_s)

    def run(self, runner: Runner, leader: Finish | None, limit_s: float, order: int = 0) -> Finish:
        """One training; it stops early where it has no hope against the leader."""
        self.tell(f"racing {runner.told}", min(1.0, self.spent_s / limit_s))
        looks: list[tuple[float, float]] = []
        gave_up, num_warm_up_steps = False, self._num_warm_up_steps(runner)
        with untouched(self.model, self.optimizer):
            self.starts_differ = self.start(order) or self.starts_differ
            torch.manual_seed(order)
            for second, metric in self._looks(runner, num_warm_up_steps, order):
                looks.append((second, metric))
                found = Finish(runner, self.run_s, self.target, tuple(looks))
                hopeless = found.left > self.little and _is_hopeless(found, leader, self.hopeless)
                gave_up = not math.isfinite(metric) or hopeless
                if gave_up or _is_beaten(found, leader):
                    break
        self.spent_s += looks[-1][0]
        self.ran.append(Finish(runner, self.run_s, self.target, tuple(looks), num_warm_up_steps, gave_up, order))
        return self.ran[-1]

    def _looks(self, runner: Runner, num_warm_up_steps: int, order: int) -> Iterator[tuple[float, float]]:
        """Trains, and looks at the metric after every eighth of the seconds."""
        first_rate = float(self.optimizer.param_groups[0]["lr"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["lr"] * (runner.lr / first_rate) if first_rate else runner.lr
            if runner.beta2 is not None:
                group["betas"] = (group["betas"][0], runner.beta2)
        alone = runner.batch <= self.in_core or self.accumulating is None
        most = self.in_core if alone else self.accumulating or 0
        micro_batch = max(size for size in range(1, min(runner.batch, most) + 1) if runner.batch % size == 0)
        num_steps = max(1, round(self.run_s / runner.step_s))
        setting = Setting(micro_batch, runner.batch // micro_batch, num_warm_up_steps, num_steps)
        trial = Trial(
            self.model,
            self.loss_fn,
            self.samples,
            self.optimizer,
            setting,
            self.target,
            validation=self.validation,
            look_batch=min(LOOK_BATCH, self.in_core),
            order=order,
            split=order if self.holds_out_anew else 0,
        )
        num_done = 0
        for look in range(1, NUM_LOOKS + 1):
            while num_done < round(num_steps * look / NUM_LOOKS):
                trial.step(nullcontext)
                num_done += 1
            yield num_done * runner.step_s, trial.look()

    def _num_warm_up_steps(self, runner: Runner) -> int:
        """A tenth of an epoch, or of the run where that is shorter: it must run at its rate."""
        if not runner.warms_up:
            return 0
        num_steps = min((self.samples.num or math.inf) / runner.batch, self.run_s / runner.step_s)
        return int(WARM_UP * num_steps)

    def starts_told(self, num: int) -> str:
        """What runs began with: other weights, or the same and the data in another order."""
        return f"{num} start{'s' * (num > 1)}" if self.starts_differ else f"{num} order{'s' * (num > 1)} of the data"

    def told(self, winner: Finish) -> str:
        """What was compared and how it ended."""
        final = {runner: ran for runner, ran in self.final.items() if ran} or {winner.runner: [winner]}
        by_cost = sorted(final, key=lambda runner: statistics.fmean(found.cost for found in final[runner]))
        ended = "; ".join(f"{runner.told} {mean_told(final[runner])}" for runner in by_cost)
        gave_up = list(dict.fromkeys(found.runner.told for found in self.ran if found.gave_up))
        gave_up_told = f"; {' and '.join(gave_up[:2])}{' and others' if len(gave_up) > 2 else ''} gave up"
        stays = ", which stays: nothing was clearly better every time" if winner.runner == self.today else ""
        num_orders, metric = [len(ran) for ran in final.values()], self.target.name.split()[0]
        fewer, most = f"{min(num_orders)} to " * (min(num_orders) < max(num_orders)), max(num_orders)
        return (
            f"raced from the same start{'s' * self.starts_differ}: {len(self.ran)} runs with "
            f"{format_seconds(self.spent_s)} of compute in all, "
            "each a training whose rate falls to zero over its last third; by "
            f"{metric} on held-out samples, in the mean over {fewer}{self.starts_told(most)}: "
            f"{ended}{gave_up_told if gave_up else ''}; the winner is {winner.runner.told}{stays}"
        )


def _longest_of_final_s(limit_s: float) -> float:
    """Of a run, if the best one and today's setting are to run from every start in a final of `limit_s` seconds."""
    return limit_s / (2 * NUM_STARTS)


def mean_told(ran: Sequence[Finish]) -> str:
    """How a finalist ended."""
    if all(found.gave_up for found in ran):
        return "gave up"
    ended = [found for found in ran if not found.gave_up]
    reached = [found.target_s for found in ended if found.target_s is not None]
    target = f", the target after {format_seconds(statistics.fmean(reached))}" if reached else ""
    times = f" ({len(reached)} of {len(ran)} times)" if reached and len(reached) < len(ran) else ""
    return f"{statistics.fmean(found.metric for found in ended):.3g}{target}{times}"


def _best_of(starts: Mapping[Runner, Sequence[Finish]], today: Runner) -> Runner:
    """In the mean over their starts: of those that come to the target almost together who is best in the end; today's
    setting unless another is clearly sooner."""
    cost = {runner: statistics.fmean(found.cost for found in ran) for runner, ran in starts.items() if ran}
    least = min(cost.values(), default=math.inf)
    if least == math.inf:
        return today
    together = [runner for runner in cost if cost[runner] <= least + TOGETHER * abs(least)]
    by_end = min(together, key=lambda runner: statistics.fmean(found.left for found in starts[runner]))
    if cost[today] == math.inf:
        return by_end
    return next(
        (one for one in (by_end, *sorted(cost, key=lambda one: cost[one])) if _beats(starts, one, today)), today
    )


def _beats(starts: Mapping[Runner, Sequence[Finish]], one: Runner, today: Runner) -> bool:
    """In the mean by more than a little, and from every start: of several that are no better one is lucky."""
    ours, theirs = ([found.cost for found in starts[runner]] for runner in (one, today))
    share = CLEARLY if starts[today][0].target is LOSS else SOONER * NUM_STARTS / len(ours)
    by = share * abs(statistics.fmean(theirs))
    return statistics.fmean(ours) < statistics.fmean(theirs) - by and all(map(operator.lt, ours, theirs))


def _first_of(starts: Mapping[Runner, list[Finish]], today: Runner, num: int) -> dict[Runner, list[Finish]]:
    """The best `num` so far, today's setting among them."""
    others = sorted(
        (one for one in starts if one != today), key=lambda one: statistics.fmean(f.cost for f in starts[one])
    )
    return {runner: starts[runner] for runner in (*others[: num - 1], today)}


def _in_order(done: Iterable[Finish]) -> list[Finish]:
    """By their places; but of those that came to the target almost together the first is who is best in the end."""
    ordered = sorted(done, key=lambda found: found.place)
    first_s = ordered[0].target_s if ordered else None
    if first_s is None:
        return ordered
    together = [found for found in ordered if found.place <= (0, (1 + TOGETHER) * first_s)]
    best = min(together, key=lambda found: found.left)
    return [best, *(found for found in ordered if found is not best)]


def _is_near(runner: Runner, others: Iterable[Runner]) -> bool:
    """One of the others has this batch, at a rate so near that it would only be run again."""
    return any(runner.batch == other.batch and other.lr / NEAR < runner.lr < NEAR * other.lr for other in others)


def _is_hopeless(found: Finish, leader: Finish | None, share: float = HOPELESS) -> bool:
    """Halfway, and far behind where the leader was then."""
    half = NUM_LOOKS // 2
    if leader is None or leader.gave_up or len(found.looks) != half or len(leader.looks) < half:
        return False
    then = replace(leader, looks=leader.looks[:half])
    return found.target_s is None and found.left > then.left_and(share)


def _is_beaten(found: Finish, leader: Finish | None) -> bool:
    """The leader was at the target long before."""
    if leader is None or leader.target_s is None:
        return False
    return found.target_s is None and found.looks[-1][0] > (1 + TOGETHER) * leader.target_s
