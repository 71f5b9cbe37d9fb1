"""Records launches of compiled graphs as ops of the trace."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from outcore.eager.intercept import in_backward
from outcore.eager.launches import ALL_LAUNCHES, Kernel, Tensors, recipe_of, replay_of
from outcore.eager.recorded_ops import RecordedOp, RecordedOps
from outcore.eager.recorded_saves import RecordedCells
from outcore.eager.recorded_storages import RecordedStorages
from outcore.eager.replay_safety import ReplaySafety
from outcore.eager.switches import Switches, changed, switches


class RecordedLaunches:
    """Records the launches of one graph in a recorded step."""

    busy: Collection[int] = ALL_LAUNCHES

    def __init__(
        self,
        storages: RecordedStorages,
        ops: RecordedOps,
        cells: RecordedCells,
        safety: ReplaySafety,
        switches: Switches,
        changing: Callable[[Tensors], None],
    ) -> None:
        """`switches`: those at the beginning of the step. `changing` is called before a launch writes into tensors."""
        self._storages, self._ops, self._cells, self._safety = storages, ops, cells, safety
        self._switches, self._changing = switches, changing

    def before(self, kernel: Kernel, reads: Tensors, changes: Tensors, numbers: Sequence[Any]) -> Any:
        storages = self._storages
        storages.slot += 1
        values = tuple(storages.value_of(tensor) for tensor in reads)
        replay = "no" if in_backward() else replay_of(kernel, reads, changes)
        if changed(self._switches, switches(few=kernel.is_generated)):
            replay = "no"
        recipe = None
        if replay != "no":
            find = partial(self._cells.source_of, len(self._ops.ops))
            recipe = recipe_of(kernel, reads, changes, numbers, find, is_random=replay == "random")
            self._safety.read_by_recipes.update(values)
        self._changing((*changes, *(reads[place] for place in kernel.overwrites)))
        return kernel, values, replay, recipe, self._ops.start()

    def after(self, mark: Any, fresh: Tensors, overwritten: Tensors) -> None:
        kernel, values, replay, recipe, running = mark
        storages, ops, cells = self._storages, self._ops, self._cells
        ops.stop(running)
        unknown = [tensor for tensor in fresh if not storages.knows(tensor)]
        if len(unknown) < len(fresh):  # an operator returned one of its arguments
            fresh, recipe, replay = unknown, None, "no"
        workspace_bytes = ops.workspace_bytes(running, fresh)
        if kernel.is_generated:  # it allocates nothing; its first launch also tunes configurations
            workspace_bytes = 0
        writes = ops.add_results(fresh, overwritten)
        if recipe is not None:
            recipe.made = cells.own(recipe, writes, fresh)
            recipe.overwrote = cells.own(recipe, writes[len(fresh) :], overwritten)
        ops.ops.append(
            RecordedOp(
                slot=storages.slot,
                name=kernel.name,
                phase="backward" if in_backward() else "forward",
                reads=values,
                writes=writes,
                workspace_bytes=max(running.unseen_bytes, workspace_bytes),
                replay=replay,
                module=ops.module,
            )
        )
