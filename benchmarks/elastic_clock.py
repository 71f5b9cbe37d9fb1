"""Measures the wall-clock cost of an exchange. Sections `cores` and `levels` of elastic.py, in rounds.

The speed of the cores of a shared machine depends on its other users: the same lone worker differed by 14 % from one
reading to the next. Every measurement is therefore repeated in several short rounds, with all setups in turn in each.
Ratios are taken within a round; their median is reported, with the minimum and the maximum. `cores` tests whether some
of the host's virtual cores share a physical core.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from outcore.elastic.compare import make_trial, rate_for
from outcore.elastic.cores import read_cores
from outcore.elastic.simulate import Costs, scale, with_network

if TYPE_CHECKING:
    from benchmarks.elastic import Bench
    from outcore.elastic.trials import Trial

Row = dict[str, Any]
Bars = Iterator[tuple[str, float, bool]]

BATCHES = (16, 8)  # `levels` at both, so that neither is a choice
NUM_JUDGED = 1000  # test images where time counts: judging on 16 cores took longer than training
NUM_SHORT_ROUNDS = 2  # of `levels`, after the one that also measures accuracy
PAPER_NETWORK = {"name": "FDR InfiniBand as listed in 1708.02983", "latency_s": 0.7e-6, "s_per_byte": 0.2e-9}
LEVEL_3, ORIGINAL = "sync-easgd level 3", "original-easgd"


def middle(values: list[float]) -> dict[str, Any]:
    """The median, and between which values it lies."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "rounds": values}


def as_percent(value: dict[str, Any]) -> str:
    return f"{100 * value['median']:.1f} % ({100 * value['least']:.1f} to {100 * value['most']:.1f})"


def pace_s(row: Row) -> float:
    """Seconds of a step, the mean over workers."""
    return float(statistics.mean(row["paces_s"]))


# --- cores ---------------------------------------------------------------------------------------------------------


def cores(bench: Bench) -> Any:
    """How much slower the first core computes while each of the others does."""
    mine, *others = [core for node in read_cores() for core in node]
    torch.set_num_threads(1)
    slower = {}
    for other in others:
        alone_s, beside_s = busy_beside(mine, None), busy_beside(mine, other)
        slower[other] = beside_s / alone_s
    most = sorted(slower.items(), key=lambda pair: -pair[1])[:3]
    print("    slowed most beside core " + ", ".join(f"{core} ({ratio:.2f} x)" for core, ratio in most))
    return {"core": mine, "slower_beside": slower}


def busy_beside(mine: int, other: int | None) -> float:
    """Seconds of a product on core `mine`, while `other` makes products, too."""
    ended, took_s = threading.Event(), []

    def multiply(core: int, *, is_timed: bool) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        matrix = torch.ones(256, 256)
        out = torch.empty_like(matrix)
        for _ in range(60 if is_timed else 1 << 30):
            began_s = time.perf_counter()
            torch.mm(matrix, matrix, out=out)
            if is_timed:
                took_s.append(time.perf_counter() - began_s)
            elif ended.is_set():
                return

    threads = [threading.Thread(target=multiply, args=(mine,), kwargs={"is_timed": True})]
    if other is not None:
        threads.insert(0, threading.Thread(target=multiply, args=(other,), kwargs={"is_timed": False}))
    for thread in threads:
        thread.start()
    threads[-1].join()
    ended.set()
    for thread in threads:
        thread.join()
    return statistics.median(took_s)


# --- levels --------------------------------------------------------------------------------------------------------


