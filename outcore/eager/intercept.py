"""How a step is hooked: the only file that knows.

Kernels of ours on two dispatch keys that PyTorch leaves unused see the ops of the thread, and saved-tensor hooks see
what autograd keeps (pack) and asks back (unpack). They only pass on to a listener: the recorder, or the execution of a
plan. Of the two keys one is on at a time: on the first every op is seen, as long as the listener needs that; on the
second only ops that write into what is there, and no other op takes a nanosecond longer.

This is no `TorchDispatchMode`, for two reasons. Autograd asks in some of its formulas whether a mode is active and then
computes otherwise (`prod`, `max()` and others), so that a step that is looked at would round differently. And the stack
of modes is the user's: what we push there may be taken off in the place of another.

A key is switched on for a thread. Autograd takes that over into its own threads and puts it back when a node ends, so
an op may still come here after the key was switched off; it is then passed on as it is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Protocol, TypeVar

import torch
from torch._compile import _disable_dynamo

from outcore.eager import doors, native
from outcore.eager.signatures import may_write, signature_of
from outcore.eager.switches import Switches, switches
from outcore.memory.tensors import OPS_KEY, PLAIN, TOKEN_DTYPE, WATCHED, WRITES_KEY, token_of

T = TypeVar("T")

_TORCH = Path(torch.__file__).parent
_FUNCTIONS = str(_TORCH / "autograd" / "function.py")
_BETWEEN = (str(Path(__file__).parents[1]), str(_TORCH / "_dynamo"), str(_TORCH / "_compile.py"))
BETWEEN = (*_BETWEEN, _FUNCTIONS)  # files from which it takes a closer look to tell who saves a tensor


class Listener(doors.Doorkeeper, Protocol):
    switches: Switches  # that the step began with

    def op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an op, while every op is watched."""

    def write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An op is about to write into its arguments, while only such ops are watched."""

    def pack(self, tensor: torch.Tensor) -> Any: ...
    def unpack(self, handle: Any) -> torch.Tensor: ...


_OPS: Any = torch._C._dispatch_key_parse(OPS_KEY)
_WRITES: Any = torch._C._dispatch_key_parse(WRITES_KEY)
_BELOW_WRITES = torch._C._dispatch_keyset_full_after(_WRITES)
_listener: Listener | None = None  # of the step that is running
_GUARDS: list[Any] = []  # not in use: to make one takes a tenth of what an op takes


_DTYPE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_NUMBERS = tuple(_DTYPE_OF)
_stays_on = False  # until the step ends


def watch(*, ops: bool, writes: bool) -> None:
    """In this thread, and in those of autograd's that take over its state when `backward()` is called. A listener that
    has seen all ops it needs goes on with those that write: each costs microseconds, and a backward has thousands. In a
    step with compiled functions it sees all, because they are compiled for tensors with our keys or without."""
    torch._C._dispatch_tls_set_dispatch_key_included(_OPS, ops or _stays_on)
    torch._C._dispatch_tls_set_dispatch_key_included(_WRITES, writes and not _stays_on)


def _kernel_of(name: str) -> Callable[..., Any]:
    """Our kernel of one operator, which is found by its name when it is first called: to look up thousands takes a
    third of a second."""
    func: Any = None

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal func
        if func is None:
            func = _find(name)
        if _compiler_is_near is None or _compiler_is_near():
            return _pass_on_carefully(func, args, kwargs)
        guard = _GUARDS.pop() if _GUARDS else torch._C._ExcludeDispatchKeyGuard(WATCHED)
        with guard:
            if _listener is None or _is_traced(args, kwargs):
                result = func._op(*args, **kwargs)
            else:
                result = _listener.op(func, args, kwargs)
        _GUARDS.append(guard)
        return result

    return kernel


def _writer_of(name: str) -> Callable[..., Any]:
    """The same on the other key, for an operator that writes. What it does inside itself is not looked at again, but
    for what is no plain tensor: that writes into the plain ones that it is made of."""
    func: Any = None

    def writer(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        nonlocal func
        if func is None:
            func = _find(name)
        if _compiler_is_near is None or _compiler_is_near():
            return _write_carefully(func, keys, args, kwargs)
        return _write(func, keys, args, kwargs)

    return writer


def _write(func: Any, keys: torch._C.DispatchKeySet, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if args and type(args[0]) in _NUMBERS and "out" in kwargs and 0 in signature_of(func).tensors:
        # PyTorch's own call, from `2 ** x`: a number in a tensor's place, which no call from Python may have there.
        args = (torch.scalar_tensor(args[0], dtype=kwargs["out"].dtype), *args[1:])
    if not _are_plain(args):
        return func.redispatch(keys & _BELOW_WRITES, *_with_tensors(func, args), **kwargs)
    guard = _GUARDS.pop() if _GUARDS else torch._C._ExcludeDispatchKeyGuard(WATCHED)
    with guard:
        if _listener is not None and not _is_traced(args, kwargs):
            _listener.write(func, args, kwargs)
        result = func._op(*args, **kwargs)
    _GUARDS.append(guard)
    return result


def _with_tensors(func: Any, args: Sequence[Any]) -> list[Any]:
    """The arguments with tensors in the place of numbers, which PyTorch hands over where the schema wants a tensor and
    does not take back. A number with dimensions beside it takes part in an op as it would have."""
    places = signature_of(func).tensors
    return [
        torch.scalar_tensor(item, dtype=_DTYPE_OF[type(item)]) if at in places and type(item) in _NUMBERS else item
        for at, item in enumerate(args)
    ]


def _are_plain(args: Sequence[Any]) -> bool:
    """Have they memory of their own? Asked of the first, which is written into in most operators."""
    first = args[0] if args else None
    if type(first) is list and first:
        first = first[0]
    if not isinstance(first, torch.Tensor):
        return True
    return type(first) in PLAIN and not _is_wrapped(first)


_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def _pass_on(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    with torch._C._ExcludeDispatchKeyGuard(WATCHED):
        if _listener is None or _is_traced(args, kwargs):
            return func(*args, **kwargs)
        return _listener.op(func, args, kwargs)


def _find(name: str) -> Any:
    space, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, space), packet), overload or "default")


def _is_traced(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Does a compiler look at what this op would do? Then it runs on tensors without content, and is none of the
    step's. Neither is what a compiler does for itself."""
    if _compilation() is not None:
        return True
    if _num_modes() and torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
        return True
    if not args:
        return kwargs.get("device") == _META
    first = args[0]
    if type(first) is torch.Tensor:
        return first.is_meta
    if type(first) is list and first:
        first = first[0]
    if isinstance(first, torch.Tensor):
        return first.is_meta or type(first).__name__ == "FakeTensor"
    return bool(kwargs) and kwargs.get("device") == _META


