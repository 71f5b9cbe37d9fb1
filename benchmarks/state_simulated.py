"""Predicts the rows of `benchmarks.state` on an H200 with the planner, without a GPU.

Each network runs one step on fake tensors (`outcore.estimating`), which gives its trace with seconds estimated from the
H200's rates. Weights are needed where ops read them, and where autograd asks for their casts; gradients leave where the
backward has made them, as `outcore.state` does. Then the planner places activations and state as `limit` does, and its
simulator says seconds, bytes moved and what homes need. `in-core` is the step with per-layer checkpointing and all of
its state on the device. `python -m benchmarks.state_simulated --help`.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

from benchmarks.slowdown import about
from benchmarks.state import ROWS, Shape, build
from outcore.errors import BudgetTooSmall
from outcore.estimating.fake_step import record_fake
from outcore.fitting.settings import FITTING
from outcore.machines import machine_from
from outcore.planning import plan, plans
from outcore.planning.preparing import prepare
from outcore.planning.program.traffic import Traffic
from outcore.planning.residency import beside_state, choose_residency, with_gradients
from outcore.planning.rewrites.gradient_sums import sums_in_place
from outcore.planning.trace_index import index_of
from outcore.units import GIB, KIB
from outcore.values import Budget, Machine, Plan, Residency, StateUnit, StateUse, Trace

HOST_GIB = 125 * 0.9  # of the machine that lends the H200
DUPLEX_SHARE = 50.8 / 55  # measured there
SLOWER = 1.2  # ops on the H200 than their estimate: 0.56 s in-core where 0.46 are estimated, 0.366 where 0.31 are


def recorded(
    shape: Shape, machine: Machine, *, checkpoints: bool, cached: bool
) -> tuple[Trace, tuple[StateUnit, ...], int]:
    """The step with its state beside the device, the units, and bytes of parameters that are too small for a home."""
    model = build(shape, "meta", checkpoints=checkpoints)
    tokens = torch.zeros(shape.batch, shape.length, dtype=torch.long)

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=cached):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()

    assert machine.op_rates is not None
    found = record_fake(model, step, None, machine, machine.op_rates)
    parameters = list(dict.fromkeys(model.named_parameters()))
    units: list[StateUnit] = []
    numbers: dict[int, int] = {}
    small_bytes = 0
    for storage, (name, parameter) in enumerate(parameters):  # in which order the recorder knows them
        num_bytes, trains = parameter.nbytes, parameter.requires_grad
        if num_bytes < 64 * KIB:
            small_bytes += num_bytes * (4 if trains else 1)
            continue
        numbers[storage] = len(units)
        units.append(StateUnit(name, num_bytes, num_bytes if trains else 0, 2 * num_bytes if trains else 0))
    before_bytes = small_bytes + found.buffer_bytes + found.input_bytes
    trace = replace(found.trace, before_bytes=before_bytes)
    uses = uses_of(trace, numbers, units)
    gradients = {use.storage for use in uses if use.kind == "gradient"}
    slots = {use.storage: use.slot for use in uses if use.kind == "gradient"}
    storages = tuple(
        replace(storage, dies=slots[number]) if number in gradients else storage
        for number, storage in enumerate(trace.storages)
    )  # from then on the window counts it
    return sums_in_place(replace(trace, state=uses, storages=storages)), tuple(units), small_bytes


def uses_of(trace: Trace, numbers: dict[int, int], units: list[StateUnit]) -> tuple[StateUse, ...]:
    """Where weights are needed and gradients leave."""
    uses: list[StateUse] = []
    storage = [value.storage for value in trace.values]
    weight_of: dict[int, int] = {}  # value -> the unit that it is, or that it is a cast of
    backward = next(op.slot for op in trace.ops if op.phase == "backward")
    for value, number in enumerate(storage):
        if number in numbers:
            weight_of[value] = numbers[number]
    for op in trace.ops:
        for read in op.reads:
            if storage[read] in numbers:
                uses.append(StateUse(op.slot, "weight", numbers[storage[read]]))
                if len(op.reads) == 1:
                    weight_of |= dict.fromkeys(op.writes, numbers[storage[read]])
    uses += [
        StateUse(tick.slot, "weight", weight_of[tick.value])
        for tick in trace.ticks
        if tick.kind == "unpack" and tick.value in weight_of
    ]
    uses += _gradients(trace, units, backward)
    return tuple(sorted(uses, key=lambda use: (use.slot, use.kind == "gradient")))


def _gradients(trace: Trace, units: list[StateUnit], backward: int) -> list[StateUse]:
    """What lives to the end of the step and was made in the backward, in the reverse order of their units: by size."""
    last = trace.num_slots - 1
    made: dict[int, int] = {}
    for op in trace.ops:
        if op.slot >= backward:
            for value in op.writes:
                if trace.storages[trace.values[value].storage].dies >= last:
                    made[trace.values[value].storage] = op.slot
    left = [number for number, unit in enumerate(units) if unit.gradient_bytes]
    uses = []

    for number, slot in sorted(made.items(), key=lambda pair: pair[1]):
        num_bytes = trace.storages[number].bytes
        matching = [unit for unit in left if -(-units[unit].gradient_bytes // 512) * 512 == num_bytes]
        if matching:
            uses.append(StateUse(slot, "gradient", matching[-1], number))
            left.remove(matching[-1])
    return uses


def fast(step: Trace, machine: Machine, budget: Budget) -> Plan:
    return plans(step, machine, budget, planner="priced", most=1)[0]


def least_of(units: tuple[StateUnit, ...]) -> Residency:
    """As `outcore.state.state.State` says: one layer's own weights, one more, and what a span of an update takes."""
    largest = max(units, key=lambda unit: unit.all_bytes)
    return Residency(units, window_bytes=3 * largest.weight_bytes)


