"""An op call -> its recipe -> the same call again, bit for bit.

A recipe refers to what the op read as (cell, view), never to tensors, so it holds no more memory than its cells do.
Exactness:
- it runs below autograd, autocast and every mode, with the very arguments the kernel got the first time, and with grad
  mode as it was (some kernels look at it);
- a random op gets back the generator state it started from;
- batch normalisation in training writes running statistics on the side: it gets scratch in their place, so they change
  once per step, not twice;
- batch normalisation can be applied again from the statistics it saved, in one pass instead of three, where a check on
  the recorded step showed that this gives the same bits (`twin`);
- an in-place op overwrites the value it read only if nobody needs that value again, else a copy of it;
- a parameter or input that was changed since (its version says so) is an error, never a wrong gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from outcore.errors import ReplayError
from outcore.running.cells import Cell, View, as_bytes, state_of

if TYPE_CHECKING:
    OpOverload = torch._ops.OpOverload[..., Any]
else:
    OpOverload = torch._ops.OpOverload

# Operators that write their arguments 3 and 4 (running mean and variance) in training without saying so, or saying so;
# what they return does not depend on them then. The position of the training flag, or None: always training.
_STATISTICS: dict[str, int | None] = {
    "aten::native_batch_norm": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
    "aten::_batch_norm_with_update": None,
    "aten::batch_norm_with_update": None,
}
# Not the same bits twice on a GPU, though no tag says so: atomics, and dropout from a state of the op's own.
_NONDETERMINISTIC = frozenset(
    {
        "aten::_cudnn_init_dropout_state",
        "aten::batch_norm_gather_stats",
        "aten::batch_norm_gather_stats_with_counts",
        "aten::batch_norm_update_stats",
        "aten::_cudnn_rnn",
        "aten::miopen_rnn",
        "aten::_index_put_impl_",
        "aten::bincount",
        "aten::cumsum",
        "aten::histc",
        "aten::index_add",
        "aten::index_add_",
        "aten::index_put",
        "aten::index_put_",
        "aten::kthvalue",
        "aten::median",
        "aten::nll_loss2d_forward",
        "aten::put_",
        "aten::scatter_add",
        "aten::scatter_add_",
        "aten::scatter_reduce",
        "aten::scatter_reduce_",
    }
)


# Filled by whoever they are handed to, which may be no op at all: a Triton or C++ kernel. Zeros are what it adds into.
_UNFILLED = frozenset(
    {
        "aten::empty",
        "aten::empty_like",
        "aten::empty_permuted",
        "aten::empty_strided",
        "aten::new_empty",
        "aten::new_empty_strided",
        "aten::new_zeros",
        "aten::zeros",
        "aten::zeros_like",
    }
)


class Ref:
    """A tensor argument: a view of a cell."""

    __slots__ = ("cell", "view")

    def __init__(self, cell: Cell, tensor: torch.Tensor) -> None:
        self.cell = cell
        self.view = View(tensor)


class Scratch:
    """An argument whose content does not matter."""

    __slots__ = ("like",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.like = (tuple(tensor.shape), tensor.dtype, tensor.device)

    def make(self) -> torch.Tensor:
        shape, dtype, device = self.like
        return torch.empty(shape, dtype=dtype, device=device)


class Recipe:
    """One op call, to be run again."""

    __slots__ = (
        "__weakref__",
        "args",
        "func",
        "generator_state",
        "grad_mode",
        "kwargs",
        "made",
        "op",
        "overwrote",
        "reads",
        "twin",
    )

    def __init__(self, op: int, func: OpOverload) -> None:
        self.op = op
        self.func = func
        self.args: list[Any] = []
        self.kwargs: dict[str, Any] = {}
        self.reads: list[Cell] = []
        self.grad_mode = torch.is_grad_enabled()
        self.twin = False
        self.generator_state: tuple[torch.device, torch.Tensor] | None = None
        self.made: list[weakref.ref[Cell]] = []  # the cells of its fresh outputs, in order
        self.overwrote: list[weakref.ref[Cell]] = []  # the cells of the next versions of what it wrote into

    def run(self, *, in_place: bool = False) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Runs the op from its cells' data (all must be there): the fresh tensors and the overwritten ones."""
        copies: dict[int, torch.Tensor] = {}
        into = self._written_refs()
        for cell in self.reads:
            refuse_changed(cell, self.func)
        if self.twin and (fresh := self._run_twin()):
            return fresh, []
        for ref in into:
            if not in_place and id(ref.cell) not in copies:
                copies[id(ref.cell)] = _copy_of(ref.cell)
        args = self._rebuilt_args(copies)
        kwargs = {name: _rebuild(arg, copies) for name, arg in self.kwargs.items()}
        with _generator(self.generator_state), torch.set_grad_enabled(self.grad_mode):
            result = self.func(*args, **kwargs)
        fresh, overwritten = outputs_of(self.func, args, kwargs, result)
        if len(fresh) != len(self.made):
            raise ReplayError(
                f"{self.func} made {len(fresh)} tensors when it was run again and {len(self.made)} the first time; "
                "use planner='swap' and report this op"
            )
        if in_place:
            for ref in into:
                ref.cell.data = None  # its content is gone
        return fresh, overwritten

    def _run_twin(self) -> list[torch.Tensor]:
        """Normalises again from the saved mean and deviation; nothing where they are gone."""
        saved = [mark() for mark in self.made[1:3]]
        for cell in saved:
            if cell is not None:
                cell.arrive()
        mean, deviation = (cell.data if cell is not None else None for cell in saved)
        if mean is None or deviation is None:
            return []
        args = self._rebuilt_args({})
        out = normalise_again(args, mean, deviation)
        return [out, mean, deviation, *(out.new_empty(0) for _ in self.made[3:])]

    def _rebuilt_args(self, copies: dict[int, torch.Tensor]) -> list[Any]:
        args = self.args.copy()
        for index in tensor_args(self.func):
            if index < len(args):
                args[index] = _rebuild(args[index], copies)
        return args

    def _written_refs(self) -> list[Ref]:
        written = [self.args[index] for index in written_args(self.func) if index < len(self.args)]
        return [part for arg in written for part in (arg if isinstance(arg, list) else [arg]) if isinstance(part, Ref)]


