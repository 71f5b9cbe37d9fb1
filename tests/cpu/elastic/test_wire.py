"""Sums over real gloo connections: sizes beyond one segment, any number of members, lost ones."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch

from outcore.elastic import window, wire
from outcore.elastic.muster import Fingerprint, Muster
from outcore.elastic.roster import Roster
from outcore.elastic.wire import SEGMENT_BYTES, Group, PeerLost, Traffic

from .town import Town

pytestmark = pytest.mark.timeout(60)
NUM_ELEMENTS = 3 * SEGMENT_BYTES // 4 + 17


def make_roster(town: Town, rank: int, limit_s: float) -> Roster:
    return Roster(Muster(town.place(rank), Fingerprint([], {}), min_members=None, join_limit_s=20), limit_s)


def make_group(town: Town, rank: int, limit_s: float = 10) -> Group:
    return make_roster(town, rank, limit_s).regroup()


def vector_of(rank: int) -> torch.Tensor:
    return torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(rank))


def expected(num: int) -> torch.Tensor:
    """The tree by hand: the rest is folded in first, then neighbours, then pairs of neighbours."""
    folded = 1 << (num.bit_length() - 1)
    parts = [
        vector_of(rank) + vector_of(rank + folded) if rank + folded < num else vector_of(rank) for rank in range(folded)
    ]
    while len(parts) > 1:
        parts = [left + right for left, right in zip(parts[::2], parts[1::2])]
    return parts[0]


@pytest.mark.parametrize(
    ("num", "shared_bytes"),
    [*((num, 1 << 17) for num in (1, 2, 3, 4, 6, 8)), *((num, None) for num in (2, 3, 4, 6))],
)
def test_sums_have_one_order_whatever_the_route(
    num: int, shared_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SHARED_BYTES", shared_bytes)
    town = Town(num)

    def act(rank: int) -> list[torch.Tensor]:
        group = make_group(town, rank)
        message = group.make_message(NUM_ELEMENTS, torch.float32)
        assert (group._window is not None) == (shared_bytes is not None and num > 1)
        sums = []
        for sizes in ([NUM_ELEMENTS], [5, 100_000, NUM_ELEMENTS - 100_005]):
            message.copy_(vector_of(rank))
            for part in torch.split(message, sizes):
                group.tree_sum(part)
            sums.append(message.clone())
        travelled, reduced = vector_of(rank), vector_of(rank)
        group.tree_sum(travelled)
        group.tree_reduce(reduced)
        group.tree_broadcast(reduced)
        return [*sums, travelled, reduced]

    for sums in town.together(act):
        for total in sums:
            assert torch.equal(total, expected(num))


@pytest.mark.parametrize("root", [0, 2, 4])
def test_a_broadcast_starts_anywhere(root: int) -> None:
    town = Town(5)

    def act(rank: int) -> float:
        vector = torch.full((NUM_ELEMENTS,), float(rank))
        make_group(town, rank).tree_broadcast(vector, root=root)
        return float(vector.sum())

    assert town.together(act) == [float(root) * NUM_ELEMENTS] * 5


@pytest.mark.parametrize(("shared_bytes", "num_messages"), [(None, 4), (1 << 17, 6)])
def test_a_small_vector_is_swapped_whole_and_a_large_one_by_halves_or_shared(
    shared_bytes: int | None, num_messages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Messages do not count blocks; large vectors cost 2 (P - 1) / P of their bytes where swapping costs log2 P."""
    monkeypatch.setattr(wire, "SHARED_BYTES", shared_bytes)
    town = Town(4)

    def act(rank: int) -> list[tuple[int, int]]:
        group, seen = make_group(town, rank), []
        message = group.make_message(NUM_ELEMENTS, torch.float32)
        for num_elements in (1000, 4 * (NUM_ELEMENTS // 4)):
            group.traffic = Traffic()
            group.tree_sum(message[:num_elements])
            seen.append((group.traffic.num_messages, group.traffic.num_bytes))
        return seen

    for small, large in town.together(act):
        assert small == (2, 2 * 4000)
        assert large[0] == num_messages
        assert large[1] == pytest.approx(1.5 * 4 * NUM_ELEMENTS, rel=1e-3)


@pytest.mark.parametrize("num", [2, 3, 4])
def test_more_blocks_than_are_under_way_at_once_rounded_or_not(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "BLOCK_BYTES", SEGMENT_BYTES // 8)
    monkeypatch.setattr(window, "BLOCK_BYTES", SEGMENT_BYTES // 8)
    town = Town(num)

    def act(rank: int) -> list[torch.Tensor]:
        group = make_group(town, rank)
        shared = group.make_message(NUM_ELEMENTS, torch.float32).copy_(vector_of(rank))
        group.tree_sum(shared)
        assert torch.equal(shared, expected(num))
        whole, rounded, layered = vector_of(rank), vector_of(rank), vector_of(rank)
        group.tree_sum(whole)
        group.tree_sum(rounded, dtype=torch.bfloat16)
        for part in torch.split(layered, 100_000):
            group.tree_sum(part, dtype=torch.bfloat16)
        return [whole, rounded, layered]

    results = town.together(act)
    for whole, rounded, layered in results:
        assert torch.equal(whole, expected(num))
        assert torch.equal(rounded, layered)
        assert torch.equal(rounded, results[0][1])
        assert torch.allclose(rounded, whole, atol=0.1)


def test_shared_sums_of_changing_sizes_do_not_run_into_each_other() -> None:
    """Nobody waits at the end of a sum: the next one, cut elsewhere, must leave what slower members still read."""
    town, sizes = Town(3), [NUM_ELEMENTS // (1 + step % 5) - step for step in range(40)]

    def act(rank: int) -> list[torch.Tensor]:
        group, seen = make_group(town, rank), []
        message, mine = group.make_message(NUM_ELEMENTS, torch.float32), vector_of(rank)
        for step, size in enumerate(sizes):
            message.copy_(mine)
            if step % 3 == rank:
                time.sleep(0.002)
            group.tree_sum(message[:size])
            seen.append(message[:size].clone())
        return seen

    wanted = expected(3)
    for seen in town.together(act):
        assert all(torch.equal(total, wanted[: len(total)]) for total in seen)


def test_who_was_dropped_and_wakes_up_late_writes_where_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Member 2 stops between hearing that all have written and adding up. The others drop it and sum without it."""
    town, add_up = Town(3), window.Window.add_up
    asleep, woken = threading.Event(), threading.Event()

    def sleepy(self: window.Window, first_byte: int, last_byte: int, kind: Any) -> None:
        if threading.current_thread().name == "sleeper" and not asleep.is_set():
            asleep.set()
            assert woken.wait(20)
        add_up(self, first_byte, last_byte, kind)

    monkeypatch.setattr(window.Window, "add_up", sleepy)
    both_there, all_done = threading.Barrier(2), threading.Event()

    def act(rank: int) -> list[torch.Tensor]:
        if rank == 2:
            threading.current_thread().name = "sleeper"
        roster = make_roster(town, rank, 0.5)
        group = roster.regroup()
        first = group.make_message(NUM_ELEMENTS, torch.float32).copy_(vector_of(rank))
        if rank == 2:
            group.tree_sum(first)  # for itself this sum is whole; the next one tells it that it was dropped
            all_done.set()
            with pytest.raises(PeerLost, match=r"rank [01] closed its connection"):
                group.tree_sum(first)
            return []
        with pytest.raises(PeerLost, match=r"rank 2 did not answer within 0.5 s"):
            group.tree_sum(first)
        group.close()
        group = roster.regroup()
        second = group.make_message(NUM_ELEMENTS, torch.float32).copy_(vector_of(rank))
        group.tree_sum(second)
        last_share = slice(2 * NUM_ELEMENTS // 3 + 1, None)
        before = first[last_share].clone()
        both_there.wait(10)
        woken.set()
        assert all_done.wait(10)
        assert not torch.equal(first[last_share], before)  # it did write
        return [second]

    for sums in town.together(act)[:2]:
        assert torch.equal(sums[0], expected(2))


def test_where_one_member_cannot_see_the_memory_nobody_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    find, asked = window.find, []

    def find_but_once(told: torch.Tensor, num_members: int, message_bytes: int) -> window.Window | None:
        asked.append(told)
        return None if len(asked) == 1 else find(told, num_members, message_bytes)

    monkeypatch.setattr(window, "find", find_but_once)
    town = Town(3)

    def act(rank: int) -> tuple[torch.Tensor, bool]:
        group = make_group(town, rank)
        vector = group.make_message(NUM_ELEMENTS, torch.float32).copy_(vector_of(rank))
        group.tree_sum(vector)
        return vector, group._window is not None

    for total, shares in town.together(act):
        assert torch.equal(total, expected(3))
        assert not shares


def test_a_window_is_known_by_its_word_and_leaves_no_file_open() -> None:
    num_open = len(os.listdir("/proc/self/fd"))
    mine, told = window.offer(2, 4096)
    assert mine is not None
    theirs = window.find(told, 2, 4096)
    assert theirs is not None
    mine.message(1)[5] = 7
    assert theirs.message(1)[5] == 7
    mine.word[0] += 1  # as if another process had this number now
    assert window.find(told, 2, 4096) is None
    assert window.find(told, 3, 4096) is None
    window.withdraw(told)
    assert window.find(told, 2, 4096) is None
    assert mine.message(1)[5] == 7
    del mine, theirs
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_who_leaves_or_dies_is_missed_in_the_window() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mine, told = window.offer(3, 4096)
    assert mine is not None
    for member, process in enumerate((os.getpid(), os.getpid(), child.pid)):
        mine._lines[member, 2] = process
    window.withdraw(told)
    assert mine.meet(0, 0.05) == 1
    assert not mine.is_gone(1)
    mine._lines[1, 0] = 2
    child.kill()  # and not waited for: a process that nobody has buried is dead all the same
    assert mine.meet(0, 3600) == 2  # found dead long before the limit, or this test runs into its own
    assert mine.is_gone(2)
    mine._lines[1:, 0] = 3
    assert mine.meet(0, 20) is None  # who came and then went was here
    assert child.wait(5) != 0
    assert child.stdin is not None
    child.stdin.close()
    mine._lines[2, :2] = 9, 0  # buried by now, and not missed: it came in time
    assert mine.meet(0, 0.05) == 1
    mine.leave(1)
    assert mine.meet(0, 20) == 1


@pytest.mark.parametrize("shared_bytes", [1 << 17, None])
def test_a_member_that_leaves_is_named_at_once_and_a_silent_one_after_the_limit(
    shared_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "SHARED_BYTES", shared_bytes)
    town = Town(2)

    def act(rank: int) -> tuple[str, float]:
        group = make_group(town, rank, limit_s=20)
        message = group.make_message(NUM_ELEMENTS, torch.float32)
        if rank == 1:
            time.sleep(0.1)
            group.close()
            return "", 0.0
        began_s = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            group.tree_sum(message)
        assert caught.value.rank == 1
        return str(caught.value), time.monotonic() - began_s

    told, took_s = town.together(act)[0]
    assert "rank 1 closed its connection" in told
    assert took_s < 15

    silent = Town(2, "silent")

    def wait(rank: int) -> str:
        group = make_group(silent, rank, limit_s=0.5)
        message = group.make_message(NUM_ELEMENTS, torch.float32)
        if rank == 1:
            time.sleep(1.2)
            return ""
        with pytest.raises(PeerLost) as caught:
            group.tree_sum(message)
        return str(caught.value)

    assert "rank 1 did not answer within 0.5 s" in silent.together(wait)[0]


def test_without_files_to_open_nobody_is_declared_dead() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        ended = window._has_ended(os.getpid())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert not ended
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert window._has_ended(dead.pid)
