"""Measures how much slower a step is in less memory, for every network and every method in one run.

Each network runs in a separate process (with `--networks others`, networks without an individual budget get a third of
in-core): in-core first, then every method under a hard cap on the device (`set_per_process_memory_fraction`, which
raises a real out-of-memory error). Times are medians of whole steps, including the optimizer: `step_s` with a
synchronization after each step, which tables and bars use, and `loop_step_s` without, as in most loops.
`compile-budget:0.1` gives torch.compile that share of activations, and without a number the budget's. `accumulate:4`
divides the batch into four and sums the gradients, which gives other numbers (BatchNorm sees a quarter of the batch).
`python -m benchmarks.slowdown --help`.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

GIB = 1024**3
SLOW_S = 1.5  # of slower steps three tell enough
MOST_WARM, MOST_WARM_OTHERS = 45, 15  # steps until a plan is final,
MOST_WARM_S, MOST_WARM_OTHERS_S = 60.0, 20.0  # and seconds: plans are searched for beside training
NUM_LOOP_OTHERS = 3  # steps that are not waited for
FIRST_PLANNED = 4  # steps before: recorded, timed again, planned, and one that follows the plan
HEADLINES = ("in-core", "hybrid")  # timed for longest; the others stand beside them
PINNED_SHARE = 4 / 3  # of in-core memory: PyTorch pins powers of two
OURS = ("hybrid", "pooch", "swap", "swap-all")
PINNING = ("save_on_cpu", "trl-offload")
PINNED_S: list[float] = []  # of each piece of host memory that we page-locked so far
FIELDS = (  # every row of every question has these, None where there is nothing to say
    "network",
    "batch",
    "memory_gib",
    "method",
    "step_s",
    "in_core_step_s",
    "peak_gib",
    "predicted_step_s",
    "predicted_peak_gib",
)


@click.command()
@click.option("--networks", default="resnet50,llama,vgg16,vit_l,r3d18,resnet152", show_default=True)
@click.option(
    "--methods",
    default="in-core,checkpoint,selective,save_on_cpu,trl-offload,compile,compile-budget,swap-all,swap,pooch,hybrid",
    show_default=True,
    help="Also accumulate:N (N parts) and compile-budget:SHARE.",
)
@click.option("--memory-gib", type=float, multiple=True, help="Budgets; default: the one of the headline table.")
@click.option("--curve", is_flag=True, help="Several budgets for each network, from nearly in-core down.")
@click.option("--steps", default=10, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None)
@click.option("--limit-s", default=300.0, show_default=True, help="Seconds for one network, all methods.")
@click.option("--traces", type=click.Path(path_type=Path), default=None, help="Folder to save recorded traces in.")
@click.option("--warm-s", default=MOST_WARM_S, show_default=True, help="Seconds until a plan counts as final.")
@click.option("--one", default="", hidden=True, help="Run this network here and print its rows.")
def main(
    networks: str,
    methods: str,
    memory_gib: tuple[float, ...],
    curve: bool,
    steps: int,
    out: Path | None,
    limit_s: float,
    traces: Path | None,
    warm_s: float,
    one: str,
) -> None:
    """Time and peak memory of a training step against the memory it is given."""
    if one:
        global MOST_WARM_S
        MOST_WARM_S = warm_s
        run_network(one, methods.split(","), memory_gib, steps, traces)
        return
    from benchmarks.networks import CURVES_GIB, OTHERS

    rows: list[dict[str, Any]] = []
    out = out or Path(f"benchmarks/results/slowdown_{hardware()}_{date.today():%Y%m%d}.json")
    out.parent.mkdir(parents=True, exist_ok=True)

    def note(row: dict[str, Any]) -> None:
        """Whatever cuts this run short leaves the rows that are there."""
        rows.append(row)
        out.write_text(json.dumps({"question": "slowdown", **about(), "rows": rows}, indent=1))

    for name in networks.replace("others", ",".join(OTHERS)).split(","):
        budgets = memory_gib or (CURVES_GIB.get(name, ()) if curve else ())
        run_in_process_of_its_own(name, methods, budgets, steps, limit_s, traces, note, ["--warm-s", str(warm_s)])
    show(rows)


def run_in_process_of_its_own(
    name: str,
    methods: str,
    memory_gib: tuple[float, ...],
    steps: int,
    limit_s: float,
    traces: Path | None,
    note: Callable[[dict[str, Any]], None],
    more: Sequence[str] = (),
) -> None:
    command = [sys.executable, "-m", "benchmarks.slowdown", "--one", name, "--methods", methods, "--steps", str(steps)]
    for size in memory_gib:
        command += ["--memory-gib", str(size)]
    if traces is not None:
        command += ["--traces", str(traces)]
    command += more
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    import threading

    timer = threading.Timer(limit_s, process.kill)
    timer.start()
    for line in process.stdout:
        if line.startswith("ROW "):
            note(json.loads(line[4:]))
        print(line, end="", flush=True)
    process.wait()
    timer.cancel()
    if time.monotonic() >= deadline:
        note({**dict.fromkeys(FIELDS), "network": name, "method": "", "error": f"stopped after {limit_s:.0f} s"})


def run_network(name: str, methods: list[str], memory_gib: tuple[float, ...], steps: int, traces: Path | None) -> None:
    from benchmarks.networks import BUDGETS_GIB, SHARE_OF_OTHERS

    in_core_step_s, in_core_loop_s, in_core_gib = 0.0, 0.0, float("inf")
    for method in methods:
        budgets: tuple[float, ...] = memory_gib or (float(BUDGETS_GIB.get(name, SHARE_OF_OTHERS * in_core_gib)),)
        for budget in budgets if method in OURS else budgets[:1]:
            row = run_method(name, method, budget, steps, traces, in_core_gib)
            if method == "in-core" and row.get("step_s"):
                in_core_step_s, in_core_loop_s, in_core_gib = row["step_s"], row["loop_step_s"], row["peak_gib"]
                row["memory_gib"] = min(budget, in_core_gib)
            row["in_core_step_s"] = in_core_step_s
            if row.get("step_s") and in_core_step_s:
                row["slowdown"] = row["step_s"] / in_core_step_s - 1
                row["loop_slowdown"] = row["loop_step_s"] / in_core_loop_s - 1
            print("ROW " + json.dumps(row), flush=True)


def run_method(
    name: str, method: str, memory_gib: float, steps: int, traces: Path | None, in_core_gib: float
) -> dict[str, Any]:
    import torch

    row: dict[str, Any] = dict.fromkeys(FIELDS)
    row |= {"network": name, "batch": 0, "memory_gib": memory_gib, "method": method}
    row["cudnn_workspace_mib"] = os.environ.get("CUDNN_CONV_WSCAP_DBG")  # none: as much as it likes
    total = torch.cuda.get_device_properties(0).total_memory
    capped = method in OURS
    if capped:
        _empty_host_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, memory_gib * GIB / total) if capped else 1.0)
    began = time.perf_counter()
    try:
        row |= _time_steps(name, method, memory_gib, steps, traces, in_core_gib)
    except Exception as error:
        told = " ".join(getattr(error, "__notes__", ())) or error
        row["error"] = f"{type(error).__name__}: {told}"[:300]
        traceback.print_exc(limit=-4)
    row["total_s"] = time.perf_counter() - began
    import gc

    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return row


def _time_steps(
    name: str, method: str, memory_gib: float, steps: int, traces: Path | None, in_core_gib: float
) -> dict[str, Any]:
    import torch

    import outcore
    from benchmarks.networks import BATCHES, build
    from benchmarks.peers import PEERS, training_step

    num_parts = _num_parts(method)
    if method in PINNING:
        _check_host(in_core_gib)
    network = build(name, BATCHES[name] // num_parts)
    model: Any = network.model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.0)
    ooc = None
    if method in OURS:
        watch_pinning()
        ooc = outcore.limit(model, int(memory_gib * GIB), planner=method)
        around: Any = ooc.step
    elif method.startswith("compile"):
        torch.compiler.reset()  # or what was compiled before for the same code is used again, with its budget
        torch._functorch.config.activation_memory_budget = 1.0
        if method.startswith("compile-budget"):
            torch._functorch.config.activation_memory_budget = _share_saved(method, memory_gib, in_core_gib)
        model.compile()
        around = PEERS["in-core"](network)
    else:
        around = PEERS["in-core" if num_parts > 1 else method](network)
    try:
        label = f"{name}_{memory_gib:g}_{method}"
        first = traces / f"{label}.first" if ooc is not None and traces is not None else None
        row = _measure(network, around, optimizer, ooc, steps, num_parts, headline=method in HEADLINES, first=first)
        if ooc is not None:
            row |= describe(ooc, traces, label)
            if traces is not None:
                once = functools.partial(training_step, network, around, optimizer, ours=True)
                _save_history(traces / f"{label}.memory.json.gz", once)
            if method in HEADLINES:
                row |= _record_again(network, around, optimizer, ooc, row["first_steps_s"][0])
    finally:
        if ooc is not None:
            ooc.close()
    return row


@functools.cache
def watch_pinning() -> None:
    """From now on each piece of host memory that we touch and page-lock is noted with its seconds."""
    from outcore.memory.store import PinnedSlab

    make = PinnedSlab.__init__

    def timed(slab: PinnedSlab, *args: Any, **kwargs: Any) -> None:
        began_s = time.perf_counter()
        make(slab, *args, **kwargs)
        PINNED_S.append(time.perf_counter() - began_s)

    PinnedSlab.__init__ = timed  # type: ignore[method-assign, assignment]


def _num_parts(method: str) -> int:
    name, _, parts = method.partition(":")
    if name != "accumulate":
        return 1
    if not parts.isdecimal() or int(parts) < 2:
        raise RuntimeError(f"{method} needs the number of parts, two or more: accumulate:4")
    return int(parts)


def _empty_host_cache() -> None:
    """What a peer pinned is nobody else's until PyTorch gives it back."""
    import torch

    if hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


