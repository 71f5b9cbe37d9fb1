"""Measures training whose weights, gradients and optimizer state do not fit, with outcore and peers under equal caps.

Every row is a Llama-shaped network with AdamW, bf16 autocast and per-layer checkpointing; each method runs it in a
process of its own, under a hard cap on device memory (the in-core peer has none) and a time limit. `limit` plans
activations and state together, without the network's checkpointing; `state` streams all state through a window of a
given size, with it. Steps count from where a method has settled. Peers that cannot be imported are left out and named.
`python -m benchmarks.state --help`.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import nn

import outcore
from benchmarks.slowdown import GIB, about, hardware
from outcore.memory.machine import host_bytes_granted
from outcore.memory.settings import MEMORY
from outcore.state.state import State

MARK = "ROW "
MOST_WARM = 30  # steps before the first that counts
WARM_SHARE = 0.7  # of a job's seconds, after which steps count whatever plans are still tried


@dataclass(frozen=True)
class Shape:
    """A Llama-shaped network and its batch."""

    width: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    batch: int
    memory_gib: float
    window_gib: float  # of it, for the state at a time
    vocabulary: int = 32000
    length: int = 2048
    lora: int = 0  # rank; the rest is frozen, in bfloat16


ROWS = {
    "3b-16k": Shape(3072, 8192, 26, 24, 24, 8, 16.0, 4.0),
    "3b-8k": Shape(3072, 8192, 26, 24, 24, 4, 12.0, 4.0),
    "1b-16k": Shape(2048, 5504, 16, 16, 16, 8, 8.0, 1.0),
    "8b-16k": Shape(4096, 14336, 36, 32, 8, 8, 24.0, 6.0),
    "8b-lora": Shape(4096, 14336, 36, 32, 8, 4, 8.0, 1.5, lora=16),
    "tiny": Shape(256, 512, 2, 4, 4, 2, 0.014, 0.004, vocabulary=512, length=32),
}


class Lora(nn.Module):
    """A frozen linear layer with a low-rank addition."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        device = base.weight.device
        self.down = nn.Parameter(torch.randn(rank, base.in_features, device=device) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low: torch.Tensor = nn.functional.linear(nn.functional.linear(x, self.down), self.up)
        whole: torch.Tensor = low + self.base(x)
        return whole


def build(shape: Shape, device: str, *, checkpoints: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.device(device):
        model: nn.Module = LlamaForCausalLM(config).train()
    if shape.lora:
        model.to(torch.bfloat16).requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear) and name.endswith("_proj"):
                    setattr(module, name, Lora(child, shape.lora))
    checkpointing: Any = model
    if not checkpoints:
        return model
    checkpointing.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def adamw(model: nn.Module, *, fused: bool = True) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=fused)


@dataclass
class Run:
    """What a method trains with. Around each forward and backward goes `block`."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    block: Callable[[], AbstractContextManager[Any]] = nullcontext
    backward: Callable[[torch.Tensor], Any] = torch.Tensor.backward
    step: Callable[[], Any] | None = None  # instead of clipping, optimizer.step() and zero_grad()
    state: State | None = None
    limited: outcore.Limited | None = None
    cached: bool = True  # autocast keeps its copies of the weights until the forward ends


def in_core(shape: Shape, device: str) -> Run:
    model = build(shape, device)
    return Run(model, adamw(model))


def ours(shape: Shape, device: str, *, later: bool) -> Run:
    model = build(shape, device)
    optimizer = adamw(model)
    home_bytes = int(0.9 * host_bytes_granted() / MEMORY.host_share)  # nothing else runs there
    state = State(model, optimizer, window_bytes=int(shape.window_gib * GIB), home_bytes=home_bytes, later=later)
    return Run(model, optimizer, state.step, state=state, cached=False)


def limited(shape: Shape, device: str, *, checkpoints: bool) -> Run:
    model = build(shape, device, checkpoints=checkpoints)
    optimizer = adamw(model)
    host = int(0.9 * host_bytes_granted() / MEMORY.host_share) if device == "cuda" else "auto"
    ooc = outcore.limit(model, int(shape.memory_gib * GIB), host=host, optimizer=optimizer)
    return Run(model, optimizer, ooc.step, state=ooc.state, limited=ooc, cached=False)


def fsdp2(shape: Shape, device: str) -> Run:
    """`fully_shard` of one process with CPUOffloadPolicy: the optimizer runs on the CPU."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    model: Any = build(shape, "cpu")
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    fully_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())
    return Run(model, adamw(model))


def torchao(shape: Shape, device: str) -> Run:
    from torchao.optim import CPUOffloadOptimizer  # type: ignore[import-not-found]

    model = build(shape, device)
    parameters = [p for p in model.parameters() if p.requires_grad]
    return Run(model, CPUOffloadOptimizer(parameters, torch.optim.AdamW, fused=True, lr=1e-4))


