"""TraceIndex -> decisions that recompute whole blocks, as `torch.utils.checkpoint` around each layer does.

The names of the modules show the blocks: the repeated parts of a network are numbered (`layers.3`, `layer2.0`). Without
names, as in compiled graphs, a block ends where only a single large value is passed on, as between residual blocks.
Values that one block passes to another are kept or swapped; everything else that a block saves is recomputed. The
search starts from these decisions, too, so that no plan is slower than checkpointing every block at the same peak.
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
    """Yields checkpointing at each level of numbered modules, with values between blocks kept, then swapped."""
    for blocks in _divisions(trace_index):
        inside = _inside_blocks(trace_index, blocks)
        for boundary in ("keep", "swap"):
            yield {value: _decide(trace_index, value, inside, boundary) for value in trace_index.evictable}


def _divisions(trace_index: TraceIndex) -> Iterator[list[str]]:
    """Yields divisions into blocks: for each op the name of its block, empty in the backward."""
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
    # single blocks, then groups, with as many blocks in a group as there are groups
    for size in dict.fromkeys((1, math.isqrt(num_blocks))):
        if num_blocks >= LEAST_BLOCKS * max(1, size):
            yield [str(number // size) if number >= 0 else "" for number in numbers]


def _between_single_values(trace_index: TraceIndex) -> list[int]:
    """Returns the number of each op's block, -1 in the backward. A block ends where at most one large value is passed
    on to later forward ops and the next op does not overwrite it."""
    trace = trace_index.trace
    large_bytes = HYBRID.small_value_share * max(trace_index.value_bytes, default=0)
    last_read = {value: at for at, op in enumerate(trace.ops) if op.phase == "forward" for value in op.reads}
    change_at = [0] * (len(trace.ops) + 1)  # by op: change of the number of values that later ops read
    for value, at in last_read.items():
        maker = trace_index.producer[value]
        is_external = trace.storages[trace.values[value].storage].external
        if 0 <= maker < at and not is_external and trace_index.value_bytes[value] >= large_bytes:
            change_at[maker] += 1
            change_at[at] -= 1
    numbers, number, num_ops, num_pending = [-1] * len(trace.ops), 0, 0, 0
    for at, op in enumerate(trace.ops):
        num_pending += change_at[at]
        if op.phase == "forward":
            numbers[at], num_ops = number, num_ops + 1
            if num_pending <= 1 and num_ops >= HYBRID.least_block_ops and not _overwrites(trace, at + 1, op):
                number, num_ops = number + 1, 0
    return numbers


def _overwrites(trace: Trace, at: int, before: Op) -> bool:
    """Whether op `at` writes into the output of the op before it, so that a block must contain both."""
    made = {trace.values[value].storage for value in before.writes}
    return at < len(trace.ops) and any(trace.values[value].storage in made for value in trace.ops[at].writes)


def _decide(trace_index: TraceIndex, value: int, inside: set[int], boundary: Decision) -> Decision:
    return "recompute" if value in inside and trace_index.recomputable[value] else boundary


def _block_of(module: str, level: int) -> str:
    """Returns the module's name up to its `level`-th number, or up to its last one; empty without numbers."""
    parts = module.split(".")
    numbered = [at for at, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[min(level, len(numbered)) - 1] + 1]) if numbered else ""


def _inside_blocks(trace_index: TraceIndex, blocks: list[str]) -> set[int]:
    """Returns the values that a block makes and no forward op outside the block reads."""
    ops = trace_index.trace.ops
    inside = {value for op, block in zip(ops, blocks, strict=True) if block for value in op.writes}
    for op, block in zip(ops, blocks, strict=True):
        if op.phase == "forward":
            inside -= {value for value in op.reads if value in inside and blocks[trace_index.producer[value]] != block}
    return inside
