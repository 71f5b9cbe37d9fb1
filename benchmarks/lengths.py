"""Measures training loops whose sequence lengths change in every step, with plain PyTorch, checkpointing and outcore.

    python -m benchmarks.lengths                      # a Llama of 0.3 B parameters on a GPU, all loops
    python -m benchmarks.lengths --device cpu --loops padding,integers --steps 150   # a small one on the CPU

Recording, planning and the first steps are included in the tokens per second; the last 20 steps are also reported
separately. On a GPU outcore gets 40 % of what plain PyTorch needs for the longest sequence, as a hard cap, and
every method runs in a process of its own with the same lengths and the same tokens.

On the CPU all methods take turns, step by step, in one process, so that whatever else the machine does disturbs them
alike. outcore gets several shares of what the longest sequence needs in-core.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import date
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.slowdown import about, hardware
from outcore.units import GIB

LONGEST, SHORTEST, BATCH = 2048, 256, 16
SHARE = 0.4  # of plain PyTorch's peak
CPU_SHARES = (1.5, 0.8, 0.6)  # of what the longest sequence needs in-core
NUM_LAST = 20
METHODS = ("plain", "checkpoint", "outcore")


def lengths_of(loop: str, steps: int, device: str) -> list[int]:
    """The lengths of a loop's steps. The longest comes among the first ten, so that memory is known early."""
    draw = random.Random(0)
    longest = LONGEST
    if device == "cpu":
        longest = 128 if loop == "padding" else 512
        drawn = [draw.randint(16, longest) for _ in range(steps)]
    elif loop == "multiples":
        drawn = [draw.randrange(SHORTEST, LONGEST + 1, 64) for _ in range(steps)]
    else:
        drawn = [draw.randint(SHORTEST, LONGEST) for _ in range(steps)]
    drawn[min(5, steps - 1)] = longest
    return drawn


def build(device: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    large = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 16, "num_attention_heads": 16}
    small = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes = small if device == "cpu" else large
    config = LlamaConfig(
        vocab_size=1000 if device == "cpu" else 32000,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=False,
        num_key_value_heads=sizes["num_attention_heads"],
        **sizes,
    )
    with torch.device(device):
        return LlamaForCausalLM(config).train()


