"""Seconds of batches that took turns -> which go on, and what each is said to take."""

from __future__ import annotations

import random

import pytest

from outcore.tuning.throughput.timing import TIMING, seconds_of_rounds, undecided

TRUE_S = {
    32: 0.0571,
    48: 0.0808,
    64: 0.106,
    79: 0.129,
}  # a small ResNet on one core: 560, 594, 604, 613 samples a second


def turns(noise: float, seed: int) -> dict[int, list[float]]:
    """As `Bench.run_interleaved` makes them, on a machine that is slower by some share from moment to moment."""
    drawn, times = random.Random(seed), dict[int, list[float]]({batch: [] for batch in TRUE_S})
    while (going := undecided(times)) and len(times[going[0]]) < TIMING.max_rounds:
        pace = 1 + noise * drawn.random()  # of the round
        for batch in going:
            times[batch].append(TRUE_S[batch] * pace * (1 + noise * drawn.random()))
    return times


def test_where_nothing_disturbs_the_least_rounds_do() -> None:
    times = turns(0.0, 0)
    assert {len(taken) for taken in times.values()} == {TIMING.min_rounds}
    assert seconds_of_rounds(times) == pytest.approx(list(TRUE_S.values()))


def test_a_noisy_machine_hardly_ever_costs_three_percent() -> None:
    best, lost = max(batch / second for batch, second in TRUE_S.items()), []
    for seed in range(300):
        times = turns(0.4, seed)
        rates = {batch: batch / second for batch, second in zip(times, seconds_of_rounds(times))}
        taken = max(rates, key=lambda batch: rates[batch])
        lost.append(1 - taken / TRUE_S[taken] / best)
    assert sum(share > 0.035 for share in lost) < 0.05 * len(lost)


def test_who_is_clearly_slower_takes_no_further_turns() -> None:
    times = turns(0.15, 1)
    assert len(times[32]) < len(times[79])


def test_one_alone_needs_no_more_than_the_least() -> None:
    assert undecided({8: [1.0] * (TIMING.min_rounds - 1)}) == [8]
    assert undecided({8: [1.0] * TIMING.min_rounds}) == []
