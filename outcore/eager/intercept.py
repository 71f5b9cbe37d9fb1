"""Hooks a step; the only file that knows how.

Kernels registered on two dispatch keys that PyTorch does not use observe the ops of the thread, and saved-tensor hooks
observe what autograd saves (pack) and needs again (unpack). They forward to a listener: the recorder, or the execution
of a plan. One of the two keys is enabled at a time. With the first, every op is observed, as long as the listener needs
it; with the second only ops that write into existing tensors, and all others run at full speed.

This is not a `TorchDispatchMode`, for two reasons. Some of autograd's formulas compute differently while a mode is
active (`prod`, `max()` and others), so an observed step would round differently. And the stack of modes belongs to the
user: a mode that is pushed here may be popped in place of another one.

A key is enabled for a thread. Autograd copies that state into its own threads and restores it when a node ends, so an
op may still arrive here after the key was disabled; it is then executed unchanged.
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
BETWEEN = (*_BETWEEN, _FUNCTIONS)  # files whose frames do not tell who saves a tensor


class Listener(doors.Doorkeeper, Protocol):
    switches: Switches  # the switches at the beginning of the step

    def op(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Runs an op, while every op is observed."""

    def write(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Called before an op writes into its arguments, while only such ops are observed."""

    def pack(self, tensor: torch.Tensor) -> Any: ...
    def unpack(self, handle: Any) -> torch.Tensor: ...


_OPS: Any = torch._C._dispatch_key_parse(OPS_KEY)
_WRITES: Any = torch._C._dispatch_key_parse(WRITES_KEY)
_BELOW_WRITES = torch._C._dispatch_keyset_full_after(_WRITES)
_listener: Listener | None = None  # of the running step
_GUARDS: list[Any] = []  # guards for reuse, because creating one takes a tenth of the time of an op


_DTYPE_OF = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
_NUMBERS = tuple(_DTYPE_OF)
_stays_on = False  # whether all ops are observed until the step ends


def watch(*, ops: bool, writes: bool) -> None:
    """Selects the observed ops in this thread, and in those that autograd starts in `backward()`.

    A listener that has seen all ops it needs continues with those that write: each observed op costs microseconds, and
    a backward has thousands. In a step with compiled functions all ops are observed, because functions are compiled for
    tensors either with these keys or without.
    """
    torch._C._dispatch_tls_set_dispatch_key_included(_OPS, ops or _stays_on)
    torch._C._dispatch_tls_set_dispatch_key_included(_WRITES, writes and not _stays_on)


def _kernel_of(name: str) -> Callable[..., Any]:
    """Returns the kernel of one operator, which is looked up by name in its first call, because looking up thousands
    takes a third of a second."""
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
    """Returns the kernel on the second key, for an operator that writes. Ops inside it are not observed again, except
    for tensors that are not plain, which write into the plain tensors that they consist of."""
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
        # PyTorch's own call, from `2 ** x`: a number in place of a tensor, which calls from Python may not have.
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
    """Returns the arguments with tensors in place of numbers, which PyTorch passes although the schema has a tensor,
    but does not accept. Beside tensors with dimensions, they take part in type promotion as numbers would."""
    places = signature_of(func).tensors
    return [
        torch.scalar_tensor(item, dtype=_DTYPE_OF[type(item)]) if at in places and type(item) in _NUMBERS else item
        for at, item in enumerate(args)
    ]


def _are_plain(args: Sequence[Any]) -> bool:
    """Whether the arguments have memory of their own. Checks the first, which most operators write into."""
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
    """Whether a compiler traces this op, on tensors without content, or uses it itself; it is then not part of the
    step."""
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

# A partly compiled function runs its other parts while the compiler is active, which must not compile this code.
# Preventing that costs an op two microseconds or more, and is not necessary while no compiler is active.
_frames: Any = torch._C._dynamo.eval_frame
_compiler_is_near: Any = getattr(_frames, "get_eval_frame_callback", None)
if hasattr(_frames, "set_code_exec_strategy"):
    _strategy = _frames._FrameExecStrategy(_frames._FrameAction.SKIP, _frames._FrameAction.DEFAULT)
else:
    _strategy = _compiler_is_near = None
compiler_near: Callable[[], Any] | None = _compiler_is_near  # returns the compiler of the running code, if any


_was_near = False


def leave_as_it_is(function: Any) -> None:
    """Excludes a function from compilation, but not the functions that it calls."""
    if _strategy is not None:
        _frames.set_code_exec_strategy(function.__code__, _strategy)


def keep_from_compiler(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a function that the compiler does not compile, including the functions that it calls."""
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
    """Whether the running code was called while the compiler was active, and is excluded from compilation."""
    return _was_near


for function in (_kernel_of(""), _writer_of(""), _find):
    leave_as_it_is(function)
_pass_on_carefully: Any = _disable_dynamo(_pass_on)
_write_carefully: Any = _disable_dynamo(_write)

# Views of a whole tensor. PyTorch changes the class of the tensors that these return (`nn.Parameter(...)`), which
# fails if they have passed through Python.
_FRESH = ("aten::alias", "aten::detach")
_libraries: dict[str, Any] = {}  # by namespace; they hold the kernels
_known: set[str] = set(_FRESH)  # operators that have a kernel


def _make_ready() -> None:
    """Registers kernels for every operator. A single fallback kernel would be simpler, but PyTorch does not use it
    while a dispatch mode is active.

    Higher-order operators (`torch.cond`, attention with a score function) choose their kernels in Python and have none
    for these keys; the ops that they call are observed individually.
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
            register = _libraries[
                space
            ].m.impl  # faster than `Library.impl`, whose checks take a third of a second in all
            register(rest, OPS_KEY, _kernel_of(name), False)
            if may_write(torch._C._get_schema(*name.partition(".")[::2])):
                register(rest, WRITES_KEY, _writer_of(name), True)


# -- the C++ library, if there is one, gets ops first and passes others on to the kernels in Python ------------------

_HANDED_ON_KEY = "TESTING_ONLY_GenericMode"  # another unused key, which is never enabled
_handed_over: set[str] = set()  # operators that the C++ library gets first


def hand_over(library: Any, names: Iterable[str]) -> None:
    """Lets the library get calls of these operators first."""
    for name in names:
        if name in _known and name not in _FRESH and name not in _handed_over:
            _handed_over.add(name)
            space, _, rest = name.partition("::")
            _libraries[space].m.impl(rest, _HANDED_ON_KEY, _kernel_of(name), False)
            library.take_over(name)


def sees_all_ops() -> bool:
    """Whether every op of this step is observed in Python, because there may be compiled functions."""
    return _stays_on


class Interception:
    """The hooks of a step. Their state is not stored in flags: `stop` checks what is set and removes it, so that it
    also undoes an interrupted `start`, and may be called twice."""

    def __init__(self) -> None:
        self._on_first: Callable[[], None] | None = None
        self._listener: Listener | None = None
        self._switches = switches()
        self.hook: Callable[[torch.Tensor], Any] = self._pack  # the function that autograd calls with tensors to save
        _make_ready()

    def start(self, on_first: Callable[[], None], *, compiles: bool = False) -> None:
        """Sets the saved-tensor hooks. `on_first` is called when the first tensor is saved before anybody listens; it
        must call `listen`. `compiles`: there may be compiled functions, and `on_first` may be called inside one, which
        restores the thread's state afterwards."""
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
        """Lets `listener` receive packs, unpacks and ops: all of them, or those that write."""
        global _listener
        listener.switches = self._switches
        _listener = self._listener = listener
        watch(ops=ops, writes=not ops)
        doors.watch(listener)

    def stop(self) -> None:
        """Removes every hook, also after an exception."""
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
            return tensor  # the tensor that it represents was packed before
        if self._listener is None and self._on_first is not None:
            self._on_first()
        listener: Any = self._listener
        return listener.pack(tensor)


def _take_hooks_off(pack: Callable[[torch.Tensor], Any]) -> bool:
    """Pops the saved-tensor hooks that begin with `pack`, also from below others; returns whether they were set."""
    above, is_found = _pop_hooks_above(pack)
    _push_hooks(above)
    return is_found


def _put_hooks_back(pack: Callable[[torch.Tensor], Any]) -> None:
    """Pushes the hooks again, below all others."""
    above, _ = _pop_hooks_above(None)
    _push_hooks([*above, (pack, _unpack)])


def _pop_hooks_above(pack: Callable[[torch.Tensor], Any] | None) -> tuple[list[Any], bool]:
    """Pops saved-tensor hooks up to and including those that begin with `pack`."""
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


# -- transforms of torch.func do not support saved-tensor hooks, which are removed while one runs ----------

_autograd: Any = torch._C._autograd
_own_disable, _own_enable = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable
_pack_in_transforms: Callable[[torch.Tensor], Any] | None = None  # of the running step
_taken_off = threading.local()  # `pack` of the hooks that were removed for a transform in this thread


def in_transform() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None


def _let_transforms_run(pack: Callable[[torch.Tensor], Any] | None) -> None:
    """Lets transforms run in a step whose hooks begin with `pack`."""
    global _pack_in_transforms
    _pack_in_transforms = pack
    _autograd._saved_tensors_hooks_disable = _own_disable if pack is None else _disable_hooks
    _autograd._saved_tensors_hooks_enable = _own_enable if pack is None else _enable_hooks


def _disable_hooks(message: str, fail_if_non_empty: bool = True) -> None:
    pack = _pack_in_transforms
    is_taken_off = fail_if_non_empty and pack is not None and _take_hooks_off(pack)
    try:
        _own_disable(message, fail_if_non_empty)
    except RuntimeError:  # the user has set hooks
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
    """Whether autograd's engine called the op directly, without Python code in between. On a GPU the engine's threads
    have no Python frame at all; otherwise the nearest frame is the function that started it."""
    frame = _caller()
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


def called_by_function() -> bool:
    """Whether a custom autograd function saves the tensor, and not an op; then its frame is the nearest."""
    frame = _caller()
    return frame is not None and frame.f_code.co_filename == _FUNCTIONS and frame.f_code.co_name == "apply"


def _caller() -> FrameType | None:
    """Returns the nearest Python frame that is neither outcore's nor the compiler's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def in_backward() -> bool:
    """Whether autograd's engine is running in this thread."""
    return bool(torch._C._current_graph_task_id() != -1)


def asked_by_function() -> bool:
    """Whether the engine runs the node of a custom function."""
    return isinstance(torch._C._current_autograd_node(), torch.autograd.function.BackwardCFunction)
