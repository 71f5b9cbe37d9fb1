"""Prepares a program for the C++ library, which follows ordinary ops and saved tensors without calling Python.

An op is ordinary if the plan at most captures it, and if it writes into nothing. A saved tensor is ordinary if one
storage has its value. All others are handled by `Execution`, as without the library. The library makes the same cells,
recipes and handles as `Execution`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from outcore.eager import intercept, native
from outcore.eager.captures import Captures
from outcore.eager.cells import MARK, Cell, Handle, Kept
from outcore.eager.followed_plan import NOBODY, FollowedPlan
from outcore.eager.program import PlannedTick, Program
from outcore.eager.replay import Held, Recipe, Ref
from outcore.eager.signatures import OpOverload, find_operator, signature_of
from outcore.eager.switches import ASKED
from outcore.memory.tensors import SOURCES
from outcore.values import MADE_AGAIN

_CLASSES = {
    "Tensor": torch.Tensor,
    "Parameter": torch.nn.Parameter,
    "Cell": Cell,
    "Ref": Ref,
    "Recipe": Recipe,
    "Held": Held,
    "Handle": Handle,
    "Kept": Kept,
    "mark": MARK,
    "NOBODY": NOBODY,
    "sources": SOURCES,
    "asked": ASKED,
    "compiler": intercept.compiler_near,
    "between": intercept.BETWEEN,
}
_knowing: list[Any] = []  # the library, once it has received these


class Follower(Protocol):
    """The part of an execution that the library uses."""

    plan: FollowedPlan
    captures: Captures

    def follow(self, tick: PlannedTick) -> None: ...


def follow(run: Follower) -> None:
    """Lets the library follow the ordinary part of the step in this thread, if it is loaded."""
    library, plan = native.library(), run.plan
    if library is None or intercept.sees_all_ops():
        return
    if not _knowing:
        library.know(_CLASSES)
        _knowing.append(library)
    if plan.program.fast_path is None:
        plan.program.fast_path = _table(library, plan.program)
    plan.position = library.follow(
        plan.program.fast_path,
        {
            "run": run,
            "captures": run.captures,
            "ticks": plan.ticks,
            "cells": plan.cells,
            "recipes": plan.recipes,
            "packed_again": plan.packed_again,
            "marked": plan.contents.marks.storages,
            "held": plan.contents.held,
            "exposed": plan.contents.exposed,
        },
    )


def _table(library: Any, program: Program) -> Any:
    ops = [_of_op(program, index) for index in range(len(program.names))]
    intercept.hand_over(library, {op[0] for op in ops if op is not None})
    return library.table(ops, [_of_tick(tick) for tick in program.ticks])


def _of_op(program: Program, index: int) -> tuple[Any, ...] | None:
    """Returns the library's data of an op; None for ops that Python handles."""
    func = find_operator(program.names[index])
    if func is None or index in program.moves or index in program.norm_replays:
        return None
    signature = signature_of(func)
    if signature.writes or signature.written or index in program.merged_ops or index in program.repeated:
        return None
    op = program.captured.get(index)
    if op is None:
        return _full_name(func), False, False, False, False, None, None, [], []
    return (
        _full_name(func),
        True,
        signature.is_simple,
        signature.is_random,
        bool(op.fused),
        func,
        signature,
        [(value, value in program.held) for value in op.reads],
        [(value, value in program.cells) for value in op.writes],
    )


def _of_tick(tick: PlannedTick) -> tuple[Any, ...] | None:
    """Returns the library's data of a tick; None for ticks that Python handles."""
    if not tick.is_pack or tick.is_shared:
        return None
    is_made_again = tick.decision in MADE_AGAIN
    told = tick, tick.value, tick.pack, tick.dtype, tick.shape
    return tick.needs_cell, is_made_again, tick.packed_again, tick.is_busy, *told


def _full_name(func: OpOverload) -> str:
    """Returns the dispatcher's name: `aten::add.Tensor`, `aten::relu`."""
    schema = func._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name
