"""Tests the claims about elastic averaging, to real accuracy and over several seeds. One command per question.

    python benchmarks/elastic_claims.py mnist --data .carry/mnist --seeds 1 --first-seed 0   # 0, 1 and 2; 16 cores
    python benchmarks/elastic_claims.py merge --parts FILE FILE FILE                         # medians and bars
    python benchmarks/elastic_claims.py mnist --data .carry/cifar10.npz --epochs 12 --target 0.6 --batch 32 --seeds 1
    python benchmarks/elastic_claims.py prediction --data .carry/mnist       # 2 minutes
    python benchmarks/elastic.py --data .carry/mnist --only scaling,partition  # weak scaling; the best lone group

`mnist`: every method trains the same network on the same shards for the same number of epochs, rates falling to zero,
until its centre has reached `--target` on all test images. Reported are the seconds to the target and their ratio to
sync-easgd's at level 3, the final accuracy, and the share of the clock spent on communication, in all and in the first
and last tenth of the steps; for each seed, and their medians. The round-robin original is included in both readings:
"iteration" is Algorithm 1 of 1708.02983 as printed (a worker's turn covers its gradient and its exchange, layer by
layer), "exchange" keeps only the exchanges in order. DDP runs in the same processes.

`prediction`: what the simulator says about 2, 4 and 8 workers, from a lone worker's steps and two processes' messages,
beside what they do over sockets; only then about 4,352.

Every trial gets the remaining time as a limit; a trial that exceeds it is recorded as such.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

from benchmarks.elastic import hardware  # noqa: E402
from benchmarks.elastic_clock import PAPER_NETWORK  # noqa: E402
from outcore.elastic.compare import make_trial, rate_for, run_trials  # noqa: E402
from outcore.elastic.cores import read_cores  # noqa: E402
from outcore.elastic.launch import LaunchPlan, launch  # noqa: E402
from outcore.elastic.simulate import Costs, fit_message_costs, simulate, with_network  # noqa: E402
from outcore.elastic.trials import Result, Trial  # noqa: E402

LEVEL_3 = "sync-easgd level 3"
PAPERS_READING, KINDER_READING = "original-easgd, turn of an iteration", "original-easgd, turn of an exchange"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    LEVEL_3: ("sync-easgd", {"level": 3, "period": 1}),
    "sync-easgd level 2": ("sync-easgd", {"level": 2, "period": 1}),
    "sync-easgd level 1": ("sync-easgd", {"level": 1, "period": 1}),
    "ddp": ("ddp", {}),
    "sync-sgd": ("sync-sgd", {"period": 1}),
    "async-easgd": ("async-easgd", {"period": 1}),
    "streaming-diloco": ("streaming-diloco", {"period": 8, "fragments": 4, "delay": 1}),
    KINDER_READING: ("original-easgd", {"period": 1, "turn": "exchange"}),
    PAPERS_READING: ("original-easgd", {"period": 1, "turn": "iteration", "packed": False}),
}
BARS = {"ratio": 5.3, "share": 0.14}


class Clock:
    """What is left of the command's time."""

    def __init__(self, limit_s: float) -> None:
        self.ends_s = time.monotonic() + limit_s

    def left_s(self) -> float:
        return max(1.0, self.ends_s - time.monotonic())


# --- to real accuracy -----------------------------------------------------------------------------------------------


def claim_trials(args: argparse.Namespace, num_workers: int, seed: int) -> list[Trial]:
    """One seed's trials, each seed beginning with another method: what a machine does over time, it does to all."""
    names = [name for name in METHODS if args.methods is None or name in args.methods.split(";")]
    turned = names[seed % len(names) :] + names[: seed % len(names)]
    fields: dict[str, Any] = {"batch": args.batch, "epochs": args.epochs, "anneals": True, "seed": seed}
    fields |= {
        "num_snapshots": args.snapshots,
        "snapshots_from": 0.25,
        "num_judged": args.judged,
        "limit_s": args.limit_s,
    }
    return [
        make_trial(
            METHODS[name][0],
            num_workers,
            name=name,
            rate=args.rate_factor * rate_for(METHODS[name][0], num_workers),
            join=METHODS[name][1],
            **fields,
        )
        for name in turned
    ]


