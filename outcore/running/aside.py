"""Small values that live long -> a part of device memory of their own.

The allocator puts a value into the best hole at that moment. Where it outlives the large blocks around it, it stays
behind and cuts their room in two; when no hole is long enough any more the allocator gives everything back and starts
over, which drains the device. Two kinds of values do that, seen on an H200 (docs/log.md):

- Gradients: they live until the optimizer has used them, longer than anything else that a backward allocates. On
  ResNet-50 in 16 GiB, 29 of 1 to 9 MiB made the allocator start over once or twice a step, with 3 GiB free in all. A
  small gradient is moved as soon as autograd has stored it.
- Weights that autocast has cast: its cache holds each of them until the context is left. On Llama in 28 GiB, 113 of 8
  and 21 MiB lay between the holes when the loss asked for 5.9 GiB in one piece. They are cast into their place at once,
  in plans that follow one for which the allocator had to start over.

That part is blocks that belong to a stream of their own, which the allocator serves from other pages. The bits are the
same.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from outcore.units import MIB
from outcore.values import Trace

SMALLEST_BYTES = MIB  # PyTorch itself keeps smaller blocks apart
MOST_SHARE = 0.02  # of the budget: pages of one stream lie idle while nothing on it needs them
MOST_BYTES = 512 * MIB
CASTS_SHARE = 0.08  # of the budget: more than for gradients, since all of them are there when memory is fullest
CAST_SHARE = 0.01  # of the budget: a larger one is a large block itself
CAST = "aten._to_copy.default"


def casts_to_move(trace: Trace, budget_bytes: int) -> frozenset[int]:
    """The ops that cast what was there before the step into something small that stays: by index."""
    left_bytes = CASTS_SHARE * budget_bytes
    found = []
    for index, op in enumerate(trace.ops):
        if op.name != CAST or op.phase != "forward" or len(op.reads) != 1 or len(op.writes) != 1:
            continue
        source, cast = (trace.storages[trace.values[value].storage] for value in (*op.reads, *op.writes))
        if not source.external or cast.external or not SMALLEST_BYTES <= cast.bytes <= CAST_SHARE * budget_bytes:
            continue
        if cast.bytes <= left_bytes:
            left_bytes -= cast.bytes
            found.append(index)
    return frozenset(found)


class Aside:
    """Moves the gradients of the smallest of these parameters, together a fiftieth of the budget, during steps, and
    casts what it is asked to.

    Only what a step's own backward made is moved: a parameter that had a gradient when the step began keeps that block,
    whoever holds it. The hooks live in the parameters and so must not keep anything alive: they know them weakly.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], budget_bytes: int, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._parameters: list[weakref.ref[torch.nn.Parameter]] = []
        self._waiting: set[int] = set()  # parameters without a gradient yet, by id
        self._hooks = []
        left_bytes = min(int(MOST_SHARE * budget_bytes), MOST_BYTES)
        known = (parameter for parameter in parameters if not torch.nn.parameter.is_lazy(parameter))
        for parameter in sorted(known, key=lambda parameter: parameter.nbytes):
            if not parameter.requires_grad or parameter.nbytes < SMALLEST_BYTES or parameter.device != device:
                continue
            left_bytes -= parameter.nbytes
            if left_bytes < 0:
                break
            self._parameters.append(weakref.ref(parameter))
            self._hooks.append(parameter.register_post_accumulate_grad_hook(self._move))

    def begin(self) -> None:
        """A step begins."""
        there = (reference() for reference in self._parameters)
        self._waiting = {id(parameter) for parameter in there if parameter is not None and parameter.grad is None}

    def end(self) -> None:
        self._waiting.clear()

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def cast(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> torch.Tensor:
        """What the cast `func` gives, aside."""
        source = args[0]
        if len(args) != 1 or set(kwargs) != {"dtype"} or type(source) not in (torch.Tensor, torch.nn.Parameter):
            made: torch.Tensor = func(*args, **kwargs)
            return made
        made = self._empty_like(source, kwargs["dtype"])
        return made.copy_(source)

    def _empty_like(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.stream(self._stream):  # without a stream: no change
            made = torch.empty_like(tensor, dtype=dtype)
        if self._stream is not None:  # it is used on this stream, and must not be given away before that is over
            made.record_stream(torch.cuda.current_stream(tensor.device))
        return made

    def _move(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._waiting:
            return
        self._waiting.discard(id(parameter))
        grad = parameter.grad
        if grad is None or not _is_plain(grad):
            return
        parameter.grad = self._empty_like(grad, grad.dtype).copy_(grad)


def _is_plain(grad: torch.Tensor) -> bool:
    """A block of this gradient alone: no bucket's view, no subclass, no graph."""
    return (
        type(grad) is torch.Tensor
        and grad.layout is torch.strided
        and not grad.requires_grad
        and not grad._is_view()
        and grad.untyped_storage().nbytes() == grad.nbytes
    )
