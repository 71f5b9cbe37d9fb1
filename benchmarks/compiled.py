"""A compiled step in a byte budget, beside what else a user can do: compiled in-core, eager in-core, eager outcore,
checkpointing and compilation, and `activation_memory_budget` at five values.

    python -m benchmarks.compiled resnet50                      # ours at all budgets, under a hard cap: about 100 s
    python -m benchmarks.compiled resnet50 --peers              # the peers instead: one compilation each
    python -m benchmarks.compiled llama --budgets 28,24 --seconds 200 -o llama.json

One process is one network. Rows are printed as JSON lines as they come; what finds no time before `--seconds` says so.
`bits_equal` compares sums over the bits of the loss and of every gradient with those of the same step compiled in-core;
`repeats` says whether in-core agrees with itself. The optimizer's rate is zero, so every row computes the same step.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import networks, peers
from benchmarks.networks import Network
from outcore.limit import Limited, limit

GIB = 2**30
BUDGETS: dict[str, tuple[float, ...]] = {
    "resnet50": (32, 24, 16, 12),
    "resnet152": (24, 16, 12),
    "vit_l": (24, 16, 12),
    "llama": (48, 36, 28, 24),
    "gpt2": (0,),  # a third of in-core
    "bert_large": (0,),
}
SHARES = (0.5, 0.3, 0.2, 0.1, 0.0)  # of activation_memory_budget
NUM_STEPS = 8  # timed
MOST_STEPS, MOST_STEPS_S = 40, 30.0  # until a plan is settled


class Bench:
    def __init__(self, name: str, seconds: float, out: Path | None) -> None:
        self.name, self.out, self.rows = name, out, list[dict[str, Any]]()
        self.ends_s = time.monotonic() + seconds
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def tell(self, **row: Any) -> None:
        row = {"network": self.name, "torch": torch.__version__, **row}
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.out is not None:
            self.out.write_text(json.dumps({"kind": "compiled", "rows": self.rows}, indent=1))

    def attempt(self, method: str, run: Callable[[], dict[str, Any]]) -> None:
        """One row. A failure is a row, too."""
        if time.monotonic() > self.ends_s:
            self.tell(method=method, error="not begun: no time left")
            return
        began = time.monotonic()
        try:
            found = run()
        except Exception as error:
            traceback.print_exc()
            found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        self.tell(method=method, **found, took_s=round(time.monotonic() - began, 1))
        self.clean()

    def clean(self) -> None:
        gc.collect()
        if self.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.set_per_process_memory_fraction(1.0)

    # --- the step

    def build(self, *, compiled: bool) -> Network:
        torch._dynamo.reset()
        found = build(self.name, self.device)
        if compiled:
            found.model.compile()
        self.optimizer = torch.optim.SGD(found.model.parameters(), lr=0.0)
        return found

    def step(self, network: Network, around: Callable[[], AbstractContextManager[Any]]) -> Tensor:
        with around():
            loss = network.loss()
            loss.backward()
        return loss.detach()

    def bits(self, network: Network, around: Callable[[], AbstractContextManager[Any]] = nullcontext) -> list[int]:
        """Two sums over the bits of the loss and of every gradient."""
        torch.manual_seed(1)
        self.optimizer.zero_grad()
        loss = self.step(network, around)
        gradients = [parameter.grad for parameter in network.model.parameters() if parameter.grad is not None]
        found = [_sums(tensor) for tensor in (loss, *gradients)]
        del gradients
        self.optimizer.zero_grad()
        return torch.stack(found).flatten().tolist()

    def measure(
        self, network: Network, around: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> dict[str, Any]:
        times, cuda = [], self.device == "cuda"
        for number in range(NUM_STEPS + 2):
            if number == 2 and cuda:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            began = time.perf_counter()
            self.step(network, around)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        found: dict[str, Any] = {"step_ms": round(statistics.median(times[2:]) * 1e3, 2)}
        if cuda:
            found["peak_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 3)
            found["reserved_gib"] = round(torch.cuda.max_memory_reserved() / GIB, 3)
        return found

    # --- rows

    def ours(self, budgets_gib: tuple[float, ...]) -> None:
        network = self.build(compiled=True)
        began = time.monotonic()
        self.step(network, nullcontext)
        compile_s = time.monotonic() - began
        self.attempt("compiled in-core", lambda: {**self.measure(network), "compile_s": round(compile_s, 1)})
        expected = self.bits(network)
        self.tell(method="compiled in-core again", repeats=self.bits(network) == expected)
        in_core_gib = self.rows[0].get("peak_gib", 1.0)
        for budget_gib in budgets_gib:
            size_gib = budget_gib or round(in_core_gib / 3, 2)
            self.attempt(f"ours {size_gib:g} GiB", partial(self.budget, network, size_gib, expected))

    def budget(self, network: Network, size_gib: float, expected: list[int]) -> dict[str, Any]:
        """Under a hard cap of the budget's size, the allocator's own blocks included."""
        if self.device == "cuda":
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, size_gib * GIB / total))
        ooc = limit(network.model, int(size_gib * GIB))
        began, num_steps = time.monotonic(), 0
        try:
            while not ooc.settled and (num_steps < MOST_STEPS or time.monotonic() - began < MOST_STEPS_S):
                self.step(network, ooc.step)
                self.optimizer.step()
                self.optimizer.zero_grad()
                num_steps += 1
            settled_s = time.monotonic() - began
            found = self.measure(network, ooc.step)
            if expected:
                found["bits_equal"] = self.bits(network, ooc.step) == expected
            return {**found, **self._planned(ooc), "settled_s": round(settled_s, 1), "settled_steps": num_steps}
        finally:
            ooc.close()

    def _planned(self, ooc: Limited) -> dict[str, Any]:
        plan, predicted, trace = ooc.plan, ooc.predicted, ooc.trace
        if plan is None or predicted is None or trace is None:
            return {"planned": False}
        return {
            "planned_ms": round(predicted.step_s * 1e3, 2),
            "planned_peak_gib": round(predicted.peak_bytes / GIB, 3),
            "in_core_ms": round(plan.in_core_step_s * 1e3, 2),
            "bound_ms": round(plan.bound_step_s * 1e3, 2),
            "swapped_gib": round(predicted.swapped_bytes / GIB, 2),
            "recomputed_gib": round(predicted.recomputed_bytes / GIB, 2),
            "recompute_ms": round(predicted.recompute_s * 1e3, 1),
            "stall_ms": round(predicted.stall_s * 1e3, 1),
            "num_launches": sum(op.name.startswith(("triton", "extern", "torch.ops", "cpp")) for op in trace.ops),
            "num_ops": len(trace.ops),
        }

    def peers(self, budgets_gib: tuple[float, ...]) -> None:
        def eager() -> dict[str, Any]:
            return self.measure(self.build(compiled=False))

        def eager_ours(size_gib: float) -> dict[str, Any]:
            network = self.build(compiled=False)
            return self.budget(network, size_gib, [])

        def share(value: float) -> dict[str, Any]:
            with torch._functorch.config.patch(activation_memory_budget=value):
                network = self.build(compiled=True)
                self.step(network, nullcontext)
                return self.measure(network)

        def checkpointed() -> dict[str, Any]:
            network = self.build(compiled=False)
            peers.checkpoint_blocks(network)
            network.model.compile()
            return self.measure(network)

        self.attempt("eager in-core", eager)
        for value in (1.0, *SHARES):
            self.attempt(f"activation_memory_budget {value:g}", partial(share, value))
        self.attempt("checkpoint + compile", checkpointed)
        for size_gib in budgets_gib:
            if size_gib:
                self.attempt(f"eager ours {size_gib:g} GiB", partial(eager_ours, size_gib))


def _sums(tensor: Tensor) -> Tensor:
    """Two sums over the bits of a tensor, without a copy as large as it in 64 bits."""
    size = tensor.element_size()
    words = tensor.detach().contiguous().view(-1).view(torch.int32 if size >= 4 else torch.int16)
    odd, total = words[::2].sum(dtype=torch.int64), words.sum(dtype=torch.int64)
    return torch.stack([total, odd])


# --- networks with dropout, which the other benchmarks do not have ----------------------------------------------------


def build(name: str, device: str) -> Network:
    if name not in ("gpt2", "bert_large"):
        return networks.build(name, device=device)
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        if name == "gpt2":
            config = transformers.GPT2Config(n_layer=24, n_embd=1280, n_head=20)
            model, shape = transformers.GPT2LMHeadModel(config).train(), (16, 1024)
        else:
            config = transformers.BertConfig(
                hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
            )
            model, shape = transformers.BertForMaskedLM(config).train(), (64, 512)
        tokens = torch.randint(0, 30000, shape)

    def loss() -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16):
            found: Tensor = model(input_ids=tokens, labels=tokens).loss
            return found

    blocks = list(model.transformer.h if name == "gpt2" else model.bert.encoder.layer)
    return Network(name, shape[0], model, loss, blocks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("network", choices=list(BUDGETS))
    parser.add_argument("--budgets", help="in GiB, one after the other: 24,16,12", default="")
    parser.add_argument("--peers", action="store_true", help="the peers instead of ours")
    parser.add_argument("--seconds", type=float, default=110.0, help="no row is begun later than this")
    parser.add_argument("-o", "--out", type=Path, help="a JSON file for all rows")
    asked = parser.parse_args()
    budgets = tuple(float(part) for part in asked.budgets.split(",") if part) or BUDGETS[asked.network]
    bench = Bench(asked.network, asked.seconds, asked.out)
    (bench.peers if asked.peers else bench.ours)(budgets)


if __name__ == "__main__":
    main()
