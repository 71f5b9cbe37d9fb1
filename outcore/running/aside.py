"""Small gradients -> a part of device memory of their own.

The allocator puts a value into the best hole at that moment. Where it outlives the large blocks around it, it stays
behind and cuts their room in two; when no hole is long enough any more the allocator gives everything back and starts
over, which drains the device. Gradients live until the optimizer has used them, longer than anything else that a
backward allocates: on ResNet-50 in 16 GiB, 29 of 1 to 9 MiB made the allocator start over once or twice a step, with
3 GiB free in all. A small one is moved as soon as autograd has stored it, in plans that follow one for which the
allocator had to start over.

That part is blocks of a stream on which nothing ever runs: the allocator serves each stream from pages of its own. Two
things have to be right. The blocks are used on the stream that computes, so the allocator is told (`record_stream`):
it gives none away, nor its pages, before that stream is done with it. And nothing may run on the other stream, not even
the NaNs that `torch.empty` writes under deterministic algorithms: they came after the values and the loss was NaN.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from outcore.planning.crowd import GRADIENTS_BYTES, GRADIENTS_SHARE, SMALLEST_BYTES


class Aside:
    """Moves the gradients of the smallest of these parameters, together a fiftieth of the budget, during steps.

    Only what a step's own backward made is moved: a parameter that had a gradient when the step began keeps that block,
    whoever holds it, and so does one with hooks of others, who may be about to sum theirs over ranks. Ours
    live in the parameters and so must not keep anything alive: they know them weakly.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        budget_bytes: int,
        device: torch.device,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_refused = on_refused  # memory: then a tensor stays where it is
        self._parameters: list[weakref.ref[torch.nn.Parameter]] = []
        self._waiting: set[int] = set()  # parameters without a gradient yet, by id
        self._hooks: list[RemovableHandle] = []
        self._is_listening = False  # from the first step on in which gradients go aside
        left_bytes = min(int(GRADIENTS_SHARE * budget_bytes), GRADIENTS_BYTES)
        known = (parameter for parameter in parameters if not torch.nn.parameter.is_lazy(parameter))
        for parameter in sorted(known, key=lambda parameter: parameter.nbytes):
            if not parameter.requires_grad or parameter.nbytes < SMALLEST_BYTES or parameter.device != device:
                continue
            left_bytes -= parameter.nbytes
            if left_bytes < 0:
                break
            self._parameters.append(weakref.ref(parameter))

    def begin(self) -> None:
        """A step begins."""
        there = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        if not self._is_listening:
            self._is_listening = True
            for parameter in there:
                if parameter.requires_grad:  # still: some are frozen later
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._move))
        self._waiting = {id(parameter) for parameter in there if parameter.grad is None}

    def end(self) -> None:
        self._waiting.clear()

    def remove(self) -> None:
        """For good."""
        self._is_listening = True
        while self._hooks:
            self._hooks.pop().remove()

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor, aside; `tensor` itself where that would be another one in some way."""
        if not _is_plain(tensor):
            return tensor
        part = _part_of(tensor.device)
        if part is None and tensor.is_cuda:
            return tensor
        try:
            with torch.cuda.stream(part):  # on the CPU: no change
                storage = torch.UntypedStorage(tensor.nbytes, device=tensor.device)
        except torch.OutOfMemoryError:  # the step itself has all it needs
            self._on_refused()
            return tensor
        with torch._C._DisableTorchDispatch():  # these are no ops of the step
            moved = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            moved.set_(storage, 0, tensor.size(), tensor.stride())
            if part is not None:
                moved.record_stream(torch.cuda.current_stream(tensor.device))
            return moved.copy_(tensor)

    def _move(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._waiting:
            return
        self._waiting.discard(id(parameter))
        if parameter.grad is not None and len(parameter._post_accumulate_grad_hooks or ()) <= 1:
            parameter.grad = self.move(parameter.grad)


def _part_of(device: torch.device) -> torch.cuda.Stream | None:
    """The stream whose pages are used by what runs on the current one; none while a graph of it is captured."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return _own_stream(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _own_stream(device: torch.device, current: int) -> torch.cuda.Stream | None:
    """PyTorch's own streams are handed out in turn: somebody else may get the same one, and run something on it. So the
    driver is asked for one that nobody knows and that waits for nobody. Without it nothing goes aside, nor with an
    allocator other than PyTorch's: memory it gives to one stream may be in use until that stream has waited.
    """
    if torch.cuda.get_allocator_backend() != "native":
        return None
    handle, without_waiting = ctypes.c_void_p(), 1
    with torch.cuda.device(device):
        try:
            failed = ctypes.CDLL("libcuda.so.1").cuStreamCreate(ctypes.byref(handle), without_waiting)
        except (OSError, AttributeError):
            failed = -1
    return None if failed else torch.cuda.ExternalStream(handle.value, device=device)


def _is_plain(tensor: torch.Tensor) -> bool:
    """A block of this tensor alone: no bucket's view, no subclass, no graph, nothing to be done when it is read."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor._is_view() or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
