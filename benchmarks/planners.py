"""Measures the planners: gap to the bound and solve time on recorded steps. Does not need a GPU.

    PYTHONPATH=. python -m benchmarks.planners    # every section, about ten minutes on one core
    python -m benchmarks.planners --section gap   # gap | cheaper | tight | growth | machines

gap       every planner on the six recorded H200 steps, all budgets of the published ideal
cheaper   the hybrid with cheaper reruns, one after the other: norm replays, passes, common ops
growth    the hybrid planner on steps of 1k, 5k, 20k and 50k ops (repeats of a recorded one)
machines  the mix of keep, swap and recompute on machines that are not here (figures as published: given, not measured)

A section that fails is recorded as such and the others go on.
"""

from __future__ import annotations

import json
import platform
import subprocess
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.recorded import BOLD_GIB, FOLDER, IDEAL, cheaper, h200, load, repeat
from outcore.errors import BudgetTooSmall
from outcore.planning import PLANNERS, plan
from outcore.planning.preparing import prepare
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.units import GIB
from outcore.values import Budget, Machine, Trace

Row = dict[str, Any]
Job = Callable[[], Row]
NOT_HERE = ("v100_pcie3", "v100_nvlink2", "rtx4090_pcie4", "gh200_c2c")
MACHINES_GIB = 15  # of a 16 GB device, what is left beside its context


def measure(trace: Trace, machine: Machine, memory_gib: float, planner: str, host_gib: int = 100, **more: Any) -> Row:
    """One plan: made, lowered, verified, simulated."""
    name, _, batch = trace.model.partition("_")
    row: Row = {"network": name, "batch": int(batch.split()[0] or 0), "memory_gib": memory_gib, "method": planner}
    row |= {"machine": machine.name, "num_ops": len(trace.ops), "torch": trace.torch, **more}
    row |= dict.fromkeys(("step_s", "peak_gib", "in_core_step_s", "predicted_step_s", "predicted_peak_gib"))
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    try:
        made = plan(trace, machine, Budget(int(memory_gib * GIB), host_gib * GIB), planner)
    except BudgetTooSmall as error:
        return row | {"needed_gib": error.needed_bytes / GIB, "at_op": error.at_op}
    solve_s, solve_cpu_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    timeline = prepare(trace, made, machine).predicted
    assert timeline.peak_bytes == made.predicted_peak_bytes
    return row | {
        "solve_s": solve_s,
        "solve_cpu_s": solve_cpu_s,
        "in_core_step_s": made.in_core_step_s,
        "in_core_peak_gib": made.in_core_peak_bytes / GIB,
        "predicted_step_s": made.predicted_step_s,
        "predicted_peak_gib": made.predicted_peak_bytes / GIB,
        "bound_step_s": made.bound_step_s,
        "gap": made.predicted_step_s / made.bound_step_s - 1,
        "over_in_core": made.predicted_step_s / made.in_core_step_s - 1,
        "bound_over_in_core": made.bound_step_s / made.in_core_step_s - 1,
        "stall_s": timeline.stall_s,
        "recompute_s": timeline.recompute_s,
        "kept_gib": timeline.kept_bytes / GIB,
        "swapped_gib": timeline.swapped_bytes / GIB,
        "recomputed_gib": timeline.recomputed_bytes / GIB,
    }


def gap_jobs(folder: Path) -> list[Job]:
    """The hybrid at every budget of the ideal; every planner at the one it is quoted for."""
    jobs: list[Job] = []
    for network, ideals in IDEAL.items():
        trace, quoted_gib = load(network, folder, workspace=False), _quoted_gib(network)
        for memory_gib, ideal in ideals.items():
            planners = [*PLANNERS] if memory_gib == quoted_gib else ["hybrid"]
            jobs += [partial(measure, trace, h200(), memory_gib, planner, ideal=ideal) for planner in planners]
        whole = load(network, folder)
        jobs.append(partial(measure, whole, h200(), quoted_gib, "hybrid", note="workspaces as recorded in-core"))
    return jobs


def cheaper_jobs(folder: Path) -> list[Job]:
    """What each of them is worth at the budgets of the README, and Llama's others."""
    jobs: list[Job] = []
    budgets = {network: [_quoted_gib(network)] for network in BOLD_GIB} | {"gpt_24": [28, 36, 48, 64], "r3d_64": [12]}
    for network, sizes in budgets.items():
        trace = load(network, folder, workspace=False)
        steps = {
            "as recorded": trace,
            "norm replays": cheaper(trace, passes=False, common_ops=False),
            "and passes": cheaper(trace, common_ops=False),
            "and common ops": cheaper(trace),
        }
        jobs += [
            partial(measure, step, h200(), memory_gib, "hybrid", reruns=reruns)
            for memory_gib in sizes
            for reruns, step in steps.items()
        ]
    return jobs


def tight_jobs(folder: Path) -> list[Job]:
    """Where few large values meet a backward that has little room, as the step really runs."""
    budgets = {"resnet_640": (12, 10), "resnet152_256": (8, 6), "r3d_64": (10, 8)}
    return [
        partial(measure, sums_in_place(cheaper(load(network, folder, workspace=False))), h200(), memory_gib, "hybrid")
        for network, sizes in budgets.items()
        for memory_gib in sizes
    ]


def _quoted_gib(network: str) -> int:
    """The budget the ideal is quoted for; where no plan fits it in eager mode, the smallest of its table that does."""
    quoted: dict[str, int] = {"vgg_256": 12, "r3d_64": 8}
    return quoted.get(network, BOLD_GIB[network])


