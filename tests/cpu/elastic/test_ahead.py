"""Workers that go on with local steps while an exchange waits for a slower one: numbers, bound, pace and faults."""

from __future__ import annotations

import json
import threading
import time
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from outcore.elastic.digits import load_digits
from outcore.elastic.place import open_place, poll
from outcore.elastic.settings import Settings
from outcore.elastic.sync import SyncExchange
from outcore.elastic.sync_averagers import ElasticSync
from outcore.elastic.transport import TCPStore
from outcore.elastic.trials import Trial, _turns, run_trial
from outcore.elastic.worker import Worker

from . import forked, reference
from .faults import run_hurt
from .town import Array, Net, Town, center_of, first_weights, train, weights_of

pytestmark = pytest.mark.timeout(100)


def take(worker: Worker, net: Net, rank: int, num: int) -> None:
    train(worker, net, rank, range(worker.num_steps, worker.num_steps + num))


def is_over(worker: Worker) -> bool:
    assert isinstance(worker._averager, ElasticSync)
    return worker._averager.is_over()


def run_ahead(extras: list[tuple[int, ...]], period: int, **chosen: Any) -> tuple[list[Array], list[Array]]:
    """Every worker takes `extras[round][rank]` steps ahead: one with none begins after all others took theirs."""
    town = Town(len(extras[0]))
    settings = Settings(period=period, limit_s=10, join_limit_s=20, **chosen)
    all_ahead = threading.Barrier(town.num_ranks)

    def act(rank: int) -> tuple[Array, Array]:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            for extra in extras:
                holds_up = rank == extra.index(0)
                take(worker, net, rank, period - (2 if holds_up else 1))
                if not holds_up:  # its exchange is under way, and cannot end
                    assert not is_over(worker)
                    take(worker, net, rank, extra[rank])
                all_ahead.wait(10)
                if holds_up:
                    take(worker, net, rank, 1)
                assert poll(lambda: is_over(worker), 10)
                take(worker, net, rank, 1)
            assert worker.stats().num_ahead == sum(extra[rank] for extra in extras)
            assert worker.stats().num_exchanges == len(extras)
            return weights_of(worker), center_of(worker)

    results = town.together(act)
    return [weights for weights, _ in results], [center for _, center in results]


@pytest.mark.parametrize("period", [2, 4])
@pytest.mark.parametrize(
    "extras", [[(2, 0)] * 3, [(0, 3, 1), (2, 0, 4), (1, 1, 0), (0, 0, 0)], [(5, 0, 5, 1), (0, 2, 0, 3)]]
)
def test_the_pull_is_of_the_difference_that_was_sent(extras: list[tuple[int, ...]], period: int) -> None:
    num = len(extras[0])
    weights, centers = run_ahead(extras, period, ahead=5, alpha=0.9 / num)
    expected = reference.elastic_ahead(extras, period, 0.9 / num)
    np.testing.assert_allclose(np.array(weights), np.array(expected[0]), rtol=2e-5, atol=2e-6)
    for center in centers:
        np.testing.assert_allclose(center, expected[1], rtol=2e-5, atol=2e-6)
        np.testing.assert_array_equal(center, centers[0])


def test_who_is_in_step_has_the_bits_of_a_worker_that_must_be() -> None:
    together: list[tuple[int, ...]] = [(0, 0, 0)] * 3
    for mine, theirs in zip(run_ahead(together, 3, ahead=5), run_ahead(together, 3, ahead=0)):
        np.testing.assert_array_equal(mine, theirs)


def test_without_gradients_a_round_is_the_same_map_however_far_ahead() -> None:
    """Workers are pulled from where the difference was taken, once for each that was sent."""
    town = Town(2)
    settings = Settings(period=2, ahead=3, alpha=0.4, limit_s=10, join_limit_s=20)
    begun = threading.Barrier(2)

    def act(rank: int) -> float:
        net = Net()
        with town.worker(rank, net, settings, torch.optim.SGD(net.parameters(), lr=0.0)) as worker:
            with torch.no_grad():
                net.bias.add_(1 + rank)
            take(worker, net, rank, 0 if rank else 1 + settings.ahead)
            begun.wait(10)
            take(worker, net, rank, rank)
            assert poll(lambda: is_over(worker), 10)
            take(worker, net, rank, 1)
            return float(weights_of(worker)[-1] - first_weights()[-1])

    assert town.together(act) == pytest.approx([0.6, 1.2], rel=1e-5)


