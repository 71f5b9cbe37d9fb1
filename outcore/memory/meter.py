"""Tensors of a step -> bytes in use on the CPU, where no allocator reports them.

A storage is counted when an op first returns a tensor on it, and discounted when it dies. This counts every tensor,
but not what a kernel allocates and frees internally. A storage that no op made (compiled code, NumPy) is also counted
when an op first returns it; the storages that existed before the step must be known to tell the two apart.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook

from outcore.memory.tensors import PLAIN, gradient_of, innermost

_SEEN = "_outcore_metered"
BESIDE = "_outcore_home"  # marks storages whose bytes are not on the device (`outcore.memory.home`)
_RUNNING: list[weakref.ref[LiveBytes]] = []  # the meter of the running step, if it has one


def existing_storages(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yields the storages of the model, of its inputs and of every tensor that the garbage collector knows. Tensors
    that existed before a call of `gc.freeze()` are hidden from it."""
    # Every object refers to its class. `gc.get_objects` would also hold references to tuples that other threads are
    # still filling, and Python raises SystemError in such a thread.
    tensors = gc.get_referrers(*PLAIN)
    gradients = (gradient for known in model.parameters() if (gradient := gradient_of(known)) is not None)
    for tensor in chain(model.parameters(), model.buffers(), gradients, inputs, tensors):
        if type(tensor) in PLAIN and tensor.layout is torch.strided:
            try:
                yield tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):  # a tensor without a storage
                continue


def outside(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> frozenset[int]:
    """Returns the identities of the storages of a model and its inputs, which are never swapped."""
    tensors = map(innermost, chain(model.parameters(), model.buffers(), inputs))
    with torch._C.DisableTorchFunctionSubclass():  # asking for a storage does not read its content
        return frozenset(tensor.untyped_storage()._cdata for tensor in tensors if tensor.layout is torch.strided)


class LiveBytes:
    """Counts the storages made since it was created, for as long as they live."""

    def __init__(self, before_bytes: int, existing: Iterable[torch.UntypedStorage] | None) -> None:
        self.current_bytes = self.peak_bytes = before_bytes
        self.knows_existing = existing is not None
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next = 0
        for storage in existing or ():
            storage.__dict__[_SEEN] = self
        _RUNNING[:] = [weakref.ref(self)]

    def see(self, tensor: torch.Tensor) -> None:
        """Counts the storage of `tensor` once, unless it existed before the step."""
        storage = tensor.untyped_storage()
        marks = storage.__dict__
        if (
            marks.get(_SEEN) is self or BESIDE in marks or storage.device.type != "cpu"
        ):  # compiled formulas are tried on "meta"
            return
        marks[_SEEN] = self
        number, self._next = self._next, self._next + 1
        size = storage.nbytes()
        self.current_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.current_bytes)
        self._refs[number] = weakref.ref(storage, partial(self._died, number, size))

    def _died(self, number: int, size: int, _: object) -> None:
        if self._refs.pop(number, None) is not None:
            self.current_bytes -= size

    def stop(self) -> None:
        self._refs.clear()
        _RUNNING.clear()


def see_brought(tensor: torch.Tensor | None) -> None:
    """Counts a tensor that was brought back to the device in the running step, whichever step saved it."""
    for mark in _RUNNING:
        if tensor is not None and (meter := mark()) is not None:
            meter.see(tensor)


class Optimizers:
    """The optimizers that update a model's parameters.

    PyTorch calls the hook for every optimizer of the process. Comparing its parameters with the model's takes as long
    as many ops, so an optimizer is examined again only after its parameter groups have changed.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Hashable] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_post_hook(partial(_tell, weakref.WeakMethod(self._stepped)))

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._ours)

    @property
    def num_states(self) -> int:
        """The number of parameters that have optimizer state. Most get it in the first step of their optimizer."""
        return sum(len(optimizer.state) for optimizer in self)

    def remove(self) -> None:
        self._hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        summary = tuple((len(params), id(params[0]) if params else 0) for params in groups)
        if self._known.get(optimizer) == summary:
            return
        self._known[optimizer] = summary
        owned = {id(parameter) for parameter in self._model.parameters()}
        if any(id(parameter) in owned for params in groups for parameter in params):
            self._ours.add(optimizer)


def _tell(listener: weakref.WeakMethod[Callable[..., None]], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """Calls the listener if it is still alive: a global hook must not keep its owner alive."""
    if (tell := listener()) is not None:
        tell(optimizer)


def _values(held: Any) -> Iterable[Any]:
    values: Iterable[Any] = dict.values(held) if isinstance(held, dict) else held.values()
    return values


def resident_bytes(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> int:
    """Returns the bytes on the CPU between steps: parameters, gradients, buffers and optimizer state, without those
    whose bytes are in files. Reading them must not trigger updates that `outcore.state` has postponed."""
    tensors: list[torch.Tensor] = []
    for parameter in model.parameters():
        tensors.append(parameter)
        if (gradient := gradient_of(parameter)) is not None:
            tensors.append(gradient)
    tensors.extend(model.buffers())
    for optimizer in optimizers:
        for state in _values(optimizer.state):
            for item in _values(state):  # LBFGS has lists of tensors
                parts = item if isinstance(item, list | tuple) else (item,)
                tensors.extend(part for part in parts if isinstance(part, torch.Tensor))
    with torch._C.DisableTorchFunctionSubclass():
        storages = [
            tensor.untyped_storage()
            for tensor in map(innermost, tensors)
            if tensor.device.type == device.type and tensor.layout is torch.strided and not is_lazy(tensor)
        ]
    return sum({storage._cdata: storage.nbytes() for storage in storages if BESIDE not in storage.__dict__}.values())
