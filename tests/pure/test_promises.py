"""The page that says why a replay is safe: every row of its tables names a test, and that test exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/design/009-why-replay-is-safe.md"
TESTS = ROOT / "tests/cpu"
DEFAULT = "test_overwriting"  # the file of tests that are named alone
SAME = "the same test"


def rows() -> list[list[str]]:
    """The cells of each row of each table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [row for row in cells if not set("".join(row)) <= set("-") and row[-1] != "test"]


def missing(cell: str) -> list[str]:
    """The tests of a cell that are nowhere, and why it names none if it does not."""
    names = re.findall(r"`([^`]+)`", cell)
    if not names and not cell.startswith(SAME):
        return [f"no test in {cell!r}"]
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    file, _, function = name.rpartition("::")
    file = (file or DEFAULT).rpartition("/")[2]
    if list(TESTS.rglob(f"{name}.py")):
        return True  # all of a file
    return any(f"def {function}(" in found.read_text() for found in TESTS.rglob(f"{file}.py"))


@pytest.mark.parametrize("row", rows(), ids=lambda row: row[1][:40])
def test_every_row_names_a_test_that_exists(row: list[str]) -> None:
    assert not missing(row[-1])


def test_a_test_that_does_not_exist_is_found() -> None:
    assert missing("`test_nothing_at_all`")
    assert missing("none")
    assert not missing(f"{SAME}, `by_numpy`")
