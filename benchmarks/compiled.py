"""Measures compiled steps in a byte budget, and the alternatives: compiled in-core, eager in-core, eager outcore,
checkpointing with compilation, and `activation_memory_budget` at five values.

    python -m benchmarks.compiled --networks resnet50,llama,vit_l --total-s 560 --out $OUT/one.json   # ours, hard cap
    python -m benchmarks.compiled --networks resnet152,gpt2,bert_large --total-s 560 --out $OUT/two.json
    python -m benchmarks.compiled --networks resnet50 --methods in-core,peers --total-s 560 --out $OUT/three.json
    python -m benchmarks.compiled --networks resnet50 --budgets 0.9,0.75,0.6,0.5,0.4,0.35,0.3,0.25    # does time fall?
    python -m benchmarks.compiled --networks tiny --methods in-core,ours,peers                       # tries it on a CPU
    python -m benchmarks.compiled --join one.json --join two.json --out all.json

Each network runs in a process of its own. A row that takes longer than `--row-s` ends that process, and another one
goes on with the next row: what is compiled by then is in the compiler's cache, which all processes share. Every row is
in the file as soon as it was measured; nothing begins after `--total-s`. A row that was measured before, in the same
file, is replaced. Budgets are in GiB and below 1 a share of compiled in-core; 9 stands for nine GiB, 0.33 for a third.

`bits` compares sums over the bits of the loss and of every gradient, in several steps, with those of the same steps
compiled in-core: "160 of 160" are equal. What compiled in-core does not repeat by itself is not compared (`repeats`).
The optimizer's rate is zero, so every row computes the same steps. `excess` is the step's time over compiled in-core's.
One more step is looked at by PyTorch's profiler: `busy_s` and `idle_s` of the compute stream, from its first kernel to
its last, `late_s` from the step's begin to the first, and `more`: kernels on which ours spends more than in-core does.
`num_ran_out`: steps that ran out of memory while plans were tried; a training would have ended there.
`num_refused` counts memory that was refused to an op, which then did with less (cuDNN), `num_restarts` how often the
allocator started over, both in the timed steps. `attempts`: the plans that were tried, with the budget's part they use.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import IO, Any

import click
import torch
from torch import Tensor, nn
from torch._C._autograd import DeviceType
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks import networks, peers
from benchmarks.networks import Network
from benchmarks.slowdown import FIELDS, GIB, about, hardware
from outcore.limit import Limited, limit

BUDGETS: dict[str, tuple[float, ...]] = {
    "resnet50": (24, 16, 12),
    "resnet152": (12,),
    "vit_l": (12,),
    "llama": (28, 24),
    "gpt2": (1 / 3,),
    "bert_large": (1 / 3,),
    "tiny": (0.8, 0.6),
}
SHARES = (0.5, 0.3, 0.2, 0.1, 0.0)  # of activation_memory_budget
PEERS = ("eager", "eager-ours", *(f"share:{share:g}" for share in SHARES), "checkpoint")
ALL = 1.5  # of compiled in-core: what a budget costs that is never needed
NUM_STEPS = 8  # timed
NUM_COMPARED = 3  # steps whose bits are compared
MOST_STEPS_S = 40.0  # until a plan is settled
MOST_RAN_OUT = 4  # steps out of memory while plans are tried, before a row fails
NUM_MORE = 8  # kernels that are named
COMPILE_S = 240.0  # more than a row's own clock, for the first row of a process that has nothing compiled
Around = Callable[[], AbstractContextManager[Any]]


class Bench:
    """The rows of one network. Those that ran in-core come first: the others are compared with them."""

    def __init__(self, name: str, device: str) -> None:
        self.name, self.device = name, device
        self.in_core_s = self.in_core_gib = 0.0
        self._in_core: list[list[int]] = []  # sums over bits, step by step
        self._repeats: list[list[bool]] = []  # which of them came twice
        self._kernels: dict[str, tuple[int, float]] = {}  # of a step compiled in-core: how often, and seconds
        self._compiled: Network | None = None

    def attempt(self, method: str, budget: float | None) -> None:
        """One row. A failure is a row, too."""
        share = budget is not None and budget < 1
        memory_gib = round(budget * (self.in_core_gib or 1.0), 4) if budget is not None and share else budget
        print(f"BEGIN {self.name} {method} {budget}", flush=True)
        row: dict[str, Any] = dict.fromkeys(FIELDS) | {"network": self.name, "method": method, "memory_gib": memory_gib}
        began = time.monotonic()
        try:
            row |= self._row(method, memory_gib)
        except Exception as error:
            traceback.print_exc(limit=-4)
            row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        if method == "in-core" and row["step_s"]:
            self.in_core_s, self.in_core_gib = row["step_s"], row["peak_gib"]
        row["in_core_step_s"] = self.in_core_s or None
        if row["step_s"] and self.in_core_s:
            row["excess"] = round(row["step_s"] / self.in_core_s - 1, 4)
        print("ROW " + json.dumps(row | {"took_s": round(time.monotonic() - began, 1)}), flush=True)
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)

    def _row(self, method: str, memory_gib: float | None) -> dict[str, Any]:
        if method == "in-core":
            return self._compiled_in_core()
        if method == "ours":
            return self._limited(self._same_compiled(), memory_gib or 1.0)
        if method == "ours:all":
            return self._limited(self._same_compiled(), ALL * (self.in_core_gib or 1.0))
        self._compiled = None
        network = self._build(compiled=False)
        if method == "eager":
            return self._measured(network)
        if method == "eager-ours":
            return self._limited(network, memory_gib or 1.0, compares=False)
        if method == "checkpoint":
            peers.checkpoint_blocks(network)
            network.model.compile()
            return self._measured(network)
        with torch._functorch.config.patch(activation_memory_budget=float(method.removeprefix("share:"))):
            network.model.compile()
            return self._measured(network)

    # --- steps

    def _build(self, *, compiled: bool) -> Network:
        torch._dynamo.reset()
        found = tiny(self.device) if self.name == "tiny" else networks.build(self.name, device=self.device)
        if compiled:
            found.model.compile()
        self.optimizer = torch.optim.SGD(found.model.parameters(), lr=0.0)
        return found

    def _same_compiled(self) -> Network:
        self._compiled = self._compiled or self._build(compiled=True)
        return self._compiled

    def _step(self, network: Network, around: Around) -> tuple[Tensor, float, float]:
        """The loss, and seconds of the host in the forward and in the backward."""
        began = time.perf_counter()
        with around():
            loss = network.loss()
            between = time.perf_counter()
            loss.backward()
        return loss.detach(), between - began, time.perf_counter() - between

    def _whole_step(self, network: Network, around: Around) -> tuple[float, float, float]:
        """Seconds, those of the optimizer and of a wait for the device included."""
        began = time.perf_counter()
        _, forward_s, backward_s = self._step(network, around)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, forward_s, backward_s

    def _measured(self, network: Network, around: Around = nullcontext) -> dict[str, Any]:
        began = time.monotonic()
        self._whole_step(network, around)
        first_s = time.monotonic() - began
        self._whole_step(network, around)
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        refused = _refusals(self.device)
        steps = [self._whole_step(network, around) for _ in range(NUM_STEPS)]
        step_s, forward_s, backward_s = (statistics.median(column) for column in zip(*steps, strict=True))
        found: dict[str, Any] = {
            "batch": network.batch,
            "step_s": round(step_s, 5),
            "fastest_s": round(min(step for step, _, _ in steps), 5),
            "host_forward_s": round(forward_s, 5),
            "host_backward_s": round(backward_s, 5),
            "first_step_s": round(first_s, 1),
        }
        if self.device == "cuda":
            now = _refusals(self.device)
            found |= {name: now[name] - refused[name] for name in now}
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
        return found

    def _bits(self, network: Network, around: Around = nullcontext) -> list[list[int]]:
        """Per step two sums over the bits of the loss and of each gradient."""
        found = []
        for number in range(NUM_COMPARED):
            torch.manual_seed(number)
            self.optimizer.zero_grad()
            loss, _, _ = self._step(network, around)
            gradients = [parameter.grad for parameter in network.model.parameters() if parameter.grad is not None]
            found.append(torch.stack([_sums(tensor) for tensor in (loss, *gradients)]).flatten().tolist())
        self.optimizer.zero_grad()
        return found

    def _profiled(self, network: Network, around: Around = nullcontext) -> dict[str, Any]:
        """What the device did in one step."""
        if self.device != "cuda":
            return {}
        everything = [ProfilerActivity.CUDA, ProfilerActivity.CPU]
        with profile(activities=everything) as found, record_function("the whole step"):
            self._whole_step(network, around)
        told, kernels = _device_of(found)
        if not self._kernels:
            self._kernels = kernels
            return told
        more = [(name, *_difference(made, self._kernels.get(name, (0, 0.0)))) for name, made in kernels.items()]
        more.sort(key=lambda one: -one[2])
        return {**told, "more": [[name[:80], count, round(1e3 * took_s, 3)] for name, count, took_s in more[:NUM_MORE]]}

    # --- rows

    def _compiled_in_core(self) -> dict[str, Any]:
        network = self._same_compiled()
        found = self._measured(network)
        self._in_core, again = self._bits(network), self._bits(network)
        self._repeats = [
            [a == b for a, b in zip(*pair, strict=True)] for pair in zip(self._in_core, again, strict=True)
        ]
        known = [same for step in self._repeats for same in step]
        return {**found, "repeats": f"{sum(known)} of {len(known)}", **self._profiled(network)}

    def _limited(self, network: Network, size_gib: float, *, compares: bool = True) -> dict[str, Any]:
        """Under a hard cap of the budget's size, the allocator's own blocks included."""
        if self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, size_gib * GIB / total))
        ooc = limit(network.model, int(size_gib * GIB))
        began, num_steps, num_ran_out = time.monotonic(), 0, 0
        try:
            while not ooc.settled and time.monotonic() - began < MOST_STEPS_S:
                try:
                    self._whole_step(network, ooc.step)
                except torch.OutOfMemoryError:  # the next one follows a smaller plan
                    num_ran_out += 1
                    if num_ran_out > MOST_RAN_OUT:
                        raise
                num_steps += 1
            settled = {
                "settled_s": round(time.monotonic() - began, 1),
                "settled_steps": num_steps,
                "num_ran_out": num_ran_out,
            }
            tried = _measured_close(ooc)
            found = {**self._measured(network, ooc.step), **_planned(ooc), **tried, **settled}
            if compares and self._in_core:
                found["bits"] = self._compared(self._bits(network, ooc.step))
                found |= self._profiled(network, ooc.step)
            return found
        finally:
            ooc.close()

    def _compared(self, found: list[list[int]]) -> str:
        pairs = [
            a == b
            for ours, theirs, repeats in zip(found, self._in_core, self._repeats, strict=True)
            for a, b, comes_twice in zip(ours, theirs, repeats, strict=True)
            if comes_twice
        ]
        return f"{sum(pairs)} of {len(pairs)}"


def _refusals(device: str) -> dict[str, int]:
    if device != "cuda":
        return {}
    told = torch.cuda.memory_stats()
    return {"num_refused": told["num_ooms"], "num_restarts": told["num_alloc_retries"]}


def _device_of(found: profile) -> tuple[dict[str, Any], dict[str, tuple[int, float]]]:
    """What a profile says of the stream on which most kernels ran, and its kernels: how often each, and seconds."""
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = found.profiler.kineto_results.events()
    device = [event for event in events if event.device_type() == DeviceType.CUDA and event.duration_ns()]
    device = [event for event in device if event.name() != "the whole step"]  # its range on the device
    compute = Counter(event.device_resource_id() for event in device).most_common(1)[0][0]
    here = sorted((event for event in device if event.device_resource_id() == compute), key=lambda one: one.start_ns())
    began_ns = min(event.start_ns() for event in events if event.name() == "the whole step")
    busy_ns, kernels, reached_ns = 0, dict[str, tuple[int, float]](), here[0].start_ns()
    for event in here:
        count, took_s = kernels.get(event.name(), (0, 0.0))
        kernels[event.name()] = count + 1, took_s + event.duration_ns() / 1e9
        end_ns = event.start_ns() + event.duration_ns()
        busy_ns += max(0, end_ns - max(reached_ns, event.start_ns()))
        reached_ns = max(reached_ns, end_ns)
    told = {
        "num_kernels": len(here),
        "busy_s": round(busy_ns / 1e9, 5),
        "idle_s": round((reached_ns - here[0].start_ns() - busy_ns) / 1e9, 5),
        "late_s": round((here[0].start_ns() - began_ns) / 1e9, 5),
        "copies_s": round(sum(event.duration_ns() for event in device if "Memcpy" in event.name()) / 1e9, 5),
    }
    return told, kernels


def _difference(one: tuple[int, float], other: tuple[int, float]) -> tuple[int, float]:
    return one[0] - other[0], one[1] - other[1]


def _measured_close(ooc: Limited) -> dict[str, Any]:
    """What the step that was measured closely took for waits and for launches that ran again."""
    timeline = ooc.timeline
    if timeline is None:
        return {}
    return {
        "close_step_s": round(timeline.step_s, 5),
        "close_stall_s": round(timeline.stall_s, 5),
        "close_recompute_s": round(timeline.recompute_s, 5),
    }


def _planned(ooc: Limited) -> dict[str, Any]:
    plan, predicted, trace, schedule = ooc.plan, ooc.predicted, ooc.trace, ooc.schedule
    if plan is None or predicted is None or trace is None or schedule is None:
        return {"planned": False, "because": ooc._loop.tally.unplanned_because}
    kinds = Counter(action.kind for action in schedule.actions)
    forward = [op for op in trace.ops if op.phase == "forward"]
    return {
        "predicted_step_s": round(predicted.step_s, 5),
        "predicted_peak_gib": round(predicted.peak_bytes / GIB, 3),
        "settled": ooc.settled,
        "planned_for_gib": round(plan.budget.device_bytes / GIB, 3),
        "ops_s": round(plan.in_core_step_s, 5),
        "bound_s": round(plan.bound_step_s, 5),
        "stall_s": round(predicted.stall_s, 5),
        "recompute_s": round(predicted.recompute_s, 5),
        "swapped_gib": round(predicted.swapped_bytes / GIB, 2),
        "recomputed_gib": round(predicted.recomputed_bytes / GIB, 2),
        "num_swapped": kinds["swap_out"],
        "num_run_again": kinds["rerun"],
        "num_ops": len(trace.ops),
        "num_launches": sum(op.name.startswith(("triton", "extern", "cpp")) for op in trace.ops),
        "num_forward": len(forward),
        "num_never_again": sum(op.replay == "no" for op in forward),
        **{f"num_{way}": ooc.stats()[way] for way in ("left", "unplanned")},
        "attempts": [
            {
                "gib": round(attempt.usable_bytes / GIB, 2),
                "step_s": round(attempt.step_s, 5),
                "predicted_step_s": round(attempt.ready.prepared.predicted.step_s, 5),
                "num_restarts": attempt.num_restarts,
                "reserved_gib": round(attempt.reserved_bytes / GIB, 2),
            }
            for kind in ooc.kinds.values()
            if kind.phase.headroom is not None
            for attempt in kind.phase.headroom.attempts
        ],
    }


def _sums(tensor: Tensor) -> Tensor:
    """Two sums over the bits of a tensor, without a copy as large as it in 64 bits."""
    size = tensor.element_size()
    words = tensor.detach().contiguous().view(-1).view(torch.int32 if size >= 4 else torch.int16)
    odd, total = words[::2].sum(dtype=torch.int64), words.sum(dtype=torch.int64)
    return torch.stack([total, odd])


class TinyBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.dropout = nn.Linear(64, 256), nn.Linear(256, 64), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(x))))
        return out


def tiny(device: str) -> Network:
    """A network that compiles in seconds, to try this file where there is no GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [TinyBlock() for _ in range(3)]
        model, x, y = nn.Sequential(*blocks), torch.randn(512, 64), torch.randint(0, 64, (512,))
    return Network("tiny", 512, model, lambda: F.cross_entropy(model(x), y), list(blocks))


