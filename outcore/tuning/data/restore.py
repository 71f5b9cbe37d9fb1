"""Restores model, optimizer and random generators bit for bit after a trial.

Trying a batch size or a learning rate trains for a few steps. `untouched` restores everything in place: tensors keep
their identity and their storage, so that references to them (in an optimizer, a wrapper, a captured graph) stay valid.
The copies are in host memory, because a second copy of a model that barely fits would not fit the device. Lightning's
finders write and load a checkpoint file, which does not contain gradients and random generators.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from outcore.errors import TuningError

Back = Callable[[], Any]  # restores something and returns it


@contextmanager
def untouched(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None, *, others: Iterable[Any] = ()
) -> Iterator[None]:
    """A context in which a model may be trained; everything is restored at its end, also after an exception.

    This includes parameters, buffers, gradients, train/eval modes, the optimizer's state and groups, and every random
    generator (Python, NumPy, torch on the CPU and on all CUDA devices). `others` are restored too: modules, optimizers,
    tensors, generators, and objects with `state_dict` and `load_state_dict` (schedulers, scalers).
    """
    keeper = _Keeper()
    backs = [keeper.keep_module(model)]
    if optimizer is not None:
        backs.append(keeper.keep_optimizer(optimizer))
    backs += [keeper.keep_other(other) for other in others]
    backs.append(keep_generators())
    try:
        yield
    finally:
        for back in backs:
            back()


@contextmanager
def without_state(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """A context in which the optimizer has no state, as before its first step. The state is kept in host memory."""
    states = dict(optimizer.state)
    if not all(isinstance(state, dict) for state in states.values()):
        raise TuningError(
            f"what {type(optimizer).__name__} keeps of a parameter is no dictionary, so it cannot start without state; "
            "tune with an optimizer that keeps its state as torch's do"
        )
    tensors = [part for state in states.values() for part in state.values() if isinstance(part, torch.Tensor)]
    devices = [tensor.device for tensor in tensors]
    for tensor in tensors:
        tensor.data = tensor.data.to("cpu")
    optimizer.state.clear()
    try:
        yield
    finally:
        for tensor, device in zip(tensors, devices):
            tensor.data = tensor.data.to(device)
        optimizer.state.clear()
        optimizer.state.update(states)


@contextmanager
def made_optimizer(make: Callable[[Any], torch.optim.Optimizer], parameters: Any) -> Iterator[torch.optim.Optimizer]:
    """Yields an optimizer for trials. `make` may return one that the user continues to use, so it is restored at the
    end.

    Its parameters are not restored: they belong to a model that is restored separately.
    """
    given = list(parameters)
    optimizer, keeper = make(given), _Keeper()
    if not hasattr(optimizer, "param_groups"):
        raise TuningError(
            f"the function that makes the optimizer returned a {type(optimizer).__name__}; return an optimizer, such "
            "as torch.optim.AdamW(parameters)"
        )
    known = {id(parameter) for parameter in given}
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise TuningError(
            "the optimizer holds parameters of another model; make it from those that the function is given, or pass "
            "the model it belongs to instead of a function that makes one"
        )
    if _needs_closure(optimizer):
        raise TuningError(
            f"{type(optimizer).__name__} computes the loss several times in a step, through a closure; tune with an "
            "optimizer whose step() needs none"
        )
    options = [{key: part for key, part in group.items() if key != "params"} for group in optimizer.param_groups]
    backs = [keeper.keep(group_options) for group_options in options]
    state_back = keeper.keep(optimizer.state)
    try:
        yield optimizer
    finally:
        for group, back in zip(optimizer.param_groups, backs):
            group.update(back())
        state_back()


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class _Keeper:
    """Copies items once: the optimizer's groups contain the model's parameters again, and tied ones occur twice."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[torch.Tensor, Back]] = {}

    def keep(self, item: Any) -> Back:
        """Returns a function that restores `item`: containers and tensors in place; anything else is immutable."""
        if isinstance(item, torch.Tensor):
            return self._keep_tensor(item)
        if isinstance(item, dict):
            return self._keep_dict(item)
        if isinstance(item, list):
            return self._keep_list(item)
        if isinstance(item, tuple):
            parts = [self.keep(part) for part in item]
            return lambda: ([part() for part in parts], item)[1]
        return lambda: item

    def _keep_tensor(self, tensor: torch.Tensor) -> Back:
        if id(tensor) in self._seen:
            return self._seen[id(tensor)][1]
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise TuningError("a lazy layer has no parameters yet; pass one batch through the model before tuning it")
        data = tensor.data  # the same storage, but a version counter of its own
        copy = data.to("cpu", copy=True)
        grad = tensor.grad if tensor.is_leaf else None
        grad_back = self.keep(grad)

        def back() -> torch.Tensor:
            if tensor.data_ptr() != data.data_ptr() or tensor.shape != data.shape:
                tensor.data = data
            data.copy_(copy)
            if tensor.is_leaf:
                tensor.grad = grad_back()
            return tensor

        self._seen[id(tensor)] = tensor, back  # keeps the tensor alive, so that its id is not reused
        return back

    def _keep_dict(self, items: dict[Any, Any]) -> Back:
        parts = {key: self.keep(part) for key, part in items.items()}

        def back() -> dict[Any, Any]:
            kept = {key: part() for key, part in parts.items()}
            items.clear()
            items.update(kept)
            return items

        return back

    def _keep_list(self, items: list[Any]) -> Back:
        parts = [self.keep(part) for part in items]

        def back() -> list[Any]:
            items[:] = [part() for part in parts]
            return items

        return back

    def keep_module(self, model: torch.nn.Module) -> Back:
        """Restores a module by its dictionaries, because a buffer's name may have been assigned another tensor."""
        modules = [(module, module.training) for module in model.modules()]
        backs = [self.keep(items) for module, _ in modules for items in (module._parameters, module._buffers)]

        def back() -> None:
            for put_back in backs:
                put_back()
            for module, training in modules:
                module.training = training

        return back

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> Back:
        backs = [self.keep(optimizer.param_groups), self.keep(optimizer.state)]
        return lambda: [put_back() for put_back in backs]

    def keep_other(self, other: Any) -> Back:
        if isinstance(other, torch.nn.Module):
            return self.keep_module(other)
        if isinstance(other, torch.optim.Optimizer):
            return self.keep_optimizer(other)
        if isinstance(other, torch.Tensor | dict | list):
            return self.keep(other)
        if isinstance(other, torch.Generator):
            state = other.get_state()
            return lambda: other.set_state(state)
        if isinstance(other, np.random.Generator):
            bits = other.bit_generator.state
            return lambda: setattr(other.bit_generator, "state", bits)
        if isinstance(other, random.Random):
            numbers = other.getstate()
            return lambda: other.setstate(numbers)
        if hasattr(other, "state_dict") and hasattr(other, "load_state_dict"):
            kept = self.keep(other.state_dict())
            return lambda: other.load_state_dict(kept())
        raise TuningError(
            f"a {type(other).__name__} cannot be put back after a trial; give it state_dict() and load_state_dict(), "
            "or leave it out of `others`"
        )


def keep_generators() -> Back:
    """Returns a function that restores this process's generators. CUDA's are read only if CUDA is initialized."""
    python, numpy, host = random.getstate(), np.random.get_state(), torch.get_rng_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None

    def back() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_rng_state(host)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)

    return back
