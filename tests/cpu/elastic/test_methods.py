"""Every method against its NumPy reference, over real gloo connections, and the invariants of the equations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from outcore.elastic.place import poll
from outcore.elastic.settings import Settings
from outcore.elastic.sync_averagers import ElasticSync
from outcore.elastic.wire import PeerLost
from outcore.elastic.worker import Worker
from outcore.errors import ElasticError

from . import reference
from .town import Array, Net, Town, center_of, train, weights_of

pytestmark = pytest.mark.timeout(60)


def run_sync(num: int, steps: int, **chosen: Any) -> tuple[list[Array], list[Array], list[Worker]]:
    town, settings = Town(num), Settings(limit_s=10, join_limit_s=20, **chosen)

    def act(rank: int) -> tuple[Array, Array, Worker]:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            train(worker, net, rank, range(steps))
            return weights_of(worker), center_of(worker), worker

    results = town.together(act)
    return [r[0] for r in results], [r[1] for r in results], [r[2] for r in results]


def run_in_order(order: list[int], num: int, **chosen: Any) -> tuple[list[Array], Array]:
    """Workers of the asynchronous methods, stepped one after the other so that arrivals have a known order."""
    town, settings = Town(num), Settings(limit_s=10, join_limit_s=20, **chosen)
    nets = [Net() for _ in range(num)]
    workers: list[Worker] = town.together(lambda rank: town.worker(rank, nets[rank], settings))
    for rank in order:
        train(workers[rank], nets[rank], rank, range(workers[rank].num_steps, workers[rank].num_steps + 1))
        assert poll(lambda: town.centers[0].num_exchanges >= num_posted(workers), 5)
    result = [weights_of(worker) for worker in workers], center_of(workers[0])
    for worker in workers:
        worker.close()
    return result


def num_posted(workers: list[Worker]) -> int:
    """Exchanges under way or done: overlapped ones are posted a step before they are due."""
    early = [int(worker.method.is_elastic and worker.method.order != "turns") for worker in workers]
    return sum((worker.num_steps + ahead) // worker.settings.period for worker, ahead in zip(workers, early))


def assert_same(got: tuple[list[Array], Array], expected: tuple[list[Array], Array]) -> None:
    np.testing.assert_allclose(np.array(got[0]), np.array(expected[0]), rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(got[1], expected[1], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize(("num", "period"), [(1, 1), (2, 2), (3, 1), (4, 3)])
def test_sync_easgd(num: int, period: int, level: int) -> None:
    steps = 3 * period + (1 if period > 1 else 0)  # ends inside a period, so that nothing is under way at the end
    weights, centers, _ = run_sync(num, steps, method="sync-easgd", period=period, level=level, alpha=0.9 / num)
    assert_same((weights, centers[0]), reference.elastic_sync(num, steps, period, 0.9 / num))
    for center in centers[1:]:
        np.testing.assert_array_equal(center, centers[0])


def train_and_diverge(worker: Worker, net: Net, rank: int, steps: int, lost: tuple[int, int]) -> None:
    """As `train`, but the gradient of rank lost[0] in step lost[1] (the first is 1) overflows."""
    for step in range(steps):
        net.loss(rank, step).backward()
        if (rank, step + 1) == lost and net.matrix.grad is not None:
            net.matrix.grad.fill_(float("inf"))
        worker.step()


def run_diverging(num: int, steps: int, lost: tuple[int, int], **chosen: Any) -> tuple[list[Array], Array]:
    town, settings = Town(num), Settings(limit_s=10, join_limit_s=20, **chosen)

    def act(rank: int) -> tuple[Array, Array]:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            train_and_diverge(worker, net, rank, steps, lost)
            return weights_of(worker), center_of(worker)

    results = town.together(act)
    return [weights for weights, _ in results], results[0][1]


@pytest.mark.filterwarnings("ignore:this worker's weights are no longer finite")
@pytest.mark.parametrize("level", [1, 2, 3])
def test_a_worker_that_diverges_abstains_and_starts_again_from_the_centre(level: int) -> None:
    got = run_diverging(3, 7, (1, 3), method="sync-easgd", period=2, level=level, alpha=0.3)
    assert_same(got, reference.elastic_sync(3, 7, 2, 0.3, lost=(1, 3)))


CENTERED = ["original-easgd", "async-easgd", "hogwild-easgd", "async-measgd", "eamsgd", "async-sgd", "async-msgd"]


@pytest.mark.filterwarnings("ignore:this worker's weights are no longer finite")
@pytest.mark.parametrize("method", [*CENTERED, "diloco"])
def test_one_diverged_worker_does_not_end_the_others(method: str) -> None:
    weights, center = run_diverging(2, 9, (1, 3), method=method, period=2)
    assert np.isfinite(weights).all()
    assert np.isfinite(center).all()


def test_everyone_diverged_is_an_error_and_not_a_result() -> None:
    with pytest.raises(ElasticError, match="lower the learning rate"):
        run_diverging(1, 7, (0, 3), method="sync-easgd", period=2)


def test_diloco() -> None:
    weights, centers, _ = run_sync(3, 8, method="diloco", period=2, outer_rate=0.7, mu=0.9)
    assert_same((weights, centers[0]), reference.diloco(3, 8, 2, 0.7, 0.9))


def test_the_sync_centre_step_is_diloco_without_momentum() -> None:
    """After one period from common weights the centre has moved by beta * mean difference in both."""
    _, outer, _ = run_sync(2, 3, method="diloco", period=2, outer_rate=0.9, mu=0.0)
    _, elastic, _ = run_sync(2, 4, method="sync-easgd", period=3, level=2, alpha=0.45)
    by_hand = reference.diloco(2, 2, 2, 0.9, 0.0)[1]
    np.testing.assert_allclose(outer[0], by_hand, rtol=1e-5)
    np.testing.assert_allclose(elastic[0], by_hand, rtol=1e-5)  # step 3 exchanges the weights of step 2


def test_sync_sgd() -> None:
    weights, centers, _ = run_sync(3, 5, method="sync-sgd", period=1)
    assert_same((weights, centers[0]), reference.sync_sgd(3, 5))
    np.testing.assert_array_equal(weights[0], weights[2])


ROUND_ROBIN = [0, 1, 2] * 4
ANY_ORDER = [2, 0, 0, 1, 2, 2, 1, 0, 1, 1, 2, 0, 0]


@pytest.mark.parametrize("turn", ["exchange", "iteration"])
def test_original_easgd(turn: str) -> None:
    town, settings = Town(3), Settings(method="original-easgd", period=1, turn=turn, limit_s=10)  # type: ignore[arg-type]

    def act(rank: int) -> Array:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            train(worker, net, rank, range(4))
            return weights_of(worker)

    results = town.together(act)  # free-running threads: the centre itself must keep the order
    assert_same(
        (results, town.centers[0].center.double().numpy()), reference.elastic_one_by_one(ROUND_ROBIN, 3, 1, 0.3)
    )


# `prepare` posts the next exchange at once, so with period 1 the centre would see the next arrival early: period 2
# keeps the exchange of the last round out of the compared state.
@pytest.mark.parametrize("method", ["async-easgd", "hogwild-easgd"])
def test_async_easgd_follows_the_order_of_arrival(method: str) -> None:
    order = [0, 1, 2] * 4
    got = run_in_order(order, 3, method=method, period=2, alpha=0.3)
    assert_same(got, overlapped(order, 3, 2, 0.3))


def test_async_measgd() -> None:
    order = [0, 1, 2] * 4
    got = run_in_order(order, 3, method="async-measgd", period=2, alpha=0.3, mu=0.9)
    assert_same(got, overlapped(order, 3, 2, 0.3, mu=0.9))


def test_eamsgd_takes_its_gradient_ahead() -> None:
    order = [0, 1, 2] * 4
    got = run_in_order(order, 3, method="eamsgd", period=2, alpha=0.3, mu=0.9)
    ahead = overlapped(order, 3, 2, 0.3, mu=0.9, look_ahead=True)
    assert_same(got, ahead)
    assert np.abs(ahead[1] - overlapped(order, 3, 2, 0.3, mu=0.9)[1]).max() > 1e-3  # not MEASGD


def overlapped(
    order: list[int], num: int, period: int, alpha: float, mu: float = 0.0, look_ahead: bool = False
) -> tuple[list[Array], Array]:
    """In rank order an exchange posted one step early meets the same centre: nobody is served in between."""
    return reference.elastic_one_by_one(order, num, period, alpha, mu, look_ahead)


@pytest.mark.parametrize(("method", "mu"), [("async-sgd", 0.0), ("async-msgd", 0.9), ("hogwild-sgd", 0.0)])
def test_async_sgd_family(method: str, mu: float) -> None:
    got = run_in_order(ANY_ORDER, 3, method=method, period=1, mu=mu)
    assert_same(got, reference.steps_one_by_one(ANY_ORDER, 3, mu))


def test_momentum_zero_is_the_plain_method() -> None:
    order = [0, 1] * 4
    plain = run_in_order(order, 2, method="async-easgd", period=2, alpha=0.4)
    for method in ("async-measgd", "eamsgd"):
        assert_same(run_in_order(order, 2, method=method, period=2, alpha=0.4, mu=0.0), plain)


def test_one_worker_sync_is_async_is_round_robin() -> None:
    sync = run_sync(1, 4, method="sync-easgd", period=2, alpha=0.5)
    for method in ("async-easgd", "original-easgd"):
        assert_same(run_in_order([0] * 4, 1, method=method, period=2, alpha=0.5), (sync[0], sync[1][0]))


def test_without_elasticity_workers_are_alone() -> None:
    weights, centers, _ = run_sync(2, 5, method="sync-easgd", period=1, level=2, alpha=0.0)
    alone = reference.elastic_sync(2, 5, 9, 0.0)
    assert_same((weights, centers[0]), alone)


@pytest.mark.parametrize("settings", [{"level": 1}, {"level": 2}, {"level": 3}, {"level": 2, "packed": False}])
def test_sync_repeats_bit_for_bit(settings: dict[str, Any]) -> None:
    """Twice the same, and the same at every level, packed or not: the order of every sum depends on ranks only."""
    kwargs: dict[str, Any] = {"method": "sync-easgd", "period": 2, "alpha": 0.2}
    base = run_sync(3, 7, **kwargs, level=2)
    other = run_sync(3, 7, **kwargs, **settings)
    for mine, theirs in zip([*base[0], *base[1]], [*other[0], *other[1]]):
        np.testing.assert_array_equal(mine, theirs)


def test_per_layer_sends_more_messages_and_the_same_numbers_async() -> None:
    order = [0, 1] * 4
    packed = run_in_order(order, 2, method="async-easgd", period=2)
    by_layer = run_in_order(order, 2, method="async-easgd", period=2, packed=False)
    np.testing.assert_array_equal(np.array(packed[0]), np.array(by_layer[0]))
    np.testing.assert_array_equal(packed[1], by_layer[1])


def test_rounded_exchange_keeps_replicas_of_the_centre_equal() -> None:
    for num in (2, 3, 5):
        exact = run_sync(num, 5, method="sync-easgd", period=2)
        _, centers, _ = run_sync(num, 5, method="sync-easgd", period=2, wire_dtype=torch.bfloat16)
        for center in centers:
            np.testing.assert_array_equal(center, centers[0])
        np.testing.assert_allclose(centers[0], exact[1][0], atol=5e-3)
        assert np.abs(centers[0] - exact[1][0]).max() > 0


def test_ring_sum_agrees_with_the_tree() -> None:
    tree = run_sync(3, 5, method="sync-easgd", period=2)
    ring = run_sync(3, 5, method="sync-easgd", period=2, reduction="ring")
    np.testing.assert_allclose(tree[1][0], ring[1][0], rtol=1e-5)


def centers_while_under_way(level: int) -> list[list[Array]]:
    """The centre a worker reads after each step; at level 3 the next exchange has ended in its thread by then."""
    town, settings = Town(3), Settings(method="sync-easgd", period=1, level=level, limit_s=10)  # type: ignore[arg-type]

    def act(rank: int) -> list[Array]:
        net, seen = Net(), []
        with town.worker(rank, net, settings) as worker:
            for step in range(5):
                train(worker, net, rank, range(step, step + 1))
                averager = worker._averager
                assert isinstance(averager, ElasticSync)
                if level == 3:
                    assert averager.exchange._running is not None
                    averager.exchange._running.result(10)
                seen.append(center_of(worker))
        return seen

    results: list[list[Array]] = town.together(act)
    return results


def test_the_centre_is_read_whole_while_an_exchange_moves_it() -> None:
    np.testing.assert_array_equal(centers_while_under_way(3), centers_while_under_way(2))


def test_a_member_lost_after_the_centre_was_moved_leaves_the_old_one(monkeypatch: pytest.MonkeyPatch) -> None:
    town, settings = Town(1), Settings(method="sync-easgd", period=1, level=3, alpha=0.3, limit_s=5)
    move, lose = ElasticSync.move_center, ElasticSync.on_lost
    moves: list[Array] = []
    kept: list[Array] = []

    def move_and_fail(self: ElasticSync, sum_difference: torch.Tensor) -> None:
        move(self, sum_difference)
        moves.append(self._moved.double().numpy().copy())
        if len(moves) == 2:
            raise PeerLost(1, "closed its connection")

    def lose_and_tell(self: ElasticSync) -> None:
        kept.append(self.center.double().numpy().copy())
        lose(self)

    monkeypatch.setattr(ElasticSync, "move_center", move_and_fail)
    monkeypatch.setattr(ElasticSync, "on_lost", lose_and_tell)
    net = Net()
    with town.worker(0, net, settings) as worker:
        train(worker, net, 0, range(4))
    np.testing.assert_array_equal(kept, [moves[0]])
    assert np.abs(moves[1] - moves[0]).max() > 1e-3
