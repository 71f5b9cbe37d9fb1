"""Short trainings of candidate settings, and how they are ranked.

A run is a complete small training: its rate falls to zero over its last third. At a constant rate an evaluation would
show the noise of a high rate rather than what was learnt. Its seconds are computed from the throughput curve and not
measured, so that load on the machine during a run does not affect the ranking.
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
    """A setting to compare; `step_s` is the time of its effective batch in a training, in seconds."""

    name: str
    batch: int
    lr: float
    step_s: float
    beta2: float | None = None
    warms_up: bool = True  # initial weights tolerate lower rates than later ones
    factor: float = 1.0  # of the rate, relative to that of the setting named `name`

    def at_rate(self, factor: float) -> Candidate:
        return replace(self, lr=self.lr * factor, factor=self.factor * factor)

    @property
    def description(self) -> str:
        how = "" if math.isclose(self.factor, 1) else f" at {self.factor:.2g} times the rate"
        return f"{self.name}{how} (batch {self.batch}, rate {self.lr:.3g})"


@dataclass(frozen=True)
class Run:
    """A candidate with the metrics during a training of `run_s` seconds."""

    candidate: Candidate
    run_s: float
    target: Target
    evaluations: tuple[tuple[float, float], ...]  # seconds, metric
    num_warm_up_steps: int = 0
    gave_up: bool = False
    start: int = 0  # index of the initial weights and the order of the data

    @property
    def metric(self) -> float:
        return self.evaluations[-1][1]

    @property
    def remaining(self) -> float:
        """The remaining error; smaller is better."""
        remaining = self.target.remaining(self.metric)
        return -self.metric if remaining is None else remaining

    @property
    def target_s(self) -> float | None:
        """Seconds to the target, interpolated between evaluations; None if it was not reached or there is none."""
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
        """The sort key: runs that reached the target by their seconds, others by what remains, stopped ones last."""
        if self.gave_up:
            return 2, 0.0
        return (1, self.remaining) if self.target_s is None else (0, self.target_s)

    @property
    def remaining_at_target(self) -> float:
        """The remaining error at the target; without a target no value suffices."""
        return -math.inf if self.target is NO_TARGET else self.target.remaining(self.target.value) or 0.0

    def remaining_plus(self, share: float) -> float:
        """Returns the remaining error increased by a share. Values below that of the target are not distinguished."""
        least = max(self.remaining, self.remaining_at_target)
        return least + share * abs(least)

    @property
    def cost(self) -> float:
        """The number that is averaged over starts: seconds to the target; without one, the remaining error."""
        if self.gave_up:
            return math.inf
        if self.target is NO_TARGET:
            return self.remaining
        if self.target_s is not None:
            return self.target_s
        further = self.remaining / max(self.remaining_at_target, 1e-9)
        return max(COMPARISON.not_reached_factor, further) * self.evaluations[-1][0]


def mean_description(runs: Sequence[Run]) -> str:
    """Returns the results of one candidate's runs in words."""
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
    """Returns the best candidate in the mean over its starts: among those that reach the target at about the same time,
    the one with the best final metric; today's setting unless another is clearly faster."""
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
    """Whether a candidate wins in the mean by a margin, and from every start, because the best of several equal ones
    is only lucky."""
    ours, theirs = ([run.cost for run in runs[one]] for one in (candidate, today))
    share = COMPARISON.clear_loss_share
    if runs[today][0].target is not NO_TARGET:
        share = COMPARISON.clear_time_share * COMPARISON.num_starts / len(ours)
    margin = share * abs(statistics.fmean(theirs))
    return statistics.fmean(ours) < statistics.fmean(theirs) - margin and all(map(operator.lt, ours, theirs))


def ranked(runs: Iterable[Run]) -> list[Run]:
    """Returns the runs by rank; among those that reach the target at about the same time, the best at its end first."""
    ordered = sorted(runs, key=lambda run: run.rank)
    first_s = ordered[0].target_s if ordered else None
    if first_s is None:
        return ordered
    together = [run for run in ordered if run.rank <= (0, (1 + COMPARISON.together_share) * first_s)]
    best = min(together, key=lambda run: run.remaining)
    return [best, *(run for run in ordered if run is not best)]


def is_near_one_of(candidate: Candidate, others: Iterable[Candidate]) -> bool:
    """Whether one of the others has the same batch at nearly the same rate, so that the run would be redundant."""
    near = COMPARISON.same_rate_factor
    return any(candidate.batch == other.batch and other.lr / near < candidate.lr < near * other.lr for other in others)


def is_hopeless(run: Run, leader: Run | None, excess_share: float) -> bool:
    """Whether a run at half time is far behind where the leader was at that point."""
    half = COMPARISON.num_evaluations // 2
    if leader is None or leader.gave_up or len(run.evaluations) != half or len(leader.evaluations) < half:
        return False
    then = replace(leader, evaluations=leader.evaluations[:half])
    return run.target_s is None and run.remaining > then.remaining_plus(excess_share)


def is_beaten(run: Run, leader: Run | None) -> bool:
    """Whether the leader reached the target much earlier."""
    if leader is None or leader.target_s is None:
        return False
    late_s = (1 + COMPARISON.together_share) * leader.target_s
    return run.target_s is None and run.evaluations[-1][0] > late_s