def mnist(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    num_cores = sum(len(node) for node in read_cores())
    num_workers = args.workers or (8 if num_cores >= 16 else max(2, num_cores // 2))
    seeds = range(args.first_seed, args.first_seed + args.seeds)
    trials = [trial for seed in seeds for trial in claim_trials(args, num_workers, seed)]

    def tell(result: Result) -> None:
        told = result.error or f"{100 * result.final_accuracy:.2f} %, {result.train_s:.1f} s"
        print(f"  seed {result.trial['seed']}, {result.trial['name']}: {told}", flush=True)

    results = run_trials(
        trials,
        num_groups=num_workers,
        num_spare_cores=max(0, num_cores - num_workers),
        data=args.data,
        limit_s=clock.left_s(),
        on_result=tell,
    )
    rows = [{**row_of(result, args.target), "seed": result.trial["seed"]} for result in results]
    late = trials[len(rows) :]
    missing = [{"name": trial.name, "seed": trial.seed, "error": "not reached in time"} for trial in late]
    where = {"num_workers": num_workers, "num_cores": num_cores, "data": results[0].data if results else args.data}
    return {**where, "target": args.target, **judged(rows, args.target), "missing": missing}


def merge(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Seeds that were run by several commands, as if by one; what it says of the machine is where they ran."""
    parts = [json.loads(path.read_text()) for path in args.parts]
    first, alike = parts[0], ("question", "hardware", "num_workers", "num_cores", "data", "target")
    if any(part[key] != first[key] for part in parts for key in alike):
        raise SystemExit(f"{[str(path) for path in args.parts]} differ in one of {', '.join(alike)}")
    rows = [row for part in parts for row in part["rows"]]
    missing = [row for part in parts for row in part["missing"]]
    told = {key: first[key] for key in (*alike, "date")}
    return {**told, **judged(rows, first["target"]), "missing": missing}


def judged(rows: list[dict[str, Any]], target: float) -> dict[str, Any]:
    table = summarize(rows)
    for name, row in table.items():
        print(f"  {name:38s} " + ", ".join(f"{key} {value:.3g}" for key, value in row.items() if value is not None))
    return {"rows": rows, "medians": table, "bars": bars_of(table, target)}


def row_of(result: Result, target: float) -> dict[str, Any]:
    """What is reported of one trial."""
    kept = {name: getattr(result, name) for name in ("num_steps", "train_s", "final_accuracy", "sent_bytes", "error")}
    kept |= {"name": result.trial["name"], "seconds_to_target": seconds_to(result.points, target)}
    if result.trial["method"] != "ddp":  # it waits inside its backward, where no clock of ours is
        kept |= {"share": result.communication_share, "first_share": result.first_share}
        kept |= {"last_share": result.last_share, "least_share": result.least_share}
    return kept | {"points": result.points}


def seconds_to(points: list[dict[str, float]], target: float) -> float | None:
    """When the centre crossed `target` for good, between the last snapshot below it and the next."""
    below = [number for number, point in enumerate(points) if point["accuracy"] < target]
    first = below[-1] + 1 if below else 0
    if first >= len(points):
        return None
    if not below:
        return float(points[0]["at_s"])
    early, late = points[first - 1], points[first]
    share = (target - early["accuracy"]) / (late["accuracy"] - early["accuracy"])
    return float(early["at_s"] + share * (late["at_s"] - early["at_s"]))


def summarize(rows: list[dict[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Medians over the seeds; ratios are to level 3 with the same seed."""
    level_3 = {row["seed"]: row["seconds_to_target"] for row in rows if row["name"] == LEVEL_3}
    for row in rows:
        own, theirs = row["seconds_to_target"], level_3.get(row["seed"])
        row["over_level_3"] = own / theirs if own and theirs else None
    table = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name and not row["error"]]
        keys = ("seconds_to_target", "over_level_3", "final_accuracy", "share", "first_share", "last_share", "train_s")
        table[name] = {key: median_of([row.get(key) for row in mine]) for key in keys}
    return table


def median_of(values: list[float | None]) -> float | None:
    """None where some seed has no value: a target that was not always reached has no median time."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def bars_of(table: dict[str, dict[str, float | None]], target: float) -> list[dict[str, Any]]:
    ratio = table.get(PAPERS_READING, {}).get("over_level_3")
    share = table.get(LEVEL_3, {}).get("share")
    reached = table.get(LEVEL_3, {}).get("final_accuracy")
    bars = [
        {"bar": f"level 3 over the paper's reading to {target:.1%}: 5.3 x", "measured": ratio},
        {"bar": "communication of level 3: at most 14 %", "measured": share},
        {"bar": f"accuracy of level 3: {target:.1%}", "measured": reached},
    ]
    holds = [
        ratio and ratio >= BARS["ratio"],
        share is not None and share <= BARS["share"],
        reached and reached >= target,
    ]
    return [{**bar, "holds": bool(ok)} for bar, ok in zip(bars, holds)]


# --- what the simulator says ------------------------------------------------------------------------------------------


def prediction(args: argparse.Namespace, clock: Clock) -> dict[str, Any]:
    """Lone workers and messages first; then 2, 4 and 8 workers over sockets, and what was predicted for them."""
    num_cores = sum(len(node) for node in read_cores())
    most = args.workers or (8 if num_cores >= 8 else 2)
    sizes = [size for size in (2, 4, 8) if size <= most]
    steps = 12 if args.quick else 80
    fields: dict[str, Any] = {"batch": args.batch, "max_steps": steps, "num_snapshots": 0, "num_judged": 100}
    fields |= {"limit_s": 60.0}
    lone = [make_trial("sync-easgd", 1, name=f"lone {rank}", first_rank=rank, **fields) for rank in range(most)]
    setups: dict[str, tuple[str, dict[str, Any]]] = {
        "sync-easgd level 2": ("sync-easgd", {"level": 2}),
        "sync-easgd level 3": ("sync-easgd", {"level": 3}),
        "sync-sgd": ("sync-sgd", {}),
    }
    together = [
        make_trial(method, size, name=name, join=join, **fields)
        for _ in range(1 if args.quick else 3)
        for size in sizes
        for name, (method, join) in setups.items()
    ]
    messages = measure_messages(5 if args.quick else 30, clock)
    results = run_over_sockets([*lone, *together], most, args.data, clock)
    alone = [result for result in results if result.trial["num_workers"] == 1 and not result.error]
    if not alone or "pingpong" not in messages:
        return {"error": "no lone worker or no message was measured in time", "messages": messages}
    costs = costs_of(messages, alone)
    rows = [predict(name, size, costs, results, setups[name]) for size in sizes for name in setups]
    for row in rows:
        print(
            f"  {row['num_workers']} x {row['name']}: predicted {1e3 * row['predicted_s']:.2f} ms a step, measured "
            f"{1e3 * (row['measured_s'] or float('nan')):.2f} ms"
        )
    return {"costs": asdict(costs), "messages": messages, "rows": rows, "beyond": beyond(costs)}


def costs_of(messages: dict[str, Any], alone: list[Result]) -> Costs:
    sizes = [row["num_bytes"] for row in messages["pingpong"]]
    latency_s, s_per_byte = fit_message_costs(sizes, [row["seconds"] for row in messages["pingpong"]])
    steps_s = [step for result in alone for step in result.step_s[len(result.step_s) // 5 :]]
    spread_s = statistics.stdev(steps_s)  # of all cores together: with several workers the slowest counts
    return Costs(latency_s, s_per_byte, messages["add_s_per_byte"], statistics.mean(steps_s), spread_s, 4 * 431_080)


def predict(
    name: str, size: int, costs: Costs, results: list[Result], setup: tuple[str, dict[str, Any]]
) -> dict[str, Any]:
    method, join = setup
    said = simulate(method, size, costs, period=1 if method == "sync-sgd" else 4, level=join.get("level", 2))
    mine = [result for result in results if (result.trial["name"], result.trial["num_workers"]) == (name, size)]
    paces_s = [statistics.mean(result.paces_s) for result in mine if not result.error]
    measured_s = statistics.median(paces_s) if paces_s else None
    row = {"name": name, "num_workers": size, "predicted_s": said.s_per_step, "measured_s": measured_s}
    row |= {"rounds_s": paces_s, "predicted_efficiency": said.efficiency}
    row["measured_efficiency"] = costs.step_s / measured_s if measured_s else None
    return row | {"predicted_over_measured": said.s_per_step / measured_s if measured_s else None}


def beyond(costs: Costs) -> dict[str, Any]:
    """The paper's 4,352 workers, over loopback and over the paper's network: simulated, not measured."""
    fast = with_network(costs, PAPER_NETWORK["latency_s"], PAPER_NETWORK["s_per_byte"])  # type: ignore[arg-type]
    return {
        name: asdict(simulate("sync-easgd", 4352, network, period=4, level=3))
        for name, network in (("loopback", costs), (str(PAPER_NETWORK["name"]), fast))
    }


def measure_messages(num_repeats: int, clock: Clock) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        worker = str(Path(__file__).with_name("elastic_messages.py").resolve())
        command = [sys.executable, worker, str(out), str(num_repeats)]
        launch(LaunchPlan(command, 2, max_restarts=0, straggler_limit_s=20, limit_s=min(60.0, clock.left_s())))
        found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    return {key: found[key] for key in ("pingpong", "add_s_per_byte") if key in found}


def run_over_sockets(trials: list[Trial], num_groups: int, data: str | None, clock: Clock) -> list[Result]:
    """As `run_trials`, by workers that do not use the memory of one host: other hosts would have none."""
    with tempfile.TemporaryDirectory(prefix="outcore-claims-") as folder:
        order, out = Path(folder) / "order.json", Path(folder) / "results.jsonl"
        out.touch()
        order.write_text(json.dumps({"data": data, "out": str(out), "trials": [asdict(trial) for trial in trials]}))
        command = [sys.executable, str(Path(__file__).resolve()), "worker", str(order)]
        num_spare = max(0, sum(len(node) for node in read_cores()) - num_groups)
        limits: dict[str, Any] = {"max_restarts": 0, "limit_s": clock.left_s()}
        launch(LaunchPlan(command, num_groups, num_spare_cores=num_spare, **limits))
        return [Result(**json.loads(line)) for line in out.read_text().splitlines()]


def worker(order: str) -> None:
    from outcore.elastic import trials, wire

    wire.SHARED_BYTES = None
    sys.argv[1:] = [order]
    trials.main()
    sys.stdout.flush()
    os._exit(0)


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        worker(sys.argv[2])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=("mnist", "prediction", "merge"))
    parser.add_argument("--data", help="folder with MNIST, or CIFAR-10's npz; scikit-learn's digits without it")
    parser.add_argument("--workers", type=int, help="[8 on 16 cores]")
    parser.add_argument("--batch", type=int, default=16, help="images of a worker's step [16]")
    parser.add_argument("--epochs", type=float, default=3.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--parts", type=Path, nargs="+", help="results of `mnist` for `merge`, a seed or more each")
    parser.add_argument("--target", type=float, default=0.985, help="accuracy of the centre on all test images")
    parser.add_argument("--rate-factor", type=float, default=1.0, help="of the rate each method is usually run with")
    parser.add_argument("--snapshots", type=int, default=12)
    parser.add_argument("--judged", type=int, default=10_000, help="test images for every snapshot")
    parser.add_argument("--methods", help=f"separated by semicolons, of: {'; '.join(METHODS)}")
    parser.add_argument("--limit-s", type=float, default=570.0)
    parser.add_argument("--quick", action="store_true", help="a few steps, to see that it runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    began_s = time.monotonic()
    found = {"mnist": mnist, "prediction": prediction, "merge": merge}[args.question](args, Clock(args.limit_s - 15))
    told: dict[str, Any] = {"question": f"elastic-claims-{args.question}", "hardware": hardware()}
    told["date"] = date.today().isoformat()
    asked = json.loads(json.dumps(vars(args), default=str))
    told |= {"asked": asked, "took_s": time.monotonic() - began_s, **found}
    stem = f"{told['question']}_{told['hardware']}_{told['date'].replace('-', '')}.json"
    out = args.out or ROOT / "benchmarks/results" / stem
    out.write_text(json.dumps(told, indent=1))
    for bar in found.get("bars", []):
        print(f"  {'holds' if bar['holds'] else 'SHORT'}  {bar['bar']}: {bar['measured']}")
    print(f"wrote {out} after {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
