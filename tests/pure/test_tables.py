"""The README's tables come from the results, and the README in the repository is up to date."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from xml.etree import ElementTree

from click.testing import CliRunner

from benchmarks.claim_tables import NAMED
from benchmarks.headline import picture
from benchmarks.plot import HEIGHT, LEFT, LETTER, SIZE, TOP, WIDTH, Box, labels
from benchmarks.tables import SECTIONS, TABLES, main, newest

BARE = "# x\n<!-- headline -->\n<!-- /headline -->\ntext\n<!-- summary -->\nold\n<!-- /summary -->\nend\n"
SLOWDOWN = {
    "question": "slowdown",
    "hardware": "h200",
    "torch": "2.11",
    "date": "2026-11-15",
    "rows": [
        {"network": "net", "batch": 4, "memory_gib": 16.0, "method": "in-core", "step_s": 0.2, "peak_gib": 50.0,
         "slowdown": 0.0},
        {"network": "net", "batch": 4, "memory_gib": 16.0, "method": "hybrid", "step_s": 0.23, "peak_gib": 15.5,
         "slowdown": 0.15, "loop_slowdown": 0.14},
        {"network": "net", "batch": 4, "memory_gib": 16.0, "method": "checkpoint", "step_s": 0.26, "peak_gib": 21.0,
         "slowdown": 0.3},
        {"network": "net", "batch": 4, "memory_gib": 16.0, "method": "selective", "step_s": 0.24, "peak_gib": 40.0,
         "slowdown": 0.2},
        {"network": "net", "batch": 4, "memory_gib": 16.0, "method": "compile", "step_s": None, "error": "8.3 a|b. Y"},
    ],
}  # fmt: skip


def run(folder: Path, *args: str) -> tuple[int, str]:
    readme, plot = folder / "README.md", folder / "docs" / "results.svg"
    figures = folder / "results.md"
    if not figures.exists():
        figures.write_text(
            "".join(f"<!-- {name} -->\n<!-- /{name} -->\n" for name in (*SECTIONS, *NAMED, "accuracy", "results"))
        )
    options = ["--results", str(folder), "--readme", str(readme), "--plot", str(plot), "--figures", str(figures)]
    if not (folder / "advice.md").exists():
        (folder / "advice.md").write_text("<!-- comparison -->\n<!-- /comparison -->\n")
    options += ["--picture", str(folder / "headline.svg"), "--advice", str(folder / "advice.md"), *args]
    return CliRunner().invoke(main, options).exit_code, readme.read_text()


def test_without_results_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(BARE)
    code, text = run(tmp_path)
    assert code == 0
    assert text.count("no results yet") == 2
    assert "no results yet" in (tmp_path / "results.md").read_text()
    assert "old" not in text
    assert text.endswith("end\n")


def test_rows_become_tables_and_a_plot(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(BARE)
    (tmp_path / "slowdown_h200_20261115.json").write_text(json.dumps(SLOWDOWN))
    assert run(tmp_path, "--check")[0] == 1
    code, text = run(tmp_path)
    assert code == 0
    assert "trains in 16 GiB instead of 50.0 GiB, and a step takes 15.0 % longer" in text
    assert "| net, batch 4 | 50.0 GiB | **16 GiB, +15.0 %** | 21.0 GiB, +30.0 % |" in text
    page = (tmp_path / "results.md").read_text()
    assert "| net | **outcore, hybrid** | 16 | 230.0 ms | +15.0 % | +14.0 % | 15.5 |" in page
    assert "| net | compile | none | does not run |  |  | 8.3 a/b |" in page
    assert "](docs/results.svg)" in page
    assert "<svg" in (tmp_path / "docs" / "results.svg").read_text()
    assert run(tmp_path, "--check")[0] == 0
    (tmp_path / "headline.svg").write_text("<svg/>")
    assert run(tmp_path, "--check")[0] == 1


def test_the_picture_has_every_figure_and_nothing_leaves_it() -> None:
    drawing = ElementTree.fromstring(picture(SLOWDOWN))
    parts = list(drawing.iter())
    texts = [part.text for part in parts if part.tag.endswith("text")]
    for figure in ("batch 4", "50.0 GiB", "21.0 GiB", "16 GiB", "+30.0 %", "+15.0 %", "every block checkpointed"):
        assert figure in texts
    assert all(float(part.get("font-size", "")) >= 12 for part in parts if part.tag.endswith("text"))
    for bar in parts:
        if bar.tag.endswith("rect"):
            assert float(bar.get("x", 0)) + float(bar.get("width", 0)) <= 600


def test_names_in_the_plot_lie_over_no_dot_and_no_other_name() -> None:
    methods = ("in-core", "hybrid", "checkpoint", "selective", "compile", "compile-budget", "accumulate:4")
    for gib in (0.1, 1.0, 5.0):  # between dots
        places = {name: (LEFT + 200 + at * gib, TOP + 90 + at * gib) for at, name in enumerate(methods)}
        axes = Box(LEFT, TOP, WIDTH - LEFT, HEIGHT - TOP)
        drawn = [ElementTree.fromstring(text) for text in labels(places, list(places.values()), axes)]
        names = [part for part in drawn if part.tag == "text"]  # the others are lines to names that lie far off
        assert len(names) == len(methods)
        boxes = [
            Box(float(name.get("x", 0)), float(name.get("y", 0)) - SIZE, LETTER * len(name.text or ""), SIZE)
            for name in names
        ]
        boxes += [Box(x - 4, y - 4, 8, 8) for x, y in places.values()]
        pairs = itertools.combinations(boxes[: len(methods)], 2)
        assert not any(one.meets(other) for one, other in pairs)
        assert not any(one.meets(dot) for one in boxes[: len(methods)] for dot in boxes[len(methods) :])


def test_how_far_off_a_prediction_was_is_worked_out_from_the_row() -> None:
    row = {"network": "net", "memory_gib": 16.0, "method": "hybrid", "step_s": 0.2, "predicted_step_s": 0.21}
    row |= {"peak_gib": 10.0, "predicted_peak_gib": 9.0, "commit": "abc"}
    text = SECTIONS["prediction"][1]({"rows": [row]})
    assert "| net, 16 GiB | hybrid | 210.0 ms | 200.0 ms | +5.0 % | -10.0 % | abc |" in text


def test_recorded_steps_stand_beside_the_step_that_swaps_all() -> None:
    ours = {"method": "hybrid", "step_s": 0.2, "first_record_s": 9.0, "pinning_s": 5.0, "record_s": 3.0}
    peers = [{"method": "swap-all", "step_s": 1.5}, {"method": "trl-offload", "step_s": 2.0, "first_steps_s": [20.0]}]
    text = SECTIONS["recording"][1]({"rows": [{"network": "net", **row} for row in (ours, *peers)]})
    assert "| net | 9.00 s | 5.00 s | 20.00 s | 3.00 s | 1.50 s | 2.0 |" in text
    assert SECTIONS["recording"][1]({"rows": [{"network": "net", **ours}]}) == ""


def test_the_least_memory_of_a_forward_is_told_with_what_was_too_little() -> None:
    tried = [(6.0, False, None), (6.25, False, None), (6.5, True, 6.4)]
    rows = [{"network": "net", "memory_gib": gib, "runs": runs, "peak_gib": held} for gib, runs, held in tried]
    assert "| net | 6.25 | 6.5 | 6.40 |" in SECTIONS["floors"][1]({"rows": rows})


def test_steps_in_which_the_device_waits_for_the_host_stand_apart() -> None:
    times = [(0.06, 0.08, 0.27), (0.07, 0.081, 0.28), (0.1, 0.1, 0.3)]
    keys = ("forward_host_s", "forward_device_s", "step_s")
    rows = [{"network": "net", "method": "hybrid", **dict(zip(keys, row, strict=True))} for row in times]
    table = SECTIONS["host"][1]({"rows": rows})
    assert "| net | hybrid | ahead | 2 | 65.0 ms | 80.5 ms | 275.0 ms |" in table
    assert "| net | hybrid | behind | 1 | 100.0 ms | 100.0 ms | 300.0 ms |" in table


def test_the_newest_of_a_question_and_hardware_counts(tmp_path: Path) -> None:
    for name in ("slowdown_h200_20261101", "slowdown_h200_20261115", "slowdown_a_b_20261101", "other_x_20261101"):
        (tmp_path / f"{name}.json").write_text(json.dumps({"rows": []}))
    found = {result["file"] for result in newest(tmp_path, TABLES)}
    assert found == {"slowdown_h200_20261115.json", "slowdown_a_b_20261101.json"}


def test_the_readme_is_what_the_results_say() -> None:
    assert CliRunner().invoke(main, ["--check"]).exit_code == 0


def test_the_layout_names_every_file() -> None:
    root = Path(__file__).parents[2]
    tree = (root / "docs" / "layout.md").read_text()
    named = set(re.findall(r"\b(\w+\.py)\b", tree))
    for path in sorted((root / "outcore").rglob("*.py")):
        assert path.name in named or path.name.startswith("__"), f"{path.name} is not in docs/layout.md"
    for room in (path for path in (root / "outcore").iterdir() if path.is_dir() and path.name != "__pycache__"):
        assert f"  {room.name}/" in tree, f"{room.name}/ is not in docs/layout.md"
    folders = ("outcore", "tests", "benchmarks", "examples", "docs")
    there = {path.name for folder in folders for path in (root / folder).rglob("*.py")}
    assert named <= there, f"gone: {sorted(named - there)}"
