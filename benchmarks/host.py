"""Measures whether the host or the device limits a step: both times of each step's forward, in a synchronized loop.

If the host cannot queue a forward as fast as the device runs it, the forward takes the host's time. The speed of a host
changes from second to second on a shared machine, so each step is accompanied by a short loop of plain Python: if its
time doubles, so does everything else on the host. `python -m benchmarks.host --help`.

`--forward` compares the host time of a planned forward, followed in Python and in C++, with a plain one: transformers
with tiny tensors on a CPU, which measure the host only, and BERT-large and GPT-2 at full size on a GPU.
"""

from __future__ import annotations

import gc
import itertools
import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

import outcore
from benchmarks.networks import BATCHES, BUDGETS_GIB, SHARE_OF_OTHERS, Network, build
from benchmarks.peers import training_step
from benchmarks.slowdown import FIELDS, GIB, MOST_WARM, MOST_WARM_OTHERS_S, MOST_WARM_S, about, hardware
from outcore.eager import native
from outcore.values import Plan

NUM_LOOP = 100_000


def loop_s() -> float:
    """Seconds of a loop of plain Python."""
    began, total = time.perf_counter(), 0
    for number in range(NUM_LOOP):
        total += number
    return time.perf_counter() - began


def one_step(
    network: Network, around: AbstractContextManager[Any], optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """Seconds of a step and of its forward, on the host and on the device."""
    python_s = loop_s()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
    began = time.perf_counter()
    with around:
        marks[0].record()
        loss = network.loss()
        marks[1].record()
        forward_s = time.perf_counter() - began
        loss.backward()
        marks[2].record()
    optimizer.step()
    optimizer.zero_grad()
    torch.cuda.synchronize()
    step_s = time.perf_counter() - began
    device_s, backward_s = (one.elapsed_time(other) / 1e3 for one, other in itertools.pairwise(marks))
    return {
        "step_s": step_s,
        "forward_host_s": forward_s,
        "forward_device_s": device_s,
        "backward_device_s": backward_s,
        "python_loop_s": python_s,
    }


def steps_of(name: str, method: str, num_steps: int) -> list[dict[str, Any]]:
    memory_gib = BUDGETS_GIB[name]
    capped_share = memory_gib * GIB / torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if method == "in-core" else capped_share)
    network = build(name, BATCHES[name])
    optimizer = torch.optim.SGD(network.model.parameters(), lr=1e-3)
    ooc = None if method == "in-core" else outcore.limit(network.model, int(memory_gib * GIB), planner=method)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext if ooc is None else ooc.step
    began = time.perf_counter()
    for number in itertools.count():
        waited = number >= MOST_WARM and time.perf_counter() - began >= MOST_WARM_S
        if number >= 5 and (ooc is None or ooc.settled or waited):
            break
        training_step(network, around, optimizer, ours=ooc is not None)
    head = dict.fromkeys(FIELDS) | {"network": name, "batch": network.batch, "memory_gib": memory_gib, "method": method}
    rows = [head | one_step(network, around(), optimizer) for _ in range(num_steps)]
    if ooc is not None:
        ooc.close()
    del network, optimizer, ooc, around
    gc.collect()
    torch.cuda.empty_cache()
    return rows


# -- what a planned forward costs the host beside a plain one ----------------------------------------------------------

TINY = ("bert", "gpt2")
FOLLOWED_BY = {"python": "off", "c++": "on"}  # who follows planned steps: what `OUTCORE_NATIVE` says then
NUM_TINY_BLOCKS, NUM_SETTLING = 12, 12


def tiny(name: str) -> Network:
    """A transformer as BERT's or GPT-2's, whose ops take the host's time alone."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (2, 16))
    if name == "bert":
        sizes = {"hidden_size": 32, "num_hidden_layers": NUM_TINY_BLOCKS, "num_attention_heads": 2}
        model = BertForMaskedLM(BertConfig(vocab_size=64, intermediate_size=128, **sizes, **_without_dropout(name)))
    else:
        sizes = {"n_embd": 32, "n_layer": NUM_TINY_BLOCKS, "n_head": 2}
        model = GPT2LMHeadModel(
            GPT2Config(
                vocab_size=64, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes, **_without_dropout(name)
            )
        )

    def loss() -> torch.Tensor:
        out: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        return out

    return Network(f"tiny {name}", 2, model.train(), loss, [])


def _without_dropout(name: str) -> dict[str, float]:
    """On a CPU it is several ops, of which some write; on a GPU it is one."""
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    return dict.fromkeys(names if name == "bert" else ("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def forward_s(network: Network, around: AbstractContextManager[Any]) -> tuple[float, float]:
    """Seconds of a step's forward on the host, and of those the thread's own. The device has nothing to do before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    with around:
        began, own_began = time.perf_counter(), time.thread_time()
        loss = network.loss()
        took = time.perf_counter() - began, time.thread_time() - own_began
        loss.backward()
    network.model.zero_grad()
    return took


