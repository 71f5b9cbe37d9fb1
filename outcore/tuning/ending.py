"""What raced + the length of a training -> the setting that is best when a training of that length is over.

What is soonest at a target need not be best in the end: a higher rate makes more noise for as long as it lasts, and
more of it is won back when the rate falls. On CIFAR-10 the soonest ended a point below twice its rate. So where the
user says how long they mean to train, trainings of that length are run, and only their ends count.

The best rate at the end has been above the soonest one's, so at its batch once, twice and four times the rate run (as
long as the higher one is better), then other batches, twice the soonest one's first where none larger raced, at no
lower rate than the best one's says, then the rates on both sides of the best. A batch beyond one that ended below the
best is not trained: neither half where twice was better, nor four times where twice was not. All train for the same
seconds of compute. At most `NUM_LENGTHS` trainings' worth is run where trainings are long; where they are short, each
runs from up to `NUM_ORDERS` starts, with other samples held out each time: of a few hundred held-out samples one alone
is a tenth or more of a point, and those that were held out in the race chose the field already.

Where the target is an accuracy, ends are compared by the mean probability that held-out samples give to their right
class. Accuracy counts whole samples and is too coarse for a few hundred of them; the loss is smooth but goes its own
way, since a network that knows its samples by heart is punished for being sure of itself, at large batches more than at
small ones. Measured by how well one training tells how accurate a setting is on other samples and from other starts:
see `docs/design/006-tuning.md`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outcore.tuning.race import LEAST_STEPS, NEAR, Finish, Race, Runner
from outcore.tuning.targets import SURENESS
from outcore.units import format_seconds

NUM_LENGTHS = 6  # trainings of the length, at most, where they are long
NUM_ORDERS = 3  # of the data, and weights to begin with, for every setting, where they are short
FIRST_ORDER = 3  # those before it were raced
UP = (1.0, 2.0, 4.0)  # times the rate that is soonest
STEP = 2.0  # times the rate, beyond these
MOST_OTHERS = 2  # batches
LITTLE = 0.1  # of the probability: however good the leader is, with so little left nobody gives up
NEARLY = 1.25  # times what the best has left
HOPELESS = 4.0  # times the leader's error more, halfway: who is slow at first may be best in the end
NO_WARM_UP = ", without a warm-up, since twice its rate trains nearly as well"
EDGE = ", of those whose next higher rate did not fail,"
NAMES = {SURENESS: "the probability of the right class", "val_loss": "the loss"}


@dataclass
class Ending:
    """Trainings of `length_s` seconds, and who is best at the end of them."""

    race: Race
    length_s: float
    limit_s: float  # of compute, for all of them
    raced: Race | None = None  # which knows rates that failed
    ended: dict[Runner, list[Finish]] = field(default_factory=dict)

    @classmethod
    def after(cls, race: Race, length_s: float, limit_s: float) -> Ending:
        """The same model, data and metric, and a count of seconds and runs of its own."""
        anew = Race(
            race.model,
            race.optimizer,
            race.loss_fn,
            race.samples,
            race.validation,
            race.in_core,
            race.tell,
            race.target.at_the_end,
            holds_out_anew=True,
            hopeless=HOPELESS,
            start=race.start,
            accumulating=race.accumulating,
        )
        if anew.target.metric == SURENESS:
            anew.little = LITTLE
        return cls(anew, length_s, limit_s, race)

    def __post_init__(self) -> None:
        self.race.run_s = min(self.length_s, self.limit_s / NUM_LENGTHS)
        num_orders = min(NUM_ORDERS, max(1, int(1.001 * self.limit_s / NUM_LENGTHS / self.race.run_s)))
        self.orders = range(FIRST_ORDER, FIRST_ORDER + num_orders)  # of the data, in which every setting is trained
        self.limit_s = NUM_LENGTHS * num_orders * self.race.run_s

    def best(self, soonest: Runner, others: Sequence[Runner]) -> Finish | None:
        """The best in the end; None: there is too little time for any, or none of them learns."""
        if soonest.step_s * LEAST_STEPS > self.race.run_s:
            return None
        others = [other for other in others if other.lr > 0 and other.step_s * LEAST_STEPS <= self.race.run_s]
        for factor in UP:
            higher = _moved(soonest, factor)
            if not self._trains(higher) or self._leader() != higher:
                break
        if not self.ended:
            return None
        moved = 1.0 if self._has_failed(self._leader()) else self._leader().factor / soonest.factor
        for _ in range(MOST_OTHERS):
            other = next((one for one in others if self._may_lead(one.batch)), None)
            if other is not None:
                self._trains(self._with_batch_of(other, moved))
        while (beside := self._beside()) is not None and self._has_time(len(self.orders)):
            self._trains(beside)
        self._compare_again()
        leader = min(self.ended, key=lambda runner: (self._is_at_the_edge(runner), self._left(runner)))
        if self._has_failed(leader):
            return None
        found = self._middle(leader)
        return replace(found, num_warm_up_steps=0) if self._bears_more(leader) else found

    def _bears_more(self, runner: Runner) -> bool:
        """Twice its rate trained to the end as well, or nearly: then it bears its own from the first step on. A warm-up
        that is not needed cost CIFAR-10 0.17 points (63 pairs). Not asked of Adam and its kin, whose first steps are as
        long as any."""
        if self.is_shortened or "betas" in self.race.optimizer.param_groups[0]:
            return False
        twice = [one for one in self.ended if one.batch == runner.batch and one.lr / runner.lr > STEP / NEAR]
        return any(self._left(one) <= NEARLY * self._left(runner) for one in twice)

    def _may_lead(self, batch: int) -> bool:
        """None of its size has ended, nor one between it and the best one's, if any learnt."""
        leader, ended = self._leader(), {runner.batch for runner in self.ended}
        low, high = sorted((batch, leader.batch))
        beyond = not self._has_failed(leader) and any(low < other < high for other in ended)
        return batch not in ended and not beyond

    def _with_batch_of(self, other: Runner, moved: float) -> Runner:
        """At the leader's rate, times the square root of how much larger its batch is: few rates of it were raced. Or
        at its own best of these, `moved` as much as the soonest one's was, where that is higher."""
        leader = self._leader()
        if self._has_failed(leader):
            return other
        return _moved(other, max(moved, leader.lr * math.sqrt(other.batch / leader.batch) / other.lr))

    def _beside(self) -> Runner | None:
        """The next higher rate of the best one, or the next lower; where both ran, of the best with another batch."""
        best: dict[int, Runner] = {}
        for runner in sorted(self.ended, key=self._left):
            best.setdefault(runner.batch, runner)
        for runner in best.values():
            factors = (1 / STEP,) if self._has_failed(runner) else (STEP, 1 / STEP)
            for beside in (_moved(runner, factor) for factor in factors):
                if not any(one.batch == beside.batch and math.isclose(one.lr, beside.lr) for one in self.ended):
                    return beside
        return None

    def _compare_again(self) -> None:
        """The best two in further orders, while there is time."""
        order = self.orders.stop
        while self._has_time(2) and sum(not self._has_failed(runner) for runner in self.ended) > 1:
            for runner in sorted(self.ended, key=self._left)[:2]:
                self.ended[runner].append(self._run(runner, order))
            order += 1

    def _has_time(self, num: int) -> bool:
        """For so many trainings."""
        return self.race.has_time(num * self.race.run_s, self.limit_s)

    def _trains(self, runner: Runner) -> bool:
        """In every order; whether there was time for it and it did not give up."""
        if not self._has_time(len(self.orders)):
            return False
        self.ended[runner] = [self._run(runner, order) for order in self.orders]
        return not self._has_failed(runner)

    def _run(self, runner: Runner, order: int) -> Finish:
        so_far = [found for ran in self.ended.values() for found in ran if found.order == order]
        return self.race.run(runner, min(so_far, key=lambda found: found.place, default=None), self.limit_s, order)

    def _left(self, runner: Runner) -> float:
        """In the mean over the orders."""
        ran = self.ended[runner]
        return math.inf if any(found.gave_up for found in ran) else statistics.fmean(found.left for found in ran)

    def _has_failed(self, runner: Runner) -> bool:
        return self._left(runner) == math.inf

    def _is_at_the_edge(self, runner: Runner) -> bool:
        """It failed, or one a little higher did in the race: another start may not bear this one. Where trainings were
        shortened, one as long as the user's may not bear it either: there the next rate up tells here, too."""
        if self._has_failed(runner) or (self.raced is not None and self.raced.is_at_the_edge(runner)):
            return True
        if not self.is_shortened:
            return False
        above = [one for one in self.ended if one.batch == runner.batch and 1 < one.lr / runner.lr < NEAR * STEP]
        return any(map(self._has_failed, above))

    @property
    def is_shortened(self) -> bool:
        return self.race.run_s < 0.99 * self.length_s

    def _leader(self) -> Runner:
        return min(self.ended, key=self._left)

    def _middle(self, runner: Runner) -> Finish:
        ran = sorted(self.ended[runner], key=lambda found: found.left)
        return ran[len(ran) // 2]

    def told(self, best: Finish) -> str:
        """What was trained and how it ended."""
        by_end = sorted(self.ended, key=self._left)
        ended = "; ".join(f"{runner.told} {self._told(runner)}" for runner in by_end)
        run_s, wanted_s = format_seconds(self.race.run_s), format_seconds(self.length_s)
        how = f"{run_s} each, as long as you train"
        if self.is_shortened:
            enough = math.ceil(self.length_s / self.race.run_s)
            how = f"{run_s} each instead of your {wanted_s}, for which trial_s has to be {enough} times as long"
        fewest, most = len(self.orders), len(self.ended[best.runner])
        starts = f"{fewest} to " * (most > fewest) + self.race.starts_told(most)
        return (
            f"then {len(self.race.ran)} trainings of {how}; {NAMES[str(self.race.target.metric)]} on held-out samples "
            f"in the end, in the mean over {starts}: {ended}; best in the end"
            f"{EDGE if best.runner != by_end[0] else ''} is {best.runner.told}"
            f"{NO_WARM_UP if best.runner.warms_up and self._bears_more(best.runner) else ''}"
        )

    def _told(self, runner: Runner) -> str:
        ends = [found.metric for found in self.ended[runner]]
        return "gave up" if self._has_failed(runner) else f"{statistics.fmean(ends):.4g}"


def _moved(runner: Runner, factor: float) -> Runner:
    """At another rate; today's setting, too, then begins with a warm-up."""
    return replace(runner.times(factor), warms_up=runner.warms_up or factor > 1)
