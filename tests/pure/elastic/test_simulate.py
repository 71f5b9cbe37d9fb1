"""The simulator against what can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from outcore.elastic.simulate import (
    Costs,
    fit_message_costs,
    replay_sync,
    scale,
    simulate,
    tree_rounds,
    with_network,
)
from outcore.errors import ElasticError

STEADY = Costs(
    latency_s=1e-4, s_per_byte=1e-9, add_s_per_byte=0.0, step_s=0.01, step_spread_s=0.0, message_bytes=1_000_000
)


def test_one_worker_has_nothing_to_wait_for() -> None:
    for level in (1, 2, 3):
        alone = simulate("sync-easgd", 1, STEADY, level=level)
        assert alone.efficiency == pytest.approx(1.0)
        assert alone.communication_share == 0.0


def test_levels_by_hand() -> None:
    """Two rounds of 1.1 ms after 4 steps of 10 ms: level 2 pays them, level 1 twice, level 3 hides them."""
    two, one, three = (simulate("sync-easgd", 4, STEADY, level=level) for level in (2, 1, 3))
    assert two.s_per_step == pytest.approx((0.04 + 2 * 0.0011) / 4)
    assert one.s_per_step == pytest.approx((0.04 + 4 * 0.0011) / 4)
    assert three.s_per_step == pytest.approx(0.01)


def test_replayed_steps_by_hand() -> None:
    """A worker that is late by less than a step holds nobody up where the exchange overlaps with one."""
    steps_s = np.array([[[1.0, 1.0, 1.0, 1.0]] * 2, [[1.0, 1.0, 1.5, 1.0], [1.0, 1.0, 1.0, 1.0]]])
    ends_s, waited_s = replay_sync(steps_s, 0.0, overlaps=False)
    assert ends_s.tolist() == [8.5, 8.5]
    assert waited_s == pytest.approx(0.5 / 2)
    ends_s, waited_s = replay_sync(steps_s, 0.0, overlaps=True)
    assert ends_s.tolist() == [8.0, 8.5]
    assert waited_s == 0.0


def test_round_robin_is_bound_by_its_centre() -> None:
    """64 workers, 2.2 ms each in turn: the centre needs 141 ms for a round that computes 40 ms."""
    many = simulate("original-easgd", 64, STEADY, num_periods=30)
    assert many.s_per_step == pytest.approx(64 * 0.0022 / 4, rel=0.05)
    few = simulate("original-easgd", 2, STEADY)
    assert few.efficiency > 0.85


def test_first_come_first_served_beats_turns_when_steps_vary() -> None:
    uneven = Costs(1e-4, 1e-9, 0.0, 0.01, 0.008, 1_000_000)
    free, turns = simulate("async-easgd", 8, uneven), simulate("original-easgd", 8, uneven)
    assert free.s_per_step < turns.s_per_step


def test_thousands_of_workers_wait_for_the_slowest() -> None:
    uneven = Costs(1e-6, 1e-10, 0.0, 0.01, 0.002, 1_000_000)
    curve = scale("sync-easgd", [1, 64, 4352], uneven)
    assert curve[0].efficiency > curve[1].efficiency > curve[2].efficiency > 0.3


def test_a_faster_network_helps() -> None:
    slow, fast = STEADY, with_network(STEADY, 7e-7, 2e-10)
    assert simulate("sync-sgd", 64, fast, period=1).efficiency > simulate("sync-sgd", 64, slow, period=1).efficiency


def test_the_fit_gives_back_the_costs() -> None:
    sizes = [1000, 10_000, 1_000_000, 10_000_000]
    latency_s, s_per_byte = fit_message_costs(sizes, [5e-5 + 4e-10 * size for size in sizes])
    assert latency_s == pytest.approx(5e-5)
    assert s_per_byte == pytest.approx(4e-10)
    assert fit_message_costs([1000, 2000], [1e-3, 1e-3])[1] == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(ElasticError, match="two sizes"):
        fit_message_costs([10, 10], [1.0, 1.0])


@pytest.mark.parametrize(("num", "rounds"), [(1, 0), (2, 1), (3, 3), (4, 2), (8, 3), (12, 5), (4352, 14)])
def test_rounds_of_the_tree(num: int, rounds: int) -> None:
    assert tree_rounds(num) == rounds


def test_large_sums_take_two_vectors_time_however_many_workers() -> None:
    costs = Costs(0.0, 1e-9, 0.0, 1.0, 0.0, 100 << 20)
    assert costs.sum_s(2) == pytest.approx(costs.message_s())
    assert costs.sum_s(1024) == pytest.approx(2 * costs.message_s(), rel=0.01)
    assert costs.sum_s(3) > costs.sum_s(4)  # the third is folded in first
    small = replace(costs, message_bytes=1 << 20)
    assert small.sum_s(1024) == pytest.approx(10 * small.message_s())