def _copy_of(cell: Cell) -> torch.Tensor:
    assert cell.data is not None
    source = as_bytes(cell.data)
    return torch.empty_like(source).copy_(source)


def _rebuild(arg: Any, copies: dict[int, torch.Tensor]) -> Any:
    if isinstance(arg, Ref):
        data = copies.get(id(arg.cell), arg.cell.data)
        assert data is not None
        return arg.view.of(data)
    if isinstance(arg, Scratch):
        return arg.make()
    if isinstance(arg, list):
        return [_rebuild(part, copies) for part in arg]
    return arg


def capture(
    op: int,
    func: OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    find: Callable[..., Cell],
) -> Recipe:
    """The recipe of a call that is about to happen. `find(tensor)` names the cell of a tensor argument."""
    recipe = Recipe(op, func)
    scratch = scratch_args(func, args)
    recipe.args = list(args)
    for index in tensor_args(func):
        if index < len(args):
            arg = args[index]
            outside = index in scratch and isinstance(arg, torch.Tensor)
            recipe.args[index] = Scratch(arg) if outside else _refer(arg, recipe.reads, find)
    recipe.kwargs = {name: _refer(arg, recipe.reads, find) for name, arg in kwargs.items()}
    if is_random(func):
        device = device_of(args, kwargs)
        recipe.generator_state = (device, generator_of(device).get_state())
    return recipe


def _refer(arg: Any, reads: list[Cell], find: Callable[[torch.Tensor], Cell]) -> Any:
    if isinstance(arg, torch.Tensor):
        ref = Ref(find(arg), arg)
        reads.append(ref.cell)
        return ref
    if isinstance(arg, list | tuple):
        return [_refer(part, reads, find) for part in arg]
    return arg


def has_twin(func: OpOverload, args: Sequence[Any]) -> bool:
    """Batch normalisation in training on CUDA: the one op whose result is cheap to make again from what it saved."""
    return bool(scratch_args(func, args)) and args[0].device.type == "cuda"


def normalise_again(
    args: Sequence[Any], mean: torch.Tensor, deviation: torch.Tensor, rows: slice = slice(None)
) -> torch.Tensor:
    """Batch normalisation of some rows of its input from saved statistics; the last argument is its epsilon."""
    return torch.batch_norm_elemt(args[0][rows], args[1], args[2], mean, deviation, args[-1])


def tensors_in(items: Any) -> Iterator[torch.Tensor]:
    """The tensors of (nested) arguments or results, in order."""
    for item in items:
        if isinstance(item, torch.Tensor):
            yield item
        elif isinstance(item, list | tuple):
            yield from tensors_in(item)


