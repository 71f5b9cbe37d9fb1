"""What can be recomputed of the values that a recorded step saves, and from what."""

from __future__ import annotations

import torch

from outcore.eager.cells import Cell
from outcore.eager.replay import below_everything
from outcore.eager.settings import EAGER
from outcore.memory.tensors import as_bytes


def has_same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors' storages are equal; compared piece by piece, because comparing needs as much memory
    again."""
    a, b = as_bytes(first), as_bytes(second)
    pieces = zip(a.split(EAGER.compared_bytes), b.split(EAGER.compared_bytes))
    return a.shape == b.shape and all(torch.equal(x, y) for x, y in pieces)


def checksum(storage: torch.UntypedStorage) -> list[int]:
    """Returns sums of its 64-bit words, in several parts. Summing shorter words would first convert all of them."""
    with below_everything():
        everything = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        num_words = len(everything) // torch.int64.itemsize
        words, rest = (
            everything[: torch.int64.itemsize * num_words].view(torch.int64),
            everything[torch.int64.itemsize * num_words :],
        )
        parts = words.split(max(1, -(-num_words // EAGER.sum_parts)))
        sums: list[int] = torch.stack([rest.sum(dtype=torch.int64), *(part.sum() for part in parts)]).tolist()
    return sums


def quickly_made(cell: Cell, budget_bytes: int, most_products: int = 1, most_ops: int = EAGER.few_ops) -> bool:
    """Whether a few ops make the cell again from swapped or external values, in a quarter of the budget, with one
    product (or convolution, or attention) at most. Each value is made separately: with more products, values at the end
    of a chain would recompute its beginning repeatedly, up to eight times the forward in all."""
    todo, seen, products, num_bytes = [cell], set(), set(), 0
    while todo:
        wanted = todo.pop()
        if wanted.recipe is None:
            return False
        if id(wanted) not in seen:
            seen.add(id(wanted))
            if wanted.recipe.is_product:
                products.add(id(wanted.recipe))
            sources = wanted.recipe.reads
            todo.extend(source for source in sources if source.parcel is None and source.data is None)
            num_bytes += wanted.num_bytes + sum(source.num_bytes for source in sources if source.parcel is not None)
        if len(seen) > most_ops or len(products) > most_products or EAGER.remade_part * num_bytes > budget_bytes:
            return False
    return True


def rerunnable(cell: Cell) -> bool:
    """Whether the cell can be recomputed at all, from values that are available now."""
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
    """Returns the values that the cell would be recomputed from, directly or indirectly."""
    todo, seen, values = [cell], set(), set()
    while todo:
        recipe = todo.pop().recipe
        if recipe is None or id(recipe) in seen:
            continue
        seen.add(id(recipe))
        todo.extend(source for source in recipe.reads if source.parcel is None and source.data is None)
        values |= {source.value for source in recipe.reads}
    return values


def let_go_all(cell: Cell) -> None:
    """Releases values that were brought for recomputing a cell."""
    todo, seen = [cell], set()
    while todo:
        wanted = todo.pop()
        if id(wanted) in seen:
            continue
        seen.add(id(wanted))
        if wanted.parcel is not None or wanted.recipe is not None:
            wanted.let_go()
        todo.extend(wanted.recipe.reads if wanted.recipe is not None else ())
