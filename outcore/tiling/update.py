"""Updates a weight and its optimizer state on the device with each finished tile of the gradient.

Instead of storing dW and reading it again, a product can use each of its tiles immediately: the corresponding tiles of
the weight and the optimizer's state are copied to the device during the product, updated there, and copied back. Every
element is updated by exactly one tile. A product that fails halfway leaves a weight that is updated in part; it is not
run again, and raises an error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from outcore.tiling.operands import TensorStore

Apply = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]  # tile of the gradient, tiles to update


@dataclass(frozen=True)
class Update:
    """Host tensors with the gradient's shape. `updated` are read, changed and written. `copies` are written with the
    elements of the first of `updated`, in their own dtype."""

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
