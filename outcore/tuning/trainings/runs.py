"""Candidate -> Run: one setting, one short training of it, and how runs are ranked.

A run is a small training of its own: its rate falls to zero over its last third. At a constant rate an evaluation shows
the noise that a high rate makes rather than what was learnt. Its seconds are those of the curve (a step of this batch
takes so long) and not of a clock: a machine that is busy during one run and idle during the next decides nothing.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from outcore.tuning.settings import SETTINGS
from outcore.tuning.trainings.target import NO_TARGET, Target
from outcore.units import format_seconds

COMPARISON = SETTINGS.comparison


@dataclass(frozen=True)
class Candidate:
    """A setting to compare; `step_s` are seconds of its effective batch as it would be trained."""

    name: str
    batch: int
    lr: float
    step_s: float
    beta2: float | None = None
    warms_up: bool = True  # initial weights bear less of a rate than later ones
    factor: float = 1.0  # of the rate that it has under its name

    def at_rate(self, factor: float) -> Candidate:
        return replace(self, lr=self.lr * factor, factor=self.factor * factor)

    @property
    def description(self) -> str:
        how = "" if math.isclose(self.factor, 1) else f" at {self.factor:.2g} times the rate"
        return f"{self.name}{how} (batch {self.batch}, rate {self.lr:.3g})"


@dataclass(frozen=True)
class Run:
    """A candidate, and the metric on the way through a training of `run_s` seconds."""

    candidate: Candidate
    run_s: float
    target: Target
    evaluations: tuple[tuple[float, float], ...]  # seconds, metric
    num_warm_up_steps: int = 0
    gave_up: bool = False
    start: int = 0  # which initial weights and which order of the data

    @property
    def metric(self) -> float:
        return self.evaluations[-1][1]

    @property
    def remaining(self) -> float:
        """What remains of the error; smaller is better."""
        remaining = self.target.remaining(self.metric)
        return -self.metric if remaining is None else remaining

    @property
    def target_s(self) -> float | None:
        """Seconds to the target, between two evaluations; None where it was not reached, or there is none."""
        if self.target is NO_TARGET:
            return None
        before_s, before = 0.0, self.evaluations[0][1]
        for second, metric in self.evaluations:
            if self.target.reached(metric):
                part = 1.0 if metric == before else (self.target.value - before) / (metric - before)
                return before_s + min(max(part, 0.0), 1.0) * (second - before_s)
            before_s, before = second, metric
        return None

    @property
    def rank(self) -> tuple[int, float]:
        """To sort by: those that reached the target, by the seconds to it; then by what remains; then who gave up."""
        if self.gave_up:
            return 2, 0.0
        return (1, self.remaining) if self.target_s is None else (0, self.target_s)

    @property
    def remaining_at_target(self) -> float:
        """What remains at the target; without one, nothing is known that would suffice."""
        return -math.inf if self.target is NO_TARGET else self.target.remaining(self.target.value) or 0.0

    def remaining_plus(self, share: float) -> float:
        """What remains, and a share more. Less than at the target need not be told apart."""
        least = max(self.remaining, self.remaining_at_target)
        return least + share * abs(least)

    @property
    def cost(self) -> float:
        """What is averaged over starts: seconds to the target; without one, what remains."""
        if self.gave_up:
            return math.inf
        if self.target is NO_TARGET:
            return self.remaining
        if self.target_s is not None:
            return self.target_s
        further = self.remaining / max(self.remaining_at_target, 1e-9)
        return max(COMPARISON.not_reached_factor, further) * self.evaluations[-1][0]


def mean_description(runs: Sequence[Run]) -> str:
    """How the runs of one candidate ended."""
    if all(run.gave_up for run in runs):
        return "gave up"
    ended = [run for run in runs if not run.gave_up]
    reached = [run.target_s for run in ended if run.target_s is not None]
    target = f", the target after {format_seconds(statistics.fmean(reached))}" if reached else ""
    times = f" ({len(reached)} of {len(runs)} times)" if reached and len(reached) < len(runs) else ""
    return f"{statistics.fmean(run.metric for run in ended):.3g}{target}{times}"


def mean_cost(runs: Sequence[Run]) -> float:
    return statistics.fmean(run.cost for run in runs)


def best_candidate(runs: Mapping[Candidate, Sequence[Run]], today: Candidate) -> Candidate:
    """In the mean over their starts: of those that come to the target almost together the one that is best in the end;
    today's setting unless another is clearly sooner."""
    cost = {candidate: mean_cost(ran) for candidate, ran in runs.items() if ran}
    least = min(cost.values(), default=math.inf)
    if least == math.inf:
        return today
    together = [one for one in cost if cost[one] <= least + COMPARISON.together_share * abs(least)]
    by_end = min(together, key=lambda candidate: statistics.fmean(run.remaining for run in runs[candidate]))
    if cost[today] == math.inf:
        return by_end
    in_order = (by_end, *sorted(cost, key=lambda candidate: cost[candidate]))
    return next((candidate for candidate in in_order if _clearly_beats(runs, candidate, today)), today)


def _clearly_beats(runs: Mapping[Candidate, Sequence[Run]], candidate: Candidate, today: Candidate) -> bool:
    """In the mean by more than a little, and from every start: of several that are no better one is lucky."""
    ours, theirs = ([run.cost for run in runs[one]] for one in (candidate, today))
    share = COMPARISON.clear_loss_share
    if runs[today][0].target is not NO_TARGET:
        share = COMPARISON.clear_time_share * COMPARISON.num_starts / len(ours)
    margin = share * abs(statistics.fmean(theirs))
    return statistics.fmean(ours) < statistics.fmean(theirs) - margin and all(map(operator.lt, ours, theirs))


def ranked(runs: Iterable[Run]) -> list[Run]:
    """By their ranks; but of those that came to the target almost together the best in the end comes first."""
    ordered = sorted(runs, key=lambda run: run.rank)
    first_s = ordered[0].target_s if ordered else None
    if first_s is None:
        return ordered
    together = [run for run in ordered if run.rank <= (0, (1 + COMPARISON.together_share) * first_s)]
    best = min(together, key=lambda run: run.remaining)
    return [best, *(run for run in ordered if run is not best)]


def is_near_one_of(candidate: Candidate, others: Iterable[Candidate]) -> bool:
    """Whether one of the others has this batch, at a rate so near that it would be the same run again."""
    near = COMPARISON.same_rate_factor
    return any(candidate.batch == other.batch and other.lr / near < candidate.lr < near * other.lr for other in others)


def is_hopeless(run: Run, leader: Run | None, excess_share: float) -> bool:
    """Halfway, and far behind where the leader was then."""
    half = COMPARISON.num_evaluations // 2
    if leader is None or leader.gave_up or len(run.evaluations) != half or len(leader.evaluations) < half:
        return False
    then = replace(leader, evaluations=leader.evaluations[:half])
    return run.target_s is None and run.remaining > then.remaining_plus(excess_share)


def is_beaten(run: Run, leader: Run | None) -> bool:
    """Whether the leader was at the target long before."""
    if leader is None or leader.target_s is None:
        return False
    late_s = (1 + COMPARISON.together_share) * leader.target_s
    return run.target_s is None and run.evaluations[-1][0] > late_s
