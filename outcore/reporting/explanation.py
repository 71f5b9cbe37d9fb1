"""Trace + Plan (+ Machine) -> what becomes of each saved value, what that costs, and why; summed per module.

The seconds of a recomputed value are those of the ops that run again when it is asked for, the chain behind it
included; those of a swapped value are its two copies, most of which hide behind compute. Copies need a machine: without
one they are not known.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from outcore.errors import PlanMismatch
from outcore.planning.program.lower import tiers_of, unroll
from outcore.planning.trace_index import TraceIndex, index_of
from outcore.values import MADE_AGAIN, Machine, Plan, Trace


@dataclasses.dataclass(frozen=True)
class Explained:
    """What becomes of one saved value, and why."""

    value: int
    op: int  # the op that made it; -1: it was not seen
    name: str  # of that op
    module: str
    decision: str
    tier: str  # where it is swapped to
    bytes: int
    seconds: float | None  # to get it back; None: not known without a machine
    why: str


@dataclasses.dataclass(frozen=True)
class ModuleShare:
    """All saved values of one module."""

    module: str
    num_values: int
    kept_bytes: int
    swapped_bytes: int
    recomputed_bytes: int
    recompute_s: float
    copy_s: float | None

    @property
    def bytes(self) -> int:
        return self.kept_bytes + self.swapped_bytes + self.recomputed_bytes


def explain(trace: Trace, plan: Plan, machine: Machine | None = None) -> list[Explained]:
    """Explains every value that the step makes and saves, in the order of saving. `trace` is the step as planned."""
    if plan.fingerprint != trace.fingerprint:
        raise PlanMismatch(
            f"the plan was made for step {plan.fingerprint}, this trace is step {trace.fingerprint}; "
            "give the trace the plan was made from"
        )
    trace_index = index_of(trace)
    tiers = tiers_of(trace_index, plan.decisions, plan.budget)
    rerun_s = _rerun_seconds(trace_index, plan, 1.0 if machine is None else machine.speed)
    found = []
    for value in trace_index.packs:
        if trace.storages[trace_index.storage[value]].external:
            continue  # a parameter or an input: nothing is decided about it
        op, decision, tier = trace_index.producer[value], plan.decisions.get(value, "keep"), tiers.get(value, "")
        num_bytes = trace.bytes_of(value)
        seconds: float | None = 0.0
        if decision in MADE_AGAIN:
            seconds = rerun_s.get(value, 0.0)
        elif decision == "swap":
            seconds = None if machine is None else machine.out_s(num_bytes, tier) + machine.in_s(num_bytes, tier)
        name, module = (trace.ops[op].name, trace.ops[op].module) if op >= 0 else ("not seen", "")
        why = (plan.reasons or {}).get(value, "").removeprefix("kept: ")
        found.append(Explained(value, op, name, module, decision, tier, num_bytes, seconds, why))
    return found


def _rerun_seconds(trace_index: TraceIndex, plan: Plan, speed: float) -> dict[int, float]:
    """Returns, for each value, the seconds of the reruns at the ticks that ask for it."""
    ticks, ops, seconds = trace_index.trace.ticks, trace_index.trace.ops, dict[int, float]()
    for tick, steps in unroll(trace_index, plan.decisions).steps.items():
        spent_s = sum(ops[step[2]].rerun_s for step in steps if step[1] == "rerun") / speed
        seconds[ticks[tick].value] = seconds.get(ticks[tick].value, 0.0) + spent_s
    return seconds


def by_module(explained: Iterable[Explained]) -> list[ModuleShare]:
    """Sums the explanations by module, those with the most bytes first."""
    groups: dict[str, list[Explained]] = {}
    for item in explained:
        groups.setdefault(item.module, []).append(item)
    shares = [_share(module, items) for module, items in groups.items()]
    return sorted(shares, key=lambda share: (-share.bytes, share.module))


def _share(module: str, items: list[Explained]) -> ModuleShare:
    sums = {"keep": 0, "swap": 0, "recompute": 0, "remake": 0}
    for item in items:
        sums[item.decision] += item.bytes
    copies = [item.seconds for item in items if item.decision == "swap"]
    known = [seconds for seconds in copies if seconds is not None]
    return ModuleShare(
        module=module,
        num_values=len(items),
        kept_bytes=sums["keep"],
        swapped_bytes=sums["swap"],
        recomputed_bytes=sum(sums[decision] for decision in MADE_AGAIN),
        recompute_s=sum(item.seconds or 0.0 for item in items if item.decision in MADE_AGAIN),
        copy_s=sum(known) if len(known) == len(copies) else None,
    )
