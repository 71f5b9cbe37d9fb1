"""How a step is hooked: the only file that knows.

A dispatch mode sees the ops, saved-tensor hooks see what autograd keeps (pack) and asks back (unpack). Both only pass
on to a listener: the recorder, or the execution of a plan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from outcore.running.switches import Switches, switches

_TORCH = Path(torch.__file__).parent
_FUNCTIONS, _FUNCTORCH = str(_TORCH / "autograd" / "function.py"), str(_TORCH / "_functorch")
_BETWEEN = (str(Path(__file__).parents[1]), str(_TORCH / "_dynamo"), str(_TORCH / "_compile.py"))


class Listener(Protocol):
    wants_ops: bool  # False: it has seen all it needs of this step's
    switches: Switches  # that the step began with

    def op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any: ...
    def pack(self, tensor: torch.Tensor) -> Any: ...
    def unpack(self, handle: Any) -> torch.Tensor: ...


class OpMode(TorchDispatchMode):
    """Passes every op to the listener."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.listener: Listener | None = None

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        # Without this, compiled functions called under a mode silently run eager, and the skip is remembered.
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.listener is None:
            return func(*args, **(kwargs or {}))
        return self.listener.op(func, args, kwargs or {})


def _dispatch(self: OpMode, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
    if self.listener is None or _compiler_is_near():
        return _careful(self, func, types, args, kwargs)
    return self.listener.op(func, args, kwargs or {})


# PyTorch wraps a mode's method so that torch.compile does not compile it too, and the wrapping costs an op two
# microseconds or more. Where no compiled function is running there is nothing to keep away.
_careful: Any = OpMode.__torch_dispatch__
_frames: Any = torch._C._dynamo.eval_frame
_compiler_is_near: Any = getattr(_frames, "get_eval_frame_callback", None)
if _compiler_is_near is not None and hasattr(_frames, "set_code_exec_strategy"):
    _skip, _default = _frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT
    _frames.set_code_exec_strategy(_dispatch.__code__, _frames._FrameExecStrategy(_skip, _default))
    setattr(OpMode, "__torch_dispatch__", _dispatch)  # noqa: B010


class Interception:
    """Hooks set around a step. `on_first` is called when something is saved and nobody listens; it must `listen`."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._listener: Listener | None = None
        self._hooks: Any = None
        self._mode: Any = None
        self._early = False  # the mode is entered with the step, not with the first forward
        self._depth = 0
        self._switches = switches()

    def start(self) -> None:
        """Sets the saved-tensor hooks."""
        self._switches = switches()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)
        self._hooks.__enter__()
        self._depth = torch._C._len_torch_dispatch_stack()
        if self._early:
            self._push()

    def can_see_ops(self) -> bool:
        """False where the user entered a dispatch mode of their own since: ours would be taken off in its place. From
        the next step on ours comes first."""
        if self._mode is None and torch._C._len_torch_dispatch_stack() != self._depth:
            self._early = True
            return False
        return True

    @property
    def is_alone(self) -> bool:
        """No dispatch mode but ours is entered, neither around the step nor, as far as was seen, in it."""
        return self._depth == 0 and not self._early

    def listen(self, listener: Listener, *, ops: bool) -> None:
        """From here on `listener` gets the packs and unpacks and, with `ops`, the ops."""
        self._listener = listener
        listener.switches = self._switches
        if ops:
            if self._mode is None:
                self._push()
            self._mode.listener = listener

    def _push(self) -> None:
        self._mode = OpMode()
        self._mode.__enter__()

    def stop(self) -> None:
        """Takes every hook away again, also in the middle of an exception."""
        mode, self._mode = self._mode, None
        if mode is not None:
            mode.__exit__(None, None, None)
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__()
        self._listener = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if self._listener is None:
            self._on_first()
        listener: Any = self._listener
        handle = listener.pack(tensor)
        if not listener.wants_ops and self._mode is not None:
            self._pop()
        return handle

    def _pop(self) -> None:
        """Python looks at no further op: each costs tens of microseconds, and a backward has thousands. The engine's
        threads take over the modes of the thread that calls `backward()`, so this must happen before, in the forward:
        what is taken off in a backward that saves something itself is back when its node ends, and nobody's any more.
        A mode that the user entered since stays where it is, and then so does ours. Inside a vmap it stays, too: that
        puts the thread back to how it was when it began, with a mode."""
        if torch._C._len_torch_dispatch_stack() == self._depth + 1 and not in_backward() and not _in_functorch():
            self._mode.__exit__(None, None, None)
            self._mode = None


def _unpack(handle: Any) -> torch.Tensor:
    unpacked: torch.Tensor = handle.run.unpack(handle)
    return unpacked


def called_by_engine() -> bool:
    """Is the op that came to our mode autograd's own, with no Python of anybody's between the two? On a GPU the engine
    has threads of its own, and there is none at all; else there is the function that called it."""
    frame = _caller()
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def called_by_function() -> bool:
    """Is what is being saved saved by a custom autograd function, not by an op? Then that is the nearest Python."""
    frame = _caller()
    return frame is not None and frame.f_code.co_filename == _FUNCTIONS and frame.f_code.co_name == "apply"


def _caller() -> FrameType | None:
    """The nearest Python that is neither ours nor the compiler's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def _in_functorch() -> bool:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not frame.f_code.co_filename.startswith(_FUNCTORCH):
        frame = frame.f_back
    return frame is not None


def in_backward() -> bool:
    """Is autograd's engine running in this thread?"""
    return bool(torch._C._current_graph_task_id() != -1)
