"""Finds the setting that is best at the end of a training of a given length.

The setting that reaches a target first is not necessarily the best one at the end. A higher rate makes more noise while
it lasts, and gains more when it falls. On CIFAR-10 the setting that was first ended one point below twice its rate. If
the user gives a length, trainings of that length are run, and only their final metric counts.

The best rate at the end has been above that of the setting that is first. Therefore its batch is trained with once,
twice and four times the rate, as long as the higher rate is better. Then other batches follow, at no lower rate than
the best one's suggests (twice the batch first, if no larger one was compared), then the rates on both sides of the
best. A batch on the far side of one that ended below the best is not trained: neither half of it where twice was
better, nor four times where twice was not. All trainings take the same seconds of compute. If they are long, at most
`max_trainings` are run. If they are short, each runs from up to `num_starts` starts, with other samples held out each
time: one of a few hundred held-out samples is a tenth of a point or more, and the samples held out in the comparison
have already selected the candidates.

If the target is an accuracy, trainings are compared by the mean probability of the right class on held-out samples.
Accuracy counts whole samples and is too coarse for a few hundred of them. The loss is smooth but penalizes the
confidence of a network that has memorised its samples, at large batches more than at small ones. The metrics were
compared by how well one training predicts a setting's accuracy on other samples and from other starts; see
`docs/design/006-tuning.md`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from outcore.tuning.settings import SETTINGS
from outcore.tuning.trainings.comparison import Comparison
from outcore.tuning.trainings.runs import Candidate, Run
from outcore.tuning.trainings.target import PROBABILITY
from outcore.tuning.trainings.trainer import TrainingRuns
from outcore.units import format_seconds

COMPARISON, FULL_LENGTH = SETTINGS.comparison, SETTINGS.full_length
NO_WARM_UP = ", without a warm-up, because twice its rate trains nearly as well"
BELOW_FAILURE = ", of those whose next higher rate did not fail,"
METRIC_NAMES = {PROBABILITY: "the probability of the right class", "val_loss": "the loss"}


@dataclass
class FullLengthComparison:
    """Trainings of `length_s` seconds, compared at their end."""

    history: TrainingRuns
    length_s: float
    limit_s: float  # of compute, for all of them
    earlier: TrainingRuns | None = None  # the runs of the comparison, with the rates that failed
    ended: dict[Candidate, list[Run]] = field(default_factory=dict)

    @classmethod
    def after(cls, comparison: Comparison, length_s: float, limit_s: float) -> FullLengthComparison:
        """Returns a comparison with the same model, data and metric that counts its seconds and runs separately."""
        earlier = comparison.history
        target = earlier.target.at_the_end
        history = TrainingRuns(
            earlier.trainer,
            earlier.progress,
            target,
            give_up_excess_share=FULL_LENGTH.give_up_excess_share,
            little_remaining=FULL_LENGTH.little_remaining if target.metric == PROBABILITY else -math.inf,
            new_split_per_start=True,
            clock=earlier.clock,
        )
        return cls(history, length_s, limit_s, earlier)

    def __post_init__(self) -> None:
        num = FULL_LENGTH.max_trainings
        self.run_s = min(self.length_s, self.limit_s / num)
        num_starts = min(FULL_LENGTH.num_starts, max(1, int(1.001 * self.limit_s / num / self.run_s)))
        self.starts = range(FULL_LENGTH.first_start, FULL_LENGTH.first_start + num_starts)
        self.limit_s = num * num_starts * self.run_s

    def best(self, soonest: Candidate, others: Sequence[Candidate]) -> Run | None:
        """Returns the best run at the end; None if there is too little time for any, or if no setting learns."""
        if soonest.step_s * COMPARISON.min_steps > self.run_s:
            return None
        others = [one for one in others if one.lr > 0 and one.step_s * COMPARISON.min_steps <= self.run_s]
        for factor in FULL_LENGTH.rate_factors:
            higher = _at_rate(soonest, factor)
            if not self._trains(higher) or self._leader() != higher:
                break
        if not self.ended:
            return None
        moved = 1.0 if self._has_failed(self._leader()) else self._leader().factor / soonest.factor
        for _ in range(FULL_LENGTH.max_other_batches):
            other = next((one for one in others if self._may_lead(one.batch)), None)
            if other is not None:
                self._trains(self._with_batch_of(other, moved))
        while (beside := self._rate_beside()) is not None and self._has_time(len(self.starts)):
            self._trains(beside)
        self._compare_best_two_again()
        leader = min(self.ended, key=lambda one: (self._is_below_a_failure(one), self._remaining(one)))
        if self._has_failed(leader):
            return None
        run = self._middle_run(leader)
        return replace(run, num_warm_up_steps=0) if self._bears_more(leader) else run

    def _bears_more(self, candidate: Candidate) -> bool:
        """Whether twice the candidate's rate trained nearly as well to the end, so that it needs no warm-up itself.

        An unnecessary warm-up cost 0.17 points on CIFAR-10 (63 pairs). It is kept for Adam and its relatives, whose
        first steps are as long as any other.
        """
        if self.is_shortened or "betas" in self.history.trainer.optimizer.param_groups[0]:
            return False
        enough = FULL_LENGTH.rate_step / COMPARISON.same_rate_factor
        twice = [one for one in self.ended if one.batch == candidate.batch and one.lr / candidate.lr > enough]
        return any(self._remaining(one) <= FULL_LENGTH.nearly_factor * self._remaining(candidate) for one in twice)

    def _may_lead(self, batch: int) -> bool:
        """Whether the batch was not trained yet, and no other one between it and the best one's, if any learnt."""
        leader, ended = self._leader(), {candidate.batch for candidate in self.ended}
        low, high = sorted((batch, leader.batch))
        is_beyond = not self._has_failed(leader) and any(low < other < high for other in ended)
        return batch not in ended and not is_beyond

    def _with_batch_of(self, other: Candidate, moved: float) -> Candidate:
        """Returns the candidate at the leader's rate times the square root of the ratio of their batches, because few
        of its rates were compared; or at its own best rate times `moved`, if that is higher."""
        leader = self._leader()
        if self._has_failed(leader):
            return other
        return _at_rate(other, max(moved, leader.lr * math.sqrt(other.batch / leader.batch) / other.lr))

    def _rate_beside(self) -> Candidate | None:
        """Returns the leader at the next higher or lower rate that did not run; if both did, that of another batch."""
        best: dict[int, Candidate] = {}
        for candidate in sorted(self.ended, key=self._remaining):
            best.setdefault(candidate.batch, candidate)
        step = FULL_LENGTH.rate_step
        for candidate in best.values():
            factors = (1 / step,) if self._has_failed(candidate) else (step, 1 / step)
            for beside in (_at_rate(candidate, factor) for factor in factors):
                if not any(one.batch == beside.batch and math.isclose(one.lr, beside.lr) for one in self.ended):
                    return beside
        return None

    def _compare_best_two_again(self) -> None:
        """Runs the best two candidates from further starts, while there is time."""
        start = self.starts.stop
        while self._has_time(2) and sum(not self._has_failed(candidate) for candidate in self.ended) > 1:
            for candidate in sorted(self.ended, key=self._remaining)[:2]:
                self.ended[candidate].append(self._run(candidate, start))
            start += 1

    def _has_time(self, num: int) -> bool:
        """Whether there is time for `num` trainings."""
        return self.history.has_time(num * self.run_s, self.limit_s)

    def _trains(self, candidate: Candidate) -> bool:
        """Trains a candidate from every start; returns False if there is no time, or if it was stopped."""
        if not self._has_time(len(self.starts)):
            return False
        self.ended[candidate] = [self._run(candidate, start) for start in self.starts]
        return not self._has_failed(candidate)

    def _run(self, candidate: Candidate, start: int) -> Run:
        so_far = [run for runs in self.ended.values() for run in runs if run.start == start]
        leader = min(so_far, key=lambda run: run.rank, default=None)
        return self.history.run(candidate, self.run_s, self.limit_s, leader=leader, start=start)

    def _remaining(self, candidate: Candidate) -> float:
        """Returns the remaining error in the mean over the starts."""
        runs = self.ended[candidate]
        return math.inf if any(run.gave_up for run in runs) else statistics.fmean(run.remaining for run in runs)

    def _has_failed(self, candidate: Candidate) -> bool:
        return self._remaining(candidate) == math.inf

    def _is_below_a_failure(self, candidate: Candidate) -> bool:
        """Whether the candidate failed, or one with a slightly higher rate failed in the comparison, so that another
        start may fail at this rate. If trainings were shortened, a full one may fail too, and the next higher rate
        counts as well."""
        if self._has_failed(candidate) or (self.earlier is not None and self.earlier.is_below_a_failure(candidate)):
            return True
        if not self.is_shortened:
            return False
        highest = COMPARISON.same_rate_factor * FULL_LENGTH.rate_step
        above = [one for one in self.ended if one.batch == candidate.batch and 1 < one.lr / candidate.lr < highest]
        return any(map(self._has_failed, above))

    @property
    def is_shortened(self) -> bool:
        return self.run_s < 0.99 * self.length_s

    def _leader(self) -> Candidate:
        return min(self.ended, key=self._remaining)

    def _middle_run(self, candidate: Candidate) -> Run:
        runs = sorted(self.ended[candidate], key=lambda run: run.remaining)
        return runs[len(runs) // 2]

    def description(self, best: Run) -> str:
        """Returns what was trained, and the results, in words."""
        by_end = sorted(self.ended, key=self._remaining)
        ended = "; ".join(f"{candidate.description} {self._end_of(candidate)}" for candidate in by_end)
        run_s, wanted_s = format_seconds(self.run_s), format_seconds(self.length_s)
        how = f"{run_s} each, as long as you train"
        if self.is_shortened:
            enough = math.ceil(self.length_s / self.run_s)
            how = f"{run_s} each instead of your {wanted_s}, for which trial_s has to be {enough} times as long"
        fewest, most = len(self.starts), len(self.ended[best.candidate])
        starts = f"{fewest} to " * (most > fewest) + self.history.trainer.starts_description(most)
        metric = METRIC_NAMES[str(self.history.target.metric)]
        return (
            f"then {len(self.history.runs)} trainings of {how}; {metric} on held-out samples in the end, in the mean "
            f"over {starts}: {ended}; best in the end"
            f"{BELOW_FAILURE if best.candidate != by_end[0] else ''} is {best.candidate.description}"
            f"{NO_WARM_UP if best.candidate.warms_up and self._bears_more(best.candidate) else ''}"
        )

    def _end_of(self, candidate: Candidate) -> str:
        ends = [run.metric for run in self.ended[candidate]]
        return "gave up" if self._has_failed(candidate) else f"{statistics.fmean(ends):.4g}"


def _at_rate(candidate: Candidate, factor: float) -> Candidate:
    """Returns the candidate at another rate; at a higher rate, today's setting begins with a warm-up too."""
    return replace(candidate.at_rate(factor), warms_up=candidate.warms_up or factor > 1)
