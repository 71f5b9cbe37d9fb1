"""A running step -> the name of the module that is at work, for `explain`."""

from __future__ import annotations

from typing import Any

import torch


class ModuleNames:
    """Which module is running, for `explain`. Quiet where parts are compiled: hooks would break their graphs."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.current = ""
        self._stack: list[str] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._hooks: list[Any] = []
        if any(type(module).__name__ == "OptimizedModule" for module in model.modules()):
            return
        register = torch.nn.modules.module
        self._hooks = [
            register.register_module_forward_pre_hook(self._enter),
            register.register_module_forward_hook(self._leave, always_call=True),
        ]

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        if torch.compiler.is_dynamo_compiling():  # as in a branch of `torch.cond`, which may change nothing outside
            return
        self._stack.append(self.current)
        self.current = self._names.get(id(module), self.current)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._stack and not torch.compiler.is_dynamo_compiling():
            self.current = self._stack.pop()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
