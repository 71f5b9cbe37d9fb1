"""Phases and shares of benchmarks/elastic_paces.py, from steps whose answer is known."""

from __future__ import annotations

from typing import Any, cast

import pytest

from benchmarks import elastic_paces
from benchmarks.elastic_paces import (
    AHEAD,
    KINDS,
    NUM_STEPS,
    PERIOD,
    Phase,
    Stepper,
    end_together,
    one_round,
    phases_of,
    scaling_bars,
)
from outcore.elastic.place import poll
from outcore.elastic.settings import Settings
from outcore.elastic.sync_averagers import ElasticSync
from outcore.elastic.transport import PrefixStore
from outcore.elastic.worker import Worker

from .town import Net, Town, train

pytestmark = pytest.mark.timeout(60)


def row(rank: int, kind: str, step_s: float, wait_s: float = 0.0, num_ahead: int = 0) -> dict[str, Any]:
    if kind in ("apart", "ahead"):
        counts = {"num_steps": 30, "num_exchanges": 5, "num_ahead": num_ahead}
        return {"rank": rank, "kind": kind, "took_s": 30 * step_s, "wait_s": wait_s, **counts}
    return {"rank": rank, "kind": kind, "steps_s": [step_s] * NUM_STEPS[kind], "wait_s": wait_s}


@pytest.mark.parametrize("number", [0, 1, 2, 3])
def test_a_round_has_every_worker_alone_and_all_together(number: int) -> None:
    phases = [phase for phase in phases_of(number, [2, 4, 8]) if phase.num_workers == 4]
    together = [phase for phase in phases if "lone" not in phase.kind]
    assert sorted(phase.kind for phase in together) == ["ahead", "apart", "elastic", "even", "silent"]
    workers = set(together[0].ranks)
    assert len(workers) == 4
    assert min(workers) % 4 == 0  # a group as it was joined
    alone = [set(phase.ranks) for phase in phases if phase.kind == "lone"]
    assert sorted(map(sorted, alone)) == [[rank] for rank in sorted(workers)]
    (even,) = [phase for phase in phases if phase.kind == "even lone"]
    assert set(even.ranks) < workers


def test_phases_can_be_chosen() -> None:
    kinds = [phase.kind for phase in phases_of(0, [2], ("lone", "apart", "ahead"))]
    assert kinds == ["lone", "lone", "apart", "ahead"]
    assert kinds[::-1] == [phase.kind for phase in phases_of(1, [2], ("lone", "apart", "ahead"))]


def test_shares_of_a_round_with_one_slow_core() -> None:
    """Cores of 1 and 2 s a step; with exchanges both take the slow one's 2 s, and 0.1 of it is nobody's waiting."""
    rows = [row(1, "lone", 2.0), row(0, "lone", 1.0), row(0, "silent", 1.0), row(1, "silent", 2.0)]
    rows += [row(0, "elastic", 2.0, wait_s=8.0), row(1, "elastic", 2.0, wait_s=0.1 * NUM_STEPS["elastic"])]
    rows += [row(0, "even lone", 4.0), row(0, "even", 5.0), row(1, "even", 5.0)]
    found = one_round(rows, 2, list(NUM_STEPS))
    assert found is not None
    assert found["efficiency"] == found["of_no_exchange"] == found["of_barrier"] == pytest.approx(0.75)
    assert found["without_exchange"] == found["of_slowest_lone"] == found["of_slowest_without"] == pytest.approx(1.0)
    assert found["even_efficiency"] == pytest.approx(0.8)
    assert found["own_share"] == pytest.approx(0.05)