def run(method: str, loop: str, device: str, steps: int, memory_bytes: int, planner: str) -> dict[str, Any]:
    """One training, timed step by step."""
    if device == "cpu":
        torch.set_num_threads(1)
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ooc: Any = None
    if method == "checkpoint":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif method == "outcore":
        import outcore

        if device == "cuda":
            total_bytes = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(memory_bytes / total_bytes)
        ooc = outcore.limit(model, memory_bytes, planner=planner)
        around = ooc.step
    batch = 8 if device == "cpu" else BATCH
    lengths = lengths_of(loop, steps, device)
    generator = torch.Generator().manual_seed(1)
    ends_s, losses = [time.perf_counter()], []
    forwards_s: list[float] = []  # of the host
    restarts: list[int] = []  # of the allocator, so far
    predicted_s: list[float | None] = []
    for length in lengths:
        tokens = torch.randint(0, model.config.vocab_size, (batch, length), generator=generator).to(device)
        with around():
            with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
            forwards_s.append(time.perf_counter() - ends_s[-1])
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if device == "cuda":
            restarts.append(torch.cuda.memory_stats()["num_alloc_retries"])
        if ooc is not None:
            predicted_s.append(ooc.predicted.step_s if ooc.predicted is not None else None)
        losses.append(loss.detach())
        if device == "cuda":
            torch.cuda.synchronize()
        ends_s.append(time.perf_counter())
        print(f"{len(losses)}: {length} tokens, {ends_s[-1] - ends_s[-2]:.3f} s", file=sys.stderr, flush=True)
    last = min(NUM_LAST, steps // 2)
    return {
        "method": method,
        "loop": loop,
        "steps": steps,
        "num_lengths": len(set(lengths)),
        "tokens_per_s": batch * sum(lengths) / (ends_s[-1] - ends_s[0]),
        "last_tokens_per_s": batch * sum(lengths[-last:]) / (ends_s[-1] - ends_s[-1 - last]),
        "peak_gib": torch.cuda.max_memory_allocated() / GIB if device == "cuda" else None,
        "reserved_gib": torch.cuda.max_memory_reserved() / GIB if device == "cuda" else None,
        "budget_gib": memory_bytes / GIB if ooc is not None else None,
        "steps_s": [end_s - start_s for start_s, end_s in itertools.pairwise(ends_s)],
        "forwards_s": forwards_s,
        "restarts": restarts,
        "predicted_s": predicted_s,
        "losses": [float(loss) for loss in losses],
        **({"stats": _stats(ooc)} if ooc is not None else {}),
    }


class InTurn:
    """One of the trainings that take turns on the CPU."""

    def __init__(self, name: str, model: Any, ooc: Any = None) -> None:
        self.name, self.model, self.ooc = name, model, ooc
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        self.steps_s: list[float] = []
        self.losses: list[float] = []

    def step(self, tokens: torch.Tensor) -> None:
        started_s = time.perf_counter()
        with self.ooc.step() if self.ooc is not None else nullcontext():
            loss = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(float(loss.detach()))
        self.steps_s.append(time.perf_counter() - started_s)

    def row(self, plain: InTurn) -> dict[str, Any]:
        last = slice(-NUM_LAST, None)
        found: dict[str, Any] = {
            "method": self.name,
            "over_plain": sum(self.steps_s) / sum(plain.steps_s),
            "last_over_plain": sum(self.steps_s[last]) / sum(plain.steps_s[last]),
            "median_over_plain": statistics.median(
                mine_s / plain_s for mine_s, plain_s in zip(self.steps_s, plain.steps_s, strict=True)
            ),
            "same_losses": self.losses == plain.losses,
            "steps_s": self.steps_s,
        }
        if self.ooc is not None:
            found |= {"budget_bytes": self.ooc.budget.device_bytes, "stats": self.ooc.stats()}
        return found


def in_core_bytes(length: int) -> int:
    """The peak of the longest sequence with everything kept, optimizer state included."""
    import outcore

    with outcore.limit(build("cpu"), "100%", planner="keep-all", cache=False) as ooc:
        training = InTurn("in-core", ooc.model, ooc)
        for _ in range(2):
            training.step(torch.zeros(8, length, dtype=torch.long))
        assert ooc.plan is not None
        return int(ooc.plan.in_core_peak_bytes)


def take_turns(loop: str, steps: int, shares: Sequence[float], planner: str) -> list[dict[str, Any]]:
    """Plain PyTorch, checkpointing and outcore in several budgets, step by step in one process."""
    import outcore

    torch.set_num_threads(1)
    lengths = lengths_of(loop, steps, "cpu")
    needed_bytes = in_core_bytes(max(lengths))
    checkpointed = build("cpu")
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trainings = [InTurn("plain", build("cpu")), InTurn("checkpoint", checkpointed)]
    for share in shares:
        ooc = outcore.limit(build("cpu"), int(share * needed_bytes), planner=planner, cache=False)
        trainings.append(InTurn(f"outcore, {share:.0%} of in-core", ooc.model, ooc))
    generator = torch.Generator().manual_seed(1)
    for length in lengths:
        tokens = torch.randint(0, 1000, (8, length), generator=generator)
        for training in trainings:
            training.step(tokens)
    about_loop = {"loop": loop, "steps": steps, "num_lengths": len(set(lengths))}
    return [about_loop | training.row(trainings[0]) for training in trainings]


def _stats(ooc: Any) -> Any:
    return json.loads(json.dumps(ooc.stats(), default=str)) if hasattr(ooc, "stats") else {"kinds": len(ooc.kinds)}


def in_process_of_its_own(arguments: list[str], limit_s: float) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.lengths", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as cut:
        return {"error": f"stopped after {limit_s:.0f} s", "said": (cut.stderr or b"").decode()[-1500:]}
    rows = [line for line in done.stdout.splitlines() if line.startswith("ROW ")]
    if not rows:
        return {"error": done.stderr[-1500:]}
    found: dict[str, Any] = json.loads(rows[-1][4:])
    return found


@click.command(help=__doc__)
@click.option("--device", default="cuda", type=click.Choice(["cuda", "cpu"]))
@click.option("--loops", default="multiples,integers")
@click.option("--methods", default=",".join(METHODS))
@click.option("--steps", default=90)
@click.option("--planner", default="hybrid")
@click.option("--memory-bytes", default=0, help="The budget; otherwise 40 % of plain PyTorch's peak.")
@click.option("--limit-s", default=150.0, help="For each method.")
@click.option("--one", is_flag=True, help="Run one method in this process and print its row.")
@click.option("--out", type=click.Path(path_type=Path))
def main(
    device: str,
    loops: str,
    methods: str,
    steps: int,
    planner: str,
    memory_bytes: int,
    limit_s: float,
    one: bool,
    out: Path | None,
) -> None:
    if one:
        print("ROW " + json.dumps(run(methods, loops, device, steps, memory_bytes, planner)), flush=True)
        return
    rows: list[dict[str, Any]] = []
    out = out or Path(f"benchmarks/results/lengths_{hardware()}_{date.today():%Y%m%d}.json")
    out.parent.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        """After every row: whatever cuts this run short leaves those that are there."""
        out.write_text(json.dumps({"question": "lengths", **about(), "rows": rows}, indent=1))

    if device == "cpu":
        for loop in loops.split(","):
            rows += take_turns(loop, steps, CPU_SHARES, planner)
            save()
        for row in rows:
            print(json.dumps({key: value for key, value in row.items() if key != "steps_s"}), flush=True)
    for loop in loops.split(",") if device == "cuda" else ():
        for method in methods.split(","):
            plain = next((row for row in rows if row.get("method") == "plain" and row["loop"] == loop), None)
            peak_gib = (plain or {}).get("peak_gib")
            given = memory_bytes or (int(SHARE * peak_gib * GIB) if peak_gib else GIB)
            arguments = ["--device", device, "--loops", loop, "--methods", method, "--steps", str(steps), "--one"]
            row = in_process_of_its_own([*arguments, "--planner", planner, "--memory-bytes", str(given)], limit_s)
            row = {"method": method, "loop": loop} | row
            if plain is not None and "losses" in row:
                row["same_losses"] = row["losses"] == plain["losses"]
            rows.append(row)
            save()
            shown = {key: value for key, value in row.items() if not isinstance(value, list)}
            print(json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