_META = torch.device("meta")
_num_modes = torch._C._len_torch_dispatch_stack
_compilation = torch._guards.CompileContext.try_get

# A function that is compiled in part runs the rest as it is, with the compiler near: it must not compile us. Keeping it
# away costs an op two microseconds or more, and where it is not near there is nothing to keep away.
_frames: Any = torch._C._dynamo.eval_frame
_compiler_is_near: Any = getattr(_frames, "get_eval_frame_callback", None)
if hasattr(_frames, "set_code_exec_strategy"):
    _strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
else:
    _strategy = _compiler_is_near = None
compiler_near: Callable[[], Any] | None = _compiler_is_near  # tells what compiles the Python that runs now, if anything


_was_near = False


def leave_as_it_is(function: Any) -> None:
    """Where the compiler is near, it does not compile this function, but may compile what the function calls."""
    if _strategy is not None:
        _frames.set_code_exec_strategy(function.__code__, _strategy)


def keep_from_compiler(function: Callable[..., T]) -> Callable[..., T]:
    """The same function; the compiler compiles neither it nor what it calls."""
    careful: Callable[..., T] = _disable_dynamo(function)

    def kept(*args: Any) -> T:
        global _was_near
        if _compiler_is_near is not None and not _compiler_is_near():
            return function(*args)
        before, _was_near = _was_near, _compiler_is_near is not None
        try:
            return careful(*args)
        finally:
            _was_near = before

    leave_as_it_is(kept)
    return kept


def compiler_was_near() -> bool:
    """Whether what runs now was called where the compiler is near, and is kept from it."""
    return _was_near


for function in (_kernel_of(""), _writer_of(""), _find):
    leave_as_it_is(function)