def test_shares_of_a_while_add_paces_up() -> None:
    """Cores of 1 and 2 s a step, 1.5 a second in all: 1.25 without exchanges, and 0.8 of that with."""
    rows = [row(0, "lone", 1.0), row(1, "lone", 2.0), row(0, "apart", 1.0), row(1, "apart", 4.0)]
    rows += [row(0, "ahead", 1.25, wait_s=3.75, num_ahead=10), row(1, "ahead", 5.0, wait_s=0.0)]
    found = one_round(rows, 2, ["lone", "apart", "ahead"])
    assert found is not None
    assert found["apart_efficiency"] == pytest.approx(1.25 / 1.5)
    assert found["ahead_efficiency"] == pytest.approx(1.0 / 1.5)
    assert found["ahead_of_apart"] == pytest.approx(0.8)
    assert found["ahead_wait_share"] == pytest.approx(0.05)
    assert (found["ahead_extra_least"], found["ahead_extra_most"]) == (0.0, 2.0)


def test_a_round_that_somebody_did_not_end_says_nothing() -> None:
    rows = [row(rank, kind, 1.0) for rank in (0, 1) for kind in KINDS if (rank, kind) != (1, "even lone")]
    assert one_round(rows, 2) is not None
    assert one_round(rows[:-1], 2) is None


@pytest.mark.parametrize(("extra_least", "holds"), [(0.0, True), (0.5, True), (0.75, False)])
def test_a_pace_that_slow_exchanges_are_hidden_in_does_not_count(extra_least: float, holds: bool) -> None:
    """Where the exchange lasts longer than a step, even the slowest goes ahead: as fast, but exchanging less often."""
    row = {"num_workers": 8, "efficiency": {"median": 0.95}, "ahead_extra_least": {"median": extra_least}}
    row |= {"ahead_efficiency": {"median": 0.96}, "ahead_of_apart": {"median": 0.91}}
    bars = list(scaling_bars({"scaling": {"measured": [row]}}))
    assert [held for _, _, held in bars] == [True, holds, False]
    assert [f"({extra_least:.2f})" in bar for bar, _, _ in bars] == [False, True, True]


class NetStepper:
    """Steps of a network whose compute costs nothing."""

    def __init__(self, worker: Worker, net: Net, rank: int) -> None:
        self.worker, self._net, self._rank = worker, net, rank

    def step(self) -> None:
        train(self.worker, self._net, self._rank, range(self.worker.num_steps, self.worker.num_steps + 1))


@pytest.mark.parametrize(
    ("lead", "meanwhile"), [(PERIOD - 1, 2 * PERIOD), (PERIOD + AHEAD, 0), (2 * PERIOD + AHEAD, 0)]
)
def test_all_end_the_same_exchange_though_one_stands_still_for_another_that_has_counted(
    lead: int, meanwhile: int
) -> None:
    """The second worker takes `lead` steps, and tells when the first, which has told, took `meanwhile`: with the
    exchange that both have begun over, and the next begun, or while standing still for one that the first has not."""
    workers: dict[int, Worker] = {}
    town, settings = Town(2), Settings(period=PERIOD, ahead=AHEAD, limit_s=20, join_limit_s=20)

    def act(rank: int) -> int:
        net = Net()
        with town.worker(rank, net, settings) as worker:
            workers[rank], stepper = worker, NetStepper(worker, net, rank)
            for _ in range(lead * rank):
                stepper.step()
            if rank == 1:
                assert poll(lambda: 0 in workers and workers[0].num_steps >= meanwhile, 10)
            store = PrefixStore("ends", town.place(rank).store)
            end_together(cast(Stepper, stepper), Phase(0, "ahead", 2, 0, 2), rank, store)
            assert isinstance(worker._averager, ElasticSync)
            assert not worker._averager._begun
            return worker.stats().num_exchanges

    one, other = town.together(act)
    assert one == other


def test_an_end_that_does_not_come_is_told_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elastic_paces, "LIMIT_S", 0.2)
    town, net = Town(1), Net()
    with town.worker(0, net, Settings(period=PERIOD, limit_s=10)) as worker:
        stepper = cast(Stepper, NetStepper(worker, net, 0))
        with pytest.raises(TimeoutError, match=r"the 2 workers' numbers of exchanges did not come within 0.2 s"):
            end_together(stepper, Phase(0, "ahead", 2, 0, 2), 0, PrefixStore("ends", town.place(0).store))
