"""Statistics of interleaved steps: which batches are still undecided, and the seconds of a step of each.

The speed of a shared machine changes from one second to the next. Batches that are compared therefore run one step each
in turn, so that a disturbance slows down all of them alike. This module has numbers only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from outcore.tuning.settings import SETTINGS

TIMING = SETTINGS.timing


def undecided(times: Mapping[int, Sequence[float]]) -> list[int]:
    """Returns the batches that may still have the fewest seconds per sample; none if that is decided."""
    if min(map(len, times.values())) < TIMING.min_rounds:
        return [*times]
    longest = [batch for batch in times if len(times[batch]) == max(map(len, times.values()))]
    best = min(longest, key=lambda batch: statistics.fmean(times[batch]) / batch)
    least_s = statistics.fmean(times[best]) / best
    candidates, is_decided = [best], True
    for batch in longest:
        behind = [theirs / batch - ours / best for theirs, ours in zip(times[batch], times[best])]
        error = statistics.stdev(behind) / math.sqrt(len(behind))
        if batch != best and statistics.fmean(behind) < 2 * error:
            candidates.append(batch)
            is_decided = is_decided and error < TIMING.decided_share * least_s
    return [] if is_decided else candidates


def seconds_of_rounds(times: Mapping[int, Sequence[float]]) -> list[float]:
    """Returns the seconds of each batch. Its ratio to the batch with the most rounds comes from the rounds they share;
    the minimum of all timings gives the speed of the undisturbed machine."""
    first = max(times.values(), key=len)
    undisturbed = statistics.fmean(min(taken) / statistics.fmean(taken) for taken in times.values())
    share = undisturbed * statistics.fmean(first)
    return [share * statistics.fmean(taken) / statistics.fmean(first[: len(taken)]) for taken in times.values()]


def in_proportion(times: Sequence[Sequence[float]], least_s: Sequence[float]) -> list[float]:
    """Returns the seconds of several batches from rounds that all of them ran: slowdowns of whole rounds do not count.
    The level is that of the minimum that each batch ever took."""
    rounds = [statistics.geometric_mean(taken) for taken in zip(*times)]
    shares = [statistics.median(step_s / round_s for step_s, round_s in zip(taken, rounds)) for taken in times]
    whole = statistics.geometric_mean(least_s) / statistics.geometric_mean(shares)
    return [whole * share for share in shares]


def spread(times: Sequence[float]) -> float:
    """Returns how far repeated timings differ, as a share of their median: from the minimum to the upper quartile.

    Noise only adds time, so the minimum is the best estimate; a single disturbance above the upper quartile does not
    count.
    """
    if len(times) < 2:
        return 0.0
    ordered = sorted(times)
    upper = ordered[math.ceil(0.75 * len(ordered)) - 1]
    return (upper - ordered[0]) / statistics.median(ordered)
