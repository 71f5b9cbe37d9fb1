"""What errors say."""

from __future__ import annotations

from outcore.errors import BudgetTooSmall


def test_two_sizes_that_read_alike_are_told_apart_in_bytes() -> None:
    assert "no plan fits 1.00 MiB (1048570 bytes) on cpu" in str(BudgetTooSmall(1048576, 1048570, "an op", where="cpu"))
