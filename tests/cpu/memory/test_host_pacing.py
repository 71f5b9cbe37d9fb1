"""A host too far ahead waits. There is no CUDA allocator here: its count of starts over is given."""

from __future__ import annotations

import pytest
import torch

from outcore.memory import cuda_allocator as allocator
from outcore.memory.cuda_allocator import HostPacing


def steps(monkeypatch: pytest.MonkeyPatch, restarts: list[int], *, fits: bool = True) -> list[bool]:
    """In how many starts over each step ends -> did the host wait before the step, and before one more?"""
    counts, waited = [5], list[torch.device]()
    monkeypatch.setattr(allocator, "count_restarts", lambda device: counts[-1])
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    pacing, found = HostPacing(torch.device("cuda", 0)), []
    pacing.begin(fits=False)  # where plans were tried
    for num in [*restarts, 0]:
        waited.clear()
        assert pacing.begin(fits=fits) == counts[-1]
        found.append(bool(waited))
        assert found[-1] == pacing.waits
        counts.append(counts[-1] + num)
    return found


@pytest.mark.parametrize("between", [[], [0], [0, 0]])
def test_waits_for_good_after_two_of_four_steps_that_start_over(
    between: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a row: the one after it begins with an empty cache."""
    before = [False] * (3 + len(between))
    assert steps(monkeypatch, [0, 2, *between, 1, 0, 0, 0, 0, 0]) == before + [True] * 6


@pytest.mark.parametrize("restarts", [[0, 0, 0], [1, 0, 0, 0, 3, 0, 0, 0, 1]])
def test_what_happens_once_in_a_while_makes_nobody_wait(monkeypatch: pytest.MonkeyPatch, restarts: list[int]) -> None:
    assert not any(steps(monkeypatch, restarts))


def test_a_step_after_one_that_started_over_begins_with_an_empty_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the plan's first ones did: what starts over leaves behind may make every step start over. Not without end."""
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    for restarts, num in (
        ([0, 0], 0),
        ([1, 0, 0], 1),
        ([2, 1, 0, 0, 1], 3),
        ([1] * 9, 4),
        ([1] * 4 + [0] + [1] * 9, 8),
    ):
        emptied.clear()
        steps(monkeypatch, restarts)
        assert len(emptied) == num
    emptied.clear()
    steps(monkeypatch, [1, 1], fits=False)
    assert not emptied


def test_where_the_plan_starts_over_anyway_waiting_is_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(steps(monkeypatch, [2, 2, 2, 2], fits=False))


def test_what_the_last_plan_tried_did_is_not_held_against_the_one_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the first step of the one that is kept maps memory anew."""
    counts = iter([0, 3, 4, 4])
    monkeypatch.setattr(allocator, "count_restarts", lambda device: next(counts))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    pacing = HostPacing(torch.device("cuda", 0))
    for fits in (False, True, True, True):
        pacing.begin(fits=fits)
        assert not pacing.waits
