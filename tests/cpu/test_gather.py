"""Rows that came back from a GPU machine become rows of the results file."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.gather import main

Row = dict[str, Any]


def row(network: str, method: str, memory_gib: float, step_s: float | None = 1.0, **more: Any) -> Row:
    found = {"network": network, "method": method, "memory_gib": memory_gib, "step_s": step_s, "peak_gib": memory_gib}
    return {**found, "predicted_step_s": 1.1, "predicted_peak_gib": memory_gib, **more}


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Two networks, one of them with a curve."""
    folder = tmp_path / "results"
    folder.mkdir()
    rows = [row("resnet50", "in-core", 16), row("resnet50", "hybrid", 16), row("vit_l", "hybrid", 12)]
    kept = [{**one, "run": "A", "commit": "old"} for one in rows]
    curves = [{**row("vit_l", "hybrid", size), "run": "A", "commit": "old"} for size in (24, 12)]
    told = {"question": "slowdown", "hardware": "h200", "torch": "2.11", "note": "n", "rows": kept, "curves": curves}
    (folder / "slowdown_h200_20200101.json").write_text(json.dumps(told))
    return folder


def gather(folder: Path, results: Path, **parts: list[Row]) -> tuple[int, Row, Row]:
    folder.mkdir()
    for name, rows in parts.items():
        (folder / f"slowdown_{name}.json").write_text(json.dumps({"rows": rows}))
    options = [str(folder), "--run", "B", "--commit", "new", "--results", str(results)]
    code = CliRunner().invoke(main, options).exit_code
    names = [results / f"{question}_h200_{date.today():%Y%m%d}.json" for question in ("slowdown", "prediction")]
    made = [json.loads(name.read_text()) if name.exists() else {} for name in names]
    return code, made[0], made[1]


def origins(rows: list[Row]) -> list[tuple[Any, ...]]:
    return [(one["network"], one["method"], one["memory_gib"], one["run"], one["commit"]) for one in rows]


def test_rows_take_the_place_of_older_ones(tmp_path: Path, results: Path) -> None:
    new = [row("resnet50", "hybrid", 16, 0.9), row("resnet50", "pooch", 16), row("resnet50", "swap", 16, None)]
    code, slowdown, prediction = gather(tmp_path / "back", results, speed_resnet50=new)
    assert code == 0
    assert origins(slowdown["rows"]) == [
        ("resnet50", "in-core", 16, "A", "old"),
        ("resnet50", "hybrid", 16, "B", "new"),
        ("resnet50", "pooch", 16, "B", "new"),
        ("vit_l", "hybrid", 12, "A", "old"),
    ]
    assert origins(slowdown["earlier_rows"]) == [("resnet50", "hybrid", 16, "A", "old")]
    assert slowdown["date"] == date.today().isoformat()
    assert len(prediction["rows"]) == 3
    assert prediction["rows"][0]["step_error"] == pytest.approx(1.1 / 0.9 - 1)


def test_what_does_not_run_is_kept_where_nothing_was_measured(tmp_path: Path, results: Path) -> None:
    full, host, other = "OutOfMemoryError: full", "RuntimeError: not run: would pin too much", "RuntimeError: broken"
    errors = [("hybrid", 16, full), ("swap", 16, full), ("", 16, "stopped"), ("swap-all", 12, full), ("trl", 16, host)]
    errors.append(("checkpoint", 16, other))
    new = [row("resnet50", method, size, None, error=error) for method, size, error in errors]
    new.append(row("resnet50", "pooch", 16))
    _, slowdown, _ = gather(tmp_path / "back", results, peers_resnet50=new)
    assert [(one["method"], one.get("error")) for one in slowdown["rows"] if one["network"] == "resnet50"] == [
        ("in-core", None),
        ("hybrid", None),
        ("pooch", None),
        ("swap", full),
        ("trl", host),
    ]
    _, slowdown, _ = gather(tmp_path / "again", results, peers_resnet50=[row("resnet50", "swap", 16)])
    assert [one.get("error") for one in slowdown["rows"] if one["method"] == "swap"] == [None]


def test_in_core_is_the_one_that_ours_stands_beside(tmp_path: Path, results: Path) -> None:
    new = [row("resnet50", "in-core", 16, 0.9), row("resnet50", "swap", 16)]
    _, slowdown, _ = gather(tmp_path / "back", results, peers_resnet50=new)
    assert origins(slowdown["rows"])[0] == ("resnet50", "in-core", 16, "A", "old")
    _, slowdown, _ = gather(tmp_path / "again", results, peers_resnet50=[*new, row("resnet50", "hybrid", 16)])
    assert origins(slowdown["rows"])[0] == ("resnet50", "in-core", 16, "B", "new")


def test_a_curve_replaces_the_curve_and_the_quoted_row(tmp_path: Path, results: Path) -> None:
    new = [row("vit_l", "in-core", 24), row("vit_l", "hybrid", 24), row("vit_l", "hybrid", 12)]
    code, slowdown, _ = gather(tmp_path / "back", results, curve1_vit_l=[*new, row("vit_l", "hybrid", 8, None)])
    assert code == 0
    assert {one["run"] for one in slowdown["curves"]} == {"B"}
    assert [one["memory_gib"] for one in slowdown["curves"]] == [24, 24, 12, 8]  # one that failed is part of it
    assert origins(slowdown["rows"])[2:] == [
        ("vit_l", "hybrid", 12, "B", "new"),
        ("vit_l", "in-core", 24, "B", "new"),
    ]
    assert len(slowdown["earlier_rows"]) == 3


def test_the_newest_figure_of_a_budget_is_the_curve_s_too(tmp_path: Path, results: Path) -> None:
    new = [row("vit_l", "hybrid", 12, 0.9), row("vit_l", "checkpoint", 24, 0.9)]
    code, slowdown, _ = gather(tmp_path / "back", results, speed_vit_l=new)
    assert code == 0
    assert origins(slowdown["curves"]) == [("vit_l", "hybrid", 24, "A", "old"), ("vit_l", "hybrid", 12, "B", "new")]
    assert origins(slowdown["earlier_rows"]).count(("vit_l", "hybrid", 12, "A", "old")) == 2


def test_of_a_curve_that_was_cut_the_rest_stays(tmp_path: Path, results: Path) -> None:
    _, slowdown, _ = gather(tmp_path / "back", results, curve1_vit_l=[row("vit_l", "hybrid", 24)])
    assert [(one["memory_gib"], one["run"]) for one in slowdown["curves"]] == [(24, "B"), (12, "A")]
    assert [(one["memory_gib"], one["run"]) for one in slowdown["earlier_rows"]] == [(24, "A")]
    rows = [row("vit_l", "hybrid", 24), row("vit_l", "hybrid", 12, None, error="full"), row("vit_l", "", 8, None)]
    _, slowdown, _ = gather(tmp_path / "again", results, curve1_vit_l=rows)
    assert [(one["memory_gib"], one["step_s"]) for one in slowdown["curves"]] == [(24, 1.0), (12, 1.0)]


@pytest.mark.parametrize("rows", [[], [row("vit_l", "hybrid", 12, None)]])
def test_nothing_measured_is_an_error_and_changes_nothing(tmp_path: Path, results: Path, rows: list[Row]) -> None:
    code, slowdown, _ = gather(tmp_path / "back", results, curve1_vit_l=rows)
    assert code == 1
    assert not slowdown
