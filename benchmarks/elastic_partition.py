"""One many-core chip as 1, 4, 8 and 16 groups: how long to an accuracy? The section `partition` of elastic.py.

1708.02983 (section 6.2) gives every group a copy of the weights and of the data, and a batch of its own. What that wins
depends on the batch. Threads of one group cannot share a tiny step, and while P batches together are still below the
batch at which noise no longer limits a step, P groups need P times fewer of them; with large batches neither holds. So
two batches are measured, each with the gradient sum (as in the paper) and with elastic averaging, and beside the lone
group with the same batch stands the best lone group of all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from benchmarks.elastic_clock import Bars, Row, pace_s, steps_to
from outcore.elastic.compare import make_trial

if TYPE_CHECKING:
    from benchmarks.elastic import Bench

TARGETS = (0.97, 0.975)
NUM_JUDGED = 2000  # as in elastic_rates.py, where the steps were counted
ROOM = 1.2  # steps beyond those counted: sums in another order lead elsewhere
# (method, batch of a group): number of groups -> (rate, steps to 97.5 %). By elastic_rates.py, seed 0, 2,000 images
# (results/elastic-rates_20261115.json). For 1 and 16 groups the rate with the fewest steps of two to five that were
# tried, a factor of 1.3 to 2 apart, larger ones diverging or no better; for 4 groups with elastic averaging or a batch
# of 32 and for 8 groups one rate between theirs. 16 groups of 32 with elastic averaging were stopped at 97.35 % after
# 351 steps; 460 are a guess. The lone group of 4 runs to 97 % only (5,750 steps): the 9,000 to 97.5 % are longer than a
# trial may take on 16 cores, at 4.8 ms each.
SETUPS: dict[tuple[str, int], dict[int, tuple[float, int]]] = {
    ("sync-sgd", 4): {1: (0.01, 6200), 4: (0.04, 1984), 8: (0.08, 1209), 16: (0.1, 675)},
    ("sync-easgd", 4): {4: (0.04, 2480), 8: (0.06, 1564), 16: (0.05, 1550)},
    ("sync-sgd", 32): {1: (0.1, 1023), 4: (0.15, 405), 8: (0.15, 336), 16: (0.2, 205)},
    ("sync-easgd", 32): {4: (0.12, 540), 16: (0.15, 460)},
}
PERIODS = {"sync-sgd": 1, "sync-easgd": 4}


def partition(bench: Bench) -> Any:
    rows: list[Row] = []
    for num_groups in (1, 16, 8, 4):  # the mark first
        if num_groups > bench.num_cores or bench.left_s() < 5:
            continue
        trials = [
            make_trial(
                method,
                num_groups,
                name=f"{method}, batch {batch}",
                batch=batch,
                rate=by_groups[num_groups][0],
                max_steps=12 if bench.args.quick else int(ROOM * by_groups[num_groups][1]),
                num_snapshots=14,
                snapshots_from=0.45,
                num_judged=NUM_JUDGED,
                limit_s=40,
                join={"level": 3, "period": PERIODS[method]},
            )
            for (method, batch), by_groups in SETUPS.items()
            if num_groups in by_groups
        ]
        rows += bench.trials(trials, num_groups)
    return {"table": [row for target in TARGETS for row in partition_table(rows, target)], "rows": rows}


def partition_table(rows: list[Row], target: float) -> list[dict[str, Any]]:
    """Seconds to the target, and the lone groups' seconds over them; a run that did not get there has none."""
    table = []
    for row in rows:
        if not row.get("points"):
            continue
        trial, steps = row["trial"], steps_to(row["points"], target)
        found = {"num_groups": trial["num_workers"], "method": trial["method"], "batch": trial["batch"]}
        found |= {"target_accuracy": target}
        found |= {"rate": trial["rate"], "steps_to_target": steps, "s_per_step": pace_s(row)}
        found |= {"seconds_to_target": None if steps is None else steps * row["train_s"] / row["num_steps"]}
        found |= {"best_accuracy": max(point["accuracy"] for point in row["points"])}
        table.append(found)
    lone = {row["batch"]: row["seconds_to_target"] for row in table if row["num_groups"] == 1}
    best = min((seconds for seconds in lone.values() if seconds), default=None)
    for row in sorted(table, key=lambda row: (row["batch"], row["num_groups"])):
        seconds, alone = row["seconds_to_target"], lone.get(row["batch"])
        row["speed_up"] = alone / seconds if alone and seconds else None
        row["speed_up_over_best_lone"] = best / seconds if best and seconds else None
        tell(row)
    return table


def tell(row: dict[str, Any]) -> None:
    def times(value: float | None) -> str:
        return "    -" if value is None else f"{value:5.2f}"

    seconds = "not reached" if row["seconds_to_target"] is None else f"{row['seconds_to_target']:6.2f} s"
    print(
        f"    {row['num_groups']:2d} x {row['method']}, batch {row['batch']:2d}: "
        f"{seconds} to {100 * row['target_accuracy']:.1f} % "
        f"({row['steps_to_target'] or 0:.0f} steps of {1e3 * row['s_per_step']:.2f} ms), {times(row['speed_up'])} x, "
        f"over the best lone group {times(row['speed_up_over_best_lone'])} x"
    )


def partition_bars(found: dict[str, Any]) -> Bars:
    for row in found.get("partition", {}).get("table", []):
        if row["num_groups"] == 16 and row["speed_up"]:
            where = f"{100 * row['target_accuracy']:.1f} %, {row['method']}, batch {row['batch']}"
            what = f"16 groups over 1 to {where}: 3.3 x"
            yield what, row["speed_up"], row["speed_up"] >= 3.3
