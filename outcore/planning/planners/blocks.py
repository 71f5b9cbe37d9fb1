"""TraceIndex -> decisions that recompute whole blocks, as `torch.utils.checkpoint` around each layer does.

The names of the modules that ran tell the blocks: the repeated parts of a network are numbered (`layers.3`,
`layer2.0`). Where there are no names, as in compiled graphs, a block ends where a single value is handed on: between
residual blocks nothing else is. What one block hands to another stays or is swapped; all else that a block saves is
recomputed. These decisions are an offer like any other, so that no plan is slower than checkpointing every block with
the same peak.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from outcore.planning.planners.scoring import Decisions
from outcore.planning.settings import HYBRID
from outcore.planning.trace_index import TraceIndex
from outcore.values import Decision, Op, Trace

LEAST_BLOCKS = 2  # a repeated part of a network occurs at least twice
DEEPEST_LEVEL = 2  # names such as `layer1.0` have two numbers: stage and block


def block_offers(trace_index: TraceIndex) -> Iterator[Decisions]:
    """Checkpointing at each level of numbered modules, with what lies between blocks kept, or swapped."""
    for blocks in _divisions(trace_index):
        inside = _inside_blocks(trace_index, blocks)
        for boundary in ("keep", "swap"):
            yield {value: _decide(trace_index, value, inside, boundary) for value in trace_index.evictable}


def _divisions(trace_index: TraceIndex) -> Iterator[list[str]]:
    """The block of each op, empty for those of the backward: by the names of modules, or by what is handed on."""
    ops = trace_index.trace.ops
    named = [
        [_block_of(op.module, level) if op.phase == "forward" else "" for op in ops]
        for level in range(1, DEEPEST_LEVEL + 1)
    ]
    divisions = [blocks for blocks in named if len(set(blocks) - {""}) >= LEAST_BLOCKS]
    if divisions:
        yield from divisions
        return
    numbers = _between_single_values(trace_index)
    num_blocks = max(numbers, default=-1) + 1
    for size in dict.fromkeys((1, math.isqrt(num_blocks))):  # each block, and as many in a group as there are groups
        if num_blocks >= LEAST_BLOCKS * max(1, size):
            yield [str(number // size) if number >= 0 else "" for number in numbers]


def _between_single_values(trace_index: TraceIndex) -> list[int]:
    """Per op the number of its block; -1 in the backward. A block ends when one large value at most is handed to later
    forward ops, which the next of them does not overwrite."""
    trace = trace_index.trace
    large_bytes = HYBRID.small_value_share * max(trace_index.value_bytes, default=0)
    last_read = {value: at for at, op in enumerate(trace.ops) if op.phase == "forward" for value in op.reads}
    num_handed = [0] * (len(trace.ops) + 1)  # what each op adds to the values on their way, or takes from them
    for value, at in last_read.items():
        maker = trace_index.producer[value]
        is_external = trace.storages[trace.values[value].storage].external
        if 0 <= maker < at and not is_external and trace_index.value_bytes[value] >= large_bytes:
            num_handed[maker] += 1
            num_handed[at] -= 1
    numbers, number, num_ops, on_their_way = [-1] * len(trace.ops), 0, 0, 0
    for at, op in enumerate(trace.ops):
        on_their_way += num_handed[at]
        if op.phase == "forward":
            numbers[at], num_ops = number, num_ops + 1
            if on_their_way <= 1 and num_ops >= HYBRID.least_block_ops and not _overwrites(trace, at + 1, op):
                number, num_ops = number + 1, 0
    return numbers


def _overwrites(trace: Trace, at: int, before: Op) -> bool:
    """Whether op `at` writes into what the op before it made: the block ends behind both."""
    made = {trace.values[value].storage for value in before.writes}
    return at < len(trace.ops) and any(trace.values[value].storage in made for value in trace.ops[at].writes)


def _decide(trace_index: TraceIndex, value: int, inside: set[int], boundary: Decision) -> Decision:
    return "recompute" if value in inside and trace_index.recomputable[value] else boundary


def _block_of(module: str, level: int) -> str:
    """The name up to its `level`-th number, or to its last one; empty where it has none."""
    parts = module.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[min(level, len(numbered)) - 1] + 1]) if numbered else ""


def _inside_blocks(trace_index: TraceIndex, blocks: list[str]) -> set[int]:
    """The values that a block makes and no forward op outside of it reads."""
    ops = trace_index.trace.ops
    inside = {value for op, block in zip(ops, blocks, strict=True) if block for value in op.writes}
    for op, block in zip(ops, blocks, strict=True):
        if op.phase == "forward":
            inside -= {value for value in op.reads if value in inside and blocks[trace_index.producer[value]] != block}
    return inside