def _check_host(in_core_gib: float) -> None:
    """A peer that pins more host memory than there is takes the whole machine with it. What the one before it pinned is
    there for it, too, in blocks of the same sizes, and is given back only where that does not do."""
    from outcore.memory.machine import host_bytes_granted

    wanted_gib, free_gib = PINNED_SHARE * in_core_gib, host_bytes_granted() / GIB
    if wanted_gib > free_gib:
        _empty_host_cache()
        free_gib = host_bytes_granted() / GIB
    if in_core_gib < float("inf") and wanted_gib > free_gib:
        raise RuntimeError(f"not run: would pin up to {wanted_gib:.0f} GiB of host memory, {free_gib:.0f} are free")


def _share_saved(method: str, memory_gib: float, in_core_gib: float) -> float:
    """The share of activations that may be saved, as torch.compile wants its budget: after a colon, or the memory's."""
    _, _, share = method.partition(":")
    if share:
        return float(share)
    if in_core_gib == float("inf"):
        raise RuntimeError("compile-budget needs in-core before it in --methods: its budget is a share of that")
    return round(min(1.0, memory_gib / in_core_gib), 2)  # the same in the next run: the compiler's cache goes by it


def _measure(
    network: Any,
    around: Any,
    optimizer: Any,
    ooc: Any,
    steps: int,
    num_parts: int,
    *,
    headline: bool,
    first: Path | None,
) -> dict[str, Any]:
    """Steps until the plan is final (recorded, timed again, planned, fitted to the allocator), then timed ones. Where
    the first plan did not stay, what the allocator did in one of its steps is saved as `first`."""
    import torch

    from benchmarks.peers import training_step

    once = functools.partial(training_step, network, around, optimizer, ours=ooc is not None, num_parts=num_parts)
    times: list[float] = []
    marks: list[float] = []
    forwards = time_forwards(network)
    num_restarts, pinning_s = 0, 0.0
    PINNED_S.clear()
    most_warm, most_s = (MOST_WARM, MOST_WARM_S) if headline else (MOST_WARM_OTHERS, MOST_WARM_OTHERS_S)
    first_began = time.perf_counter()
    while len(times) < (3 if times and min(times) > SLOW_S else steps):
        if ooc is None:
            warm = len(marks) >= 3
        else:
            waited = len(marks) >= most_warm and time.perf_counter() - first_began >= most_s
            warm = waited or (ooc.settled and len(marks) >= 5)
        if warm and not times:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            num_restarts = torch.cuda.memory_stats()["num_alloc_retries"]
        if first is not None and len(marks) == FIRST_PLANNED and not ooc.settled:
            first.parent.mkdir(parents=True, exist_ok=True)
            ooc.plan.save(first.with_name(first.name + ".plan.json"))
            _save_history(first.with_name(first.name + ".memory.json.gz"), once)
        began = time.perf_counter()
        loss = once()
        (times if warm or times else marks).append(time.perf_counter() - began)
        if len(marks) == 1:
            pinning_s = sum(PINNED_S)
    forward_host_s = statistics.median(forwards[-len(times) :])
    return {
        "batch": network.batch * num_parts,
        "loop_step_s": _time_loop(functools.partial(once, wait=False), len(times) if headline else NUM_LOOP_OTHERS),
        "step_s": statistics.median(times),
        "num_steps": len(times),
        "forward_host_s": forward_host_s,  # until the host has queued it
        "spread_s": [min(times), max(times)],
        "first_steps_s": marks,
        "pinning_s": pinning_s if ooc is not None else None,  # of the first step
        "peak_gib": torch.cuda.max_memory_allocated() / GIB,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB,
        "num_alloc_retries": torch.cuda.memory_stats()["num_alloc_retries"] - num_restarts,
        "loss": float(loss),
    }


