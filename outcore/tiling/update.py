"""A finished tile of a gradient -> the tiles of a weight and its optimizer state, updated on the device.

Instead of storing dW and reading it again, a product may use each of its tiles at once: the tiles of the weight and of
the optimizer's state at the same place come to the device while the product runs, are updated there, and go back. Every
element is updated by exactly one tile. A product that fails halfway leaves a weight that is updated in part: it is not
run again, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from outcore.tiling.operands import TensorStore

Apply = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]  # tile of the gradient, tiles of what is updated


@dataclass(frozen=True)
class Update:
    """Host tensors of the gradient's shape. `updated` are read, changed and written; `copies` are written, with the
    numbers of the first of these in their own type."""

    updated: tuple[torch.Tensor, ...]
    apply: Apply
    copies: tuple[torch.Tensor, ...] = ()

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.updated[0].dtype

    @property
    def element_bytes(self) -> int:
        return sum(tensor.element_size() for tensor in (*self.updated, *self.copies))

    @cached_property
    def read_stores(self) -> list[TensorStore]:
        return [TensorStore(tensor) for tensor in self.updated]

    @cached_property
    def stores(self) -> list[TensorStore]:
        return [*self.read_stores, *(TensorStore(tensor) for tensor in self.copies)]

    def run(self, gradient: torch.Tensor, tiles: Sequence[torch.Tensor]) -> None:
        num = len(self.updated)
        self.apply(gradient, tiles[:num])
        for tile in tiles[num:]:
            tile.copy_(tiles[0])