def test_nobody_is_further_ahead_than_told() -> None:
    town, settings = Town(2), Settings(period=2, ahead=2, limit_s=10, join_limit_s=20)
    stands_still, went_on = threading.Event(), threading.Event()

    def act(rank: int) -> None:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            if rank == 1:
                assert stands_still.wait(10)
                assert not went_on.wait(0.3)
                take(worker, net, rank, 2)
                assert went_on.wait(10)
                return
            take(worker, net, rank, 3)
            assert worker.stats().num_ahead == 2
            before_s = worker.stats().wait_s
            stands_still.set()
            take(worker, net, rank, 1)
            went_on.set()
            assert worker.stats().num_ahead == 2
            assert worker.stats().wait_s - before_s > 0.2

    town.together(act)


def test_closing_ends_an_exchange_that_a_slower_worker_begins_later() -> None:
    town, settings = Town(2), Settings(period=2, ahead=4, alpha=0.45, limit_s=10, join_limit_s=20)
    closing = threading.Event()

    def act(rank: int) -> Array | None:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            if rank == 0:
                take(worker, net, rank, 3)
                closing.set()
                return None
            assert closing.wait(10)
            time.sleep(0.1)
            take(worker, net, rank, 1)
            assert poll(lambda: is_over(worker), 10)
            take(worker, net, rank, 1)
            assert worker.stats().num_exchanges == 1
            return center_of(worker)

    _, center = town.together(act)
    np.testing.assert_allclose(center, reference.elastic_ahead([(2, 0)], 2, 0.45)[1], rtol=2e-5, atol=2e-6)


def test_who_ends_early_leaves_and_the_others_go_on() -> None:
    town, settings = Town(3), Settings(period=2, ahead=8, limit_s=5, join_limit_s=20)

    def act(rank: int) -> tuple[float, list[int], Array]:
        net, began_s = Net(), time.monotonic()
        with town.worker(rank, net, settings) as worker:
            for _ in range(12):
                take(worker, net, rank, 1)
                time.sleep(0.01 * (1 + 3 * rank))
            return time.monotonic() - began_s, worker.members(), center_of(worker)

    results = town.together(act)
    assert results[2][1] in ([2], [1, 2])  # the slowest saw the others go
    assert max(took_s for took_s, _, _ in results) < 5
    assert np.isfinite([center for _, _, center in results]).all()


@pytest.mark.filterwarnings("ignore:this worker's weights are no longer finite")
def test_a_worker_that_diverged_while_ahead_starts_again_from_the_centre() -> None:
    town, settings = Town(2), Settings(period=2, ahead=4, limit_s=10, join_limit_s=20)
    lost = threading.Event()

    def act(rank: int) -> tuple[Array, Array]:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            if rank == 0:  # overflows, sends nothing, and goes on with what it has
                net.loss(rank, 0).backward()
                assert net.bias.grad is not None
                net.bias.grad.fill_(float("inf"))
                worker.step()
                take(worker, net, rank, 2)
                lost.set()
            assert lost.wait(10)
            take(worker, net, rank, rank)
            assert poll(lambda: is_over(worker), 10)
            take(worker, net, rank, 1)
            return weights_of(worker), center_of(worker)

    (restarted, center), (other, same_center) = town.together(act)
    np.testing.assert_array_equal(restarted, center)
    np.testing.assert_array_equal(center, same_center)
    assert np.isfinite(other).all()


def test_statistics_are_those_of_the_beginning_however_far_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forwards of steps ahead move BatchNorm's running mean; what was sent stands, and what moved is kept."""
    town, settings = Town(1), Settings(period=2, ahead=4, limit_s=10)
    ahead, fill = threading.Event(), SyncExchange.fill

    def late(self: SyncExchange, *args: Any) -> None:
        assert ahead.wait(10)
        fill(self, *args)

    monkeypatch.setattr(SyncExchange, "fill", late)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def mean() -> torch.Tensor:
        seen: torch.Tensor = net.state_dict()["1.running_mean"]
        return seen.clone()

    def step(worker: Worker) -> torch.Tensor:
        net(torch.randn(5, 3)).sum().backward()
        worker.step()
        return mean()

    with town.worker(0, net, settings) as worker:
        sent = step(worker)
        for _ in range(3):
            assert not torch.equal(step(worker), sent)
        assert worker.stats().num_ahead == 3
        ahead.set()
        assert poll(lambda: is_over(worker), 10)
        kept = mean()
        assert not torch.equal(step(worker), kept)
        assert worker.stats().num_exchanges == 1
        torch.testing.assert_close(worker.center_state_dict()["1.running_mean"], sent)