def time_forwards(network: Any) -> list[float]:
    """Grows by what each forward of the network takes the host."""
    forwards, loss = list[float](), network.loss

    def timed() -> Any:
        began = time.perf_counter()
        made = loss()
        forwards.append(time.perf_counter() - began)
        return made

    network.loss = timed
    return forwards


def _time_loop(once: Callable[[], Any], num_steps: int) -> float:
    """The median step where nobody waits for the device between steps, as most training loops run: a host that is slow
    in one part of a step catches up in another."""
    import torch

    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num_steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        once()
        mark.record()
    torch.cuda.synchronize()
    took: list[float] = [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]
    return statistics.median(took)


def _record_again(network: Any, around: Any, optimizer: Any, ooc: Any, first_s: float) -> dict[str, Any]:
    """What recording costs: the very first step, and one for which host memory is pinned already."""
    from benchmarks.peers import training_step

    ooc.kinds.clear()
    began = time.perf_counter()
    training_step(network, around, optimizer, ours=True)
    return {"first_record_s": first_s, "record_s": time.perf_counter() - began}


def _save_history(path: Path, step: Callable[[], Any]) -> None:
    """What the allocator did in one step, request by request, for `benchmarks/holes.py` to be compared with."""
    import gzip

    import torch

    there = [
        ["there", block["address"], block["size"], segment["stream"]]
        for segment in torch.cuda.memory_snapshot()
        for block in segment["blocks"]
        if segment["segment_type"] == "large" and block["state"].startswith("active")
    ]
    torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=200_000)
    try:
        step()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    kept = [[event["action"], event.get("addr", 0), event["size"], event.get("stream", 0)] for event in events]
    path.write_bytes(gzip.compress(json.dumps(there + kept).encode()))


