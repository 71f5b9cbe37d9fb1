"""Steps are remembered across runs; whatever is broken, stale or too much is as if it were not there."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from outcore.fitting.cache import Remembered, StepCache, default_folder, key_of
from outcore.fitting.settings import CacheSettings
from outcore.planning import plan
from outcore.values import Budget, Machine
from tests.pure.test_reporting import small_trace

TRACE = small_trace()
MACHINE = Machine("elsewhere", 10**9, 10**9, 0, 1e6, 1e6, 1.0, 1.0)
REMEMBERED = Remembered(TRACE, plan(TRACE, MACHINE, Budget(5000 * 1024, 10**9)), 0.125)


def test_an_entry_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    StepCache(tmp_path / "new" / "folder").save("abc", REMEMBERED)
    found = StepCache(tmp_path / "new" / "folder").load("abc")
    assert found == REMEMBERED
    assert found is not None
    assert found.trace.fingerprint == TRACE.fingerprint
    assert StepCache(tmp_path).load("another") is None


def test_without_a_folder_nothing_is_remembered() -> None:
    cache = StepCache(None)
    cache.save("abc", REMEMBERED)
    assert cache.load("abc") is None


@pytest.mark.parametrize("damage", [b"", b"no gzip", b"\x1f\x8b\x08 cut", "half"])
def test_a_broken_entry_is_absent_and_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes | str
) -> None:
    cache = StepCache(tmp_path)
    cache.save("abc", REMEMBERED)
    path = tmp_path / "abc.json.gz"
    path.write_bytes(path.read_bytes()[:-40] if isinstance(damage, str) else damage)
    with caplog.at_level(logging.INFO, "outcore"):
        assert cache.load("abc") is None
    assert len(caplog.records) == 1
    assert "recorded anew" in caplog.text
    assert not path.exists()


def test_the_entries_that_were_not_used_for_longest_go_first(tmp_path: Path) -> None:
    cache = StepCache(tmp_path, CacheSettings(num_entries=2))
    for age, key in enumerate(("old", "older")):
        cache.save(key, REMEMBERED)
        os.utime(tmp_path / f"{key}.json.gz", (1000 - age, 1000 - age))
    assert cache.load("older") is not None  # now it is the newest
    cache.save("new", REMEMBERED)
    assert cache.load("old") is None
    assert cache.load("older") is not None
    assert cache.load("new") is not None


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.INFO, "outcore"):
        StepCache(tmp_path / "file" / "folder").save("abc", REMEMBERED)
    assert "could not be remembered" in caplog.text


def test_keys_depend_on_every_fact_and_on_no_order() -> None:
    facts = {"budget": 1, "device": "H200", "sizes": ((1, 2),)}
    assert key_of(facts) == key_of(dict(reversed(facts.items())))
    assert all(key_of(facts) != key_of({**facts, name: "other"}) for name in facts)


def test_the_folder_is_the_users_cache_unless_another_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("OUTCORE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "outcore" / "steps"
    monkeypatch.setenv("OUTCORE_CACHE", str(tmp_path / "mine"))
    assert default_folder() == tmp_path / "mine"
