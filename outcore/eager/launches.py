"""Launches of compiled graphs as ops of a step, for the recorder and the execution of a plan.

A graph (`outcore.compiled`) declares which buffers each launch reads and writes. Otherwise a launch is an op like any
other: it has a recipe, and its results have cells. Three things differ from an operator call:

- generated kernels move no version counter, and launches run below the layer that would, so marks are set by value;
- a launch may write into small external inputs of its graph (running statistics); a rerun gets copies of their earlier
  content;
- a backward graph may overwrite a value that was saved for it. The unpacked memory then passes to the launch's result,
  after being copied if somebody else still reads it (`Claim`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from outcore.eager.cells import Cell
from outcore.eager.replay import Held, Marks, Ref, copy_of, refuse_changed, refuse_held, with_generator
from outcore.eager.settings import EAGER
from outcore.eager.signatures import replay_kind
from outcore.eager.switches import Switches, changed, switches
from outcore.errors import ReplayError
from outcore.memory.device_kind import generator_of
from outcore.memory.tensors import as_bytes
from outcore.values import Replay

ALL_LAUNCHES = range(1 << 62)
Tensors = Sequence[torch.Tensor]


class Kernel(Protocol):
    """The kernel of a launch (`outcore.compiled.graphs.Kernel`)."""

    @property
    def number(self) -> int: ...
    @property
    def name(self) -> str: ...
    @property
    def is_generated(self) -> bool: ...
    @property
    def is_pure(self) -> bool: ...
    @property
    def is_product(self) -> bool: ...
    @property
    def overwrites(self) -> tuple[int, ...]: ...
    @property
    def operator(self) -> Any: ...
    @property
    def rerun(self) -> Callable[[Tensors, Tensors, Sequence[Any]], tuple[Tensors, Tensors]] | None: ...


class LaunchRecipe:
    """One launch that can be rerun."""

    __slots__ = (
        "__weakref__",
        "args",
        "copies",
        "generator_state",
        "kernel",
        "made",
        "numbers",
        "overwrote",
        "switches",
    )

    def __init__(self, kernel: Kernel, args: Sequence[Ref | Held], changes: Tensors, numbers: Sequence[Any]) -> None:
        self.kernel = kernel
        self.args = args
        self.copies = [tensor.clone() for tensor in changes]  # their content before the launch
        self.numbers = numbers
        self.switches: Switches = switches(few=kernel.is_generated)
        self.generator_state: tuple[torch.device, torch.Tensor] | None = None
        self.made: Marks = ()  # the cells of what it makes, in order
        self.overwrote: Marks = ()  # the cells of the next versions of what it overwrites

    @property
    def func(self) -> str:
        """Its name, for messages."""
        return self.kernel.name

    @property
    def is_product(self) -> bool:
        return self.kernel.is_product

    @property
    def reads(self) -> list[Cell]:
        return [arg.cell for arg in self.args if arg.cell is not None]

    def sources(self) -> list[Cell]:
        """Returns the cells that must be present to run it."""
        return self.reads

    def run(self, *, in_place: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Reruns the launch from its cells' data (all must be present); returns fresh and overwritten tensors."""
        if how := changed(self.switches, switches(few=self.kernel.is_generated)):
            raise ReplayError(
                f"{self.func} cannot be recomputed: {how} since the forward; switch it before the step begins or after "
                "it ends, or use planner='swap'"
            )
        into, given = self.kernel.overwrites, []
        for place, arg in enumerate(self.args):
            if isinstance(arg, Held):
                refuse_held(arg, self.func)
                given.append(arg.find())
                continue
            refuse_changed(arg.cell, self.func)
            assert arg.cell.data is not None
            given.append(arg.of(copy_of(arg.cell) if place in into and not in_place else arg.cell.data))
        assert self.kernel.rerun is not None
        with with_generator(self.generator_state):
            fresh, overwritten = self.kernel.rerun(given, [copy.clone() for copy in self.copies], self.numbers)
        for place in into if in_place else ():
            arg = self.args[place]
            if isinstance(arg, Ref):
                arg.cell.data = None  # its content is gone
        return list(fresh), list(overwritten)


def replay_of(kernel: Kernel, reads: Tensors, changes: Tensors) -> Replay:
    """Returns whether this launch may be rerun: `pure`, `random` or `no`."""
    if kernel.rerun is None or sum(tensor.nbytes for tensor in changes) > EAGER.most_copied_bytes:
        return "no"
    if kernel.is_generated:
        return "pure" if kernel.is_pure else "no"
    return replay_kind(kernel.operator, reads, {}) if kernel.operator is not None and reads else "no"


def recipe_of(
    kernel: Kernel,
    reads: Tensors,
    changes: Tensors,
    numbers: Sequence[Any],
    find: Callable[[torch.Tensor], Cell | Held],
    *,
    is_random: bool,
) -> LaunchRecipe:
    """Returns the recipe of a launch before it runs. `find(tensor)` returns the cell or held tensor of an input."""
    found = [(find(tensor), tensor) for tensor in reads]
    args = [source if isinstance(source, Held) else Ref(source, tensor) for source, tensor in found]
    recipe = LaunchRecipe(kernel, args, changes, numbers)
    if is_random:
        device = reads[0].device
        recipe.generator_state = device, generator_of(device).get_state()
    return recipe


class Claim:
    """Tells whether unpacked memory may be overwritten. It may not while a referenced cell holds the same bytes."""

    __slots__ = ("_cell", "_released")

    def __init__(self, cell: Cell | None, released: Callable[[torch.Tensor], None] | None = None) -> None:
        self._cell = weakref.ref(cell) if cell is not None else None
        self._released = released

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the tensor, or a copy on a new storage, before it is overwritten."""
        cell = self._cell() if self._cell is not None else None
        storage = tensor.untyped_storage()
        if cell is not None and cell.data is not None and cell.data.untyped_storage()._cdata == storage._cdata:
            source = as_bytes(tensor)
            copied = torch.empty_like(source).copy_(source)
            view = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            return view.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
        if self._released is not None:
            self._released(tensor)
        return tensor
