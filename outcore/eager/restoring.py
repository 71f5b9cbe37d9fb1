"""A cell whose bytes are elsewhere -> its data on the device: fetched, or made again from what can be fetched.

No schedule is needed for that, which is why a plan can be left at any point.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outcore.eager.cells import Cell, MakesAgain, whole
from outcore.eager.settings import EAGER
from outcore.memory.store import Store

SMALL_BYTES = EAGER.small_bytes


def swap_out_now(cell: Cell, store: Store) -> bool:
    """Swaps out with nothing in flight afterwards; False when there is no room (the cell then keeps its data)."""
    if not cell.swap_out(store):
        return False
    assert cell.parcel is not None
    cell.parcel.wait_out()
    cell.data = None
    return True


def rerun(
    recipe: MakesAgain, values: Sequence[int], *, in_place: bool, see: Callable[[torch.Tensor | None], None]
) -> None:
    """Runs an op again and hands the values wanted to their cells."""
    fresh, overwritten = recipe.run(in_place=in_place)
    for marks, tensors in ((recipe.made, fresh), (recipe.overwrote, overwritten)):
        for mark, tensor in zip(marks, tensors):
            see(tensor)
            cell = mark()
            if cell is not None and cell.value in values:
                cell.data = tensor


def bring(cell: Cell, see: Callable[[torch.Tensor | None], None] = lambda tensor: None) -> torch.Tensor:
    """The data of a cell, whatever it takes. What is brought along the way is let go after its last reader."""
    if cell.data is None and cell.lent is not None and (storage := cell.lent()) is not None:
        cell.data = whole(storage)
    if cell.data is not None:
        cell.arrive()
        return cell.data
    order = _makers(cell)
    brought = {id(wanted) for wanted in order if wanted.data is None}
    num_readers: dict[int, int] = {}
    for wanted in order:
        for source in _sources(wanted):
            num_readers[id(source)] = num_readers.get(id(source), 0) + 1
    for wanted in order:
        sources = _sources(wanted)
        if wanted.data is None and wanted.parcel is not None:
            wanted.swap_in()
            see(wanted.data)
        elif wanted.data is None:
            _make(wanted, see)
        wanted.arrive()
        for source in sources:
            num_readers[id(source)] -= 1
            if not num_readers[id(source)] and id(source) in brought:
                source.let_go()
    assert cell.data is not None
    return cell.data


def _sources(cell: Cell) -> list[Cell]:
    """What a cell must be made from, if it must be made."""
    must = cell.data is None and cell.parcel is None and cell.recipe is not None
    return cell.recipe.sources() if must and cell.recipe is not None else []


def _makers(cell: Cell) -> list[Cell]:
    """The cells to bring for one, sources first. Without recursion: a chain may be as long as the network."""
    order: list[Cell] = []
    entered = {id(cell)}
    stack = [(cell, iter(_sources(cell)))]
    while stack:
        wanted, sources = stack[-1]
        for source in sources:
            if id(source) not in entered:
                entered.add(id(source))
                stack.append((source, iter(_sources(source))))
                break
        else:
            order.append(wanted)
            stack.pop()
    return order


def _make(wanted: Cell, see: Callable[[torch.Tensor | None], None]) -> None:
    recipe = wanted.recipe
    assert recipe is not None, "a saved value was lost"
    fresh, overwritten = recipe.run()
    for marks, tensors in ((recipe.made, fresh), (recipe.overwrote, overwritten)):
        for mark, tensor in zip(marks, tensors):
            if mark() is wanted:
                see(tensor)
                wanted.data = tensor
