"""Properties of operators that the hot path needs: which arguments are tensors or written, and whether it may rerun."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from outcore.memory.device_kind import kind_of
from outcore.values import Replay

if TYPE_CHECKING:
    OpOverload = torch._ops.OpOverload[..., Any]
else:
    OpOverload = torch._ops.OpOverload

# Operators that write their arguments 3 and 4 (running mean and variance) in training, whether declared or not;
# their results do not depend on these. Position of the training flag; None: always training.
_STATISTICS: dict[str, int | None] = {
    "aten::native_batch_norm": 5,
    "aten::cudnn_batch_norm": 5,
    "aten::miopen_batch_norm": 5,
    "aten::_native_batch_norm_legit": 5,
    "aten::_batch_norm_with_update": None,
    "aten::batch_norm_with_update": None,
}
# Others that write running statistics without declaring it, with the positions of these arguments.
_UNSAID = {
    "aten::batch_norm_gather_stats": (3, 4),
    "aten::batch_norm_gather_stats_with_counts": (3, 4),
    "aten::batch_norm_update_stats": (1, 2),
}
# Noise that autograd saves before it is drawn; writing it does not move its version counter.
_NOISE = {"aten::rrelu_with_noise": (1,), "aten::rrelu_with_noise_": (1,)}
# Operators that change a tensor's layout, but not its content.
_SHAPES_ONLY = frozenset(
    f"aten::{name}"
    for name in (
        "as_strided_",
        "detach_",
        "rename_",
        "requires_grad_",
        "squeeze_",
        "swapaxes_",
        "swapdims_",
        "t_",
        "transpose_",
        "unsqueeze_",
    )
)
# Collectives write into their arguments, which their schemas do not declare.
_COLLECTIVES = ("c10d::", "_c10d_functional::")
_CONVOLUTIONS = ("aten::convolution", "aten::_convolution", "aten::cudnn_convolution")
# Frequent operators with one kernel per device, though they are not tagged as pointwise.
_SIMPLE = frozenset(
    f"aten::{name}"
    for name in (
        "_fused_rms_norm",
        "_log_softmax",
        "_softmax",
        "_to_copy",
        "cat",
        "copy_",
        "cudnn_batch_norm",
        "embedding",
        "max_pool2d_with_indices",
        "native_batch_norm",
        "native_dropout",
        "native_layer_norm",
    )
)
# Not reproducible bitwise on a GPU, though no tag says so: atomics, and dropout from a state of the op's own.
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


# Filled later, possibly without an op, by a Triton or C++ kernel, which may also add into zeros.
UNFILLED = frozenset(
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

RECTIFIERS = ("aten.relu.default", "aten.relu_.default")
PRODUCT, CAST = "aten.mul.Tensor", "aten._to_copy.default"
NESTED = (list, tuple)
T = TypeVar("T")
_FIRST = (0,)


def parts_in(items: Any, kind: type[T]) -> list[T]:
    """Returns the items of one kind among (nested) arguments or results, in order."""
    found: list[T] = []
    for item in items:
        if isinstance(item, kind):
            found.append(item)
        elif isinstance(item, NESTED):
            found += parts_in(item, kind)
    return found


def tensors_in(items: Any) -> list[torch.Tensor]:
    """Returns the tensors among (nested) arguments or results, in order."""
    return parts_in(items, torch.Tensor)


def reads_of(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors whose content the op depends on, in the order in which `capture` meets them."""
    signature = signature_of(func)
    scratch = signature.scratch(args)
    positions = (index for index in signature.tensors if index < len(args) and index not in scratch)
    return tensors_in([*(args[index] for index in positions), *kwargs.values()])