def deepspeed(shape: Shape, device: str, *, stage: int) -> Run:
    import deepspeed as library  # type: ignore[import-not-found]

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29512",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    zero: dict[str, Any] = {"stage": stage, "offload_optimizer": {"device": "cpu", "pin_memory": True}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu", "pin_memory": True}
    config = {
        "train_micro_batch_size_per_gpu": shape.batch,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, optimizer, *_ = library.initialize(model=build(shape, "cpu"), config=config)
    return Run(engine, optimizer, backward=engine.backward, step=engine.step)


METHODS: dict[str, Callable[[Shape, str], Run]] = {
    "in-core": in_core,
    "limit": partial(limited, checkpoints=False),
    "limit-checkpointed": partial(limited, checkpoints=True),
    "state": partial(ours, later=True),
    "state-at-step": partial(ours, later=False),
    "fsdp2": fsdp2,
    "torchao": torchao,
    "deepspeed-2": partial(deepspeed, stage=2),
    "deepspeed-3": partial(deepspeed, stage=3),
}


def one_step(run: Run, tokens: torch.Tensor, *, clip: bool) -> torch.Tensor:
    with run.block():
        with torch.autocast(tokens.device.type, dtype=torch.bfloat16, cache_enabled=run.cached):
            loss: torch.Tensor = run.model(input_ids=tokens, labels=tokens).loss
        run.backward(loss)
    if run.step is not None:
        run.step()
        return loss.detach()
    if clip:
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.detach()


def measure(row: str, method: str, *, clip: bool, device: str, num_steps: int, limit_s: float) -> None:
    """Prints seconds and peaks after every step, in this process: whoever cuts it has what was measured so far."""
    began, shape = time.perf_counter(), ROWS[row]
    run = METHODS[method](shape, device)
    torch.manual_seed(1)
    tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.length), device=device)
    if device == "cuda":
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(1.0 if method == "in-core" else shape.memory_gib * GIB / total)
    head = {
        "row": row,
        "method": method,
        "clip": clip,
        "parameters": sum(p.numel() for p in run.model.parameters()),
        "tokens": shape.batch * shape.length,
        "memory_gib": shape.memory_gib if method != "in-core" else None,
        "made_s": time.perf_counter() - began,
    }
    seconds: list[float] = []
    losses: list[float] = []
    num_warm = 2  # that make the state and learn the order
    for number in range(MOST_WARM + num_steps):
        passed_s = time.perf_counter() - began
        if number == num_warm < MOST_WARM and passed_s < WARM_SHARE * limit_s and not is_settled(run):
            num_warm += 1  # plans are still being tried
        if number >= num_warm + num_steps or (number > num_warm and passed_s > limit_s):
            break
        if number <= num_warm and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        losses.append(one_step(run, tokens, clip=clip).item())
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        print(f"step {number}: {seconds[-1]:.3f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
        measured = head | {"step_s": statistics.median(seconds[num_warm:] or seconds[-1:]), "num_warm": num_warm}
        measured |= {"settled": is_settled(run), "steps_s": seconds, "losses": losses}
        print(MARK + json.dumps(measured | looked_at(run, device)), flush=True)


def is_settled(run: Run) -> bool:
    return run.limited is None or run.limited.settled


def looked_at(run: Run, device: str) -> dict[str, Any]:
    """What a run has taken so far, and what was predicted of it."""
    found: dict[str, Any] = {
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if device == "cuda" else None,
        "host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    if run.state is not None:
        window, homes = run.state.window, run.state.window.homes
        found |= {
            "home_gib": homes.peak_bytes / GIB,
            "predicted_home_gib": run.state.residency.home_bytes / GIB,
            "window_gib": window.peak_bytes / GIB,
            "num_early": run.state.num_early,
            "copied_gib_in_all_steps": {way: size / GIB for way, size in homes.copied_bytes.items()},
        }
    if run.limited is not None and (predicted := run.limited.predicted) is not None:
        timeline = run.limited.timeline
        found |= {
            "predicted_step_s": predicted.step_s,
            "predicted_peak_gib": predicted.peak_bytes / GIB,
            "stats": run.limited.stats(),
            "counted_peak_gib": timeline.peak_bytes / GIB if timeline is not None else None,
        }
    return found


def in_process(row: str, method: str, *, clip: bool, device: str, num_steps: int, limit_s: float) -> dict[str, Any]:
    """The same in a process of its own: what it leaves behind, and what it breaks, is its own."""
    command = [sys.executable, "-m", "benchmarks.state", "--rows", row, "--methods", method, "--device", device]
    command += ["--steps", str(num_steps), "--limit-s", str(limit_s), "--here", "--clip" if clip else "--no-clip"]
    head = {"row": row, "method": method, "clip": clip}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s + 20, check=False)
    except subprocess.TimeoutExpired as cut:
        said, what = (cut.stderr or b"").decode()[-1500:], f"took more than {limit_s + 20:.0f} s"
        return last_of((cut.stdout or b"").decode(), head) | {"error": what, "said": said}
    found = last_of(done.stdout, head)
    return found if done.returncode == 0 else found | {"error": (done.stderr.strip() or "killed")[-1500:]}


def last_of(printed: str, head: dict[str, Any]) -> dict[str, Any]:
    """What was measured by the last step that ended."""
    lines = [line for line in printed.splitlines() if line.startswith(MARK)]
    found: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK)) if lines else {}
    return head | found


