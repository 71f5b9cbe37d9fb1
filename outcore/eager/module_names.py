"""The name of the running module, for `explain`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from outcore.eager.intercept import compiler_was_near, leave_as_it_is


class ModuleNames:
    """Tracks which module is running, for `explain`. Inactive if the model or parts of it are compiled: hooks would
    break their graphs, and compiled functions depend on the number of hooks."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.current = ""
        self._stack: list[str] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        hooks: list[Any] = []
        # An interrupt may end a step before `close` is possible, so the hooks are also removed with this object.
        self._detach = weakref.finalize(self, _remove, hooks)
        self._detach.atexit = False
        if compiler_was_near() or any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
            return
        register = torch.nn.modules.module
        hooks.append(register.register_module_forward_pre_hook(_weakly(self, ModuleNames._enter)))
        hooks.append(register.register_module_forward_hook(_weakly(self, ModuleNames._leave), always_call=True))

    def _enter(self, module: torch.nn.Module, *_: Any) -> None:
        self._stack.append(self.current)
        self.current = self._names.get(id(module), self.current)

    def _leave(self, *_: Any) -> None:
        if self._stack:
            self.current = self._stack.pop()

    def close(self) -> None:
        self._detach()


def _weakly(names: ModuleNames, act: Callable[..., None]) -> Callable[..., None]:
    """Returns a hook that calls a method of an object without holding it."""
    mark = weakref.ref(names)

    def hook(*args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # in a branch of `torch.cond`, which must have no side effects
            return
        found = mark()
        if found is not None:
            act(found, *args)

    return hook


for function in (_weakly(ModuleNames.__new__(ModuleNames), ModuleNames._enter), ModuleNames._enter, ModuleNames._leave):
    leave_as_it_is(function)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
