"""Records a step on fake tensors as a trace, without memory, device or run time.

A `FakeTensorMode` runs the step: every op returns the shapes of its results without computing. This mode observes it
and writes the same trace that `outcore.eager.recorder` writes for a real step: ops, storages with the lifetimes of the
program itself, and what autograd saves. Nothing is held for autograd here either: saved tensors are described
(`_Saved`), and a fake tensor is created when autograd needs one, so that the lifetimes are the program's own.

Seconds are estimated from each op's computation and memory traffic and from a machine's rates. The trace does not
contain what only a run can measure: workspaces inside kernels, and ops that a rerun fuses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from outcore.eager.cells import SMALL_BYTES
from outcore.eager.known_contents import content_of, follow_contents, know_content
from outcore.eager.module_names import ModuleNames
from outcore.eager.recorded_ops import EngineSums
from outcore.eager.recorded_saves import RecordedTick
from outcore.eager.settings import EAGER
from outcore.eager.signatures import UNFILLED, outputs_of, reads_of, replay_kind, signature_of, tensors_in
from outcore.values import Op, Storage, Trace, Value

_MARK = "_outcore_fake"
_ITEM = torch.ops.aten._local_scalar_dense.default
_UNSEEN = (
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.lift_fresh.default,
    torch.ops.prim.device.default,
)
_ADD, _RECURRENT = torch.ops.aten.add.Tensor, torch.ops.aten.mkldnn_rnn_layer.default
_CPU_ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_PRODUCTS = ("aten.mm.default", "aten.bmm.default")

_SavedTensorsHooks: Any = torch.autograd.graph.saved_tensors_hooks

# From an op's arguments and result: its seconds, and the seconds of a norm replay.
Seconds = Callable[[Any, Sequence[Any], dict[str, Any], Any], tuple[float, float]]


def fake_on(mode: FakeTensorMode, like: torch.Tensor, device: torch.device) -> FakeTensor:
    """Returns a fake tensor of this shape on `device`, wherever `like` is (also on `meta`)."""
    with _disable_current_modes():
        empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        return FakeTensor(mode, empty, device)


class _Storage:
    """A storage being recorded."""

    __slots__ = ("born", "bytes", "current", "dies", "external", "is_models", "num_bytes", "num_versions", "there")

    def __init__(self, num_bytes: int, grain_bytes: int, born: int, there: Any, *, external: bool) -> None:
        self.num_bytes, self.born, self.external = num_bytes, born, external
        self.bytes = -(-num_bytes // grain_bytes) * grain_bytes  # as the allocator counts it
        self.there: Callable[[], Any] = there  # the storage, or None once it is gone
        self.dies = -1
        self.current = -1  # the value of its newest version
        self.num_versions = 0
        self.is_models = False  # whether it is a parameter's or a buffer's


class _Storages:
    """The storages and values of the step. `slot` is its clock: the running op or tick."""

    def __init__(self, grain_bytes: int) -> None:
        self.slot = -1
        self.values: list[Value] = []
        self.all: list[_Storage] = []
        self._grain_bytes = grain_bytes
        self._watched: list[Any] = []  # weak references, whose callbacks run as long as they are held

    def value_of(self, tensor: torch.Tensor) -> int:
        """Returns the value that a fake tensor is a view of. Tensors that no op made existed before the step."""
        number: int | None = tensor.untyped_storage().__dict__.get(_MARK)
        storage = self.all[number] if number is not None else self.add(tensor, producer=-1, external=True)
        return storage.current

    def of_value(self, value: int) -> _Storage:
        return self.all[self.values[value].storage]

    def add(self, tensor: torch.Tensor, *, producer: int, external: bool) -> _Storage:
        storage, number = tensor.untyped_storage(), len(self.all)
        there = partial(lambda held: held, storage) if external else weakref.ref(storage)
        added = _Storage(storage.nbytes(), self._grain_bytes, max(self.slot, 0), there, external=external)
        self.all.append(added)
        storage.__dict__[_MARK] = number
        if not external:
            self.watch(storage, partial(setattr, added, "dies"))
        self._add_value(number, producer)
        return added

    def add_version(self, tensor: torch.Tensor, producer: int) -> int:
        """Returns the value of the next version of a fake tensor's storage, which is written into."""
        return self._add_value(self.values[self.value_of(tensor)].storage, producer)

    def _add_value(self, number: int, producer: int) -> int:
        storage = self.all[number]
        self.values.append(Value(number, storage.num_versions, producer))
        storage.num_versions += 1
        storage.current = len(self.values) - 1
        return storage.current

    def watch(self, held: Any, note: Callable[[int], None]) -> None:
        """Calls `note` with the slot in which an object dies."""
        self._watched.append(weakref.ref(held, lambda _: note(self.slot)))

    def unmark(self) -> None:
        """Removes the marks, because a user's fake tensors may outlive this recording."""
        for storage in self.all:
            if (there := storage.there()) is not None:
                there.__dict__.pop(_MARK, None)

    def close(self) -> None:
        self._watched.clear()


