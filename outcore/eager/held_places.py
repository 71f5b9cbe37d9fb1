"""Placeholders of a plan, as blocks of device memory while they are held.

A placeholder is an empty block of memory, held where a longer block is to lie later. It is given back just before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outcore.eager.program import Moves
from outcore.planning.allocator.hints import Placeholder


class HeldPlaces:
    """The placeholders of one step. When memory is too short for one, the step needs what there is: it takes no more.
    `on_refused` is told that the allocator refused memory that no op of the step asked for."""

    def __init__(
        self, placeholders: Sequence[Placeholder], device: torch.device, on_refused: Callable[[], None]
    ) -> None:
        self.blocks: dict[int, torch.UntypedStorage] = {}
        self.is_refused = False
        self.placeholders, self._device, self._on_refused = placeholders, device, on_refused

    def move(self, moves: Moves) -> None:
        """Gives some placeholders back, and takes others."""
        given, taken = moves
        for number in given:
            self.blocks.pop(number, None)
        try:
            for number in taken if not self.is_refused else ():
                num_bytes = self.placeholders[number].num_bytes
                self.blocks[number] = torch.UntypedStorage(num_bytes, device=self._device)
        except torch.OutOfMemoryError:  # more lies around than was planned for
            self._on_refused()
            self.blocks.clear()
            self.is_refused = True

    def clear(self) -> None:
        self.blocks.clear()
