"""The code of docs/tour.md runs, block after block, and the tour's figures hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

TOUR = Path(__file__).parents[2] / "docs" / "tour.md"


def test_the_tour_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", TOUR.read_text(), flags=re.DOTALL)
    assert len(blocks) >= 7
    for number, block in enumerate(blocks):
        exec(compile(block, f"tour block {number}", "exec"), names)
    told = capsys.readouterr().out
    for line in ("1 2 aten.addmm.default (2, 1, 0) -> (3,) 0", "5 12 pack value 8 (2048, 1024)", "keep-all needs"):
        assert line in told
    assert names["ooc"].plan.in_core_peak_bytes // 2**20 == 47
    assert "Sequential in 44.00 MiB" in (tmp_path / "step.html").read_text()
