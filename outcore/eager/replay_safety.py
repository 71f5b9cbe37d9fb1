"""What a recorded step does to memory without an op that says so -> which of its ops must never run again.

An op may run again if it finds what it read, and if what it makes is what the program had. Custom autograd functions
and running statistics break that: their kernels write into memory that no operator names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from outcore.eager.recorded_storages import RecordedStorages
from outcore.eager.remaking import checksum
from outcore.eager.replay import Away
from outcore.memory.workspace import WorkspaceMeter


class ReplaySafety:
    """Values whose content is not what the ops alone would make of it."""

    def __init__(self, storages: RecordedStorages, workspaces: WorkspaceMeter) -> None:
        self.written_into: set[int] = set()  # values that a custom function got back, and may write into
        self.rewritten: set[int] = set()  # values that changed in or after a custom function, and by no op
        self.unsaid: set[int] = set()  # values that an op writes into without saying so: running statistics
        self.read_by_recipes: set[int] = set()
        self._aways: list[tuple[int, Away]] = []  # ops that read a weight which comes and goes
        self._storages, self._workspaces = storages, workspaces

    def is_lost(self, reads: Sequence[int], writes: Sequence[int]) -> bool:
        """Whether something an op read or made was written into by what is no op, or by an op that does not say so."""
        values = (*reads, *writes)
        exposed, known = self._storages.exposed, self._storages.values
        is_exposed = bool(exposed) and not exposed.isdisjoint(known[value].storage for value in values)
        return is_exposed or not self.unsaid.isdisjoint(reads) or not self.rewritten.isdisjoint(values)

    def reads_away(self, op: int, away: Away) -> None:
        self._aways.append((op, away))

    @property
    def changed_away(self) -> set[int]:
        """Ops that read a weight which was put away because it changed later in the step."""
        return {op for op, away in self._aways if away.cell is not None}

    def see_given(self, function: Any, value: int, tensor: torch.Tensor) -> None:
        """The backward of a custom function got a saved tensor. Whether it changes is known when that backward is over:
        kernels of others use what they saved as memory, and no version counter tells. The tensor is held until then,
        so this is asked only where a rerun might read it."""
        self.written_into.add(value)
        if value not in self.read_by_recipes:
            return
        given, before = [tensor.untyped_storage()], checksum(tensor.untyped_storage())
        self._workspaces.reset(self._storages.live_bytes)

        def compare(*_: Any) -> None:
            hook.remove()
            if checksum(given.pop()) != before:
                self.rewritten.add(value)
            self._workspaces.reset(self._storages.live_bytes)

        hook = function.register_hook(compare)
