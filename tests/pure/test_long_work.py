"""Who waits is told for what, and nobody else is."""

from __future__ import annotations

import logging
import threading
import time

import pytest
from rich.console import Console

from outcore.reporting import long_work
from outcore.reporting.long_work import shown_if_long


def test_short_work_is_not_told_of(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    num_threads = threading.active_count()
    with caplog.at_level(logging.INFO, "outcore"), shown_if_long("planning", after_s=60) as tell:
        tell("part", 0.5)
    assert caplog.text == ""
    assert capsys.readouterr().err == ""
    assert threading.active_count() == num_threads


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_work_is_logged_and_shown_on_a_terminal(
    is_terminal: bool,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(long_work, "Console", lambda stderr: Console(stderr=stderr, force_terminal=is_terminal))
    num_threads = threading.active_count()
    with caplog.at_level(logging.INFO, "outcore"), shown_if_long("planning", after_s=0.02) as tell:
        tell("improving", 0.25)
        while "planning" not in caplog.text:
            time.sleep(0.01)
        time.sleep(0.05)
        tell("improving further", 0.75)
    assert "planning took" in caplog.text
    assert ("improving further" in capsys.readouterr().err) == is_terminal
    while threading.active_count() > num_threads:  # rich's own ends a moment after the bar
        time.sleep(0.01)
