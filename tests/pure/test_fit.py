from __future__ import annotations

import pytest

from benchmarks.fit import MOST, PRECISION, largest


@pytest.mark.parametrize("limit", [64, 65, 100, 640, 1000, 5000])
def test_the_largest_that_works_is_found_to_a_part_in_sixteen(limit: int) -> None:
    tried: list[int] = []

    def works(size: int) -> bool:
        tried.append(size)
        return size <= limit

    found = largest(works, 64, MOST["batch"])
    assert found <= limit
    assert limit - found <= max(1, limit // PRECISION)
    assert len(tried) <= 12
    assert len(set(tried)) == len(tried)


def test_nothing_works() -> None:
    assert largest(lambda size: False, 64, 8192) == 0


def test_everything_works() -> None:
    assert largest(lambda size: True, 64, 4096) == 4096
