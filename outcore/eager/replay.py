"""Recipes: op calls that can be rerun bit for bit.

A recipe refers to the op's inputs as (cell, view), never as tensors, so it holds no more memory than its cells do. A
rerun is exact because:
- it runs below autograd, autocast and every mode, with the same arguments that the kernel got the first time, and with
  the same grad mode (some kernels depend on it);
- a random op starts from the same generator state;
- switches that change what a kernel computes (TF32, cuDNN, the default dtype) must be the same (`switches`);
- batch normalisation in training writes running statistics; it gets temporary memory for them, so that they change once
  per step and not twice;
- batch normalisation may be applied again from the statistics it saved, in one pass instead of three, if a comparison
in
  the recorded step, also with weights other than ones and zeros, gave the same bits (`norm_replay`);
- ops whose results nobody else reads may run in the same pass as the op that reads them (`fused_replay`);
- an in-place op overwrites the value it read only if that value is not needed again, and otherwise a copy of it;
- a parameter or input that changed is read from the content saved before the change; if the change was not observed but
  its version counter shows it, the rerun raises an error. `docs/design/009-why-replay-is-safe.md` lists all ways to
  change it, and the known limits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from outcore.eager import fused_replay as fused
from outcore.eager.cells import Cell, View, alias, state_of, version_of
from outcore.eager.signatures import (
    CAST,
    NESTED,
    PRODUCT,
    RECTIFIERS,
    OpOverload,
    device_of,
    outputs_of,
    parts_in,
    signature_of,
    tensors_in,
)
from outcore.eager.switches import Switches, changed, switches
from outcore.errors import ReplayError
from outcore.memory.device_kind import generator_of, kind_of
from outcore.memory.tensors import as_bytes
from outcore.memory.tensors import below_everything as below_everything


class Ref(View):
    """A tensor argument: a view of a cell."""

    __slots__ = ("cell",)

    def __init__(self, cell: Cell, tensor: torch.Tensor) -> None:
        View.__init__(self, tensor)
        self.cell = cell
        cell.is_read = True


class Held:
    """An external tensor: a parameter, a buffer, an input. It must be unchanged, or its content must have been saved
    before it changed."""

    __slots__ = ("__weakref__", "cell", "state", "storage", "tensor", "view")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = alias(tensor)
        self.storage = tensor.untyped_storage()  # kept alive, so that its address is not reused
        self.state = version_of(self.tensor), self.storage._cdata
        self.cell: Cell | None = None  # its content before a change
        self.view: View | None = None  # the layout of that content

    def put_away(self, cell: Cell) -> None:
        self.cell, self.view = cell, View(self.tensor)

    def find(self) -> torch.Tensor:
        """Returns the tensor. Call it below autograd."""
        if self.cell is None or self.view is None:
            return self.tensor
        assert self.cell.data is not None
        return self.view.of(self.cell.data)


class Away(Held):
    """A weight that is on the device only while it is read (`outcore.state`). Its content is saved before it changes;
    if that was not observed but its version shows it, the rerun raises an error."""

    __slots__ = ("handle", "lies")

    def __init__(self, handle: Any, tensor: torch.Tensor) -> None:
        self.handle, self.lies, self.cell, self.view = handle, View(tensor), None, None

    def put_away(self, cell: Cell) -> None:
        self.cell, self.view = cell, self.lies

    def find(self) -> torch.Tensor:
        if self.cell is not None:
            return super().find()
        try:
            found: torch.Tensor = self.handle.run.unpack(self.handle)
        except RuntimeError as error:
            raise ReplayError(
                f"a weight cannot be read again ({error}); change it after backward(), or use planner='swap'"
            ) from None
        return found


class Scratch:
    """An argument whose content is irrelevant."""

    __slots__ = ("like",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.like = (tensor.shape, tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        shape, dtype, device = self.like
        return torch.empty(shape, dtype=dtype, device=device)


class Saved(View):
    """A mean or a deviation that autograd keeps, until the norm's backward has used it."""

    __slots__ = ("storage",)

    def __init__(self, tensor: torch.Tensor) -> None:
        View.__init__(self, tensor)
        self.storage = weakref.ref(tensor.untyped_storage())

    def find(self) -> torch.Tensor | None:
        storage = self.storage()
        if storage is None:
            return None
        found = torch.empty(0, dtype=self.dtype, device=storage.device)
        return found.set_(storage, self.offset, self.size, self.stride)


