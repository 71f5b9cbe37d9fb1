"""Pools measured speeds that differ by less than their spread.

Two processes on one busy machine are measured at different times, and one may seem slower only because of other load in
the meantime. This module has numbers only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence


def pooled(levels: Sequence[float], spreads: Sequence[float]) -> list[float]:
    """Returns positive levels (seconds, or samples per second) in which equal ones are replaced by their geometric
    mean.

    Levels form a group if they differ from the group's first by no more than both spreads together. A spread is a share
    of its level. Groups are formed from the smallest level upwards.
    """
    in_order = sorted(range(len(levels)), key=lambda index: levels[index])
    groups: list[list[int]] = []
    for index in in_order:
        if groups and _are_alike(levels, spreads, groups[-1][0], index):
            groups[-1].append(index)
        else:
            groups.append([index])
    result = list(levels)
    for group in groups:
        mean = statistics.geometric_mean([levels[index] for index in group])
        for index in group:
            result[index] = mean
    return result


def _are_alike(levels: Sequence[float], spreads: Sequence[float], one: int, other: int) -> bool:
    """Compares on a logarithmic scale: with a spread of 1 the level may as well be half or twice as high."""
    apart = abs(math.log(levels[one] / levels[other]))
    return apart <= math.log1p(spreads[one]) + math.log1p(spreads[other])
