"""Results that are published: what every row of the benchmarks of speed holds, whoever wrote it."""

from __future__ import annotations

import pytest

from benchmarks.slowdown import FIELDS
from benchmarks.tables import ROOT, newest

RESULTS = ROOT / "benchmarks" / "results"


@pytest.mark.parametrize("question", ["slowdown", "prediction", "planners", "overhead", "fit"])
def test_each_row_says_what_ran_and_what_came_of_it(question: str) -> None:
    found = newest(RESULTS, (question,))
    assert found
    for result in found:
        rows = [*result["rows"], *result.get("curves", [])]
        assert rows
        assert not [row for row in rows if not row.keys() >= {*FIELDS}]
        assert result["commit"]
        assert result.get("torch") or all(row["torch"] for row in rows)


def test_a_prose_that_quotes_a_results_file_quotes_one_that_is_there() -> None:
    names = {path.name for path in RESULTS.iterdir()}
    archive = ROOT / "docs" / "log"  # what it quotes may be in git's history only
    pages = [ROOT / "README.md", *(page for page in (ROOT / "docs").rglob("*.md") if archive not in page.parents)]
    words = {word.strip("`.,;:()") for page in pages for word in page.read_text().split()}
    quoted = {word.removeprefix("benchmarks/results/") for word in words if word.endswith(".json") and "_20261" in word}
    assert {name for name in quoted if not name.startswith("_")} <= names  # "..._20261117.json"
