"""Tensor subclasses that report the first access to a tensor.

A parameter whose update is due must be updated before anybody reads it, and a parameter that is being copied to the
device in advance must not be written meanwhile. During that time the tensor's class is a subclass. Every torch
function, method or property of the tensor then goes through `__torch_function__`, which calls the registered function,
restores the original class and continues with the call. Attributes that are the same before and after (shape, dtype,
`grad is None`, ...) are answered without calling it, so that `zero_grad()` and loops over the parameters trigger
nothing.

A parameter that a module is reading has another subclass, which only records whether somebody asks for `data`, because
writes through `data` do not change the version counter.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils import _foreach_utils
from torch.utils._pytree import tree_leaves

from outcore.memory.tensors import PLAIN
from outcore.state.window import num_users as users_of

_CALL, _ON_CALL = "_outcore_on_touch", "_outcore_on_call"
OnCall = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]
_Base: Any = torch.Tensor
_PROPERTIES = ("shape", "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "_version", "grad", "ndim")
_HOOK_PROPERTIES = ("_backward_hooks", "_post_accumulate_grad_hooks")
_METHODS = ("size", "dim", "numel", "nelement", "stride", "is_contiguous", "is_floating_point", "is_complex", "__len__")
_UNCHANGED = frozenset(
    (
        *(
            getattr(_Base, name).__get__
            for name in (*_PROPERTIES, *_HOOK_PROPERTIES, "is_cuda", "is_cpu", "is_sparse", "itemsize")
        ),
        *(getattr(_Base, name) for name in (*_METHODS, "element_size")),
        _Base.grad.__set__,
    )
)


_HIDDEN = frozenset(
    (_Base.data.__get__, _Base.data.__set__, _Base.untyped_storage, _Base.storage, _Base.numpy, _Base.set_)
)


class _Watched:
    """The common part of both subclasses for watched tensors."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in _UNCHANGED:
            watched = [found for found in tree_leaves((args, kwargs)) if isinstance(found, _Watched)]
            for on_call in {found.__dict__.get(_ON_CALL) for found in watched}:
                result = on_call(func, args, kwargs or {}) if on_call is not None else NotImplemented
                if result is not NotImplemented:
                    return result
            for found in watched:
                touch(found)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        touch(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        touch(self)
        return self.__reduce_ex__(protocol)


class WatchedParameter(_Watched, torch.nn.Parameter):
    """A parameter whose first access is reported."""


class WatchedTensor(_Watched, torch.Tensor):
    """A plain tensor whose first access is reported."""


class ReadParameter(torch.nn.Parameter):
    """A parameter that a module is reading. Access to its `data` or storage is reported."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HIDDEN:
            touch(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        touch(self)
        unwatch(self)
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        touch(self)
        unwatch(self)
        return self.__reduce_ex__(protocol)


def observe(parameter: torch.nn.Parameter, on_hidden: Callable[[], None]) -> None:
    """Calls `on_hidden` whenever the bytes of `parameter` are accessed in a way that its version counter misses."""
    parameter.__dict__[_CALL] = on_hidden
    parameter.__class__ = ReadParameter


def watch(tensor: torch.Tensor, on_touch: Callable[[], None], on_call: OnCall | None = None) -> None:
    """Makes the first access to `tensor` call `on_touch`, which must `unwatch` it.

    `tensor` is a plain parameter or a plain tensor. `on_call` is asked first: it returns the result of a call, or
    NotImplemented.
    """
    tensor.__dict__[_CALL] = on_touch
    tensor.__dict__[_ON_CALL] = on_call
    tensor.__class__ = WatchedParameter if isinstance(tensor, torch.nn.Parameter) else WatchedTensor


def unwatch(tensor: torch.Tensor) -> None:
    """Restores the original class of a tensor."""
    tensor.__dict__.pop(_ON_CALL, None)
    if tensor.__dict__.pop(_CALL, None) is not None:
        tensor.__class__ = torch.nn.Parameter if isinstance(tensor, torch.nn.Parameter) else torch.Tensor


def is_watched(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, _Watched)


def touch(watched: Any) -> None:
    """Calls the registered function of a tensor, if there is one."""
    on_touch = watched.__dict__.get(_CALL)
    if on_touch is not None:
        on_touch()


PLAIN.add(ReadParameter)  # while a module runs, it is treated as an ordinary parameter

# Functions for many tensors check their types; these subclasses must not change which implementation they choose.
for _known, _kinds in (
    (_foreach_utils._foreach_supported_types, (WatchedTensor,)),
    (torch_optimizer._foreach_supported_types, (WatchedTensor, WatchedParameter, ReadParameter)),
):
    _types: Any = _known
    _types.extend(_kinds)


def num_users(tensor: torch.Tensor) -> int:
    """Returns the number of tensors on the storage of `tensor`, without reporting an access."""
    with torch._C.DisableTorchFunctionSubclass():
        return users_of(tensor.untyped_storage())


def is_held(tensor: torch.Tensor, num_own: int) -> bool:
    """Whether the Python object of a tensor is referenced by anybody besides its owner and `num_own` others."""
    return sys.getrefcount(tensor) > 3 + num_own  # the owner, this argument, and that of getrefcount


class WatchedState(defaultdict[torch.Tensor, Any]):
    """An optimizer's `state` that runs all due updates before it is read."""

    def __init__(self, state: dict[torch.Tensor, Any], before_look: Callable[[], None]) -> None:
        super().__init__(dict)
        super().update(state)
        self.before_look = before_look

    def __getitem__(self, key: torch.Tensor) -> Any:
        self.before_look()
        return super().__getitem__(key)

    def get(self, key: torch.Tensor, default: Any = None) -> Any:
        self.before_look()
        return super().get(key, default)

    def __iter__(self) -> Iterator[torch.Tensor]:
        self.before_look()
        return super().__iter__()

    def values(self) -> Any:
        self.before_look()
        return super().values()

    def items(self) -> Any:
        self.before_look()
        return super().items()

    def pop(self, *args: Any) -> Any:
        self.before_look()
        return super().pop(*args)

    def quiet(self, key: torch.Tensor) -> Any:
        """Returns the present entry without running updates; None if there is none."""
        return super().get(key)

    def __copy__(self) -> Any:
        return self.plain()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.plain(), memo)

    def __reduce__(self) -> Any:
        return self.plain().__reduce__()

    def plain(self) -> defaultdict[torch.Tensor, Any]:
        """Returns an ordinary dictionary with the same content."""
        self.before_look()
        plain: defaultdict[torch.Tensor, Any] = defaultdict(dict)
        plain.update(super().items())
        return plain
