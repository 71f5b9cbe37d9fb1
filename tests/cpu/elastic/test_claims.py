"""benchmarks/elastic_claims.py, from trials whose answer is known."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.claim_tables import SECTIONS
from benchmarks.elastic_claims import (
    LEVEL_3,
    METHODS,
    PAPERS_READING,
    Clock,
    bars_of,
    claim_trials,
    costs_of,
    merge,
    predict,
    row_of,
    seconds_to,
    summarize,
)
from outcore.elastic.trials import Result


def points(*accuracies: float) -> list[dict[str, float]]:
    return [{"step": 10.0 * n, "at_s": float(n), "accuracy": value} for n, value in enumerate(accuracies, 1)]


@pytest.mark.parametrize(
    ("accuracies", "seconds"),
    [
        ((0.90, 0.98, 0.99), 2.5),
        ((0.90, 0.99, 0.97, 0.99), 3.75),  # what it lost again does not count
        ((0.99, 0.99), 1.0),
        ((0.90, 0.98), None),
        ((0.99, 0.98), None),
    ],
)
def test_the_target_is_reached_when_it_is_not_left_again(accuracies: tuple[float, ...], seconds: float | None) -> None:
    assert seconds_to(points(*accuracies), 0.985) == (seconds if seconds is None else pytest.approx(seconds))


def result(name: str, seed: int, pace: float, share: float, *accuracies: float) -> dict[str, Any]:
    trial = {"name": name, "method": METHODS[name][0], "seed": seed, "join": METHODS[name][1]}
    told = points(*accuracies)
    for point in told:
        point["at_s"] *= pace
    waits: dict[str, Any] = {
        "waits_s": [share * 10],
        "first_waits_s": [share],
        "last_waits_s": [share / 2],
        "first_s": 1.0,
        "last_s": 1.0,
    }
    made = Result(trial, "mnist", train_s=10.0, final_accuracy=accuracies[-1], points=told, **waits)
    return {**row_of(made, 0.985), "seed": seed}


def test_medians_are_over_seeds_and_ratios_within_one() -> None:
    rows = [result(LEVEL_3, seed, 1.0 + seed, 0.1, 0.9, 0.99) for seed in range(3)]
    rows += [result(PAPERS_READING, seed, (1.0 + seed) * ratio, 0.5, 0.9, 0.99) for seed, ratio in enumerate((5, 7, 6))]
    table = summarize(rows)
    assert table[PAPERS_READING]["over_level_3"] == pytest.approx(6.0)
    assert table[LEVEL_3]["share"] == pytest.approx(0.1)
    assert table[LEVEL_3]["last_share"] == pytest.approx(0.05)
    assert [bar["holds"] for bar in bars_of(table, 0.985)] == [True, True, True]
    rows[1] = result(LEVEL_3, 1, 1.0, 0.1, 0.9, 0.95)  # one seed that does not get there: no median time
    short = summarize(rows)
    assert short[LEVEL_3]["seconds_to_target"] is None
    assert [bar["holds"] for bar in bars_of(short, 0.985)] == [False, True, True]
    told: dict[str, Any] = {"num_workers": 8, "target": 0.985, "rows": rows}
    page = SECTIONS["elastic-claims"][1](told | {"medians": short, "bars": bars_of(short, 0.985)})
    assert "| sync-easgd level 3 | not reached |  | 99.00 % | 10.0 % | 10.0 % | 5.0 % |" in page
    assert "5.3 x | not reached | **SHORT** |" in page


def test_seeds_of_several_commands_are_one_result_of_the_machine_where_they_ran(tmp_path: Path) -> None:
    paths = [tmp_path / f"{seed}.json" for seed in range(2)]
    for seed, path in enumerate(paths):
        told = {"question": "elastic-claims-mnist", "hardware": "x86_64-16cpu", "date": "2026-11-18", "data": "mnist"}
        told |= {"num_workers": 8, "num_cores": 16, "target": 0.985, "missing": []}  # type: ignore[dict-item]
        path.write_text(json.dumps(told | {"rows": [result(LEVEL_3, seed, 1.0, 0.1, 0.9, 0.99)]}))
    merged = merge(Namespace(parts=paths), Clock(1.0))
    assert (merged["question"], merged["hardware"]) == ("elastic-claims-mnist", "x86_64-16cpu")
    assert [row["seed"] for row in merged["rows"]] == [0, 1]
    paths[1].write_text(paths[1].read_text().replace("16cpu", "2cpu"))
    with pytest.raises(SystemExit, match="differ in one of question, hardware"):
        merge(Namespace(parts=paths), Clock(1.0))


def test_every_seed_runs_every_method_and_begins_with_another() -> None:
    args = Namespace(methods=None, batch=16, epochs=2.0, snapshots=3, judged=100, rate_factor=0.5, limit_s=60.0)
    orders = [[trial.name for trial in claim_trials(args, 8, seed)] for seed in range(3)]
    assert all(sorted(order) == sorted(METHODS) for order in orders)
    assert len({order[0] for order in orders}) == 3


def test_a_prediction_stands_beside_what_was_measured() -> None:
    pingpong = [{"num_bytes": size, "seconds": 1e-4 + 1e-9 * size} for size in (4, 4096, 1 << 20)]
    alone = [Result({"num_workers": 1}, "mnist", step_s=[0.01, 0.011] * 20)]
    costs = costs_of({"pingpong": pingpong, "add_s_per_byte": 1e-10}, alone)
    assert costs.latency_s == pytest.approx(1e-4, rel=0.01)
    measured = Result({"name": "sync-sgd", "num_workers": 8}, "mnist", paces_s=[0.02] * 8)
    row = predict("sync-sgd", 8, costs, [measured], ("sync-sgd", {}))
    assert row["measured_s"] == pytest.approx(0.02)
    assert row["predicted_s"] > costs.step_s
    assert row["predicted_over_measured"] == pytest.approx(row["predicted_s"] / 0.02)
