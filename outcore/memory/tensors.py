"""What kinds of tensors there are, and their bytes: plain strided tensors may be moved or rebuilt byte by byte.

`below_everything` is where they are moved: below autograd, autocast, dispatch modes and our own watching of ops, where
no hook sees it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}  # and classes that only notice who looks (`outcore.state`)
# The dispatch keys on which a step's ops are watched (`eager/intercept.py`). PyTorch has no kernel for either. All ops:
# below autograd and autocast, where kernels get their final arguments, and beside the key of dispatch modes. Ops that
# write into what is there: above autograd.
OPS_KEY, WRITES_KEY = "Fake", "DeferredInit"
WATCHED = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(OPS_KEY)) | torch._C.DispatchKeySet(
    torch._C._dispatch_key_parse(WRITES_KEY)
)


# Where they lie. The methods of `torch.Tensor` and `torch.UntypedStorage` are watched while a step runs: who asks for a
# pointer may write through it.
data_ptr: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
storage_ptr: Callable[[torch.UntypedStorage], int] = getattr(torch._C.StorageBase, "data_ptr")  # noqa: B009


_data: Any = torch._C.TensorBase.data


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor.data`, which is watched while a step runs, for those who do not write through it."""
    data: torch.Tensor = _data.__get__(tensor)
    return data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """`tensor.data = data` with the same content: nothing that a step must be told of."""
    _data.__set__(tensor, data)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether this is a strided tensor with an ordinary storage, which may be moved or rebuilt byte by byte."""
    return (
        type(tensor) in PLAIN
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not tensor.is_quantized
        and not tensor.is_nested
        and not tensor._is_zerotensor()  # it has bytes and no memory
    )


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with memory of its own inside the wrappers of torch.func, which have none."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


_functorch: Any = torch._C._functorch


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """None for what `torch.func.functional_call` put in the place of a parameter: PyTorch warns of asking it."""
    return parameter.grad if parameter.is_leaf else None


def as_bytes(data: torch.Tensor) -> torch.Tensor:
    """The whole storage of a tensor as a byte tensor."""
    storage = data.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=data.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _keys_above_kernels() -> torch._C.DispatchKeySet:
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    autocast |= torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    with (
        torch._C._DisableTorchDispatch(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(autocast),
    ):
        return torch._C._dispatch_tls_local_exclude_set() | WATCHED


_ABOVE = _keys_above_kernels()


def below_everything() -> Any:
    """Below autograd, autocast, modes and our own watching: where kernels are. All guards as one, and no Python of ours
    around it: an interrupt between two lines would leave a guard on."""
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE)


def unseen() -> Any:
    """What is done inside is no part of the step that is watched."""
    return torch._C._ExcludeDispatchKeyGuard(WATCHED)


class Source(Protocol):
    """Who brings a tensor to the device whenever somebody reads it (`outcore.state`)."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """What stands for the tensor, or a view of it, while it may be away: `handle.run.unpack(handle)` gives it back,
        or raises RuntimeError where it was changed since."""
        ...


_SOURCE = "_outcore_source"
_SOURCES: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages that have one, by where they lie
_MOST_SOURCES = 4096  # before those that are gone are removed


def set_source(storage: torch.UntypedStorage, source: Source) -> None:
    """Whoever holds a tensor on this storage holds it for a moment only."""
    storage.__dict__[_SOURCE] = weakref.ref(source)
    _SOURCES[storage_ptr(storage)] = weakref.ref(storage)
    if len(_SOURCES) > _MOST_SOURCES:
        for address in [address for address, mark in _SOURCES.items() if mark() is None]:
            del _SOURCES[address]


def source_at(address: int) -> Any:
    """Who brings what lies there, if anybody does. To ask a tensor for its storage has consequences, which this has
    not (`outcore.eager.cells`)."""
    storage = _SOURCES[address]() if address in _SOURCES else None
    mark = storage.__dict__[_SOURCE] if storage is not None and storage_ptr(storage) == address else None
    return mark() if mark is not None else None


def source_of(tensor: torch.Tensor) -> Any:
    """Who brings this tensor to the device, if anybody does."""
    if not _SOURCES or tensor.layout is not torch.strided:
        return None
    mark = tensor.untyped_storage().__dict__.get(_SOURCE)
    return mark() if mark is not None else None


# What compiled code saves for its backward never leaves our hands: autograd gets an empty tensor in its place. A type
# that nobody computes gradients with tells these apart at first sight, a mark on the storage for certain.
TOKEN_DTYPE = torch.uint16
_TOKEN = "_outcore_token"


def make_token(stands_for: object) -> torch.Tensor:
    """An empty tensor that stands for something else, for as long as anybody holds its storage."""
    token = torch.empty(0, dtype=TOKEN_DTYPE)
    token.untyped_storage().__dict__[_TOKEN] = stands_for
    return token


def token_of(tensor: torch.Tensor) -> object | None:
    """What a token stands for; None: this is no token."""
    if tensor.dtype is not TOKEN_DTYPE or tensor.device.type != "cpu":
        return None
    return tensor.untyped_storage().__dict__.get(_TOKEN)
