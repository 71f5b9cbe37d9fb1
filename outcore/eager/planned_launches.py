"""Captures launches of compiled graphs that the schedule of a planned step reruns."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from outcore.eager.captures import Captures
from outcore.eager.followed_plan import NOBODY, FollowedPlan
from outcore.eager.launches import ALL_LAUNCHES, Kernel, LaunchRecipe, Tensors, recipe_of
from outcore.eager.switches import changed
from outcore.memory.clock import OpTimes
from outcore.memory.meter import LiveBytes


class PlannedLaunches:
    """The launches of a graph in a planned step; its first launch is op `first` of the step."""

    def __init__(
        self,
        plan: FollowedPlan,
        captures: Captures,
        times: OpTimes | None,
        meter: LiveBytes | None,
        first: int,
        kernels: Sequence[Kernel],
    ) -> None:
        self._plan, self._captures, self._times, self._meter = plan, captures, times, meter
        self._first = first
        self.busy: Collection[int] = ALL_LAUNCHES
        if times is None and meter is None:
            asked = (*plan.program.captured, *plan.program.moves) if plan.on_plan else ()
            here = {index - first for index in asked if first <= index < first + len(kernels)}
            self.busy = {*here, *(kernel.number for kernel in kernels if kernel.overwrites)} if here else ()

    def before(self, kernel: Kernel, reads: Tensors, changes: Tensors, numbers: Sequence[Any]) -> Any:
        plan, index = self._plan, self._first + kernel.number
        program, recipe = plan.program, None
        started = self._times.start(kernel.name) if self._times is not None else None
        if plan.on_plan and index <= program.last_watched:
            if index in program.moves:
                plan.places.move(program.moves[index])
            if index in program.captured:
                op = program.captured[index]
                find = partial(self._captures.source, iter(op.reads))
                recipe = recipe_of(kernel, reads, changes, numbers, find, is_random=op.replay == "random")
                if changed(self._captures.switches, recipe.switches):
                    plan.leave(f"op {index} ({kernel.name}) runs under other switches than the step began with")
        plan.changing((*changes, *(reads[place] for place in kernel.overwrites)), kernel.name)
        return started, index, recipe

    def after(self, mark: Any, fresh: Tensors, overwritten: Tensors) -> None:
        started, index, recipe = mark
        if self._times is not None:
            self._times.stop(started)
        if recipe is not None and self._plan.on_plan:
            self._name(index, recipe, fresh, overwritten)
        if self._meter is not None:
            for tensor in fresh:
                self._meter.see(tensor)

    def _name(self, index: int, recipe: LaunchRecipe, fresh: Tensors, overwritten: Tensors) -> None:
        plan, made = self._plan, (*fresh, *overwritten)
        writes, outside = plan.program.captured[index].writes, plan.program.outside
        if len(made) != len(writes):
            plan.leave(f"op {index} ({recipe.func}) made {len(made)} values, not {len(writes)}")
            return
        marks = [
            NOBODY if value in outside else plan.add_output(value, tensor, recipe)
            for value, tensor in zip(writes, made)
        ]
        recipe.made, recipe.overwrote = marks[: len(fresh)], marks[len(fresh) :]
        plan.recipes[index] = weakref.ref(recipe)