_pass_on_carefully: Any = _disable_dynamo(_pass_on)
_write_carefully: Any = _disable_dynamo(_write)

# Views of all of a tensor. PyTorch makes a tensor of another class from what these return, and that must have come
# through no Python: `nn.Parameter(...)`.
_FRESH = ("aten::alias", "aten::detach")
_libraries: dict[str, Any] = {}  # by namespace: they hold our kernels
_known: set[str] = set(_FRESH)  # operators that have one


def _make_ready() -> None:
    """Registers our kernels for every operator there is. One for all of them (a fallback) would do, but for this:
    PyTorch does not find it while a dispatch mode is active.

    Operators that call functions (`torch.cond`, attention with a score function) choose their kernels in Python and
    have none for our keys: what they call is seen by itself.
    """
    if not _libraries:
        everything = _libraries["_"] = torch.library.Library("_", "IMPL")
        everything.fallback(lambda func, *args, **kwargs: _pass_on_carefully(func, args, kwargs), OPS_KEY)
        everything.fallback(torch.library.fallthrough_kernel, WRITES_KEY)
        _libraries["aten"] = torch.library.Library("aten", "IMPL")
        for name in _FRESH:
            _libraries["aten"].impl(name.removeprefix("aten::"), torch.library.fallthrough_kernel, OPS_KEY)
        torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.extend((_OPS, _WRITES))
        for operator in torch._ops._higher_order_ops.values():
            operator.fallthrough(_OPS)
            operator.fallthrough(_WRITES)
    for name in torch._C._dispatch_get_all_op_names():
        if name not in _known:
            _known.add(name)
            space, _, rest = name.partition("::")
            if space not in _libraries:
                _libraries[space] = torch.library.Library(space, "IMPL")
            register = _libraries[space].m.impl  # `Library.impl` checks much, and takes a third of a second for all
            register(rest, OPS_KEY, _kernel_of(name), False)
            if may_write(torch._C._get_schema(*name.partition(".")[::2])):
                register(rest, WRITES_KEY, _writer_of(name), True)


# -- the library in C++ sees ops first, where it is there, and hands on to our kernels what it leaves ------------------

_HANDED_ON_KEY = "TESTING_ONLY_GenericMode"  # another key that PyTorch leaves unused; nothing ever switches it on
_handed_over: set[str] = set()  # operators


def hand_over(library: Any, names: Iterable[str]) -> None:
    """From now on calls of these operators come to the library first."""
    for name in names:
        if name in _known and name not in _FRESH and name not in _handed_over:
            _handed_over.add(name)
            space, _, rest = name.partition("::")
            _libraries[space].m.impl(rest, _HANDED_ON_KEY, _kernel_of(name), False)
            library.take_over(name)


def sees_all_ops() -> bool:
    """Whether every op of this step comes to Python, because there may be compiled functions."""
    return _stays_on


class Interception:
    """Hooks set around a step. Of what was set, nothing is remembered in flags: `stop` looks what is on, and takes off
    what is ours. So it undoes a `start` that an interrupt ended halfway, too, and may be called twice."""

    def __init__(self) -> None:
        self._on_first: Callable[[], None] | None = None
        self._listener: Listener | None = None
        self._switches = switches()
        self.hook: Callable[[torch.Tensor], Any] = self._pack  # that autograd calls with what it saves
        _make_ready()

    def start(self, on_first: Callable[[], None], *, compiles: bool = False) -> None:
        """Sets the saved-tensor hooks. `on_first` is called when something is saved and nobody listens; it must
        `listen`. `compiles`: there may be compiled functions, and that may happen inside one, which puts the thread
        back to how it was."""
        global _stays_on
        self._on_first = on_first
        self._switches = switches()
        library = native.library()
        self.hook = library.packer(self._pack) if library is not None else self._pack
        torch._C._autograd._push_saved_tensors_default_hooks(self.hook, _unpack)
        _let_transforms_run(self.hook)
        _stays_on = compiles
        watch(ops=compiles, writes=False)

    def listen(self, listener: Listener, *, ops: bool) -> None:
        """From here on `listener` gets the packs and unpacks and the ops: all of them, or those that write."""
        global _listener
        listener.switches = self._switches
        _listener = self._listener = listener
        watch(ops=ops, writes=not ops)
        doors.watch(listener)

    def stop(self) -> None:
        """Takes every hook away again, also in the middle of an exception."""
        global _listener, _stays_on
        if self._on_first is None:
            return
        _stays_on = False
        watch(ops=False, writes=False)
        doors.leave()
        _listener = None
        _let_transforms_run(None)
        _take_hooks_off(self.hook)
        self._listener = self._on_first = None

    def _pack(self, tensor: torch.Tensor) -> Any:
        if _compiler_is_near is None or _compiler_is_near():
            return _pack_carefully(self, tensor)
        return self._pack_now(tensor)

    def _pack_now(self, tensor: torch.Tensor) -> Any:
        if tensor.dtype is TOKEN_DTYPE and token_of(tensor) is not None:
            return tensor  # what it stands for was packed before
        if self._listener is None and self._on_first is not None:
            self._on_first()
        listener: Any = self._listener
        return listener.pack(tensor)


