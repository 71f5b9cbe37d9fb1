"""Actions of a schedule -> copies, waits, frees and reruns on the cells of the step that follows it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.eager.cells import Cell
from outcore.eager.followed_plan import FollowedPlan
from outcore.eager.restoring import bring, rerun
from outcore.memory.clock import Clock
from outcore.memory.meter import see_brought
from outcore.memory.store import Store
from outcore.units import format_bytes
from outcore.values import Action, Span


class ActionTimes:
    """When the actions of some kinds ran. Read after the step, when nothing of the step is to be held any more."""

    def __init__(self, device: torch.device, kinds: Sequence[str]) -> None:
        self.stopwatches = {kind: Clock(device, spin=False) for kind in kinds}

    def seconds(self) -> tuple[float, float]:
        """Seconds the compute stream waited for copies, and seconds of reruns. Waits for the device."""
        waits = self.stopwatches["wait_out"].seconds() + self.stopwatches["wait_in"].seconds()
        return sum(waits), sum(self.stopwatches["rerun"].seconds())

    def spans(self, began: Any) -> tuple[Span, ...]:
        """The waits and the reruns on the clock of the step, which began with an event or at a time of that clock."""
        found = [
            Span("compute", start_s, end_s, "rerun" if kind == "rerun" else "stall")
            for kind, stopwatch in self.stopwatches.items()
            for start_s, end_s in stopwatch.spans(began)
        ]
        return tuple(sorted(found, key=lambda span: span.start_s))


class Actions:
    """Performs the actions of one step. `log`: where each is noted, if the step is measured; waits and reruns are timed
    then, too."""

    def __init__(self, plan: FollowedPlan, store: Store, log: list[str] | None) -> None:
        self._plan, self._store, self._log = plan, store, log
        self.times = ActionTimes(store.device, ("wait_out", "wait_in", "rerun") if log is not None else ())

    def perform(self, action: Action) -> None:
        if self._log is None:
            _BY_KIND[action.kind](self, action)
            return
        self._log.append(f"{action.tick} {action.kind} {action.op if action.kind == 'rerun' else action.value}")
        stopwatch = self.times.stopwatches.get(action.kind)
        started = stopwatch.start() if stopwatch is not None else None
        _BY_KIND[action.kind](self, action)
        if stopwatch is not None:
            stopwatch.stop(started)

    def note_unplanned(self, cell: Cell, tick: int) -> None:
        """The schedule should have brought it: the log of what was done must not look like the plan then."""
        if self._log is not None:
            self._log.append(f"{tick} unplanned {cell.value}")

    def _drop(self, action: Action) -> None:
        """Nothing to do: the pack did not hold it."""

    def _swap_out(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is None or cell.data is None or cell.parcel is not None:
            return
        self._plan.on_the_way_out[action.value] = cell
        if not cell.swap_out(self._store, (action.tier,)) and not cell.swap_out(self._store):
            warnings.warn(
                f"outcore: no room to swap {format_bytes(cell.num_bytes)} out; it stays, and the step may need more "
                "memory than planned (raise host=..., or name a folder with disk=...)",
                stacklevel=2,
            )

    def _wait_out(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None and cell.parcel is not None:
            cell.parcel.wait_out()

    def _free(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None and (cell.parcel is not None or cell.recipe is not None):  # it can be brought back
            cell.let_go()
        self._plan.on_the_way_out.pop(action.value, None)

    def _swap_in(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None and cell.data is None and cell.parcel is not None:
            cell.swap_in()
            see_brought(cell.data)

    def _wait_in(self, action: Action) -> None:
        cell = self._plan.find(action.value)
        if cell is not None:
            cell.arrive()

    def _rerun(self, action: Action) -> None:
        recipe = self._plan.recipe(action.op)
        if recipe is None:
            return
        for cell in recipe.sources():
            if cell.data is None:
                self.note_unplanned(cell, action.tick)
                bring(cell, see_brought)
            cell.arrive()
        rerun(recipe, action.values, in_place=action.in_place, see=see_brought)


_BY_KIND: dict[str, Callable[[Actions, Action], None]] = {
    "drop": Actions._drop,
    "swap_out": Actions._swap_out,
    "wait_out": Actions._wait_out,
    "free": Actions._free,
    "swap_in": Actions._swap_in,
    "wait_in": Actions._wait_in,
    "rerun": Actions._rerun,
}
