"""The part of a unit that is on the device for its update: the whole unit, or a span of its elements.

The weight is there as a whole, because modules read it as a whole; gradient and optimizer state are brought in spans if
they are too large for the window. Counters and other small state advance once per parameter, with its last span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from outcore.memory.home import flat
from outcore.state.optimizers import Splitting
from outcore.state.settings import STATE
from outcore.state.unit import TEMPORARIES, Unit, can_move
from outcore.state.window import Item

ALIGN_NUMBERS = STATE.align_numbers


class Piece:
    """A unit, or a span of its elements, on the device for its update. The weight is there as a whole."""

    def __init__(
        self, unit: Unit, span: slice | None, known: dict[str, Any], gradient: torch.Tensor | None, new_bytes: int
    ) -> None:
        self.unit, self.span = unit, span
        self.new_bytes = new_bytes  # bytes of state that the update will create
        self.is_last = span is None or span.stop == unit.weight.home.numel()
        self._known = dict(known)  # the optimizer's state of the unit before the step
        self._given = gradient  # a gradient that is not at home
        self._gradient: Item | None = None
        if gradient is None:
            assert unit.gradient is not None
            self._gradient = self._part(unit.gradient)
        self._kept = {name: self._part(item) for name, item in unit.kept.items()}

    def _part(self, item: Item) -> Item:
        return item if self.span is None else Item(item.window, flat(item.home)[self.span])

    def _items(self) -> list[Item]:
        found = [self.unit.weight, *self._kept.values()]
        return found if self._gradient is None else [*found, self._gradient]

    def missing_bytes(self) -> int:
        return self.new_bytes + sum(item.num_bytes for item in self._items() if item.here is None)

    def fetch(self) -> None:
        self.unit.fetch_weight()
        for item in self._items():
            item.fetch()

    def give_up(self) -> None:
        self.unit.give_up()
        for item in self._items()[1:]:
            item.drop()

    def parameter(self) -> nn.Parameter:
        """Returns the parameter, or one for this span of it, on the device with its gradient."""
        unit, gradient = self.unit, self._given
        if self._gradient is not None and unit.gradient is not None:
            gradient = self._gradient.arrive()
            unit.gradient.scale(gradient)
        elif self.span is not None and gradient is not None:
            gradient = flat(gradient)[self.span]
        unit.expose()
        if self.span is None:
            unit.parameter.grad = gradient
            return unit.parameter
        part = nn.Parameter(flat(unit.weight.arrive())[self.span])
        part.__dict__.update(unit.parameter.__dict__)
        part.grad = gradient
        return part

    def state(self) -> dict[str, Any]:
        """Returns the piece's optimizer state on the device."""
        found = {name: self._kept[name].arrive() if name in self._kept else kept for name, kept in self._known.items()}
        if not self.is_last:  # counters advance once per parameter, not once per span
            for name in found.keys() - self._kept.keys():
                found[name] = found[name].clone() if isinstance(found[name], torch.Tensor) else found[name]
        return found

    def take(self, made: dict[str, Any]) -> None:
        """Sends home the tensors that the update changed or created."""
        for name, kept in made.items():
            item = self._kept.get(name)
            if item is None or kept is not item.here:
                if not self._is_large(kept):
                    continue
                if item is not None:
                    item.drop()
                item = self._new_item(name, kept)
            self.unit.window.depart(item, item.drop)
        if self._gradient is not None:
            self._gradient.drop()

    def _is_large(self, kept: Any) -> bool:
        if self.span is None:
            return can_move(kept, self.unit.weight.home.device)
        return isinstance(kept, torch.Tensor) and kept.numel() == self.span.stop - self.span.start and kept.dim() > 0

    def _new_item(self, name: str, kept: torch.Tensor) -> Item:
        unit = self.unit
        if name not in unit.kept or self.span is None:
            like = kept if self.span is None else unit.weight.home
            unit.kept[name] = Item(unit.window, unit.window.homes.empty_like(like, kept.dtype, unit.tier))
        item = self._part(unit.kept[name])
        item.hold(kept)
        return item


def spans_of(unit: Unit, kept_bytes: int, most_bytes: float, splitting: Splitting) -> Sequence[slice | None]:
    """Returns spans of a unit whose update would need more than `most_bytes` on the device; otherwise [None]."""
    numbers = unit.weight.home.numel()
    per_number = ((2 + TEMPORARIES) * unit.weight.num_bytes + kept_bytes) / numbers
    most = max(1, int(most_bytes / per_number) // ALIGN_NUMBERS) * ALIGN_NUMBERS
    if not splitting.by_element or numbers <= most:
        return [None]
    return [slice(at, min(at + most, numbers)) for at in range(0, numbers, most)]


def share_of(unit: Unit, span: slice | None, num_bytes: int) -> int:
    """Returns a span's share of `num_bytes` of a unit."""
    return num_bytes if span is None else num_bytes * (span.stop - span.start) // unit.weight.home.numel()
