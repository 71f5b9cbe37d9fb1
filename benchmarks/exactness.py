"""Compares training in-core and under a budget bit for bit. Each network is trained with deterministic algorithms;
loss, gradients, parameters, buffers and the generator are compared. `python -m benchmarks.exactness --help`.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import time
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import click

GIB = 1024**3
SEED = 7


def train(name: str, memory_gib: float | None, steps: int, planner: str) -> dict[str, Any]:
    """Losses of all steps; of the last one, a digest of each gradient, parameter and buffer."""
    import torch

    from benchmarks.networks import build
    from outcore.limit import limit

    began_s = time.monotonic()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (memory_gib or 1e9) * GIB / total))
    network = build(name)
    optimizer = torch.optim.SGD(network.model.parameters(), lr=1e-3)
    ooc = limit(network.model, int(memory_gib * GIB), planner=planner) if memory_gib else None
    torch.manual_seed(SEED)
    losses, digests = [], {}
    for step in range(steps):
        if ooc is None:
            loss = network.loss()
            loss.backward()
        else:
            with ooc.step():
                loss = network.loss()
                loss.backward()
        losses.append(float(loss.detach()))
        if step == steps - 1:
            for of, parameter in network.model.named_parameters():
                assert parameter.grad is not None
                digests[f"gradient of {of}"] = _digest(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    peak = torch.cuda.max_memory_allocated()
    digests |= {of: _digest(tensor) for of, tensor in network.model.state_dict().items()}
    digests["generator"] = _digest(torch.cuda.get_rng_state())
    found: dict[str, Any] = {"losses": losses, "digests": digests, "peak_gib": peak / GIB}
    if ooc is not None:
        assert ooc.predicted is not None
        assert ooc.trace is not None
        found |= {
            "predicted_peak_gib": ooc.predicted.peak_bytes / GIB,
            "num_twins": sum(op.norm_replay for op in ooc.trace.ops),
            "num_fused": dict(Counter(str(1 + len(op.fused)) for op in ooc.trace.ops if op.fused)),  # by ops in a pass
            "num_plans": [1 + len(kind.phase.headroom.attempts) if kind.phase.headroom else 1 for kind in ooc.kinds],
            "num_left": sum(kind.num_left for kind in ooc.kinds.values()),
        }
        ooc.close()
    found["took_s"] = round(time.monotonic() - began_s, 1)
    del network, optimizer, ooc, loss
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return found


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def differing(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """What is not the same in two trainings, bit for bit."""
    steps = [f"loss of step {at}" for at, (a, b) in enumerate(zip(one["losses"], other["losses"])) if a != b]
    return steps + [of for of, digest in one["digests"].items() if other["digests"].get(of) != digest]


def in_core(name: str, steps: int, repeat: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A plain training, and what is to be said of it."""
    import torch

    # Not with warn_only for all: attention would stay as it is.
    torch.use_deterministic_algorithms(True)
    told: dict[str, Any] = {"all_deterministic": True}
    try:
        plain = train(name, None, steps, "")
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        told = {"all_deterministic": False, "but_for": str(error).split()[0]}
        repeat = True
        torch.use_deterministic_algorithms(True, warn_only=True)
        gc.collect()
        plain = train(name, None, steps, "")
    told["in_core_repeats"] = not differing(plain, train(name, None, steps, "")) if repeat else None
    return plain, told


def short(found: dict[str, Any]) -> dict[str, Any]:
    """With one digest for all."""
    whole = hashlib.sha256(json.dumps(found["digests"], sort_keys=True).encode()).hexdigest()[:24]
    return {key: value for key, value in found.items() if key != "digests"} | {
        "digest": whole,
        "num_digests": len(found["digests"]),
    }


@click.command()
@click.option("--networks", default="resnet50,llama", show_default=True)
@click.option("--steps", default=16, show_default=True, help="Enough for the plan to settle.")
@click.option("--planners", default="hybrid", show_default=True)
@click.option("--repeat/--no-repeat", default=True, help="Run in-core twice, to show that it repeats itself.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(networks: str, steps: int, planners: str, repeat: bool, out: Path | None) -> None:
    """Bitwise comparison with in-core training."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"

    from benchmarks.networks import BATCHES, BUDGETS_GIB
    from benchmarks.slowdown import about

    rows: list[dict[str, Any]] = []
    out = out or Path(f"benchmarks/results/exactness_h200_{date.today():%Y%m%d}.json")

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        out.write_text(json.dumps({"question": "exactness", **about(), "rows": rows}, indent=1))

    for name in networks.split(","):
        try:
            plain, told = in_core(name, steps, repeat)
        except Exception as error:
            keep({"network": name, "error": repr(error)[:300]})
            continue
        for planner in planners.split(","):
            row: dict[str, Any] = {"network": name, "batch": BATCHES[name], "method": planner, "num_steps": steps}
            row |= {"memory_gib": BUDGETS_GIB[name], "in_core": short(plain)} | told
            try:
                ours = train(name, BUDGETS_GIB[name], steps, planner)
                differs = differing(plain, ours)
                row |= {"ours": short(ours), "bitwise_equal": not differs, "differs": differs[:20]}
            except Exception as error:
                row["error"] = repr(error)[:300]
            keep(row)


if __name__ == "__main__":
    main()
