from __future__ import annotations

import threading

import pytest

from outcore.errors import TilingError
from outcore.tiling.slots import SlotCache


class Arrived:
    def __init__(self, arrived: bool) -> None:
        self._arrived = arrived

    def query(self) -> bool:
        return self._arrived


def load(cache: SlotCache, key: str) -> int:
    entry, hit = cache.acquire(key)
    if not hit:
        entry.ready = Arrived(True)
    cache.release(entry, f"read {key}")
    return entry.slot


def test_the_least_recently_used_block_leaves() -> None:
    cache = SlotCache(2)
    first, second = load(cache, "one"), load(cache, "two")
    load(cache, "one")
    assert load(cache, "three") == second
    assert load(cache, "one") == first
    assert (cache.num_hits, cache.num_misses) == (2, 3)


def test_a_block_somebody_reads_never_leaves() -> None:
    cache = SlotCache(2)
    held, _ = cache.acquire("held")
    load(cache, "one")
    assert load(cache, "two") != held.slot
    other, _ = cache.acquire("two")
    with pytest.raises(TilingError, match="too few slots"):
        cache.acquire("three")
    cache.release(other, None)
    assert load(cache, "three") == other.slot


def test_the_next_writer_learns_of_every_use_of_the_block_before() -> None:
    cache = SlotCache(1)
    load(cache, "one")
    load(cache, "one")
    entry, hit = cache.acquire("two")
    assert not hit
    assert cache.claim_readers(entry) == ["read one", "read one"]
    assert cache.claim_readers(entry) == []


def test_only_arrived_blocks_are_lent() -> None:
    cache = SlotCache(1)
    entry, _ = cache.acquire("one")
    assert cache.lend("one") is None
    entry.ready = Arrived(False)
    cache.release(entry, None)
    assert cache.lend("one") is None
    entry.ready = Arrived(True)
    lent = cache.lend("one")
    assert lent is entry
    cache.give_back(lent, "copied by a peer")
    entry, _ = cache.acquire("two")
    assert cache.claim_readers(entry) == ["copied by a peer"]
    assert cache.lend("elsewhere") is None


def test_a_lane_whose_last_idle_slot_is_lent_waits_for_it() -> None:
    cache = SlotCache(1)
    entry, _ = cache.acquire("one")
    entry.ready = Arrived(True)
    cache.release(entry, None)
    lent = cache.lend("one")
    assert lent is entry
    taken: list[int] = []
    taker = threading.Thread(target=lambda: taken.append(cache.acquire("two")[0].slot), daemon=True)
    taker.start()
    taker.join(timeout=0.05)
    assert taker.is_alive()
    cache.give_back(lent, "copied by a peer")
    taker.join(timeout=10)
    assert taken == [entry.slot]
