"""What the allocator refused, by a count that the test sets: the real one needs a GPU (tests/gpu/test_allocator.py)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import pytest
import torch

from outcore.memory.cuda_allocator import Refusals


class Counter(Refusals):
    """Refuses when it is told to."""

    num = 0

    def _count(self) -> int:
        return 0 if self._told else self.num


def step(refusals: Counter, num: int, *, raises: type[Exception] | None = None, excused: int = 0) -> bool:
    """Whether a step with so many refusals told the user."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with refusals:
                refusals.num += num
                for _ in range(excused):
                    refusals.excuse()
                if raises is not None:
                    raise raises("no")
        except (torch.OutOfMemoryError, ValueError):
            pass
    return bool(caught)


@pytest.fixture
def refusals() -> Counter:
    return Counter(torch.device("cuda", 0))


def test_one_is_told_of_once(refusals: Counter) -> None:
    assert [step(refusals, num) for num in (0, 1, 1)] == [False, True, False]


def test_what_happens_between_steps_is_nobodys_op(refusals: Counter) -> None:
    refusals.num += 3
    assert not step(refusals, 0)


def test_what_is_excused_is_not_told(refusals: Counter) -> None:
    assert not step(refusals, 2, excused=2)
    assert step(refusals, 2, excused=1)


def test_a_step_that_ran_out_leaves_what_it_did_not_say(refusals: Counter) -> None:
    assert not step(refusals, 1, raises=torch.OutOfMemoryError)
    assert not step(refusals, 0)
    assert not step(refusals, 2, raises=torch.OutOfMemoryError)
    assert step(refusals, 0)


def test_a_step_that_failed_otherwise_leaves_all(refusals: Counter) -> None:
    assert not step(refusals, 1, raises=ValueError)
    assert step(refusals, 0)


def test_the_warning_names_the_line_of_the_step(refusals: Counter) -> None:
    @contextlib.contextmanager
    def around() -> Iterator[None]:  # as a step does it
        with refusals:
            yield

    with pytest.warns(UserWarning, match="asked for more memory") as caught, around():
        refusals.num += 1
    assert caught[0].filename == __file__


def test_on_a_cpu_there_are_none() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with Refusals(torch.device("cpu")):
            pass
