"""Captures the ops of a planned step that the schedule reruns, as recipes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from outcore.eager.branching import Switch
from outcore.eager.cells import Cell, cell_of, state_of
from outcore.eager.followed_plan import NOBODY, FollowedPlan
from outcore.eager.replay import Call, Held, Recipe, Saved, capture
from outcore.eager.signatures import OpOverload, Signature, outputs_of, signature_of
from outcore.eager.switches import Switches, changed, switches
from outcore.memory.tensors import PLAIN, source_of

_UNKNOWN = Cell.__new__(Cell)  # the cell of a tensor after the step left its plan


class Captures:
    """The captured ops of one step, and those whose result is used for later ones. `switches` are those at the
    beginning of the step."""

    def __init__(self, plan: FollowedPlan) -> None:
        self.switches: Switches = switches()
        self._plan = plan
        self.calls: dict[int, Call] = {}  # calls of ops that later ops repeat

    def run(self, index: int, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs op `index`, which is captured, repeats another, or is repeated."""
        if index in self._plan.program.repeated or index in self._plan.program.merged_ops:
            return self._repeat(index, func, args, kwargs)
        return self._capture(index, func, args, kwargs)

    def _capture(self, index: int, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        plan, op = self._plan, self._plan.program.captured[index]
        recipe = capture(index, func, args, kwargs, partial(self.source, iter(op.reads)))
        if changed(self.switches, recipe.switches):
            plan.leave(f"op {index} ({func}) runs under other switches than the step began with")
        if recipe.signature.writes:
            plan.write(func, args, kwargs)
        result = recipe.signature.call(*args, **kwargs)
        if not plan.on_plan:
            return result
        fresh, overwritten = outputs_of(func, args, kwargs, result, len(op.writes))
        if len(fresh) + len(overwritten) != len(op.writes):
            self.made_other_values(index, len(fresh) + len(overwritten))
            return result
        if index in self._plan.program.norm_replays:
            recipe.statistics = Saved(fresh[1]), Saved(fresh[2])
        if fresh:
            recipe.made = [plan.add_output(value, tensor, recipe) for value, tensor in zip(op.writes, fresh)]
        if overwritten:
            changed_by_it = zip(op.writes[len(fresh) :], overwritten)
            recipe.overwrote = [self._overwritten(value, tensor, recipe) for value, tensor in changed_by_it]
        plan.recipes[index] = weakref.ref(recipe)
        if op.fused:
            self.fuse(recipe, (fresh or overwritten)[0])
        return result

    def made_other_values(self, index: int, num_made: int) -> None:
        op = self._plan.program.captured[index]
        self._plan.leave(f"op {index} ({op.name}) made {num_made} values, not {len(op.writes)}")

    def fuse(self, recipe: Recipe, made: torch.Tensor) -> None:
        fused = self._plan.program.captured[recipe.op].fused
        if not recipe.fuse([self._plan.recipe(inner) for inner in fused], made):
            self._plan.leave(f"op {recipe.op} ({recipe.func}) reads other tensors than recorded")

    def add_output(self, value: int, tensor: torch.Tensor, recipe: Recipe) -> weakref.ref[Cell]:
        return self._plan.add_output(value, tensor, recipe)

    def _overwritten(self, value: int, tensor: torch.Tensor, recipe: Recipe) -> weakref.ref[Cell]:
        if value in self._plan.program.outside:
            return NOBODY
        return self._plan.add_output(value, tensor, recipe, overwritten=True)

    def source(self, reads: Iterator[int], tensor: torch.Tensor) -> Cell | Held:
        """Returns the cell or held tensor for the next tensor that a captured op reads. An unknown tensor gets a new
        cell: it was made without an op, or will be saved later."""
        return self.stand_in(next(reads, -1), tensor)

    def stand_in(self, value: int, tensor: torch.Tensor) -> Cell | Held:
        """Returns the cell or held tensor for a tensor that has this value in the plan."""
        plan = self._plan
        if type(tensor) not in PLAIN:  # its alias may have a version counter of its own
            plan.leave(f"value {value} is a {type(tensor).__name__}, not a plain tensor as recorded")
            return _UNKNOWN
        if value in self._plan.program.held and (source := source_of(tensor)) is not None:
            return plan.contents.will_bring(source, tensor)
        if value in self._plan.program.held:
            held = Held(tensor)
            if not plan.contents.will_read(held):
                plan.leave(f"value {value} lies in memory that somebody else may write into")
            return held
        cell = plan.find(value)
        if cell is not None and cell_of(tensor) is cell:
            return cell
        if cell is not None:
            plan.leave(f"value {value} is another tensor than recorded")
        cell = Cell(value, tensor)
        cell.hold(tensor, plan.contents.marks)
        if plan.on_plan:
            plan.add(cell)
            if plan.has_switched and value not in plan.program.pack_values:
                plan.put_away_unforeseen(cell)
        return cell

    # -- ops that repeat others ---------------------------------------------------------------------------------------

    def _repeat(self, index: int, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs a merged op, whose value an earlier op made, or the op that it repeats."""
        plan, program = self._plan, self._plan.program
        first = program.merged_ops.get(index, index)
        value, call = program.repeated[first], self.calls.get(first)
        if index != first:
            result = signature_of(func).call(*args, **kwargs)
            if call is None or not call.is_same(args, kwargs):
                plan.leave(f"op {index} ({func}) does not repeat op {first} any more")
            elif (cell := plan.find(value)) is not None:
                cell.name(result, plan.contents.marks)
            return result
        self.calls[index] = Call(func, args, kwargs)
        if index in program.captured:
            return self._capture(index, func, args, kwargs)
        result = signature_of(func).call(*args, **kwargs)
        cell = Cell(value, result)
        cell.name(result, plan.contents.marks)
        plan.add(cell)
        return result

    def go_over(self, switch: Switch) -> None:
        """Continues with another program."""
        self.calls = {op: call for op, call in self.calls.items() if switch.has_op(op)}

    def forget(self, signature: Signature, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Forgets calls whose arguments an op writes into. Versions are not sufficient, because `x.data` has a counter
        of its own."""
        storages = {state_of(tensor)[1] for tensor in signature.written_of(args, kwargs)}
        self.calls = {first: call for first, call in self.calls.items() if not call.reads(storages)}