def outputs_of(
    func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any], result: Any, num_recorded: int = -1
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Returns the tensors that an op made on new storages, and the arguments that it wrote into. If the recorded op
    made `num_recorded` tensors, and returns no others now, its results are on new storages as in the recording."""
    signature = signature_of(func)
    if num_recorded == 1 and signature.written == _FIRST and result is args[0]:
        return [], [result]
    made = tensors_in(result if type(result) is tuple else (result,))
    if len(made) == num_recorded and not signature.written:
        return made, []
    asked = signature.parts_of(args, kwargs, torch.Tensor)
    everything = [tensor for tensor in asked if tensor.layout is torch.strided]
    if signature.is_view and len(everything) < len(asked):
        return [], []  # the values or indices of a sparse tensor, which has no storage
    given = {tensor.untyped_storage()._cdata for tensor in everything}
    fresh: list[torch.Tensor] = []
    for tensor in made:
        if tensor.layout is torch.strided and (key := tensor.untyped_storage()._cdata) not in given:
            given.add(key)
            fresh.append(tensor)
    if signature.writes_unsaid:
        return fresh, everything
    if not signature.written:
        return fresh, []
    return fresh, [tensor for tensor in signature.written_of(args, kwargs) if tensor.layout is torch.strided]


class Signature:
    """The properties of an operator, looked up once, because its schema and its hash are slow."""

    __slots__ = (
        "call",
        "func",
        "is_random",
        "is_simple",
        "is_view",
        "name",
        "names_out",
        "noise",
        "sets",
        "statistics",
        "tensors",
        "unsaid",
        "writes",
        "writes_unsaid",
        "written",
    )

    def __init__(self, func: OpOverload) -> None:
        schema = func._schema
        self.func = func  # kept, so that no other operator ever has its id
        self.call: Callable[..., Any] = func._op  # what `func(...)` calls, without a frame of Python around it
        self.name = str(func)  # `aten.relu_.default`
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        # One kernel per device, independent of switches for libraries or precisions.
        self.is_simple = torch.Tag.pointwise in func.tags or schema.name in _SIMPLE
        self.is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in schema.returns)
        self.writes_unsaid = schema.name.startswith(_COLLECTIVES)
        # Positions of the arguments that are or contain tensors, and of those that the schema says are written.
        self.tensors = tuple(i for i, argument in enumerate(schema.arguments) if "Tensor" in str(argument.type))
        self.written = tuple(
            i for i, arg in enumerate(schema.arguments) if arg.alias_info is not None and arg.alias_info.is_write
        )
        # Names of the arguments that are written and never given by position: `out=...`.
        self.names_out = tuple(argument.name for argument in schema.arguments if argument.is_out)
        self.statistics = schema.name in _STATISTICS and (_STATISTICS[schema.name],)
        self.unsaid = _UNSAID.get(schema.name, ())
        self.noise = _NOISE.get(schema.name, ())
        self.sets = schema.name == "aten::set_"
        # Whether a call may change an existing tensor.
        self.writes = may_write(schema)

    def parts_of(self, args: Sequence[Any], kwargs: dict[str, Any], kind: type[T]) -> list[T]:
        """Returns the tensor arguments of a call that are of one kind."""
        asked = [args[index] for index in self.tensors if index < len(args)]
        return parts_in((*asked, *kwargs.values()) if kwargs else asked, kind)

    def written_of(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors that a call writes into according to its schema."""
        written = [args[index] for index in self.written if index < len(args)]
        if kwargs:
            written += [kwargs[name] for name in self.names_out if name in kwargs]
        return tensors_in(written)

    def changed_by(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Returns the tensors that a call writes into, whether its schema declares it or not."""
        if self.writes_unsaid:
            return tensors_in((*args, *kwargs.values()))
        return self.written_of(args, kwargs) + self.changed_silently_by(args)

    def changed_silently_by(self, args: Sequence[Any]) -> list[torch.Tensor]:
        """Returns the tensors that a call writes into without moving their version counters, whose new content plain
        PyTorch would use in a backward: running statistics, and noise."""
        positions = self.unsaid or self.noise or self.scratch(args)
        return tensors_in(args[at] for at in positions if at < len(args)) if positions else []

    def scratch(self, args: Sequence[Any]) -> tuple[int, ...]:
        """Returns the positions of arguments that are only written: running statistics of a norm in training."""
        if not self.statistics:
            return ()
        flag = self.statistics[0]
        return (3, 4) if flag is None or (len(args) > flag and args[flag]) else ()


def may_write(schema: torch._C.FunctionSchema) -> bool:
    """Whether an operator may change the content of an argument."""
    return bool(
        (schema.is_mutable and schema.name not in _SHAPES_ONLY)
        or schema.name in _STATISTICS
        or schema.name in _UNSAID
        or schema.name.startswith(_COLLECTIVES)
    )


def find_operator(name: str) -> OpOverload | None:
    """Returns the operator with a trace's name, such as `aten.relu.default`; None if there is none."""
    space, _, rest = name.partition(".")
    packet, _, overload = rest.rpartition(".")
    found = getattr(getattr(getattr(torch.ops, space), packet, None), overload, None)
    return found if isinstance(found, torch._ops.OpOverload) else None


_SIGNATURES: dict[int, Signature] = {}


def signature_of(func: OpOverload) -> Signature:
    known = _SIGNATURES.get(id(func))
    if known is None:
        known = _SIGNATURES[id(func)] = Signature(func)
    return known


def replay_kind(func: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> Replay:
    """Returns whether this call may be rerun: `pure`, `random` or `no`."""
    if not _known(func) or kwargs.get("generator") is not None:
        return "no"
    if any(isinstance(arg, torch.Generator) for arg in args):
        return "no"
    if (
        func._schema.name in _CONVOLUTIONS
        and torch._C._get_cudnn_benchmark()
        and kind_of(args[0].device).tries_convolutions
    ):
        return "no"  # cuDNN selects algorithms in every thread anew, and may select another one in a backward
    return "random" if signature_of(func).is_random else "pure"


@cache
def _known(func: OpOverload) -> bool:
    """Whether it is one of torch's own kernels; side effects of unknown kernels are unknown."""
    name = func._schema.name
    tags = func.tags
    return (
        name.partition("::")[0] in ("aten", "prims")
        and name not in _NONDETERMINISTIC
        and name not in UNFILLED
        and torch.Tag.nondeterministic_bitwise not in tags
        and torch.Tag.data_dependent_output not in tags
        and torch.Tag.dynamic_output_shape not in tags
        and torch.Tag.inplace_view not in tags
        and not any(arg.is_out for arg in func._schema.arguments)
    )


def device_of(args: Sequence[Any], kwargs: dict[str, Any]) -> torch.device:
    """Returns the device on which an op draws its random numbers."""
    for tensor in tensors_in((*args, *kwargs.values())):
        if tensor.device.type != "cpu" or tensor.dim():
            return tensor.device
    device = kwargs.get("device")
    return torch.device(device) if device is not None else torch.device("cpu")