# --- the command ------------------------------------------------------------------------------------------------------

Row = tuple[str, float | None]  # method, budget


class Rows:
    """The rows of a file, each written as soon as it is there."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.rows: list[dict[str, Any]] = json.loads(out.read_text())["rows"] if out.exists() else []

    def add(self, row: dict[str, Any]) -> None:
        key = _row_key(row)
        self.rows = [other for other in self.rows if _row_key(other) != key] + [row]
        self.out.parent.mkdir(parents=True, exist_ok=True)
        self.out.write_text(json.dumps({"question": "compiled", **about(), "rows": self.rows}, indent=1))


def _row_key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["network"], row["method"], row["memory_gib"]


def rows_of(name: str, methods: str, budgets: str) -> list[Row]:
    """In the order in which they run."""
    sizes = tuple(float(part) for part in budgets.split(",") if part) or BUDGETS.get(name, (1 / 3,))
    found: list[Row] = []
    for method in methods.replace("peers", ",".join(PEERS)).split(","):
        found += [(method, size) for size in sizes] if method in ("ours", "eager-ours") else [(method, None)]
    return found


def run_network(name: str, rows: list[Row], row_s: float, ends_s: float, add: Callable[[dict[str, Any]], None]) -> None:
    """Its rows in a process, and in another one from the next row on where one takes too long."""
    left, is_first = list(rows), True
    while left and time.monotonic() < ends_s:
        baseline: list[Row] = [("in-core", None)] if not is_first and left[0][0] != "in-core" else []
        num_done = _run_in_process_of_its_own(name, [*baseline, *left], row_s, ends_s, add) - len(baseline)
        num_done, is_first = max(0, num_done), False
        if num_done < len(left):
            method, budget = left[num_done]
            why = "no time left" if time.monotonic() >= ends_s else f"stopped after {row_s:.0f} s, or ended by itself"
            row = {"network": name, "method": method, "memory_gib": budget, "error": why}
            add(dict.fromkeys(FIELDS) | row)
        left = left[num_done + 1 :]


def _run_in_process_of_its_own(
    name: str, rows: list[Row], row_s: float, ends_s: float, add: Callable[[dict[str, Any]], None]
) -> int:
    """How many rows there were before it ended."""
    command = [sys.executable, "-m", "benchmarks.compiled", "--one", name, "--rows", json.dumps(rows)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    lines: queue.Queue[str] = queue.Queue()

    def read(stream: IO[str]) -> None:
        for line in stream:
            lines.put(line)
        lines.put("")

    threading.Thread(target=read, args=(process.stdout,), daemon=True).start()
    num_done, until_s = 0, time.monotonic() + row_s + COMPILE_S
    while True:
        try:
            line = lines.get(timeout=max(0.0, min(until_s, ends_s) - time.monotonic()))
        except queue.Empty:
            break
        if not line:
            break
        print(line, end="", flush=True)
        if line.startswith("ROW "):
            add(json.loads(line[4:]))
            num_done, until_s = num_done + 1, time.monotonic() + row_s
    process.kill()
    process.wait()
    return num_done


@click.command(help=__doc__)
@click.option("--networks", "names", default="resnet50,llama,vit_l,resnet152,gpt2,bert_large", show_default=True)
@click.option(
    "--methods",
    default="in-core,ours",
    show_default=True,
    help=f"Also ours:all (a budget that is never needed) and peers: {', '.join(PEERS)}.",
)
@click.option("--budgets", default="", help="In GiB, or shares of compiled in-core; default: those of the bars.")
@click.option("--row-s", default=150.0, show_default=True, help="Seconds for one row, the first of a network's more.")
@click.option("--total-s", default=560.0, show_default=True, help="Seconds for everything.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
@click.option(
    "--join", "parts", multiple=True, type=click.Path(path_type=Path), help="Put files together, run nothing."
)
@click.option("--one", default="", hidden=True, help="Run rows of this network here and print them.")
@click.option("--rows", "asked", default="[]", hidden=True)
def main(
    names: str,
    methods: str,
    budgets: str,
    row_s: float,
    total_s: float,
    out: Path | None,
    parts: tuple[Path, ...],
    one: str,
    asked: str,
) -> None:
    if one:
        bench = Bench(one, "cuda" if torch.cuda.is_available() else "cpu")
        for method, budget in json.loads(asked):
            bench.attempt(method, budget)
        return
    ends_s = time.monotonic() + total_s
    rows = Rows(out or Path(f"benchmarks/results/compiled_{hardware()}_{date.today():%Y%m%d}.json"))
    for part in parts:
        for row in json.loads(part.read_text())["rows"]:
            rows.add(row)
    for name in names.split(",") if not parts else ():
        run_network(name, rows_of(name, methods, budgets), row_s, ends_s, rows.add)


if __name__ == "__main__":
    main()
