"""Steps that do other work than expected: changing over to another program, or keeping what fits.

Steps with the same call may do different work: layers are skipped at random, experts are chosen, a loop trains two
networks in turn. This is not known before their first op, so a step begins with the most likely program. If it does
something else, it changes over to a program that begins in the same way and continues like the step (`Switch`). Both
programs have the same saved tensors under different numbers; values that the new program would have swapped or dropped
by then are moved now.

If no program is known, the step continues without one. It then keeps the newest saved tensors on the device, as many
bytes as the budget leaves besides everything else that a step needs (`Spare`), and swaps out the oldest, because a
backward needs the newest first.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from outcore.eager.cells import Cell, version_of
from outcore.eager.program import Program
from outcore.memory.store import Store


class Spare:
    """Cells that stay on the device after a step left its plan."""

    def __init__(self, find_bytes: Callable[[], int], store: Store) -> None:
        self._find_bytes, self.store = find_bytes, store
        self._held = deque[weakref.ref[Cell]]()  # the oldest first
        self._held_bytes = 0

    @cached_property
    def _spare_bytes(self) -> int:
        return self._find_bytes()  # takes a millisecond, and few steps need it

    def add(self, cell: Cell) -> None:
        """Adds a cell that holds its data. Call it below autograd."""
        self._held.append(weakref.ref(cell))
        self._held_bytes += cell.num_bytes
        if self._held_bytes > self._spare_bytes:
            self._swap_out_oldest()

    def _swap_out_oldest(self) -> None:
        cells = dict.fromkeys(mark() for mark in self._held)
        live = [cell for cell in cells if cell is not None and cell.data is not None]
        self._held_bytes = sum(cell.num_bytes for cell in live)
        oldest = 0
        while oldest < len(live) and self._held_bytes > self._spare_bytes:
            put_away(live[oldest], self.store)
            self._held_bytes -= live[oldest].num_bytes
            oldest += 1
        self._held = deque(weakref.ref(cell) for cell in live[oldest:])


def put_away(cell: Cell, store: Store) -> None:
    """Moves a cell off the device and waits. It stays if there is no room for it, or if it was written since, which
    autograd must notice."""
    if cell.parcel is None and cell.recipe is None:
        is_as_saved = cell.data is not None and version_of(cell.data) == cell.held[0]
        if not is_as_saved or not cell.swap_out(store):
            return
    if cell.parcel is not None:
        cell.parcel.wait_out()
    cell.let_go()


class Switch:
    """A change from one program to another that begins with the same packs and unpacks."""

    def __init__(self, before: Program, after: Program, num_ticks: int) -> None:
        self.program, self.num_ticks = after, num_ticks
        self.num_ops = after.num_ops_before(num_ticks)
        self._before = before
        self._num_common_ops = _num_common(before.op_keys[: self.num_ops], after.op_keys)

    @property
    def is_exact(self) -> bool:
        """Whether all ops so far are the same in both programs. If not, one program cannot recompute values from the
        other's ops, and the step could need more memory than either was planned for."""
        return self._num_common_ops == self.num_ops

    def has_op(self, op: int) -> bool:
        """Whether both programs have an op under the same number."""
        return op < self._num_common_ops

    def renamed(self, cells: dict[int, weakref.ref[Cell]]) -> dict[int, weakref.ref[Cell]]:
        """Returns the cells that the new program knows, by its own values."""
        by_new_value: dict[int, weakref.ref[Cell]] = {}
        pairs = [(value, value) for value in cells if 0 <= self._before.producers[value] < self._num_common_ops]
        packed = zip(self._before.ticks[: self.num_ticks], self.program.ticks, strict=False)
        pairs += [(old.value, new.value) for old, new in packed if old.is_pack]
        for old_value, new_value in pairs:
            mark = cells.get(old_value)
            cell = mark() if mark is not None else None
            if mark is not None and cell is not None:
                cell.value = new_value
                by_new_value[new_value] = mark
        return by_new_value

    def put_away(self, cells: dict[int, weakref.ref[Cell]], store: Store) -> None:
        """Completes swap-outs in progress, and moves values off the device that the new program has moved by now. Call
        it below autograd."""
        gone = self.program.gone_before(self.num_ticks)
        for value, mark in cells.items():
            cell = mark()
            if cell is not None and cell.data is not None and (cell.parcel is not None or value in gone):
                if cell.fetched:
                    continue  # it is brought because it is about to be read
                put_away(cell, store)


def find_switch(
    programs: Iterable[Program], before: Program, num_ticks: int, fits: Callable[[Program, int], bool]
) -> Switch | None:
    """Returns the change to the first program that has the same first `num_ticks` as `before` and for which
    `fits(program, num_ticks)` is true; preferably an exact one."""
    resembled: Switch | None = None
    for program in programs:
        if program is before or program.placeholders or len(program.ticks) <= num_ticks:
            continue
        if program.events[:num_ticks] == before.events[:num_ticks] and fits(program, num_ticks):
            switch = Switch(before, program, num_ticks)
            if switch.is_exact:
                return switch
            resembled = resembled or switch
    return resembled


def _num_common(first: Sequence[object], second: Sequence[object]) -> int:
    return next((at for at, (a, b) in enumerate(zip(first, second)) if a != b), min(len(first), len(second)))
