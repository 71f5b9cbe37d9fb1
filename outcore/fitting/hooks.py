"""Model -> ForwardHook: the one hook that a model under a limit has.

The hook does not refer to a limit. It checks which step is running and whether that is a step of its model. So it keeps
nothing alive, and a model has one such hook however often it was limited. A copy of the model, in memory or in a file,
has a function that does nothing in place of the hook, so it can be read without outcore.
"""

from __future__ import annotations

import contextlib
import weakref
from typing import Any, Protocol

import torch
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from outcore.eager.intercept import keep_from_compiler, leave_as_it_is
from outcore.errors import warn
from outcore.memory.tensors import gradient_of


class Step(Protocol):
    """A step that is running."""

    model: torch.nn.Module
    owner: Any

    def on_forward(self, args: Any, kwargs: Any) -> None: ...


ACTIVE: list[Step] = []  # the running step, if there is one; two would mark the same storages


class ForwardHook:
    """Notifies the running step of its model's forward, and warns of training outside any step."""

    def __init__(self, num_forgotten: int) -> None:
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()  # the model's limits that are not closed
        self._handle: RemovableHandle | None = None
        self._num_forgotten = num_forgotten
        self._outside = _Outside()

    def __call__(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_dynamo_compiling():
            _tell(self, model, args, kwargs)

    def tell(self, model: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if ACTIVE:
            self._outside.reset()
            if ACTIVE[-1].model is model:
                ACTIVE[-1].on_forward(args, kwargs)
        elif model.training and torch.is_grad_enabled() and any(owner.warns_outside for owner in self.owners):
            self._outside.note(model, self._num_forgotten)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    def add(self, owner: Any, model: torch.nn.Module, *, first: bool = False) -> None:
        """Registers the hook. `first` puts it before the hooks that fetch weights, because a step may move weights when
        it begins."""
        self.owners.add(owner)
        if self._handle is None:
            self._handle = model.register_forward_pre_hook(self, with_kwargs=True)
        if first:
            hooks: Any = model._forward_pre_hooks
            hooks.move_to_end(self._handle.id, last=False)

    def remove_if_unused(self) -> None:
        # as a list, because it excludes an owner that is being destroyed
        if not list(self.owners) and self._handle is not None:
            self._handle.remove()
            self._handle = None


_tell = keep_from_compiler(ForwardHook.tell)
leave_as_it_is(ForwardHook.__call__)


def hook_of(model: torch.nn.Module, num_forgotten: int) -> ForwardHook:
    """Returns the hook of a model, a new one if it has none."""
    known = next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, ForwardHook)), None)
    return known if known is not None else ForwardHook(num_forgotten)


class _Outside:
    """Counts consecutive training steps outside `ooc.step()`: forwards in training mode after which weights have
    changed or gradients exist."""

    def __init__(self) -> None:
        self._num = 0
        self._is_told = False
        self._version = -1
        self._parameter: weakref.ref[torch.Tensor] | None = None

    def reset(self) -> None:
        self._num, self._version = 0, -1

    def note(self, model: torch.nn.Module, most: int) -> None:
        if self._is_told:
            return
        parameter = self._parameter() if self._parameter is not None else None
        if parameter is None:
            trained = (known for known in model.parameters() if known.requires_grad and not is_lazy(known))
            parameter = next(trained, None)
            if parameter is None:
                return
            self._parameter = weakref.ref(parameter)
        version, self._version = self._version, parameter._version
        if version >= 0 and (parameter._version != version or gradient_of(parameter) is not None):
            self._num += 1
        if self._num >= most:
            self._is_told = True
            warn(
                f"a model under a memory limit trained {self._num} times outside `with ooc.step():`, where nothing is "
                "limited; put forward and backward of every training step inside it, or close the limit"
            )
