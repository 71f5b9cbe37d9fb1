"""Rows -> a table of docs/results.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

NONE_YET = "no results yet"
Result = dict[str, Any]
Row = dict[str, Any]


def markdown(headings: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [headings, ("---",) * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
