"""What can be made again of what a recorded step saves, and from what."""

from __future__ import annotations

import torch

from outcore.running.cells import Cell, as_bytes
from outcore.running.replay import below_everything

_HANDFUL = 16  # ops
_PIECE_BYTES = 1 << 26


def has_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    """All of their storages, a piece at a time: comparing takes as much memory again."""
    pieces = zip(as_bytes(one).split(_PIECE_BYTES), as_bytes(other).split(_PIECE_BYTES))
    return all(torch.equal(a, b) for a, b in pieces)


def checksum(tensor: torch.Tensor) -> int:
    with below_everything():
        return int(as_bytes(tensor).sum(dtype=torch.int64))


def quickly_made(cell: Cell, budget_bytes: int) -> bool:
    """Do a handful of ops make it from what is swapped or outside, all of them together in a quarter of the budget?"""
    todo, seen, num_bytes = [cell], set(), 0
    while todo:
        wanted = todo.pop()
        if wanted.recipe is None:
            return False
        if id(wanted) not in seen:
            seen.add(id(wanted))
            sources = wanted.recipe.reads
            todo.extend(source for source in sources if source.parcel is None and source.data is None)
            num_bytes += wanted.num_bytes + sum(source.num_bytes for source in sources if source.parcel is not None)
        if len(seen) > _HANDFUL or 4 * num_bytes > budget_bytes:
            return False
    return True


def rerunnable(cell: Cell) -> bool:
    """Can it be rerun at all, from what is there now?"""
    todo, seen = [cell], set()
    while todo:
        recipe = todo.pop().recipe
        if recipe is None:
            return False
        if id(recipe) not in seen:
            seen.add(id(recipe))
            todo.extend(source for source in recipe.reads if source.parcel is None and source.data is None)
    return True


def values_read(cell: Cell) -> set[int]:
    """All that it would be made from, and what that would be made from."""
    todo, seen, found = [cell], set(), set()
    while todo:
        recipe = todo.pop().recipe
        if recipe is None or id(recipe) in seen:
            continue
        seen.add(id(recipe))
        todo.extend(source for source in recipe.reads if source.parcel is None and source.data is None)
        found |= {source.value for source in recipe.reads}
    return found
