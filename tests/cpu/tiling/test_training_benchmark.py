"""The benchmark of whole training steps runs on a CPU, and all of its methods train the same weight."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.tiled_training import main


def test_every_method_trains_and_the_bound_is_stated(tmp_path: Path) -> None:
    out = tmp_path / "training.json"
    main(["--small", "--out", str(out)])
    found = json.loads(out.read_text())
    assert not found["notes"]
    rows = {row["method"]: row for row in found["rows"]}
    assert list(rows) == [
        "in-core",
        "TiledLinear, TiledAdamW",
        "TiledLinear, fused AdamW on the host",
        "weight and state moved in and out",
    ]
    for name, row in rows.items():
        assert row["seconds"] > 0
        if name.startswith("TiledLinear"):
            assert row["weight_difference"] < 0.02
            assert row["bound_s"] > 0
    weight_bytes = found["shapes"]["features"] ** 2 * 2
    streamed = rows["TiledLinear, TiledAdamW"]
    assert streamed["bytes_out"] >= 3 * weight_bytes  # weight and averages; the gradient is not stored
    assert set(streamed["products"]) == {"forward", "backward input", "update"}


def test_a_part_that_comes_too_late_is_left_out(tmp_path: Path) -> None:
    out = tmp_path / "training.json"
    main(["--small", "--out", str(out), "--limit-s", "0"])
    found = json.loads(out.read_text())
    assert not found["rows"]
    assert [note["skipped"] for note in found["notes"]] == ["no time left"] * 4
