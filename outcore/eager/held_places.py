"""The placeholders of a plan: empty blocks of device memory.

A placeholder is held where a longer block will be allocated later, and freed just before that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outcore.eager.program import Moves
from outcore.planning.allocator.hints import Placeholder


class HeldPlaces:
    """The placeholders of one step. If memory is too short for one, no more are taken, because the step needs it.
    `on_refused` is called when the allocator refused memory that no op of the step requested."""

    def __init__(
        self, placeholders: Sequence[Placeholder], device: torch.device, on_refused: Callable[[], None]
    ) -> None:
        self.blocks: dict[int, torch.UntypedStorage] = {}
        self.is_refused = False
        self.placeholders, self._device, self._on_refused = placeholders, device, on_refused

    def move(self, moves: Moves) -> None:
        """Frees some placeholders, and takes others."""
        given, taken = moves
        for number in given:
            self.blocks.pop(number, None)
        try:
            for number in taken if not self.is_refused else ():
                num_bytes = self.placeholders[number].num_bytes
                self.blocks[number] = torch.UntypedStorage(num_bytes, device=self._device)
        except torch.OutOfMemoryError:  # more memory is in use than planned
            self._on_refused()
            self.blocks.clear()
            self.is_refused = True

    def clear(self) -> None:
        self.blocks.clear()
