"""How many bytes of the device are in use: by the allocator's own count on CUDA, by our own count on the CPU.

On the CPU no allocator can be asked, so storages are counted as ops make them and discounted when they die. That sees
every tensor, and nothing a kernel allocates and frees inside itself. What was made without an op (compiled code, NumPy)
is counted when an op first returns it; to tell that from what was there before the step, that has to be known.
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
BESIDE = "_outcore_home"  # on storages whose bytes lie beside the device (`outcore.memory.home`)
_RUNNING: list[weakref.ref[LiveBytes]] = []  # the one of the step that is running, if it has one


def storages_there(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    """Of the model and its inputs, and of every tensor Python can see: `gc.freeze()` hides those that were there before
    it."""
    # An object refers to its class. `gc.get_objects` would hold the tuples that other threads are filling, too, and
    # Python raises SystemError in such a thread.
    tensors = gc.get_referrers(*PLAIN)
    gradients = (gradient for known in model.parameters() if (gradient := gradient_of(known)) is not None)
    for tensor in chain(model.parameters(), model.buffers(), gradients, inputs, tensors):
        if type(tensor) in PLAIN and tensor.layout is torch.strided:
            try:
                yield tensor.untyped_storage()
            except (RuntimeError, NotImplementedError):  # without one: nothing of ours
                continue


def outside(model: torch.nn.Module, inputs: Iterable[torch.Tensor]) -> frozenset[int]:
    """Which storages a model and its inputs have, by number: nothing is won by swapping those."""
    there = map(innermost, chain(model.parameters(), model.buffers(), inputs))
    with torch._C.DisableTorchFunctionSubclass():  # to ask for these is not to look at their content
        return frozenset(tensor.untyped_storage()._cdata for tensor in there if tensor.layout is torch.strided)


class LiveBytes:
    """Storages made since it began, counted while they live."""

    def __init__(self, before_bytes: int, there: Iterable[torch.UntypedStorage] | None) -> None:
        self.current_bytes = self.peak_bytes = before_bytes
        self.knows_what_was_there = there is not None
        self._refs: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._next = 0
        for storage in there or ():
            storage.__dict__[_SEEN] = self
        _RUNNING[:] = [weakref.ref(self)]

    def see(self, tensor: torch.Tensor) -> None:
        """Counts the storage of `tensor`, which was not there before the step, once."""
        storage = tensor.untyped_storage()
        marks = storage.__dict__
        if marks.get(_SEEN) is self or BESIDE in marks or storage.device.type != "cpu":  # formulas are tried on "meta"
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
    """Tells the meter of the running step, if it has one, of what was brought back, whichever step saved it."""
    for mark in _RUNNING:
        if tensor is not None and (meter := mark()) is not None:
            meter.see(tensor)


class Optimizers:
    """Those that step a model's parameters: a process tells of every one that steps, ours or not. To walk through a
    model takes as long as many ops, so one whose parameters are as they were is not looked at again."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._ours: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._known: weakref.WeakKeyDictionary[torch.optim.Optimizer, Hashable] = weakref.WeakKeyDictionary()
        self._hook = register_optimizer_step_post_hook(partial(_tell, weakref.WeakMethod(self._stepped)))

    def __iter__(self) -> Iterator[torch.optim.Optimizer]:
        return iter(self._ours)

    def remove(self) -> None:
        self._hook.remove()

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        groups = [group["params"] for group in optimizer.param_groups]
        told = tuple((len(params), id(params[0]) if params else 0) for params in groups)
        if self._known.get(optimizer) == told:
            return
        self._known[optimizer] = told
        owned = {id(parameter) for parameter in self._model.parameters()}
        if any(id(parameter) in owned for params in groups for parameter in params):
            self._ours.add(optimizer)


def _tell(listener: weakref.WeakMethod[Callable[..., None]], optimizer: torch.optim.Optimizer, *_: object) -> None:
    """A hook for all optimizers must not keep its owner alive."""
    if (tell := listener()) is not None:
        tell(optimizer)


def _values(held: Any) -> Iterable[Any]:
    values: Iterable[Any] = dict.values(held) if isinstance(held, dict) else held.values()
    return values


def resident_bytes(model: torch.nn.Module, optimizers: Iterable[torch.optim.Optimizer], device: torch.device) -> int:
    """Bytes on the CPU between steps: parameters, gradients, buffers and optimizer state, but for what lies beside it.
    Nobody is told that we look: updates of `outcore.state` may be due."""
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
