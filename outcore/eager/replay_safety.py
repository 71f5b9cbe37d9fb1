"""Finds the ops of a recorded step that must never be rerun, because memory was written without an op that declares it.

An op may be rerun if its inputs are available unchanged, and if its result is the one that the program used. Custom
autograd functions and running statistics violate this: their kernels write into memory that no operator names.
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
    """Values whose content differs from what the ops alone would make."""

    def __init__(self, storages: RecordedStorages, workspaces: WorkspaceMeter) -> None:
        self.written_into: set[int] = set()  # values that a custom function unpacked, and may write into
        self.rewritten: set[int] = set()  # values changed in or after a custom function, without an op
        self.unsaid: set[int] = set()  # values that an op writes without declaring it: running statistics
        self.read_by_recipes: set[int] = set()
        self._aways: list[tuple[int, Away]] = []  # ops that read a weight that comes and goes
        self._storages, self._workspaces = storages, workspaces

    def is_lost(self, reads: Sequence[int], writes: Sequence[int]) -> bool:
        """Whether a value that an op read or made was written without an op, or by an op that does not declare it."""
        values = (*reads, *writes)
        exposed, known = self._storages.exposed, self._storages.values
        is_exposed = bool(exposed) and not exposed.isdisjoint(known[value].storage for value in values)
        return is_exposed or not self.unsaid.isdisjoint(reads) or not self.rewritten.isdisjoint(values)

    def reads_away(self, op: int, away: Away) -> None:
        self._aways.append((op, away))

    @property
    def changed_away(self) -> set[int]:
        """Ops that read a weight which was swapped out because it changed later in the step."""
        return {op for op, away in self._aways if away.cell is not None}

    def see_given(self, function: Any, value: int, tensor: torch.Tensor) -> None:
        """Checks whether a custom function's backward changes a saved tensor that it unpacked. Foreign kernels use
        saved tensors as memory without changing version counters. The tensor is held until the backward is over, so
        this is checked only for values that a rerun might read."""
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
