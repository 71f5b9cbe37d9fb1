"""Real processes, real signals: a handful of the faults that `benchmarks/elastic.py --soak` draws at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from .faults import run_hurt

pytestmark = pytest.mark.timeout(100)


@pytest.mark.parametrize(
    ("fault", "method", "victim"),
    [
        ("kill", "sync-easgd", 0),
        ("stop_and_wake", "sync-easgd", 1),
        ("rejoin", "sync-sgd", 2),
        ("kill_center", "async-easgd", 0),
    ],
)
def test_the_others_train_on(tmp_path: Path, fault: str, method: str, victim: int) -> None:
    report = run_hurt(tmp_path, fault, method, victim, run_s=4.5)
    assert report.problems == [], report
    assert report.loss_at_end < report.loss_at_fault
