"""Observes accesses to a tensor's memory other than operators, and informs the listener before each.

Operators are observed by the dispatcher, also those that write through `x.data` (`intercept.py`). The following are
not: giving a tensor another storage, getting a tensor with a version counter of its own, and passing its memory to
others (NumPy, DLPack, a pointer). Each of these is a Python function of PyTorch and is wrapped while a step runs.

On a GPU, pointers are not observed. Kernels (Triton's) are launched with pointers all the time, and use them only while
they run; the recorder compares tensors that custom functions save with the results of their ops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch.autograd import grad_mode

from outcore.memory.tensors import PLAIN


class Doorkeeper(Protocol):
    def opened(self, storage: torch.UntypedStorage) -> None:
        """Called before somebody gets a tensor on this storage with a version counter of its own."""

    def exposed(self, storage: torch.UntypedStorage) -> None:
        """Called before somebody gets its memory, and may write into it without any operator."""

    def replacing(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Called before a tensor gets another storage. The returned function is called afterwards."""


_keeper: Doorkeeper | None = None
_torch: Any = torch
_data: Any = torch.Tensor.data


def _storage_of(item: Any) -> torch.UntypedStorage | None:
    """Returns the storage; None if there is no memory to write into (a subclass, a sparse or traced tensor)."""
    if isinstance(item, torch.UntypedStorage):
        return item if item.device.type != "meta" else None
    if type(item) not in PLAIN or item.layout is not torch.strided or item.is_nested or item.is_meta:
        return None
    return None if torch._C._functorch.is_functorch_wrapped_tensor(item) else item.untyped_storage()


def _open(tensor: Any) -> None:
    if _keeper is not None and (storage := _storage_of(tensor)) is not None:
        _keeper.opened(storage)


def _expose(item: Any) -> None:
    if _keeper is not None and (storage := _storage_of(item)) is not None:
        _keeper.exposed(storage)


def _expose_on_host(item: Any) -> None:
    if item.device.type == "cpu":
        _expose(item)


class _Data:
    """`x.data`, and `x.data = y`. Accessed on the class, it returns PyTorch's own, with which overrides are
    compared."""

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return _data
        _open(tensor)
        return _data.__get__(tensor)

    def __set__(self, tensor: Any, other: Any) -> None:
        done = _keeper.replacing(tensor) if _keeper is not None and _storage_of(tensor) is not None else None
        _data.__set__(tensor, other)
        if done is not None:
            done()


class _Method:
    """A method of tensors or storages that calls a function first."""

    def __init__(self, tell: Callable[[Any], None], original: Any) -> None:
        self._tell, self._original = tell, original

    def __get__(self, item: Any, owner: Any = None) -> Any:
        return self._original if item is None else partial(self._call, item)

    def _call(self, item: Any, *args: Any, **kwargs: Any) -> Any:
        self._tell(item)
        return self._original(item, *args, **kwargs)


def _function(tell: Callable[[Any], None], original: Any) -> Any:
    def door(item: Any, *args: Any, **kwargs: Any) -> Any:
        tell(item)
        return original(item, *args, **kwargs)

    return door


def _swap(original: Any) -> Any:
    def swap_tensors(one: torch.Tensor, other: torch.Tensor) -> None:
        plain = [tensor for tensor in (one, other) if _storage_of(tensor) is not None]
        done = [_keeper.replacing(tensor) for tensor in plain] if _keeper is not None else []
        original(one, other)
        for tell in done:
            tell()

    return swap_tensors


def _preserve(original: Any) -> Any:
    def preserve(self: Any, tensors: Any) -> None:
        for tensor in tensors if isinstance(tensors, tuple) else (tensors,):
            _open(tensor)
        original(self, tensors)

    return preserve


def _doors() -> list[tuple[Any, str, Any]]:
    """Returns the owner, the name and the replacement of each wrapped function."""
    doors: list[tuple[Any, str, Any]] = [(torch.Tensor, "data", _Data())]
    for where, names, tell in (
        (torch.Tensor, ("numpy", "__dlpack__"), _expose),
        (torch.UntypedStorage, ("__setitem__", "byteswap", "copy_", "fill_", "resize_", "share_memory_"), _expose),
        (torch.Tensor, ("data_ptr",), _expose_on_host),
        (torch.UntypedStorage, ("data_ptr",), _expose_on_host),
    ):
        doors += [(where, name, _Method(tell, getattr(where, name))) for name in names]
    for module in (_torch, _torch.utils.dlpack):
        doors.append((module, "to_dlpack", _function(_expose, module.to_dlpack)))
    preserve = grad_mode._unsafe_preserve_version_counter
    doors.append((preserve, "__init__", _preserve(preserve.__init__)))
    doors.append((torch.utils, "swap_tensors", _swap(torch.utils.swap_tensors)))
    return doors


_DOORS = _doors()
_OWN = {(id(where), name): vars(where).get(name) for where, name, _ in _DOORS}


def watch(keeper: Doorkeeper) -> None:
    global _keeper
    _keeper = keeper
    for where, name, door in _DOORS:
        setattr(where, name, door)


def leave() -> None:
    """Restores all wrapped functions. May be called twice."""
    global _keeper
    _keeper = None
    for where, name, door in _DOORS:
        if vars(where).get(name) is not door:
            continue
        own = _OWN[id(where), name]
        if own is not None:
            setattr(where, name, own)
        else:
            delattr(where, name)
