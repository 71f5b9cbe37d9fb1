"""Differences between workers that are smaller than the spread of their timings do not count."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from outcore.tuning.throughput.timing import spread
from outcore.tuning.workers.pooling import pooled
from outcore.tuning.workers.split import Worker, WorkerGroup, without_noise

SIZES = (1, 8, 64)


def worker(sample_s: float, spread: float) -> Worker:
    return Worker(SIZES, tuple(sample_s * size for size in SIZES), 0.0, 64, spread)


def test_levels_within_their_spreads_become_one() -> None:
    assert pooled([1.0, 1.2, 3.0], [0.1, 0.1, 0.1]) == pytest.approx([math.sqrt(1.2)] * 2 + [3.0])
    assert pooled([1.0, 1.2], [0.05, 0.05]) == [1.0, 1.2]
    assert pooled([5.0, 1.0], [math.inf, 0.0]) == pytest.approx([math.sqrt(5.0)] * 2)
    assert pooled([1.0, 1.2, 1.44, 1.73], [0.1] * 4)[3] > 1.2  # a chain of neighbours does not make its ends alike


@pytest.mark.parametrize(("spread", "shares"), [(2.0, (32, 32)), (0.05, (55, 9))])
def test_a_worker_that_seems_six_times_slower_gets_less_only_if_that_is_known(
    spread: float, shares: tuple[int, int]
) -> None:
    group = WorkerGroup(without_noise([worker(1e-3, spread), worker(6e-3, spread)]), 0.0)
    assert group.keep(64).shares == shares


def test_equal_parts_are_taken_where_they_are_slower_by_no_more_than_the_spread() -> None:
    uneven = replace(worker(1e-3, 0.08), sizes_s=(1.1e-3, 8.9e-3, 64e-3))
    assert WorkerGroup((worker(1e-3, 0.0), uneven), 0.0).keep(64).shares == (32, 32)


def test_the_spread_of_timings_leaves_a_single_hiccup_out() -> None:
    assert spread([1.0]) == 0.0
    assert spread([1.0, 1.0, 1.0, 1.0, 9.0]) == 0.0
    assert spread([1.0, 1.2, 1.1, 1.3]) == pytest.approx(0.2 / 1.15)