Marks = Sequence["weakref.ref[Cell]"]
_NO_KWARGS: dict[str, Any] = {}
_REFERRING: Any = (Ref, Held)


class Recipe:
    """One op call that can be rerun."""

    __slots__ = (
        "__weakref__",
        "args",
        "func",
        "generator_state",
        "grad_mode",
        "inner",
        "kwargs",
        "made",
        "op",
        "overwrote",
        "result",
        "signature",
        "statistics",
        "switches",
    )

    def __init__(self, op: int, func: OpOverload, args: Sequence[Any]) -> None:
        self.op = op
        self.func = func
        self.signature = signature_of(func)
        self.args = list(args)  # tensors in it become Ref, Held or Scratch
        self.kwargs = _NO_KWARGS
        self.grad_mode = torch.is_grad_enabled()
        self.switches: Switches = switches(few=self.signature.is_simple)
        self.statistics: tuple[Saved, Saved] | None = None  # statistics for a norm replay
        self.inner: tuple[Recipe, ...] = ()  # run before it, only for it, and in the same pass if possible
        self.result: View | None = None  # the layout of a pass's result
        self.generator_state: tuple[torch.device, torch.Tensor] | None = None
        self.made: Marks = ()  # the cells of its fresh outputs, in order
        self.overwrote: Marks = ()  # the cells of the next versions of what it wrote into

    def run(self, *, in_place: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Reruns the op from its cells' data (all must be present); returns fresh and overwritten tensors."""
        for cell in self.sources():
            refuse_changed(cell, self.func)
        for recipe in (*self.inner, self):
            if how := changed(recipe.switches, switches(few=recipe.signature.is_simple)):
                raise ReplayError(
                    f"{recipe.func} cannot be recomputed: {how} since the forward; switch it before the step begins or "
                    "after it ends, or use planner='swap'"
                )
            for held in recipe.signature.parts_of(recipe.args, recipe.kwargs, Held):
                refuse_held(held, self.func)
        if not self.inner:
            return self.run_alone(in_place=in_place)
        made = self._run_as_one(in_place=in_place)
        if made is None:
            return self._run_in_turn(in_place=in_place)
        return ([made], []) if self.made else ([], [made])

    def run_alone(self, *, in_place: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        if self.statistics is not None and (fresh := self._replay_norm()):
            return fresh, []
        copies: dict[int, torch.Tensor] = {}
        into = self._written_refs()
        for ref in into:
            if not in_place and id(ref.cell) not in copies:
                copies[id(ref.cell)] = copy_of(ref.cell)
        args = self._rebuilt_args(copies)
        kwargs = {name: _rebuild(arg, copies) for name, arg in self.kwargs.items()}
        with with_generator(self.generator_state), torch.set_grad_enabled(self.grad_mode):
            result = self.func(*args, **kwargs)
        fresh, overwritten = outputs_of(self.func, args, kwargs, result, len(self.made))
        if len(fresh) != len(self.made):
            raise ReplayError(
                f"{self.func} made {len(fresh)} tensors when it was run again and {len(self.made)} the first time; "
                "use planner='swap' and report this op"
            )
        if in_place:
            for ref in into:
                ref.cell.data = None  # its content is gone
        return fresh, overwritten

    def _replay_norm(self) -> list[torch.Tensor]:
        """Normalises again from the saved mean and deviation; returns an empty list if that is not possible."""
        statistics = self._find_statistics()
        out = normalise_again(self.func, self._rebuilt_args({}), *statistics) if statistics is not None else None
        return (
            [] if out is None or statistics is None else [out, *statistics, *(out.new_empty(0) for _ in self.made[3:])]
        )

    def _find_statistics(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        mean, deviation = (saved.find() for saved in self.statistics or ())
        return None if mean is None or deviation is None else (mean, deviation)

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product, a convolution, or attention."""
        return self.func._overloadpacket in flop_registry

    def call(self) -> Hashable:
        """Returns a key that is equal for two recipes of a recorded step with the same op on the same values."""
        args = [_as_call(arg) for arg in self.args]
        return self.func, *args, *((name, _as_call(self.kwargs[name])) for name in sorted(self.kwargs))

    # -- passes of several ops
    # -----------------------------------------------------------------------------------------------

    def fuse(self, inner: Sequence[Recipe | None], made: torch.Tensor) -> bool:
        """Makes these ops run before this one whenever it runs, each for the next and the last for this one, which made
        `made`. Returns False if they do not make its inputs."""
        reader = self
        for maker in reversed(inner):
            if maker is None or not reader._reads_from(maker):
                return False
            reader = maker
        self.inner, self.result = tuple(recipe for recipe in inner if recipe is not None), View(made)
        return True

    def _reads_from(self, maker: Recipe) -> bool:
        cell = maker.outcome()
        return any(isinstance(arg, Ref) and arg.cell is cell for arg in self.args)

    @property
    def reads(self) -> list[Cell]:
        """The cells of its arguments. Computed in the backward, where the host has more time than in the forward."""
        parts: list[Ref | Held] = self.signature.parts_of(self.args, self.kwargs, _REFERRING)
        return [part.cell for part in parts if part.cell is not None]

    def sources(self) -> list[Cell]:
        """Returns the cells that must be present to run it."""
        if not self.inner:
            return self.reads
        results = [recipe.outcome() for recipe in self.inner]
        return [cell for recipe in (*self.inner, self) for cell in recipe.reads if cell not in results]

    def outcome(self) -> Cell | None:
        """Returns the cell of its result, or of the value that it overwrote."""
        marks = self.made or self.overwrote
        return marks[0]() if marks else None

    def _run_in_turn(self, *, in_place: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Runs the fused ops one by one. Intermediate results may be overwritten; data that was brought for readers
        outside the pass is restored afterwards."""
        cells = [cell for cell in (recipe.outcome() for recipe in self.inner) if cell is not None]
        others = [cell.data for cell in cells]

        def run(recipe: Recipe) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            ours = all(ref.cell in cells for ref in recipe._written_refs())
            return recipe.run_alone(in_place=in_place or ours)

        for recipe, cell in zip(self.inner, cells, strict=True):
            fresh, overwritten = run(recipe)
            cell.data = (fresh or overwritten)[0]
        results = run(self)
        for cell, data in zip(cells, others):
            cell.data = data
        return results

    def _run_as_one(self, *, in_place: bool) -> torch.Tensor | None:
        """Runs the pass as one kernel. Returns None, without any effect, if layouts or the machine do not allow it."""
        result, head = self.result, self.inner[0]
        if result is None or not self._can_be_one(result, in_place=in_place):
            return None
        args = head._rebuilt_args({})
        if self.signature.name == CAST:
            between = self.args[self._place_of(self.inner[-1])].dtype
            return fused.multiply(args[0], args[1], between, result)
        if args[0].dtype is not result.dtype or not View(args[0]).lies_like(result, anywhere=not in_place):
            return None
        if head.statistics is not None:
            found = head._find_statistics()
            plus = next((_rebuild(one.args[1 - one._place_of(head)], {}) for one in self.inner[1:]), None)
            return normalise_again(head.func, args, *found, plus=plus, rectified=True) if found is not None else None
        made = fused.add_relu(args[0], args[1], in_place=in_place)
        if made is not None and in_place:
            for ref in head._written_refs():
                ref.cell.data = None  # its content is gone
        return made

    def _can_be_one(self, result: View, *, in_place: bool) -> bool:
        """Whether the ops form a supported pass: a norm, a sum, or both, rectified; or a product, cast; on whole
        results with the same layout."""
        head, *middle = self.inner
        casts, outcome = self.signature.name == CAST, self.outcome()
        if casts:
            known = head.signature.name == PRODUCT and self.kwargs.keys() == {"dtype"} and not middle
        else:
            sums = middle if head.statistics is not None else [head, *middle]
            known = self.signature.name in RECTIFIERS and len(sums) < 2 and all(part.is_plain_sum for part in sums)
            known = known and not any(part.signature.written and part._place_of(head) for part in middle)
        whole = in_place or (outcome is not None and result.offset == 0 and result.num_bytes == outcome.num_bytes)
        return (
            known
            and whole
            and all(
                place >= 0 and (view := reader.args[place]).lies_like(result) and (casts or view.dtype is result.dtype)
                for maker, reader in zip(self.inner, (*middle, self))
                for place in (reader._place_of(maker),)
            )
        )

    def _place_of(self, maker: Recipe) -> int:
        """Returns the position of the only argument that another recipe makes; -1 if there are none or several."""
        cell = maker.outcome()
        places = [at for at, arg in enumerate(self.args) if isinstance(arg, Ref) and arg.cell is cell]
        return places[0] if len(places) == 1 else -1

    @property
    def is_plain_sum(self) -> bool:
        return self.signature.name in ("aten.add.Tensor", "aten.add_.Tensor") and not self.kwargs

    def _rebuilt_args(self, copies: dict[int, torch.Tensor]) -> list[Any]:
        args = self.args.copy()
        for index in self.signature.tensors:
            if index < len(args):
                args[index] = _rebuild(args[index], copies)
        return args

    def _written_refs(self) -> list[Ref]:
        if not self.signature.written:
            return []
        written = [self.args[index] for index in self.signature.written if index < len(self.args)]
        return parts_in(written, Ref)


def copy_of(cell: Cell) -> torch.Tensor:
    assert cell.data is not None
    source = as_bytes(cell.data)
    return torch.empty_like(source).copy_(source)


def _rebuild(arg: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(arg, Ref):
        data = copies.get(id(arg.cell), arg.cell.data)
        assert data is not None
        return arg.of(data)
    if isinstance(arg, Held):
        return arg.find()
    if isinstance(arg, Scratch):
        return arg.make()
    if isinstance(arg, list):
        return [_rebuild(part, copies) for part in arg]
    return arg


def _as_call(arg: Any) -> Hashable:
    if isinstance(arg, Ref):
        return arg.cell.value, arg.key()
    return tuple(_as_call(part) for part in arg) if isinstance(arg, list) else _exactly(arg)


def _exactly(arg: Any) -> Hashable:
    """Returns a key that distinguishes equal numbers: 1, True and 1.0, or 0.0 and -0.0."""
    return type(arg), arg, repr(arg) if isinstance(arg, float | complex) else ""


class Call:
    """The arguments of an op call, to find out whether another call is the same. It holds no tensor."""

    __slots__ = ("func", "key", "storages", "switches")

    def __init__(self, func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        tensors = [tensor for tensor in tensors_in((*args, *kwargs.values())) if tensor.layout is torch.strided]
        self.storages = [weakref.ref(tensor.untyped_storage()) for tensor in tensors]
        self.func, self.switches = func, switches(few=signature_of(func).is_simple)
        self.key = [_told(arg) for arg in args], {name: _told(arg) for name, arg in kwargs.items()}

    def is_same(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """Whether a call has the same tensors, unchanged since, and the same other arguments. The address of a storage
        that is gone may have been reused."""
        other = Call(self.func, args, kwargs)
        known = all(storage() is not None for storage in self.storages)
        return known and other.key == self.key and not changed(self.switches, other.switches)

    def reads(self, storages: set[int]) -> bool:
        """Whether the call reads one of these storages, given by address."""
        return any(storage is not None and storage._cdata in storages for storage in (mark() for mark in self.storages))


def _told(arg: Any) -> Hashable:
    if isinstance(arg, torch.Tensor):
        return (*state_of(arg), View(arg).key()) if arg.layout is torch.strided else object()
    return tuple(_told(part) for part in arg) if isinstance(arg, NESTED) else _exactly(arg)


def capture(
    op: int,
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    find: Callable[[torch.Tensor], Cell | Held],
) -> Recipe:
    """Returns the recipe of a call before it runs. `find(tensor)` returns the cell or held tensor of an argument."""
    recipe = Recipe(op, func, args)
    signature, referred, num_args = recipe.signature, recipe.args, len(args)
    scratch = signature.scratch(args)
    for index in signature.tensors:
        if index < num_args and (arg := args[index]) is not None:
            outside = index in scratch and isinstance(arg, torch.Tensor)
            referred[index] = Scratch(arg) if outside else _refer(arg, find)
    if kwargs:
        recipe.kwargs = {name: _refer(arg, find) for name, arg in kwargs.items()}
    if signature.is_random:
        device = device_of(args, kwargs)
        recipe.generator_state = (device, generator_of(device).get_state())
    return recipe


def _refer(arg: Any, find: Callable[[torch.Tensor], Cell | Held]) -> Any:
    if isinstance(arg, torch.Tensor):
        source = find(arg)
        return source if isinstance(source, Held) else Ref(source, arg)
    if isinstance(arg, NESTED):
        return [_refer(part, find) for part in arg]
    return arg


def has_norm_replay(func: OpOverload, args: Sequence[Any]) -> bool:
    """Whether it is batch normalisation in training on CUDA, which can be made again cheaply from what it saved."""
    return bool(signature_of(func).scratch(args)) and kind_of(args[0].device).normalises_from_statistics


def normalise_again(
    func: OpOverload,
    args: Sequence[Any],
    mean: torch.Tensor,
    deviation: torch.Tensor,
    rows: slice = slice(None),
    *,
    plus: torch.Tensor | None = None,
    rectified: bool = False,
) -> torch.Tensor | None:
    """Applies batch normalisation to some rows of its input from saved statistics; the last argument is its epsilon.
    Returns None if that is not possible."""
    folded = fused.is_folded(func, args[0])
    if folded or rectified:
        numbers = (args[1], args[2], mean, deviation)
        return fused.normalise(args[0][rows], numbers, folded=folded, plus=plus, rectified=rectified)
    return torch.batch_norm_elemt(args[0][rows], args[1], args[2], mean, deviation, args[-1])


@contextmanager
def with_generator(start: tuple[torch.device, torch.Tensor] | None) -> Iterator[None]:
    if start is None:
        yield
        return
    generator = generator_of(start[0])
    now = generator.get_state()
    generator.set_state(start[1])
    try:
        yield
    finally:
        generator.set_state(now)


def refuse_held(held: Held, func: OpOverload | str) -> None:
    if type(held) is Held and held.cell is None and state_of(held.tensor) != held.state:
        raise _changed(held.tensor, func)


def refuse_changed(cell: Cell, func: OpOverload | str) -> None:
    """Raises ReplayError unless an external value is as it was when the op first read it."""
    outside = cell.parcel is None and cell.recipe is None
    if outside and cell.data is not None and state_of(cell.data) != cell.held:
        raise _changed(cell.data, func)


def _changed(tensor: torch.Tensor, func: OpOverload | str) -> ReplayError:
    return ReplayError(
        f"{func} cannot be recomputed: a tensor it reads ({tuple(tensor.shape)}, {tensor.dtype}) was changed in place "
        "since the forward; change it after backward(), or use planner='swap'"
    )
