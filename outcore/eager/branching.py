"""A step that turns out to be another one -> the program of that one, or room for what is saved from here on.

Steps that are called alike may do different work: layers are skipped at random, experts are chosen, a loop trains two
networks in turn. Nothing tells before their first op which one comes, so a step begins with the program that is the
most likely. Where it does something else, it goes over to a program that begins with what happened so far and goes on
as the step does (`Switch`). Both speak of the same saved tensors under other numbers; what the new program has put away
by then is put away now.

Where no program is known, the step goes on without one. It then keeps the newest saved tensors on the device, as many
bytes as the budget leaves beside everything else that a step needs (`Spare`), and swaps out the oldest: a backward asks
for the newest first.
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
        """A cell that holds its data. Call it below autograd."""
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
    """Off the device, with nothing in flight afterwards. A cell stays where there is no room to swap it to, and where
    it was written into since: autograd must see that."""
    if cell.parcel is None and cell.recipe is None:
        is_as_saved = cell.data is not None and version_of(cell.data) == cell.held[0]
        if not is_as_saved or not cell.swap_out(store):
            return
    if cell.parcel is not None:
        cell.parcel.wait_out()
    cell.let_go()


class Switch:
    """From one program to another that begins with the same packs and unpacks."""

    def __init__(self, before: Program, after: Program, num_ticks: int) -> None:
        self.program, self.num_ticks = after, num_ticks
        self.num_ops = after.num_ops_before(num_ticks)
        self._before = before
        self._num_common_ops = _num_common(before.op_keys[: self.num_ops], after.op_keys)

    @property
    def is_exact(self) -> bool:
        """Whether all ops so far are the same in both. Where they are not, what one program makes again from an op the
        other cannot, and the step could take more memory than either was planned for."""
        return self._num_common_ops == self.num_ops

    def has_op(self, op: int) -> bool:
        """Whether both programs know an op by the same number."""
        return op < self._num_common_ops

    def renamed(self, cells: dict[int, weakref.ref[Cell]]) -> dict[int, weakref.ref[Cell]]:
        """The cells that the new program can speak of, by its own values."""
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
        """What is on its way out gets there, and what the new program has off the device by now leaves it. Call it
        below autograd."""
        gone = self.program.gone_before(self.num_ticks)
        for value, mark in cells.items():
            cell = mark()
            if cell is not None and cell.data is not None and (cell.parcel is not None or value in gone):
                if cell.fetched:
                    continue  # it comes because somebody is about to read it
                put_away(cell, store)


def find_switch(
    programs: Iterable[Program], before: Program, num_ticks: int, fits: Callable[[Program, int], bool]
) -> Switch | None:
    """To the first program that begins with the first `num_ticks` of `before` and of which `fits(program, num_ticks)`
    is true; an exact one, if there is one."""
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