def reads_of(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors whose content the op depends on, in the order `capture` meets them."""
    scratch = scratch_args(func, args)
    positions = (index for index in tensor_args(func) if index < len(args) and index not in scratch)
    return list(tensors_in([*(args[index] for index in positions), *kwargs.values()]))


def outputs_of(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors an op made: those on storages of their own, and the arguments it wrote into."""
    asked = [args[index] for index in tensor_args(func) if index < len(args)]
    everything = [tensor for tensor in tensors_in((*asked, *kwargs.values())) if tensor.layout is torch.strided]
    given = {tensor.untyped_storage()._cdata for tensor in everything}
    fresh: list[torch.Tensor] = []
    for tensor in tensors_in((result,)):
        if tensor.layout is not torch.strided:
            continue
        key = tensor.untyped_storage()._cdata
        if key not in given:
            given.add(key)
            fresh.append(tensor)
    if writes_unsaid(func):
        return fresh, everything
    written = [args[index] for index in written_args(func) if index < len(args)]
    written += [kwargs[name] for name in out_names(func) if name in kwargs]
    return fresh, [tensor for tensor in tensors_in(written) if tensor.layout is torch.strided]


@cache
def writes_unsaid(func: OpOverload) -> bool:
    """Collectives write into what they are given, and their schemas do not say so."""
    return func._schema.name.startswith(("c10d::", "_c10d_functional::"))


def scratch_args(func: OpOverload, args: Sequence[Any]) -> tuple[int, ...]:
    """Positions of arguments that are only written: batch normalisation's running statistics in training."""
    name = func._schema.name
    if name not in _STATISTICS:
        return ()
    flag = _STATISTICS[name]
    return (3, 4) if flag is None or (len(args) > flag and args[flag]) else ()


@cache
def tensor_args(func: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that are or contain tensors. Asking each argument instead takes longer than the op."""
    return tuple(i for i, argument in enumerate(func._schema.arguments) if "Tensor" in str(argument.type))


@cache
def written_args(func: OpOverload) -> tuple[int, ...]:
    """Positions of the arguments that the schema says are written."""
    arguments = func._schema.arguments
    return tuple(i for i, arg in enumerate(arguments) if arg.alias_info is not None and arg.alias_info.is_write)


@cache
def out_names(func: OpOverload) -> tuple[str, ...]:
    """Names of the arguments that are written and never given by position: `out=...`."""
    return tuple(argument.name for argument in func._schema.arguments if argument.is_out)


@cache
def is_random(func: OpOverload) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def replay_kind(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """`pure`, `random` or `no`: may this call be run again?"""
    if not _known(func) or kwargs.get("generator") is not None:
        return "no"
    if any(isinstance(arg, torch.Generator) for arg in args):
        return "no"
    return "random" if is_random(func) else "pure"


@cache
def _known(func: OpOverload) -> bool:
    """Only torch's own kernels: what an unknown kernel does besides its result is unknown."""
    name = func._schema.name
    tags = func.tags
    return (
        name.partition("::")[0] in ("aten", "prims")
        and name not in _NONDETERMINISTIC
        and name not in _UNFILLED
        and torch.Tag.nondeterministic_bitwise not in tags
        and torch.Tag.data_dependent_output not in tags
        and torch.Tag.dynamic_output_shape not in tags
        and torch.Tag.inplace_view not in tags
        and not any(arg.is_out for arg in func._schema.arguments)
    )


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Where an op draws its random numbers."""
    for tensor in tensors_in((*args, *kwargs.values())):
        if tensor.device.type != "cpu" or tensor.dim():
            return tensor.device
    device = kwargs.get("device")
    return torch.device(device) if device is not None else torch.device("cpu")


def generator_of(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = device.index if device.index is not None else torch.cuda.current_device()
        return torch.cuda.default_generators[index]
    return torch.default_generator


@contextmanager
def _generator(start: tuple[torch.device, torch.Tensor] | None) -> Iterator[None]:
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


_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


@contextmanager
def below_everything() -> Iterator[None]:
    """Below autograd, autocast and modes: where kernels are. By `with` alone: an interrupt between two lines of ours
    would leave a guard on."""
    with (
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(_ABOVE),
    ):
        yield


def refuse_changed(cell: Cell, func: OpOverload) -> None:
    """An outside value must be what it was when the op first read it."""
    outside = cell.parcel is None and cell.recipe is None
    if outside and cell.data is not None and state_of(cell.data) != cell.held:
        raise ReplayError(
            f"{func} cannot be recomputed: a tensor it reads ({tuple(cell.data.shape)}, {cell.data.dtype}) was "
            "changed in place since the forward; change it after backward(), or use planner='swap'"
        )
