"""What can be made again of what a recorded step saves, and from what."""

from __future__ import annotations

import torch

from outcore.eager.cells import Cell
from outcore.eager.replay import below_everything
from outcore.eager.settings import EAGER
from outcore.memory.tensors import as_bytes


def has_same_bytes(first: torch.Tensor, second: torch.Tensor) -> bool:
    """All of their storages, a piece at a time: comparing takes as much memory again."""
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
    """Do a few ops make it from what is swapped or outside, all of them together in a quarter of the budget, and one
    product (or convolution, or attention) among them at most? Each value is made by itself: with more, those at the
    end of a chain would make its beginning again and again, up to eight times the forward in all."""
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
    """What was brought to make it, in vain."""
    todo, seen = [cell], set()
    while todo:
        wanted = todo.pop()
        if id(wanted) in seen:
            continue
        seen.add(id(wanted))
        if wanted.parcel is not None or wanted.recipe is not None:
            wanted.let_go()
        todo.extend(wanted.recipe.reads if wanted.recipe is not None else ())
