"""What errors say."""

from __future__ import annotations

from outcore.errors import BudgetTooSmall


def test_two_sizes_that_read_alike_are_told_apart_in_bytes() -> None:
    assert "no plan fits 6.86 MiB (7197564 bytes) on cpu" in str(BudgetTooSmall(7197573, 7197564, "an op", where="cpu"))