class _Saved:
    """What autograd holds in place of a tensor. `tensor` is set if it is external or small, and thus held."""

    __slots__ = ("__weakref__", "device", "dtype", "offset", "pack", "shape", "stride", "tensor", "value")

    def __init__(self, tensor: torch.Tensor, value: int, pack: int, *, is_held: bool) -> None:
        self.tensor = tensor if is_held else None
        self.value, self.pack = value, pack
        self.shape, self.stride, self.offset = tensor.shape, tensor.stride(), tensor.storage_offset()
        self.dtype, self.device = tensor.dtype, tensor.device


class FakeRecorder(TorchDispatchMode):
    """Records what runs inside `with recorder:` (inside `with mode:`). `grain_bytes`: the allocator's, 1 on the CPU."""

    def __init__(
        self,
        model: torch.nn.Module,
        mode: FakeTensorMode,
        device: torch.device,
        seconds: Seconds,
        *,
        grain_bytes: int,
        is_cuda: bool,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device
        self._mode, self._seconds, self._is_cuda = mode, seconds, is_cuda
        self._storages = _Storages(grain_bytes)
        self._ops: list[Op] = []
        self._ticks: list[RecordedTick] = []
        self._given: dict[int, torch.UntypedStorage] = {}  # storages for the user's tensors
        self._num_packs = 0
        self._unsaid: set[int] = set()  # values written without declaration: running statistics
        self._calls: dict[Hashable, int] = {}  # operator and values of a call -> the first op with it
        self._sums = EngineSums()
        self._modules = ModuleNames(model)
        self._has_begun = False  # a step begins with its model's forward; tensors made before are inputs
        self._undo = ExitStack()
        self._undo.callback(self._modules.close)
        self._undo.callback(self._storages.unmark)
        self._undo.callback(model.register_forward_pre_hook(self._begin).remove)

    def __enter__(self) -> FakeRecorder:
        hooks: Any = _SavedTensorsHooks(self._pack, self._unpack)
        self._undo.enter_context(hooks)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._undo.close()

    def _begin(self, *_: Any) -> None:
        self._has_begun = True

    # -- storages and values ------------------------------------------------------------------------------------------

    def _value_of(self, tensor: torch.Tensor) -> int:
        return self._storages.value_of(self._faked(tensor))

    def know(self, model: torch.nn.Module) -> None:
        """Records the model's fake parameters and buffers as existing before the step."""
        for tensor in (*model.parameters(), *model.buffers()):
            self._storages.of_value(self._value_of(tensor)).is_models = True

    # -- ops ----------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _ITEM and (asked := self._content(args[0])) is not None:
            with _disable_current_modes():
                return func(asked)
        args, kwargs = tree_map(self._faked, (args, kwargs or {}))
        if func in _UNSEEN or not self._has_begun:
            result = func(*args, **kwargs)
            follow_contents(func, args, kwargs, result)
            return result
        self._storages.slot += 1
        func = self._as_run(func, args)
        reads = tuple(map(self._value_of, _strided(reads_of(func, args, kwargs))))
        forward = torch._C._current_autograd_node() is None
        replay = replay_kind(func, args, kwargs) if torch.is_grad_enabled() or not forward else "no"
        scratch = [args[at] for at in _scratch(func, args) if isinstance(args[at], torch.Tensor)]
        result = _run(func, args, kwargs, is_cuda=self._is_cuda)
        follow_contents(func, args, kwargs, result)
        fresh, overwritten = (_strided(made) for made in outputs_of(func, args, kwargs, result))
        index = len(self._ops)
        self._rewrite(scratch)
        writes = [self._storages.add(t, producer=index, external=False).current for t in fresh]
        writes += [self._storages.add_version(self._faked(tensor), index) for tensor in overwritten]
        seconds, again_s = self._seconds(func, args, kwargs, result) if fresh or overwritten else (0.0, 0.0)
        is_alone = forward and replay == "pure" and len(writes) == len(fresh) == 1
        normalises = bool(forward and scratch and self._is_cuda)
        self._ops.append(
            Op(
                self._storages.slot,
                signature_of(func).name,
                "forward" if forward else "backward",
                seconds,
                reads,
                tuple(writes),
                replay=replay,
                module=self._modules.current,
                norm_replay=normalises,
                norm_replay_s=again_s if normalises else 0.0,
                repeats=self._first_call(index, func, args, kwargs) if is_alone else -1,
                joins=not forward and self._sums.joins(func, args, reads, writes),
            )
        )
        return result

    def _faked(self, leaf: Any) -> Any:
        """Returns a fake tensor for a tensor of the user that the step closes over: the same one every time."""
        if not isinstance(leaf, torch.Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        real = leaf.untyped_storage()
        storage = self._given.get(real._cdata)
        if storage is None:
            storage = self._given[real._cdata] = torch.UntypedStorage(real.nbytes(), device="meta")
        fake = self._view(storage, leaf, self._device if leaf.is_meta else leaf.device)
        know_content(fake, leaf)
        return fake

    def _content(self, asked: torch.Tensor) -> torch.Tensor | None:
        """Returns the content of a tensor, if it is known."""
        return content_of(asked) if isinstance(asked, FakeTensor) else asked

    def _view(self, storage: torch.UntypedStorage, like: torch.Tensor | _Saved, device: torch.device) -> FakeTensor:
        """Returns a fake tensor on a storage."""
        with _disable_current_modes(), torch.no_grad():
            empty = torch.empty(0, dtype=like.dtype, device="meta")
            offset, stride = (
                (like.offset, like.stride) if isinstance(like, _Saved) else (like.storage_offset(), like.stride())
            )
            return FakeTensor(self._mode, empty.set_(storage, offset, like.shape, stride), device)

    def _as_run(self, func: Any, args: Sequence[Any]) -> Any:
        """Returns the in-place addition for the bias of a linear layer, which is out of place only under a mode."""
        if func is not _ADD or not isinstance(args[1], torch.Tensor) or args[1].dim() != 1 or not self._ops:
            return func
        producer = self._storages.values[self._value_of(args[0])].producer
        if producer < len(self._ops) - 2 or producer < 0 or self._ops[producer].name not in _PRODUCTS:
            return func
        weight = self._ops[producer].reads[-1]
        is_layer = self._storages.of_value(weight).external
        return torch.ops.aten.add_.Tensor if is_layer and args[0].dtype is args[1].dtype else func

    def _rewrite(self, tensors: Sequence[torch.Tensor]) -> None:
        """Records that content changes without an op that declares it."""
        for tensor in tensors:
            self._unsaid.add(self._value_of(tensor))
            self._storages.add_version(self._faked(tensor), -1)

    def _first_call(self, index: int, func: Any, args: Any, kwargs: dict[str, Any]) -> int:
        """Returns the first op with the same call on the same values; -1 if there is none."""
        leaves = tree_leaves((args, kwargs))
        try:
            call = (
                signature_of(func).name,
                tuple(
                    (self._value_of(leaf), leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype)
                    if isinstance(leaf, torch.Tensor)
                    else leaf
                    for leaf in leaves
                ),
            )
            first = self._calls.setdefault(call, index)
        except TypeError:  # an argument is not hashable
            return -1
        return first if first != index else -1

    # -- what autograd saves ------------------------------------------------------------------------------------------

    def _pack(self, tensor: torch.Tensor) -> _Saved | torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_nested:
            return tensor
        self._begin()
        self._storages.slot += 1
        value = self._value_of(tensor)
        pack, self._num_packs = self._num_packs, self._num_packs + 1
        storage = self._storages.of_value(value)
        is_held = storage.external or storage.bytes < SMALL_BYTES or self._is_unfilled(value)
        saved = _Saved(tensor, value, pack, is_held=is_held)
        tick = self._add_tick("pack", saved)
        self._storages.watch(saved, tick.end)
        return saved

    def _is_unfilled(self, value: int) -> bool:
        producer = self._storages.values[value].producer
        return producer >= 0 and "::".join(self._ops[producer].name.split(".")[:2]) in UNFILLED

    def _unpack(self, saved: _Saved | torch.Tensor) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        self._storages.slot += 1
        tick = self._add_tick("unpack", saved)
        tick.end(self._storages.slot)
        if saved.tensor is not None:
            return saved.tensor
        number = self._storages.values[saved.value].storage
        storage = self._storages.all[number].there()
        if storage is None:
            storage = torch.UntypedStorage(self._storages.all[number].num_bytes, device="meta")
            storage.__dict__[_MARK] = number
            tick.dies = -1
            self._storages.watch(storage, tick.end)
        return self._view(storage, saved, saved.device)

    def _add_tick(self, kind: Literal["pack", "unpack"], saved: _Saved) -> RecordedTick:
        shape, dtype = tuple(saved.shape), str(saved.dtype).removeprefix("torch.")
        tick = RecordedTick(self._storages.slot, kind, saved.value, saved.pack, -1, shape, dtype)
        self._ticks.append(tick)
        return tick

    # -- the end ------------------------------------------------------------------------------------------------------

    def input_bytes(self) -> int:
        """Returns the bytes of tensors that the step used but did not make, and that are not the model's."""
        return sum(storage.bytes for storage in self._storages.all if storage.external and not storage.is_models)

    def finish(self, before_bytes: int, *, device: str, name: str) -> Trace:
        self._storages.close()
        last = max(self._storages.slot, 0)
        return Trace(
            ops=tuple(
                op if self._unsaid.isdisjoint(op.reads) else replace(op, replay="no", repeats=-1) for op in self._ops
            ),
            values=tuple(self._storages.values),
            storages=tuple(
                Storage(s.bytes, s.born, last if s.dies < 0 else s.dies, s.external) for s in self._storages.all
            ),
            ticks=tuple(tick.finish(last) for tick in self._ticks),
            before_bytes=before_bytes,
            device=device,
            torch=torch.__version__,
            model=name,
        )


def _strided(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(tensors) if tensor.layout is torch.strided]


def recurrent_workspace_bytes(args: Sequence[Any]) -> int:
    """Returns the workspace that oneDNN saves in a recurrent layer for its backward. Its size is measured with two
    short sequences, because only oneDNN knows it, and it grows linearly with the length."""
    inputs, weights = args[0], args[1:5]
    num_steps, num_sequences = inputs.shape[:2]
    shapes = tuple(tuple(weight.shape) for weight in weights)
    options = args[7], tuple(args[8]), *args[9:]
    short, longer = (_asked_workspace_bytes(n, inputs.shape[-1], inputs.dtype, shapes, options) for n in _ASKED_STEPS)
    each_step = (longer - short) / (_ASKED_STEPS[1] - _ASKED_STEPS[0])
    return int((short + each_step * (num_steps - _ASKED_STEPS[0])) * num_sequences / _ASKED_SEQUENCES)


_ASKED_STEPS, _ASKED_SEQUENCES = EAGER.asked_steps, EAGER.asked_sequences


@cache
def _asked_workspace_bytes(
    num_steps: int, num_features: int, dtype: torch.dtype, shapes: tuple[Any, ...], options: tuple[Any, ...]
) -> int:
    with _disable_current_modes(), torch.enable_grad():
        inputs = torch.zeros(num_steps, _ASKED_SEQUENCES, num_features, dtype=dtype)
        weights = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        states = [torch.zeros(_ASKED_SEQUENCES, options[3], dtype=dtype) for _ in range(2)]
        workspace = _RECURRENT(inputs, *weights, *states, options[0], list(options[1]), *options[2:])[3]
        return int(workspace.nbytes)


def _run(func: Any, args: Sequence[Any], kwargs: dict[str, Any], *, is_cuda: bool) -> Any:
    result = func(*args, **kwargs)
    if is_cuda and func is _CPU_ATTENTION and (args[0].dtype is torch.float32 or kwargs.get("attn_mask") is not None):
        rows = torch.empty_like(args[0].transpose(1, 2), memory_format=torch.contiguous_format)
        return rows.transpose(1, 2), *result[
            1:
        ]  # CUDA's memory-efficient kernel, which is used here, writes row by row
    if func is torch.ops.aten.add_.Tensor and result is args[0] and torch._C._current_autograd_node() is None:
        return torch.ops.aten.alias.default(result)  # a different tensor for autograd
    if func is _RECURRENT and args[-1]:
        num_bytes = recurrent_workspace_bytes(args)
        workspace = torch.empty(num_bytes, dtype=torch.uint8, device=args[0].device)
        return (*result[:3], workspace)
    return result


def _scratch(func: Any, args: Sequence[Any]) -> tuple[int, ...]:
    signature = signature_of(func)
    return tuple(at for at in signature.unsaid or signature.scratch(args) if at < len(args))