def growth_jobs(folder: Path) -> list[Job]:
    trace = load("resnet_640", folder, workspace=False)
    jobs: list[Job] = []
    for num_ops in (1_000, 5_000, 20_000, 50_000):
        times = max(round(num_ops / len(trace.ops)), 1)
        memory_gib = 0.5 + 16 * times * 0.98  # the same share of what the step needs
        jobs.append(partial(_measure_repeated, trace, times, memory_gib))
    return jobs


def _measure_repeated(trace: Trace, num_times: int, memory_gib: float) -> Row:
    return measure(repeat(trace, num_times), h200(), memory_gib, "hybrid", host_gib=100 * num_times, repeats=num_times)


def machines() -> list[Machine]:
    """The H200 as measured, and others as published: `given` in their files names what was not measured. `speed` is the
    ratio of memory bandwidths to the H200's 4.8 TB/s: most ops move bytes."""
    return [h200(), *(Machine.load(Path(__file__).parent / "machines" / f"{name}.machine.json") for name in NOT_HERE)]


def machine_jobs(folder: Path) -> list[Job]:
    jobs: list[Job] = []
    for network in ("resnet_640", "vit_128"):
        trace = load(network, folder, workspace=False)
        for machine in machines():
            planners = ("swap-all", "swap", "pooch", "hybrid")
            given = list(machine.given)
            jobs += [partial(measure, trace, machine, MACHINES_GIB, planner, given=given) for planner in planners]
    return jobs


SECTIONS = {
    "gap": gap_jobs,
    "cheaper": cheaper_jobs,
    "tight": tight_jobs,
    "growth": growth_jobs,
    "machines": machine_jobs,
}


def show(console: Console, section: str, rows: list[Row]) -> None:
    table = Table(title=section, box=None)
    columns = [
        "network",
        "machine",
        "ops",
        "GiB",
        "planner",
        "over in-core",
        "bound",
        "ideal",
        "keep/swap/rec. GiB",
        "solve",
    ]
    for column in columns:
        table.add_column(column, justify="left" if column in ("network", "machine", "planner") else "right")
    for row in rows:
        table.add_row(*_cells(row))
    console.print(table)


def _cells(row: Row) -> list[str]:
    head = [f"{row['network']} {row['batch']}", row["machine"], str(row["num_ops"])]
    head += [f"{row['memory_gib']:.0f}", row["method"]]
    ideal = f"{row['ideal']:+.1%}" if "ideal" in row else ""
    if "needed_gib" in row:
        return [*head, f"needs {row['needed_gib']:.1f} GiB", "", ideal, "", ""]
    mix = f"{row['kept_gib']:.1f}/{row['swapped_gib']:.1f}/{row['recomputed_gib']:.1f}"
    over, bound = f"{row['over_in_core']:+.2%}", f"{row['bound_over_in_core']:+.2%}"
    return [*head, over, bound, ideal, mix, f"{row['solve_cpu_s']:.2f} s"]


def run_section(console: Console, jobs: list[Job], until_s: float) -> tuple[list[Row], list[str]]:
    rows, errors = [], []
    for at, job in enumerate(jobs):
        if time.perf_counter() > until_s:
            errors.append(f"{len(jobs) - at} of {len(jobs)} not run: the section's time was up")
            break
        with console.status(f"{at + 1} of {len(jobs)}"):
            try:
                rows.append(job())
            except Exception as error:
                errors.append(f"job {at}: {type(error).__name__}: {error}")
    return rows, errors


def about() -> Row:
    try:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = "unknown"
    versions = {name: version(name) for name in ("outcore", "numpy", "scipy")}
    return {
        "commit": commit,
        "date": date.today().isoformat(),
        "python": platform.python_version(),
        "versions": versions,
    }


@click.command()
@click.option("--section", type=click.Choice([*SECTIONS, "all"]), default="all", show_default=True)
@click.option("--folder", type=click.Path(path_type=Path), default=FOLDER, help="Where the recorded steps are.")
@click.option("--out", type=click.Path(path_type=Path), help="Results file; default benchmarks/results/planners_….json")
@click.option("--seconds", default=600.0, show_default=True, help="Longest time for one section.")
def main(section: str, folder: Path, out: Path | None, seconds: float) -> None:
    """Gap to the bound and solve time of all planners on recorded steps."""
    console = Console(width=160)
    path = out or Path(__file__).parent / "results" / f"planners_recorded-h200_{date.today():%Y%m%d}.json"
    results: Row = {"question": "planners", "simulated": True, **about(), "rows": [], "errors": []}
    if section != "all" and path.exists():  # the other sections stay
        before = json.loads(path.read_text())
        results["rows"] = [{"commit": before["commit"], **row} for row in before["rows"] if row["section"] != section]
    for name in SECTIONS if section == "all" else [section]:
        try:
            jobs = SECTIONS[name](folder)
        except OSError as error:
            results["errors"].append(f"{name}: {error}")
            continue
        rows, errors = run_section(console, jobs, time.perf_counter() + seconds)
        results["rows"] += [{"section": name, **row, "commit": results["commit"]} for row in rows]
        results["errors"] += [f"{name}: {error}" for error in errors]
        show(console, name, rows)
    results["rows"].sort(key=lambda row: [*SECTIONS].index(row["section"]))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1))
    for problem in results["errors"]:
        console.print(f"[red]{problem}")
    console.print(f"written: {path.name}")


if __name__ == "__main__":
    main()
