"""Compares today's setting with the advice by short trainings, and returns the one that reaches the target first.

Noise scales and range tests are theory and short measurements. Before they change the user's setting, settings are
compared by training: from the same weights, with the data in the same order, for the same seconds of compute. They are
judged on samples that none of them trains on, by the target's metric (by the loss, if there is no target). The
candidates are today's setting, the advice at several rates, today's batch at a higher rate, and the advice with half
and a quarter of its batch at the best of its rates.

The number of candidates shrinks while runs get longer: the better half continues with twice the seconds, together with
rates between those that ran. Once the target is reached, runs are not longer than that takes, and the first to reach it
wins (among those that reach it at about the same time, the one with the best final metric). If the target is not
reached in the time allowed, the one closest to it wins.

Successive halving is from Jamieson and Talwalkar, arXiv 1502.07943. Here every run starts from the beginning, because a
training whose rate has fallen to zero cannot continue, and each round adds new candidates. A single start says little
(on MNIST the same setting reached 93 % after 1.6 s and after 3.6 s), and the best of many candidates may only be lucky.
Therefore runs stop growing only when the leader reaches the target from other starts too (other weights, another order
of the data). The best few and today's setting then run from these starts, and the setting is changed only for one that
is faster from every start, and by a tenth in the mean. The advised length is determined by the worst start: a training
that is too short costs another round (schedule.py), one that is too long costs little.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from outcore.tuning.settings import SETTINGS
from outcore.tuning.trainings.runs import (
    Candidate,
    Run,
    best_candidate,
    is_near_one_of,
    mean_cost,
    mean_description,
    ranked,
)
from outcore.tuning.trainings.target import NO_TARGET
from outcore.tuning.trainings.trainer import TrainingRuns
from outcore.tuning.trainings.trial import num_evaluated
from outcore.units import format_seconds

COMPARISON = SETTINGS.comparison


def longest_step_s(limit_s: float) -> float:
    """Returns the longest step, in seconds, with which a candidate can be compared in `limit_s` seconds for all
    runs."""
    return limit_s / COMPARISON.min_candidates / COMPARISON.min_steps


@dataclass
class Comparison:
    """Rounds of growing runs, then a final from several starts."""

    history: TrainingRuns
    run_s: float = 0.0  # seconds of compute for each run of this round
    final: dict[Candidate, list[Run]] = field(default_factory=dict)
    today: Candidate | None = None

    def winner(self, today: Candidate, advised: Sequence[Candidate], limit_s: float) -> Run | None:
        """Returns the winner's median run; None if `limit_s` seconds are too few. `advised` begins with the advice.

        If the time is over before the target is reached, but a run that reaches it would not be much longer, the time
        is doubled. Otherwise the highest rates would win, which are closest to a target that nobody reaches, but reach
        it late.
        """
        slowest_s = max(today.step_s, *(candidate.step_s for candidate in advised))
        if slowest_s > longest_step_s(limit_s):
            return None
        num_samples, min_run_s = self.history.trainer.samples.num, COMPARISON.min_steps * slowest_s
        longest_s = max(COMPARISON.max_epochs * (num_samples or math.inf) / today.batch * today.step_s, slowest_s)
        self.run_s = max(min(limit_s * COMPARISON.first_run_share, longest_s), min_run_s)
        last_round = in_order = self._round(self._first_candidates(today, advised), limit_s)
        most_s = limit_s
        while last_round and len(self.history.runs) < COMPARISON.max_runs:
            target_s = self._slowest_target_s(last_round[0], most_s)
            guess_s, num_before = self.length_s(last_round[0]), len(self.history.runs)
            run_s = self._next_run_s(target_s, guess_s, longest_s, min_run_s)
            if target_s is None:
                has_time = self.history.has_time(run_s, most_s) and run_s <= _longest_final_run_s(most_s)
                enough_s = math.inf if guess_s is None else guess_s / COMPARISON.min_length_factor
                extended_s = COMPARISON.extension_factor * limit_s
                is_near = enough_s <= min(longest_s, _longest_final_run_s(extended_s))
                most_s = extended_s if is_near and not has_time and not self.history.is_late(most_s) else most_s
                run_s = max(self.run_s, min(run_s, _longest_final_run_s(most_s)))
            self.run_s = run_s
            this_round = self._round(self._next_candidates(last_round, today), most_s)
            nothing_ran = len(self.history.runs) == num_before
            if nothing_ran or (target_s is not None and this_round[0].target_s is None):
                break
            last_round, in_order = this_round, [*this_round, *in_order]
        self.run_s = in_order[0].run_s if in_order else self.run_s  # shorter runs did not reach the target
        return self.run_final(in_order, today, self.history.spent_s + most_s)

    def _slowest_target_s(self, leader: Run, limit_s: float) -> float | None:
        """Returns the seconds to the target from the slowest start; None if it is not reached from all starts. The
        fastest of many runs may only be lucky, and would make all further runs too short."""
        slowest_s = leader.target_s
        for start in range(1, COMPARISON.num_starts):
            known = self.history.known(leader.candidate, self.run_s, start)
            if slowest_s is None or (known is None and not self.history.has_time(self.run_s, limit_s)):
                break
            run = known or self.history.run(leader.candidate, self.run_s, limit_s, start=start)
            slowest_s = None if run.target_s is None else max(slowest_s, run.target_s)
        return slowest_s

    def run_final(self, in_order: Sequence[Run], today: Candidate, limit_s: float) -> Run:
        """Runs the best few and today's setting from further starts: fewer settings if time is short, and a single
        start each if there is no time at all."""
        history, num_starts = self.history, COMPARISON.num_starts
        going = list(dict.fromkeys(run.candidate for run in in_order if not run.gave_up))
        best = sorted(going, key=history.is_below_a_failure)[: COMPARISON.num_finalists]
        if history.spent_s + num_starts * len({*best, today}) * self.run_s > limit_s:  # starts are worth more
            others = [candidate for candidate in best if candidate != today]
            known = [one for one in others if (run := history.known(one, self.run_s)) and not run.gave_up]
            best = known or others[:1]
        runs: dict[Candidate, list[Run]] = {candidate: [] for candidate in dict.fromkeys([*best, today])}
        self.final, self.today = dict(runs), today
        for start in range(num_starts):
            num = (limit_s - history.spent_s) / ((num_starts - start) * self.run_s)
            runs = _best_so_far(runs, today, max(2, int(num))) if start else runs
            is_over = history.spent_s + len(runs) * self.run_s > limit_s or history.is_late(limit_s)
            if len(runs) == 1 or (start and is_over):
                break
            for candidate, ran in runs.items():
                known_run = history.known(candidate, self.run_s, start)
                ran.append(known_run or history.run(candidate, self.run_s, limit_s, start=start))
        winning = sorted(runs[best_candidate(runs, today)], key=lambda run: run.cost)
        return winning[len(winning) // 2] if winning else in_order[0]

    def _next_run_s(self, target_s: float | None, guess_s: float | None, longest_s: float, least_s: float) -> float:
        """Returns the seconds of each run in the next round: twice as many, or fewer if fewer should suffice. Once the
        target was reached they are just above that time, unless that is about the same as before."""
        if target_s is None:
            enough_s = max(guess_s or math.inf, COMPARISON.shorter_factor * self.run_s)
            return max(self.run_s, min(2 * self.run_s, enough_s, longest_s))
        shorter_s = max(COMPARISON.shorter_factor * target_s, least_s)
        return shorter_s if COMPARISON.shorter_factor * shorter_s < self.run_s else self.run_s

    def length_s(self, winner: Run) -> float | None:
        """Returns the seconds of a training that ends beyond the target, as another start may be worse; None: unknown.

        The remaining error of the winner's worst start is extrapolated, not too far, along the line of the lowest
        remaining error over run lengths. A run that reached the target is extended by a quarter to a half, an
        extrapolated length by a quarter. Both are extended further by the uncertainty of the held-out samples.
        """
        history, target = self.history, self.history.target
        ended = self.final.get(winner.candidate) or self._all_starts_of(winner)
        if any(run.gave_up for run in ended):
            return None
        worst = max(ended, key=lambda run: run.remaining)
        lengths = sorted({run.run_s for run in history.runs})
        least = [
            min((run.remaining for run in history.runs if run.run_s == run_s and not run.gave_up), default=0.0)
            for run_s in lengths
        ]
        held_out_error = target.held_out_error(num_evaluated(history.trainer.samples, history.trainer.validation))
        wanted = (1 - COMPARISON.beyond_target_share) * (target.remaining(target.value) or 0.0)
        reached = target is not NO_TARGET and target.reached(worst.metric)
        shortest, longest = COMPARISON.min_length_factor, COMPARISON.max_length_factor
        times = shortest if reached and worst.remaining <= 0 else math.inf
        if len(lengths) > 1 and min(wanted, worst.remaining, *least) > 0:
            slope, _ = np.polyfit(np.log(lengths), np.log(least), 1)
            min_slope = SETTINGS.training.min_slope
            times = (wanted / worst.remaining) ** (1 / slope) if slope < -min_slope else math.inf
        if not reached and not times < COMPARISON.max_extrapolation:
            return None
        times = min(max(times, shortest), longest) if reached else shortest * max(times, 1.0)
        return (1 + held_out_error) * times * winner.run_s

    def _all_starts_of(self, run: Run) -> list[Run]:
        """Returns the runs of the same candidate and length from every start."""
        wanted = run.candidate, run.run_s
        return [one for one in self.history.runs if (one.candidate, one.run_s) == wanted] or [run]

    def best_of_other_batches(self, winner: Candidate) -> list[Candidate]:
        """Returns the best candidate of each other batch by its longest runs, those closest to the leader first."""
        ended = [run for run in self.history.runs if not run.gave_up]
        least = {run.run_s: min(one.remaining for one in ended if one.run_s == run.run_s) for run in ended}
        best: dict[int, Run] = {}
        for run in sorted(ended, key=lambda run: (-run.run_s, run.remaining)):
            if run.candidate.batch != winner.batch:
                best.setdefault(run.candidate.batch, run)
        return [run.candidate for run in sorted(best.values(), key=lambda run: run.remaining - least[run.run_s])]

    # -- candidates ---------------------------------------------------------------------------------------------------

    def _first_candidates(self, today: Candidate, advised: Sequence[Candidate]) -> Iterator[Candidate]:
        """Yields candidates, the most likely winners first: with long steps there is no time for all of them."""
        yield today
        step, runs = COMPARISON.rate_step, self.history.runs
        advice, *others = advised
        for factor in (1.0, step, 1 / step, step**2):
            if not is_near_one_of(advice.at_rate(factor), [today]):
                yield advice.at_rate(factor)
        higher = replace(today.at_rate(math.sqrt(step)), warms_up=True)
        if not is_near_one_of(higher, [run.candidate for run in runs]):
            yield higher
        at_rates = sorted((run for run in runs if run.candidate.name == advice.name), key=lambda run: run.rank)
        factor = at_rates[0].candidate.factor if at_rates else 1.0
        for other in others:
            if not is_near_one_of(other.at_rate(factor), [today]):
                yield other.at_rate(factor)

    def _round(self, candidates: Iterable[Candidate], limit_s: float) -> list[Run]:
        """Runs all candidates that there is time for; returns them ranked. Known runs of this length are reused."""
        done: list[Run] = []
        for candidate in candidates:
            known = self.history.known(candidate, self.run_s)
            if known is None and not self.history.has_time(self.run_s, limit_s):
                continue
            leader = min(done, key=lambda run: run.rank, default=None)
            done.append(known or self.history.run(candidate, self.run_s, limit_s, leader=leader))
        return ranked(done)

    def _next_candidates(self, last_round: Sequence[Run], today: Candidate) -> list[Candidate]:
        """Returns the better half, today's setting unless it is far behind, and rates next to the leader's."""
        going = [run.candidate for run in last_round[: math.ceil(COMPARISON.kept_share * len(last_round))]]
        leader, step, runs = last_round[0], COMPARISON.rate_step, self.history.runs
        far = leader.remaining_plus(COMPARISON.behind_share)
        still_in = [run.candidate for run in last_round if run.candidate == today and run.remaining <= far]
        highest = max(run.candidate.lr for run in runs if run.candidate.batch == leader.candidate.batch)
        up = step if leader.candidate.lr >= highest else math.sqrt(step)
        factors = (up, 1 / math.sqrt(step)) if leader.candidate != today else ()
        beside = [leader.candidate.at_rate(factor) for factor in factors]
        new = [candidate for candidate in beside if not is_near_one_of(candidate, [run.candidate for run in runs])]
        return list(dict.fromkeys([leader.candidate, *still_in, *new, *going]))

    # -- words --------------------------------------------------------------------------------------------------------

    def description(self, winner: Run) -> str:
        """Returns what was compared, and the results, in words."""
        history, trainer = self.history, self.history.trainer
        final = {candidate: runs for candidate, runs in self.final.items() if runs} or {winner.candidate: [winner]}
        by_cost = sorted(final, key=lambda candidate: mean_cost(final[candidate]))
        ended = "; ".join(f"{one.description} {mean_description(final[one])}" for one in by_cost)
        gave_up = list(dict.fromkeys(run.candidate.description for run in history.runs if run.gave_up))
        who_gave_up = f"; {' and '.join(gave_up[:2])}{' and others' if len(gave_up) > 2 else ''} gave up"
        stays = ", which stays: nothing was clearly better every time" if winner.candidate == self.today else ""
        num_starts = [len(runs) for runs in final.values()]
        fewer, most = f"{min(num_starts)} to " * (min(num_starts) < max(num_starts)), max(num_starts)
        return (
            f"raced from the same start{'s' * trainer.starts_differ}: {len(history.runs)} runs with "
            f"{format_seconds(history.spent_s)} of compute in all, each a training whose rate falls to zero over its "
            f"last third; by {history.target.metric_name} on held-out samples, in the mean over "
            f"{fewer}{trainer.starts_description(most)}: {ended}{who_gave_up if gave_up else ''}; the winner is "
            f"{winner.candidate.description}{stays}"
        )


def _longest_final_run_s(limit_s: float) -> float:
    """Returns the longest run with which the best and today's setting can run from every start in `limit_s` seconds."""
    return limit_s / (2 * COMPARISON.num_starts)


def _best_so_far(runs: Mapping[Candidate, list[Run]], today: Candidate, num: int) -> dict[Candidate, list[Run]]:
    """Returns the best `num` candidates so far, always including today's setting."""
    others = sorted((one for one in runs if one != today), key=lambda one: mean_cost(runs[one]))
    return {candidate: runs[candidate] for candidate in (*others[: num - 1], today)}