def describe(ooc: Any, traces: Path | None, label: str) -> dict[str, Any]:

    plan, predicted = ooc.plan, ooc.predicted
    print(ooc, flush=True)
    if traces is not None:
        traces.mkdir(parents=True, exist_ok=True)
        ooc.trace.save(traces / f"{label}.trace.json")
        plan.save(traces / f"{label}.plan.json")
    return {
        "predicted_step_s": predicted.step_s,
        "predicted_peak_gib": predicted.peak_bytes / GIB,
        "in_core_predicted_s": plan.in_core_step_s,
        "bound_step_s": plan.bound_step_s,
        "measured_stall_s": ooc.timeline.stall_s,
        "measured_recompute_s": ooc.timeline.recompute_s,
        "measured_step_s": ooc.timeline.step_s,
        "swapped_gib": predicted.swapped_bytes / GIB,
        "recomputed_gib": predicted.recomputed_bytes / GIB,
        "kept_gib": predicted.kept_bytes / GIB,
        "recompute_s": predicted.recompute_s,
        "stall_s": predicted.stall_s,
        "attempts": [
            {
                "room_gib": attempt.usable_bytes / GIB,
                "step_s": attempt.step_s,
                "predicted_step_s": attempt.ready.prepared.predicted.step_s,
                "num_restarts": attempt.num_restarts,
                "reserved_gib": attempt.reserved_bytes / GIB,
            }
            for kind in ooc.kinds
            if kind.phase.headroom is not None
            for attempt in kind.phase.headroom.attempts
        ],
        "num_twins": sum(op.norm_replay for op in ooc.trace.ops),
        "num_fused": dict(Counter(str(1 + len(op.fused)) for op in ooc.trace.ops if op.fused)),  # by ops in a pass
        "waits": ooc.device_memory.host_waits,  # the host, for the device, before a step begins
        "num_left": sum(kind.num_left for kind in ooc.kinds.values()),
        "machine": json.loads(ooc.machine.to_json()),
    }


def about() -> dict[str, Any]:
    import torch

    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "commit": commit.stdout.strip(),
        "hardware": hardware(),
    }


def hardware() -> str:
    import torch

    return (
        torch.cuda.get_device_name(0).replace("NVIDIA ", "").replace(" ", "_").lower()
        if torch.cuda.is_available()
        else "cpu"
    )


def show(rows: list[dict[str, Any]]) -> None:
    headings = (
        ("GiB", 6),
        ("step s", 8),
        ("over", 7),
        ("in a loop", 9),
        ("peak", 7),
        ("reserved", 8),
        ("pred. s", 8),
        ("pred. peak", 10),
    )
    print(f"{'network':10} {'method':14} " + " ".join(f"{text:>{width}}" for text, width in headings))
    for row in rows:
        if row.get("step_s") is None:
            print(f"{row['network']:10} {row.get('method', ''):14} {row.get('error', '')[:90]}")
            continue
        print(
            f"{row['network']:10} {row['method']:14} {row['memory_gib']:6.1f} {row['step_s']:8.4f} "
            f"{100 * row.get('slowdown', 0):+6.1f}% {100 * row.get('loop_slowdown', 0):+8.1f}% "
            f"{row['peak_gib']:7.2f} {row['reserved_gib']:8.2f} "
            f"{row.get('predicted_step_s') or 0:8.4f} {row.get('predicted_peak_gib') or 0:10.2f}"
        )


if __name__ == "__main__":
    main()