@pytest.mark.parametrize("shares_steps", [False, True])
def test_trials_share_out_as_many_steps_as_they_would_take_each(shares_steps: bool) -> None:
    trial, store = Trial("uneven", "sync-easgd", 2, shares_steps=shares_steps), HashStore()
    turns = [_turns(trial, 10, store) for _ in range(2)]
    fast = list(islice(turns[0], 8))
    slow, rest = list(turns[1]), list(turns[0])
    assert [step for step, _ in [*fast, *rest]] == list(range(1, 9 + len(rest)))
    assert (len(fast), len(slow), len(rest)) == ((8, 12, 0) if shares_steps else (8, 10, 2))
    shares = [share for _, share in [*fast, *slow, *rest]]
    assert min(shares) == 0.0
    assert max(shares) < 1.0


def test_a_trial_that_shares_steps_ends_for_all_whoever_ends_first() -> None:
    """In step, with an odd number left to share: one takes the last alone, and needs the other to be there or gone."""
    town, digits = Town(2), load_digits(None)
    join: dict[str, Any] = {"level": 2, "period": 1, "limit_s": 600.0}
    trial = Trial("odd", "sync-easgd", 2, max_steps=3, num_snapshots=0, shares_steps=True, limit_s=600, join=join)
    town.place(0).store.add("steps", 1)
    results = town.together(lambda rank: run_trial(trial, digits, town.place(rank)))  # nobody waits for the limit
    assert sorted(results[0].steps_taken) == [2, 3]
    assert 0 < results[0].final_accuracy < 1


def test_a_trial_past_its_limit_tells_the_steps_that_all_share() -> None:
    town, digits = Town(1), load_digits(None)
    trial = Trial("late", "sync-easgd", 1, max_steps=500, shares_steps=True, slowed=4.0, limit_s=0.2)
    with pytest.raises(TimeoutError, match=r"stopped after \d+ of 500 shared steps: the limit of 0.2 s passed"):
        run_trial(trial, digits, town.place(0))


# --- processes -----------------------------------------------------------------------------------------------------

FAST_S, SLOW_S = 0.01, 0.03


def keep_pace(folder: Path, rank: int, port: int) -> None:
    """Steps that are mostly sleep, for a second each: in step with the other, and free to go ahead."""
    torch.set_num_threads(1)
    told = {}
    for name, ahead in (("in step", 0), ("ahead", 16)):
        place = open_place(rank, 2, ("127.0.0.1", port), name, limit_s=10)
        net = nn.Linear(300, 200)  # large enough for shared memory
        settings = Settings(period=4, ahead=ahead, limit_s=10, join_limit_s=30)
        with Worker(net, torch.optim.SGD(net.parameters(), lr=0.01), settings, place) as worker:
            began_s = time.monotonic()
            while time.monotonic() < began_s + 1.0:
                net(torch.ones(1, 300)).sum().backward()
                time.sleep(SLOW_S if rank else FAST_S)
                worker.step()
            told[name] = worker.num_steps / (time.monotonic() - began_s)
    (folder / f"{rank}.json").write_text(json.dumps(told))


def test_a_slow_worker_takes_nothing_from_a_fast_one(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [forked.context().Process(target=keep_pace, args=(tmp_path, rank, server.port)) for rank in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(40)
        assert process.exitcode == 0
    fast, slow = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    # Of the same second, so that a busy machine slows both: three times as many steps, or as many where they wait.
    assert fast["ahead"] / slow["ahead"] > 1.5, (fast, slow)
    assert fast["in step"] / slow["in step"] < 1.3, (fast, slow)


@pytest.mark.parametrize(("fault", "victim"), [("kill", 2), ("rejoin", 2)])
def test_the_others_train_on_while_some_are_ahead(tmp_path: Path, fault: str, victim: int) -> None:
    """Rank 2 is the slowest: when it dies, the others are ahead and nobody stands waiting for it."""
    report = run_hurt(tmp_path, fault, "sync-easgd", victim, run_s=3.5, ahead=12)
    assert report.problems == [], report
    assert report.loss_at_end < report.loss_at_fault