def _take_hooks_off(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Pops the saved-tensor hooks that begin with `pack`, also from below others. Whether they were set."""
    above, is_found = _pop_hooks_above(pack)
    _push_hooks(above)
    return is_found


def _put_hooks_back(pack: Callable[[torch.Tensor], Any]) -> None:
    """Pushes them again, below all others."""
    above, _ = _pop_hooks_above(None)
    _push_hooks([*above, (pack, _unpack)])


def _pop_hooks_above(pack: Callable[[torch.Tensor], Any] | None) -> tuple[list[Any], bool]:
    """Pops saved-tensor hooks until those that begin with `pack` are popped, too."""
    above: list[Any] = []
    while (hooks := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        if pack is not None and hooks[0] == pack:
            return above, True
        above.append(hooks)
    return above, False


def _push_hooks(above: list[Any]) -> None:
    for hooks in reversed(above):
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


# -- transforms of torch.func refuse saved-tensor hooks: ours are off while one runs, and what it saves stays ----------

_autograd: Any = torch._C._autograd
_own_disable, _own_enable = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable
_pack_in_transforms: Callable[[torch.Tensor], Any] | None = None  # of the step that is running
_taken_off = threading.local()  # `pack`: of the hooks that a transform in this thread runs without


def in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _let_transforms_run(pack: Callable[[torch.Tensor], Any] | None) -> None:
    """While a step runs, whose hooks begin with `pack`."""
    global _pack_in_transforms
    _pack_in_transforms = pack
    _autograd._saved_tensors_hooks_disable = _own_disable if pack is None else _disable_hooks
    _autograd._saved_tensors_hooks_enable = _own_enable if pack is None else _enable_hooks


def _disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
    pack = _pack_in_transforms
    is_taken_off = fail_if_non_empty and pack is not None and _take_hooks_off(pack)
    try:
        _own_disable(message, fail_if_non_empty)
    except RuntimeError:  # hooks of the user's
        if is_taken_off and pack is not None:
            _put_hooks_back(pack)
        raise
    if is_taken_off:
        _taken_off.pack = pack


def _enable_hooks() -> None:
    _own_enable()
    pack, _taken_off.pack = getattr(_taken_off, "pack", None), None
    if pack is not None and pack == _pack_in_transforms:
        _put_hooks_back(pack)


def _unpack(handle: Any) -> torch.Tensor:
    near = _compiler_is_near is None or _compiler_is_near()
    unpacked: torch.Tensor = _unpack_carefully(handle) if near else _unpack_now(handle)
    return unpacked


def _unpack_now(handle: Any) -> torch.Tensor:
    unpacked: torch.Tensor = handle if isinstance(handle, torch.Tensor) else handle.run.unpack(handle)
    return unpacked


_pack_carefully: Any = _disable_dynamo(Interception._pack_now)
_unpack_carefully: Any = _disable_dynamo(_unpack_now)
leave_as_it_is(Interception._pack)
leave_as_it_is(_unpack)


def called_by_engine() -> bool:
    """Is the op that came to our kernel autograd's own, with no Python of anybody's between the two? On a GPU the
    engine has threads of its own, and there is none at all; else there is the function that called it."""
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


def in_backward() -> bool:
    """Is autograd's engine running in this thread?"""
    return bool(torch._C._current_graph_task_id() != -1)


def asked_by_function() -> bool:
    """Is the node that the engine runs a custom function's?"""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)
