"""The round robin and bounded staleness, with threads and short limits."""

from __future__ import annotations

import threading
import time

from outcore.elastic.turns import Turns


def test_ranks_are_served_in_order_however_they_arrive() -> None:
    turns, served = Turns(3, limit_s=5, staleness=None), []

    def serve(rank: int, delay_s: float) -> None:
        for _ in range(4):
            time.sleep(delay_s)
            turns.take(rank)
            served.append(rank)
            turns.pass_on(rank)

    threads = [threading.Thread(target=serve, args=(rank, delay_s)) for rank, delay_s in enumerate((0.02, 0.0, 0.01))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(5)
    assert served == [0, 1, 2] * 4


def test_a_silent_rank_loses_its_turn_once_and_may_return() -> None:
    turns = Turns(3, limit_s=0.6, staleness=None)
    began_s = time.monotonic()
    turns.take(1)  # waits for rank 0, which never comes
    turns.pass_on(1)
    assert 0.6 <= time.monotonic() - began_s < 30
    began_s = time.monotonic()
    turns.take(2)
    turns.pass_on(2)
    turns.take(1)
    turns.pass_on(1)
    assert time.monotonic() - began_s < 0.6  # nobody waits for rank 0 twice
    turns.take(0)
    turns.pass_on(0)
    turns.take(1)


def test_a_dead_rank_is_out_at_once() -> None:
    turns = Turns(2, limit_s=60, staleness=None)
    turns.attach(0, "0.1")
    turns.detach(0, "0.1")
    turns.take(1)


def test_staleness_holds_the_fast_back_until_the_slow_moves() -> None:
    turns, passed = Turns(2, limit_s=5, staleness=1), threading.Event()
    turns.attach(0, "0.1")
    turns.attach(1, "1.1")
    turns.keep_pace("0.1", 1)

    def run_ahead() -> None:
        turns.keep_pace("0.1", 2)
        passed.set()

    threading.Thread(target=run_ahead, daemon=True).start()
    assert not passed.wait(0.1)
    turns.keep_pace("1.1", 1)
    assert passed.wait(1)


def test_staleness_gives_a_silent_worker_up_after_the_limit() -> None:
    turns = Turns(2, limit_s=0.1, staleness=0)
    turns.attach(0, "0.1")
    turns.attach(1, "1.1")
    began_s = time.monotonic()
    turns.keep_pace("0.1", 1)
    assert 0.1 <= time.monotonic() - began_s < 30
    turns.keep_pace("0.1", 2)
    assert time.monotonic() - began_s < 30


def test_a_newcomer_starts_at_the_clock_of_the_others() -> None:
    turns = Turns(2, limit_s=60, staleness=0)
    turns.attach(0, "0.1")
    turns.keep_pace("0.1", 7)
    turns.attach(1, "1.1")
    turns.keep_pace("0.1", 7)  # would wait a minute if the newcomer stood at 0


def test_a_wait_can_be_cut_into_slices() -> None:
    turns = Turns(2, limit_s=0.3, staleness=0)
    began_s = time.monotonic()
    num_slices = 1
    while not turns.take(1, within_s=0.05):
        num_slices += 1
    assert num_slices > 2
    assert 0.3 <= time.monotonic() - began_s < 30
    turns.attach(0, "0.1")
    turns.attach(1, "1.1")
    assert not turns.keep_pace("0.1", 1, within_s=0.05)