def forward_rows(network: Network, planners: list[str], num_steps: int) -> list[dict[str, Any]]:
    """Plain, then under each planner, followed in Python and in C++."""
    own: dict[str, Any] = {"network": network.name, "batch": network.batch}
    for _ in range(5):
        forward_s(network, nullcontext())
    in_core_bytes = 0
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        forward_s(network, nullcontext())
        in_core_bytes = torch.cuda.max_memory_allocated()
    rows: list[dict[str, Any]] = [
        _median("in-core", "", [forward_s(network, nullcontext()) for _ in range(num_steps)]) | own
    ]
    plain_s = rows[0]["forward_cpu_s"]
    for planner in planners:
        plan: Plan | None = None  # of the first, which the second follows, too
        for who, chosen in FOLLOWED_BY.items():
            native.use(chosen)
            began = time.perf_counter()
            if native.library(wait=True) is None and who == "c++":
                raise click.ClickException("the fast path could not be compiled or loaded; the log says why")
            loaded_s = time.perf_counter() - began
            memory = int(in_core_bytes * SHARE_OF_OTHERS) or "100%"
            ooc = outcore.limit(network.model, memory, planner=planner, plan=plan, cache=False)
            began = time.perf_counter()
            for number in itertools.count():
                is_late = time.perf_counter() - began > MOST_WARM_OTHERS_S
                if number >= NUM_SETTLING and (ooc.settled or is_late):
                    break
                forward_s(network, ooc.step())
            row = _median(planner, who, [forward_s(network, ooc.step()) for _ in range(num_steps)])
            rows.append(row | own | {"loaded_s": loaded_s, "num_left": ooc.stats()["left"]})
            plan = plan or ooc.plan
            ooc.close()
            gc.collect()
    for row in rows:
        row["times_plain"] = row["forward_cpu_s"] / plain_s
        print(
            f"{row['network']} {row['method']} {row['followed_by']}: {row['forward_cpu_s'] * 1e3:.2f} ms of the "
            f"host's ({row['forward_host_s'] * 1e3:.2f} by the clock), {row['times_plain']:.2f} x plain",
            flush=True,
        )
    return rows


def _median(method: str, who: str, found: list[tuple[float, float]]) -> dict[str, Any]:
    host_s, cpu_s = (statistics.median(side) for side in zip(*found, strict=True))
    head = dict.fromkeys(FIELDS) | {"method": method, "followed_by": who, "num_steps": len(found)}
    return head | {"forward_host_s": host_s, "forward_cpu_s": cpu_s}


def write_forward(networks: str, steps: int, out: Path | None) -> None:
    rows: list[dict[str, Any]] = []
    if torch.cuda.is_available():
        for name in networks.split(","):
            rows += forward_rows(build(name, BATCHES[name]), ["hybrid"], steps)
            torch.cuda.empty_cache()
    else:
        torch.set_num_threads(1)
        for name in TINY:
            rows += forward_rows(tiny(name), ["keep-all", "recompute-all"], steps)
    out = out or Path(f"benchmarks/results/host-forward_{hardware()}_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps({"question": "host-forward", **about(), "rows": rows}, indent=1))


@click.command()
@click.option("--networks", default="resnet152", show_default=True)
@click.option("--methods", default="in-core,hybrid", show_default=True)
@click.option("--steps", default=40, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=None)
@click.option("--forward", is_flag=True, help="What a planned forward costs the host beside a plain one.")
def main(networks: str, methods: str, steps: int, out: Path | None, *, forward: bool) -> None:
    """Host and device seconds of forwards; on a CPU they are the same; only --forward asks there."""
    if forward:
        write_forward(networks, steps, out)
        return
    if not torch.cuda.is_available():
        raise click.ClickException("this asks who waits for whom, the host or a GPU; there is no GPU here")
    rows: list[dict[str, Any]] = []
    for name in networks.split(","):
        for method in methods.split(","):
            found = steps_of(name, method, steps)
            rows += found
            median = {key: statistics.median(row[key] for row in found) for key in ("step_s", "forward_host_s")}
            print(
                f"{name} {method}: step {median['step_s']:.4f} s, host's forward {median['forward_host_s']:.4f} s",
                flush=True,
            )
    out = out or Path(f"benchmarks/results/host_{hardware()}_{date.today():%Y%m%d}.json")
    out.write_text(json.dumps({"question": "host", **about(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
