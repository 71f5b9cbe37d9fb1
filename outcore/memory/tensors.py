"""Tensors and their bytes: which tensors are plain, where their storages are, and how to move them unobserved.

A plain strided tensor can be moved or rebuilt byte by byte. That happens inside `below_everything`: below autograd,
autocast, dispatch modes and the keys on which a step's ops are watched, so no hook observes it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from outcore.memory.settings import MEMORY

PLAIN: set[type] = {torch.Tensor, torch.nn.Parameter}  # and subclasses that only intercept access (`outcore.state`)
# The dispatch keys on which a step's ops are watched (`eager/intercept.py`); PyTorch itself has no kernels for them.
# OPS_KEY sees all ops below autograd and autocast, where kernels get their final arguments, next to the key of dispatch
# modes. WRITES_KEY sees in-place ops above autograd.
OPS_KEY, WRITES_KEY = "Fake", "DeferredInit"
WATCHED = torch._C.DispatchKeySet(torch._C._dispatch_key_parse(OPS_KEY)) | torch._C.DispatchKeySet(
    torch._C._dispatch_key_parse(WRITES_KEY)
)


# Addresses. The methods of the same name of `torch.Tensor` and `torch.UntypedStorage` are intercepted while a step
# runs, because code that asks for a pointer may write through it. These functions are not intercepted.
data_ptr: Callable[[torch.Tensor], int] = torch._C.TensorBase.data_ptr
storage_ptr: Callable[[torch.UntypedStorage], int] = getattr(torch._C.StorageBase, "data_ptr")  # noqa: B009


_data: Any = torch._C.TensorBase.data


def data_of(tensor: torch.Tensor) -> torch.Tensor:
    """Returns `tensor.data` without being intercepted, for callers that do not write through it."""
    data: torch.Tensor = _data.__get__(tensor)
    return data


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Sets `tensor.data` to the same content without being intercepted."""
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
        and not tensor._is_zerotensor()  # a zero tensor has a size but no memory
    )


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has a storage of bytes that count. A nested tensor has one, though it is not moved byte by byte."""
    return type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor._is_zerotensor()


def innermost(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor inside the wrappers of torch.func, which have no memory of their own."""
    while _functorch.is_functorch_wrapped_tensor(tensor):
        tensor = _functorch.get_unwrapped(tensor)
    return tensor


_functorch: Any = torch._C._functorch


def gradient_of(parameter: torch.Tensor) -> torch.Tensor | None:
    """Returns the gradient of a parameter, or None for a tensor that is not a leaf, where PyTorch would warn.

    `torch.func.functional_call` replaces parameters by such tensors.
    """
    return parameter.grad if parameter.is_leaf else None


def as_bytes(data: torch.Tensor) -> torch.Tensor:
    """Returns the whole storage of a tensor as a byte tensor."""
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
    """Returns a guard that excludes autograd, autocast, dispatch modes and the keys on which ops are watched.

    It is a single C++ guard: with several guards in Python, an interrupt between two lines would leave one of them on.
    """
    return torch._C._ExcludeDispatchKeyGuard(_ABOVE)


def unseen() -> Any:
    """Returns a guard inside which ops are not recorded as part of the running step."""
    return torch._C._ExcludeDispatchKeyGuard(WATCHED)


class Source(Protocol):
    """Brings a tensor to the device when it is read (`outcore.state`)."""

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns a handle for the tensor, or a view of it, that autograd keeps instead. `handle.run.unpack(handle)`
        returns the tensor, or raises RuntimeError if it was changed in the meantime."""
        ...


_SOURCE = "_outcore_source"
SOURCES: dict[int, weakref.ref[torch.UntypedStorage]] = {}  # storages that have a source, by their addresses


def set_source(storage: torch.UntypedStorage, source: Source) -> None:
    """Registers who brings tensors on this storage to the device. References to such tensors are short-lived."""
    storage.__dict__[_SOURCE] = weakref.ref(source)
    SOURCES[storage_ptr(storage)] = weakref.ref(storage)
    if len(SOURCES) > MEMORY.most_sources:
        for address in [address for address, mark in SOURCES.items() if mark() is None]:
            del SOURCES[address]


def source_at(address: int) -> Any:
    """Returns the source of the storage at an address, or None. Asking a tensor for its storage would have side effects
    (`outcore.eager.cells`); this has none."""
    storage = SOURCES[address]() if address in SOURCES else None
    mark = storage.__dict__[_SOURCE] if storage is not None and storage_ptr(storage) == address else None
    return mark() if mark is not None else None


def source_of(tensor: torch.Tensor) -> Any:
    """Returns the source of a tensor, or None."""
    if not SOURCES or tensor.layout is not torch.strided:
        return None
    mark = tensor.untyped_storage().__dict__.get(_SOURCE)
    return mark() if mark is not None else None


# What compiled code saves for its backward stays with us; autograd gets an empty tensor, a token, instead. A dtype for
# which there are no gradients makes the check for tokens fast, and a mark on the storage makes it certain.
TOKEN_DTYPE = torch.uint16
_TOKEN = "_outcore_token"


def make_token(stands_for: object) -> torch.Tensor:
    """Returns an empty tensor that keeps `stands_for` alive for as long as its storage lives."""
    token = torch.empty(0, dtype=TOKEN_DTYPE)
    token.untyped_storage().__dict__[_TOKEN] = stands_for
    return token


def token_of(tensor: torch.Tensor) -> object | None:
    """Returns what a token stands for, or None if the tensor is not a token."""
    if tensor.dtype is not TOKEN_DTYPE or tensor.device.type != "cpu":
        return None
    return tensor.untyped_storage().__dict__.get(_TOKEN)