def level_trials(workers: list[int], args: argparse.Namespace) -> list[tuple[int, Trial]]:
    """Original EASGD (one worker at a time, layer by layer, as published) against the three levels, at two batches: a
    core takes 30 ms for a batch of 64 where the paper's GPU took one, and beside that no message would show. The first
    round measures accuracy: the same number of steps for all. What a step does to the weights does not depend on the
    clock, so the rounds after it are short and only time steps. Then torch's own data parallelism."""
    easgd: list[tuple[str, str, dict[str, Any]]] = [
        (ORIGINAL, ORIGINAL, {"turn": "iteration", "packed": False}),
        *((f"sync-easgd level {level}", "sync-easgd", {"level": level, "period": 1}) for level in (3, 2, 1)),
    ]
    peers: list[tuple[str, str, dict[str, Any]]] = [(name, name, {}) for name in ("ddp", "sync-sgd")]
    found = []
    for number in range(1 + NUM_SHORT_ROUNDS + 1):
        is_whole, is_last = number == 0, number > NUM_SHORT_ROUNDS
        num_steps = args.steps if is_whole or is_last else 30
        fields: dict[str, Any] = {"num_snapshots": 7 if is_whole or is_last else 0, "limit_s": 30}
        fields["num_judged"] = NUM_JUDGED if is_whole or is_last else 100
        found += [
            (
                number,
                make_trial(
                    method,
                    num,
                    name=name,
                    batch=batch,
                    rate=0.5 * rate_for(method, num),
                    max_steps=12 if args.quick else max(16, num_steps * workers[0] // num),
                    join=join,
                    **fields,
                ),
            )
            for batch in BATCHES
            for num in workers
            for name, method, join in (peers if is_last else easgd)
        ]
    return found


def levels(bench: Bench) -> Any:
    """A core for every worker, the others for messages and the centre: whose method it is makes no difference."""
    workers = [2] if bench.num_cores < 8 else [4, 8]
    num_spare = max(0, bench.num_cores - max(workers))
    numbered = level_trials(workers, bench.args)
    rows = bench.trials([trial for _, trial in numbered], max(workers), num_spare)
    for row, (number, _) in zip(rows, numbered):
        row["round"] = number
    tables = [summarize_levels(rows, num, batch) for batch in BATCHES for num in workers]
    return {"rows": rows, "num_spare_cores": num_spare, "summary": tables}


def summarize_levels(rows: list[Row], num: int, batch: int) -> dict[str, Any]:
    alike = [row for row in rows if (row["trial"]["num_workers"], row["trial"]["batch"]) == (num, batch)]
    fine = [row for row in alike if row.get("points")]
    absent = [f"round {row['round']}, {row['trial']['name']}: {row['error']}" for row in alike if row not in fine]
    summary: dict[str, Any] = {"num_workers": num, "batch": batch, "not_reached": absent}
    whole = {row["trial"]["name"]: row for row in fine if len(row["points"]) > 1}
    elastic = [row for name, row in whole.items() if "easgd" in name]
    if LEVEL_3 not in whole:
        return summary
    target = min(max(point["accuracy"] for point in row["points"]) for row in elastic)
    at_once = {row["round"]: pace_s(row) for row in fine if row["trial"]["name"] == LEVEL_3}
    print(f"    {num} workers, batch {batch}: time over level 3's to {100 * target:.1f} % and per step; communication")
    needed = steps_to(whole[LEVEL_3]["points"], target)
    table: dict[str, Any] = {}
    for name in whole:
        mine = [row for row in fine if row["trial"]["name"] == name]
        steps = steps_to(whole[name]["points"], target)
        # A peer runs in a round of its own: the last round that level 3 ran in stands beside it.
        over = [pace_s(row) / at_once.get(row["round"], at_once[max(at_once)]) for row in mine]
        table[name] = {
            "steps_to_target": steps,
            "s_per_step": middle([pace_s(row) for row in mine]),
            "over_level_3_per_step": middle(over),
            "over_level_3": middle([ratio * steps / needed for ratio in over]) if steps and needed else None,
            "communication_share": middle([row["communication_share"] for row in mine]),
            "least_share": middle([row["least_share"] for row in mine]),
            "final_accuracy": whole[name]["final_accuracy"],
        }
        tell_level(name, table[name])
    return summary | {"target_accuracy": target, "table": table}


def tell_level(name: str, row: Row) -> None:
    def told(value: dict[str, Any] | None, factor: float = 1.0) -> str:
        if value is None:
            return "not reached"
        return f"{factor * value['median']:.2f} ({factor * value['least']:.2f} to {factor * value['most']:.2f})"

    shares = f"{told(row['communication_share'], 100)} %, least {100 * row['least_share']['median']:.1f} %"
    shares = "inside its backward" if name == "ddp" else shares
    print(
        f"      {name:20s} {told(row['over_level_3'])} x, {told(row['over_level_3_per_step'])} x per step of "
        f"{1e3 * row['s_per_step']['median']:.2f} ms; {shares}; {100 * row['final_accuracy']:.1f} %"
    )


def steps_to(points: list[dict[str, float]], target: float) -> float | None:
    """The step at which the centre crossed `target`, interpolated: the grid of snapshots must not decide."""
    before = {"step": 0.0, "accuracy": 0.1}
    for point in points:
        if point["accuracy"] >= target:
            rise = point["accuracy"] - before["accuracy"]
            share = (target - before["accuracy"]) / rise if rise > 0 else 1.0
            return float(before["step"] + max(0.0, share) * (point["step"] - before["step"]))
        before = point
    return None


def level_bars(found: dict[str, Any]) -> Bars:
    for table in found.get("levels", {}).get("summary", []):
        where, rows = f"{table['num_workers']} workers, batch {table['batch']}", table.get("table", {})
        over = rows.get(ORIGINAL, {}).get("over_level_3")
        if over is not None:
            yield f"level 3 over original to equal accuracy, {where}: 5.3 x", over["median"], over["median"] >= 5.3
        if LEVEL_3 in rows:
            share = 100 * rows[LEVEL_3]["communication_share"]["median"]
            yield f"communication share of level 3, {where}: below 14 %", share, share < 14


# --- beyond -------------------------------------------------------------------------------------------------------


def simulate_beyond(bench: Bench, step_s: float, spread_s: float, sizes: list[int]) -> Any:
    """Weak scaling up to the paper's 4,352, from a lone worker's steps and what `messages` measured."""
    found = bench.results["sections"].get("messages", {}).get("found", {})
    if "latency_s" not in found:
        return {"error": "the section `messages` must run first: it measures latency and bandwidth"}
    costs = Costs(found["latency_s"], found["s_per_byte"], found["add_s_per_byte"], step_s, spread_s, 4 * 431_080)
    far = [*sizes, 64, 256, 1024, 2176, 4352]
    fast = with_network(costs, PAPER_NETWORK["latency_s"], PAPER_NETWORK["s_per_byte"])  # type: ignore[arg-type]
    curves: dict[str, Any] = {"costs": asdict(costs), "network": PAPER_NETWORK}
    for name, network in (("this host's loopback", costs), ("paper's network", fast)):
        curves[name] = {
            f"level {level}": [asdict(s) for s in scale("sync-easgd", far, network, level=level)] for level in (1, 2, 3)
        }
        curves[name]["sync-sgd"] = [asdict(s) for s in scale("sync-sgd", far, network, period=1)]
        last = curves[name]["level 3"][-1]
        print(f"    simulated, {name}: {last['num_workers']} workers at {100 * last['efficiency']:.1f} %")
    return curves
