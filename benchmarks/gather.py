"""Adds the output of one call to a GPU machine to the results file, with its run and commit; then run `make tables`.

    python -m benchmarks.gather FOLDER --run AH     # slowdown_<part>_<network>.json lie there, as on_gpu.sh writes them

Commit immediately afterwards, because an interrupted session keeps only what is committed. `speed` and `peers` replace
rows of the same network and method, and outcore's rows also the curve's at the same budget; `curve1` to `curve3`
replace those of a curve, and the row of the README's budget is taken from it. Replaced rows stay in the file, under
`earlier_rows`. Predictions are rewritten from all rows.
"""

from __future__ import annotations

import json
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import click

from benchmarks.networks import BUDGETS_GIB
from benchmarks.prediction import judged
from benchmarks.slowdown import FIELDS, OURS

RESULTS = Path(__file__).parent / "results"
NOTE = (
    "Each row with its run and the commit that ran; slowdown is against the in-core step of its own process; hard "
    "cap = memory_gib for our rows, none for the others, which hold it as the budget they stand beside. step_s "
    "waits for the device after every step, loop_step_s does not (older rows have none); num_alloc_retries counts "
    "over num_steps steps of each kind. VGG-16 and R3D-18 ran with channels last (_nhwc) in 12 GiB, see "
    "docs/design/002-planning.md for the 6 GiB of the issue; in the default layout (run Y) cuDNN is refused its "
    "workspaces in every step and takes other algorithms, so that those numbers are not the ones of a run with "
    "more memory. accumulate:4 and compile give other numbers. curves: every row of runs at several budgets, one "
    "process a network and run. earlier_rows: what later runs replaced; earlier_note: what was said of these."
)
NO_ROOM = ("OutOfMemoryError", "BudgetTooSmall", "RuntimeError: not run: would pin")  # errors
Row = dict[str, Any]


@click.command()
@click.argument("folder", type=click.Path(path_type=Path, exists=True))
@click.option("--run", required=True, help="A name for this call, the next one of the log: AH, AI, ...")
@click.option("--commit", help="What ran.  [default: this checkout's]")
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, show_default=False)
def main(folder: Path, run: str, commit: str | None, results: Path) -> None:
    """Rows of FOLDER into the newest slowdown file, under today's date."""
    commit = commit or _head()
    before = max(results.glob("slowdown_h200_*.json"), key=lambda path: path.stem)
    kept = json.loads(before.read_text())
    num = 0
    for path in sorted(folder.rglob("slowdown_*.json")):
        part = path.stem.split("_")[1]
        rows = [whole(row) | {"run": run, "commit": commit} for row in json.loads(path.read_text())["rows"]]
        measured = [row for row in rows if row.get("step_s") is not None]
        num += len(measured)
        if not part.startswith("curve"):
            replace_points(kept, measured)
        elif measured:
            replace_curve(kept, rows)
            measured = [row for row in measured if row["method"] not in OURS or is_quoted(row)]
        if not any(row["method"] == "hybrid" for row in measured):  # the in-core row is the one that ours stands beside
            measured = [row for row in measured if row["method"] != "in-core"]
        replace_rows(kept, measured)
        add_refused(kept, rows)
    if not num:
        raise click.ClickException(f"{folder} has no measured rows in files named slowdown_<part>_<network>.json")
    kept |= {"date": date.today().isoformat(), "commit": commit, "note": NOTE}
    after = results / f"slowdown_h200_{date.today():%Y%m%d}.json"
    after.write_text(json.dumps(kept, indent=1))
    predicted = results / after.name.replace("slowdown", "prediction")
    predicted.write_text(json.dumps(predictions(kept, after.name), indent=1))
    print(f"{num} rows of run {run} ({commit}) into {after.name}; now `make tables`, and commit")


def whole(row: Row) -> Row:
    """With every field, None where it has nothing to say."""
    return dict.fromkeys(FIELDS) | row


def is_quoted(row: Row) -> bool:
    """At the budget that the README quotes for its network?"""
    return bool(row["memory_gib"] == BUDGETS_GIB[row["network"]])


def replace_rows(kept: Row, rows: list[Row]) -> None:
    """In the place of the same network's and method's, or behind the network's last one."""
    for row in rows:
        same = [at for at, old in enumerate(kept["rows"]) if _key(old) == _key(row)]
        if same:
            kept.setdefault("earlier_rows", []).append(kept["rows"][same[0]])
            kept["rows"][same[0]] = row
        else:
            places = [at for at, old in enumerate(kept["rows"]) if old["network"] == row["network"]]
            kept["rows"].insert(max(places, default=len(kept["rows"]) - 1) + 1, row)


def add_refused(kept: Row, rows: list[Row]) -> None:
    """What memory has no room for is a finding, too, unless it ran another time."""
    known = {_key(row) for row in kept["rows"]}
    wanted = [row for row in rows if str(row.get("error")).startswith(NO_ROOM) and _key(row) not in known]
    replace_rows(kept, [row for row in wanted if is_quoted(row)])


def _key(row: Row) -> tuple[str, str]:
    return row["network"], row.get("method", "")


def replace_curve(kept: Row, rows: list[Row]) -> None:
    """Budget by budget: a run that was cut says nothing of those it did not come to."""
    curves = kept.setdefault("curves", [])
    known = {_place(row) for row in curves if row.get("step_s") is not None}
    rows = [row for row in rows if row["method"] and (row.get("step_s") is not None or _place(row) not in known)]
    new, networks = {_place(row) for row in rows}, {row["network"] for row in rows}
    kept.setdefault("earlier_rows", []).extend(row for row in curves if _place(row) in new)
    rest = [row for row in curves if _place(row) not in new]
    others, same = ([row for row in rest if (row["network"] in networks) is is_same] for is_same in (False, True))
    kept["curves"] = [*others, *rows, *same]


def replace_points(kept: Row, rows: list[Row]) -> None:
    """The newest figure of a budget is the curve's, too, where the curve has that budget."""
    for row in rows:
        for at, old in enumerate(kept.get("curves", [])):
            if row["method"] in OURS and _place(old) == _place(row):
                kept.setdefault("earlier_rows", []).append(old)
                kept["curves"][at] = row


def _place(row: Row) -> tuple[str, str, float]:
    return *_key(row), row["memory_gib"]


def predictions(kept: Row, name: str) -> Row:
    everything = [*kept["rows"], *kept.get("curves", [])]
    ours = [row for row in everything if row.get("method") == "hybrid"]
    found = {(row["network"], row["memory_gib"], row.get("run")): row for row in ours}
    head: Row = {key: kept[key] for key in ("date", "torch", "python", "hardware", "commit") if key in kept}
    note = f"the rows of {name}, its curves too, each with its run and commit: predicted against measured"
    return {"question": "prediction", **head, "note": note, "rows": [judged(row) for row in found.values()]}


def _head() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    return found.stdout.strip()


if __name__ == "__main__":
    main()