class Job(NamedTuple):
    """A row, a method and the seconds it is given."""

    row: str
    method: str
    clip: bool
    limit_s: float


# The most important first, with the seconds an H200 needs (derived: building, pinning half a second per GiB, planning
# some 20 s, and steps), 1,400 in all; `--first` and `--total-s` cut the list into calls.
QUEUE = (
    Job("3b-16k", "in-core", False, 40),
    Job("3b-16k", "limit", False, 170),
    Job("1b-16k", "in-core", False, 30),
    Job("1b-16k", "limit", False, 90),
    Job("3b-8k", "in-core", False, 30),
    Job("3b-8k", "limit", False, 150),
    Job("3b-16k", "limit", True, 140),
    Job("3b-8k", "limit", True, 130),
    Job("3b-8k", "fsdp2", False, 60),
    Job("1b-16k", "fsdp2", False, 50),
    Job("3b-16k", "fsdp2", False, 60),
    Job("8b-lora", "limit", False, 120),
    Job("8b-16k", "limit-checkpointed", False, 240),
    Job("3b-8k", "state", False, 80),
    Job("1b-16k", "torchao", False, 40),
    Job("1b-16k", "deepspeed-2", False, 90),
    Job("3b-8k", "deepspeed-3", False, 120),
)


@click.command()
@click.option("--rows", default="", help="These rows, instead of the list of jobs.")
@click.option("--methods", default="in-core,limit,limit-checkpointed,state,fsdp2,torchao", show_default=True)
@click.option("--clip/--no-clip", default=False, help="Clip gradients by their norm.")
@click.option("--steps", default=6, show_default=True)
@click.option("--limit-s", default=100.0, show_default=True, help="For each row and method.")
@click.option("--first", default=0, show_default=True, help="Of the list of jobs, where to begin.")
@click.option("--total-s", default=560.0, show_default=True, help="No job begins that has not this much time left.")
@click.option("--device", default="cuda", show_default=True)
@click.option("--here", is_flag=True, help="In this process; prints lines for programs.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(
    rows: str,
    methods: str,
    clip: bool,
    steps: int,
    limit_s: float,
    first: int,
    total_s: float,
    device: str,
    here: bool,
    out: Path | None,
) -> None:
    """Seconds of training steps whose state does not fit. The file is written after every job."""
    if here:
        measure(rows, methods, clip=clip, device=device, num_steps=steps, limit_s=limit_s)
        return
    jobs = [Job(row, method, clip, limit_s) for row in rows.split(",") for method in methods.split(",")]
    began, made = time.perf_counter(), list[dict[str, Any]]()
    out = out or Path(f"benchmarks/results/state_{hardware()}_{date.today():%Y%m%d}.json")
    for number, job in enumerate(jobs if rows else QUEUE[first:], first):
        if not rows and time.perf_counter() - began + job.limit_s > total_s:
            print(f"go on with --first {number}", flush=True)
            break
        start = time.perf_counter()
        made.append(in_process(job.row, job.method, clip=job.clip, device=device, num_steps=steps, limit_s=job.limit_s))
        print(told(made[-1], time.perf_counter() - start), flush=True)
        out.write_text(json.dumps({"question": "state", **about(), "rows": made}, indent=1))


def told(row: dict[str, Any], seconds: float) -> str:
    name = f"{row['row']} {row['method']}{' clipped' if row['clip'] else ''} ({seconds:.0f} s)"
    if "step_s" not in row:
        return f"{name}: {row['error']}"
    predicted = f", {row['predicted_step_s']:.3f} s predicted" if "predicted_step_s" in row else ""
    cut = ", cut" if "error" in row else ""
    return f"{name}: {row['step_s']:.3f} s{predicted}, {row['peak_gib'] or 0:.1f} GiB of device memory{cut}"


if __name__ == "__main__":
    main()
