"""TraceIndex -> decisions that recompute whole blocks, as `torch.utils.checkpoint` around each layer does.

The names of the modules that ran tell the blocks: the repeated parts of a network are numbered (`layers.3`,
`layer2.0`). What one block hands to another stays or is swapped; all else that a block saves is recomputed. These
decisions are an offer like any other, so that no plan is slower than checkpointing every block with the same peak.
"""

from __future__ import annotations

from collections.abc import Iterator

from outcore.planning.planners.scoring import Decisions
from outcore.planning.trace_index import TraceIndex
from outcore.values import Decision

LEAST_BLOCKS = 2  # fewer are no repeated part of a network
DEEPEST_LEVEL = 2  # stages of blocks have two numbers in their names


def block_offers(trace_index: TraceIndex) -> Iterator[Decisions]:
    """Checkpointing at each level of numbered modules, with what lies between blocks kept, or swapped."""
    for level in range(1, DEEPEST_LEVEL + 1):
        blocks = [_block_of(op.module, level) if op.phase == "forward" else "" for op in trace_index.trace.ops]
        if len(set(blocks) - {""}) < LEAST_BLOCKS:
            return
        inside = _inside_blocks(trace_index, blocks)
        for boundary in ("keep", "swap"):
            yield {value: _decide(trace_index, value, inside, boundary) for value in trace_index.evictable}


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