def in_core(shape: Shape, machine: Machine, slower: float) -> float:
    trace, units, _ = recorded(shape, machine, checkpoints=True, cached=True)
    trace = trace.at(slower)
    whole = Budget(2**60, 2**60)
    assert machine.op_rates is not None
    update_s = sum(2 * (u.weight_bytes + u.kept_bytes) + u.gradient_bytes for u in units)
    return plan(trace, machine, whole, "keep-all").in_core_step_s + update_s / machine.op_rates.memory_bytes_per_s


@click.command()
@click.option("--rows", default="3b-16k,3b-8k,1b-16k", show_default=True)
@click.option("--host-gib", default=HOST_GIB, show_default=True)
@click.option("--clip/--no-clip", default=False, help="Updates wait: gradients are clipped.")
@click.option("--by-cpu/--by-device", default=False, help="The CPU updates what has a home.")
@click.option("--cached/--not-cached", default=False, help="autocast keeps the casts of weights.")
@click.option("--checkpoints/--no-checkpoints", default=False)
@click.option("--slower", default=SLOWER, show_default=True, help="Ops take this many times their estimate.")
@click.option("--reach", default=FITTING.first_share, show_default=True, help="Of the budget, that plans may use.")
@click.option("--out", type=click.Path(path_type=Path), default=None)
def main(
    rows: str,
    host_gib: float,
    clip: bool,
    by_cpu: bool,
    cached: bool,
    checkpoints: bool,
    slower: float,
    reach: float,
    out: Path | None,
) -> None:
    """Prints a line per row."""
    machine = replace(machine_from("h200"), duplex_share=DUPLEX_SHARE)
    found = []
    for row in rows.split(","):
        began, shape = time.perf_counter(), ROWS[row]
        alone_s = in_core(shape, machine, slower)
        trace, units, _ = recorded(shape, machine, checkpoints=checkpoints, cached=cached)
        trace = trace.at(slower)
        made_s = time.perf_counter() - began
        budget = Budget(int(reach * shape.memory_gib * GIB), int(host_gib * GIB))
        early = () if clip or by_cpu else [number for number, unit in enumerate(units) if unit.gradient_bytes]
        head = {"row": row, "clip": clip, "by_cpu": by_cpu, "in_core_s": alone_s, "ops": len(trace.ops)}
        try:
            chosen = choose_residency(
                trace, replace(least_of(units), by_cpu=by_cpu), machine, budget, fast, early=early
            )
        except BudgetTooSmall as error:
            print(row, error)
            continue
        found.append(
            head | told(trace, chosen, machine, budget) | {"planned_in_s": time.perf_counter() - began - made_s}
        )
        print(json.dumps(found[-1]), flush=True)
        if out is not None:
            out.write_text(json.dumps({"question": "state, simulated", **about(), "rows": found}, indent=1))


def told(trace: Trace, residency: Residency, machine: Machine, budget: Budget) -> dict[str, Any]:
    before_bytes = trace.before_bytes + residency.device_bytes - residency.resident_gradient_bytes
    step = with_gradients(replace(trace, before_bytes=before_bytes), residency)
    left = replace(budget, host_bytes=budget.host_bytes - residency.home_bytes)
    made = plans(step, beside_state(machine, residency), left, planner="hybrid", most=1, brief=True)[0]
    predicted = prepare(step, made, machine, residency=residency).predicted
    alone = Traffic(index_of(step), machine, residency)
    return {
        "step_s": predicted.step_s,
        "ops_s": sum(op.seconds for op in trace.ops) / machine.speed,
        "recompute_s": predicted.recompute_s,
        "stall_s": predicted.stall_s,
        "peak_gib": predicted.peak_bytes / GIB,
        "in_gb": alone.in_bytes / 1e9,
        "out_gb": alone.out_bytes / 1e9,
        "swapped_gb": predicted.swapped_bytes / 1e9,
        "resident_gib": residency.resident_bytes / GIB,
        "window_gib": residency.window_bytes / GIB,
        "early": len(residency.early),
        "units": len(residency.units),
        "home_gib": residency.home_bytes / GIB,
        "host_peak_gib": (residency.home_bytes + predicted.host_peak_bytes) / GIB,
    }


if __name__ == "__main__":
    main()
