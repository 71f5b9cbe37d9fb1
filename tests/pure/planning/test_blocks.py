"""Checkpointing block by block is always among the default planner's offers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from outcore.planning import plan
from outcore.planning.planners.blocks import block_offers
from outcore.planning.planners.scoring import score
from outcore.planning.trace_index import index_of
from outcore.units import GIB
from outcore.values import Budget, Machine, Trace

GOLDEN = Path(__file__).parents[2] / "golden"
MACHINE = Machine.load(GOLDEN / "h200.machine.json")


def without_names(trace: Trace) -> Trace:
    return replace(trace, ops=tuple(replace(op, module="") for op in trace.ops))


@pytest.mark.parametrize("has_names", [True, False])
@pytest.mark.parametrize("name", ["r3d18_nhwc", "vgg16_nhwc"])
def test_no_plan_is_slower_than_checkpointing_with_the_same_peak(name: str, has_names: bool) -> None:
    trace = Trace.load(GOLDEN / f"{name}.trace.json")
    trace = trace if has_names else without_names(trace)
    index, roomy = index_of(trace), Budget(100 * GIB, 0)
    offers = [decisions for decisions in block_offers(index) if "recompute" in decisions.values()]
    assert offers
    for decisions in offers:
        checkpointed = score(index, MACHINE, roomy, decisions)
        if "swap" in decisions.values():
            continue
        made = plan(trace, MACHINE, Budget(checkpointed.peak_bytes, 0), brief=True)  # no host memory to swap to
        assert made.predicted_step_s <= checkpointed.step_s


def test_residual_blocks_are_found_without_names() -> None:
    """What is kept is what the residual blocks hand on, as where names tell."""
    trace = Trace.load(GOLDEN / "r3d18_nhwc.trace.json")
    kept = [
        {value for value, decision in next(block_offers(index_of(known))).items() if decision == "keep"}
        for known in (trace, without_names(trace))
    ]
    assert len(kept[0] & kept[1]) >= 0.8 * max(map(len, kept)) > 0


def test_blocks_keep_what_one_hands_to_another() -> None:
    trace = Trace.load(GOLDEN / "r3d18_nhwc.trace.json")
    decisions = next(block_offers(index_of(trace)))
    readers = {value: op.module for op in trace.ops if op.phase == "forward" for value in op.reads}
    for value, decision in decisions.items():
        maker = trace.ops[trace.values[value].producer].module
        if decision == "recompute":  # layer1.0, layer1.1, ... are the blocks
            assert readers[value].split(".")[:2] == maker.split(".")[:2]
    assert {"keep", "recompute"} == set(decisions.values())
