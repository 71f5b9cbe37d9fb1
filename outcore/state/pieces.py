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
        self._reserved: list[torch.Tensor] = []  # homes of state that the update will create

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

    def reserve(self, splitting: Splitting) -> None:
        """Allocates the homes that the update will need, so that an error leaves everything as it is."""
        if not self._known:
            self._reserved = new_homes(self.unit, splitting)

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
            unit.kept[name] = Item(unit.window, home_of(kept.dtype, like, self._reserved, unit))
        item = self._part(unit.kept[name])
        item.hold(kept)
        return item


def new_homes(unit: Unit, splitting: Splitting) -> list[torch.Tensor]:
    """Allocates homes for the optimizer state of a unit that has none yet."""
    homes, weight = unit.window.homes, unit.weight.home
    return [] if unit.kept else [homes.empty_like(weight, dtype) for dtype in splitting.state_dtypes]


def home_of(dtype: torch.dtype, like: torch.Tensor, reserved: list[torch.Tensor], unit: Unit) -> torch.Tensor:
    """Returns a home for a tensor of the optimizer state, one of the reserved ones if it fits."""
    for at, home in enumerate(reserved):
        if home.dtype == dtype and home.size() == like.size() and home.stride() == like.stride():
            return reserved.pop(at)
    return unit.window.homes.empty_like(like, dtype, unit.tier)


def kept_bytes_of(unit: Unit, splitting: Splitting) -> int:
    """Returns the bytes of a unit's optimizer state, also before it exists."""
    return sum(item.num_bytes for item in unit.kept.values()) or splitting.state_bytes(unit.parameter)


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
