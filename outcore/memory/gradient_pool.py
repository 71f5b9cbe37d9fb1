"""Small gradients -> GradientPool: pages of device memory that hold nothing else.

Gradients live until the optimizer has used them, longer than anything else that a backward pass allocates, and so they
fragment the memory around them (`outcore.planning.allocator.hints`). On ResNet-50 in 16 GiB, 29 gradients of 1 to 9 MiB
made the allocator start over once or twice a step, with 3 GiB free in all. In plans made after such a restart, a small
gradient is moved to the pool as soon as autograd has stored it.

The pool consists of blocks of a stream on which nothing ever runs, because the caching allocator serves each stream
from pages of its own. Two conditions must hold. The blocks are used on the compute stream, so the allocator is told
(`record_stream`): it does not reuse them, nor their pages, before that stream is done with them. And nothing may run on
the pool's stream, not even the NaNs that `torch.empty` writes under deterministic algorithms: they were written after
the values, and the loss was NaN.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Callable, Iterable

import torch
from torch.utils.hooks import RemovableHandle

from outcore.planning.allocator.hints import SMALLEST_BYTES, smallest_in_pool


class GradientPool:
    """Moves the gradients of the smallest parameters, together at most a fiftieth of the budget, during steps.

    Only gradients that the step's own backward pass made are moved. A parameter that had a gradient when the step began
    keeps that block, and so does a parameter with hooks of others, which may be about to sum gradients over ranks. Our
    hooks live in the parameters and must not keep anything alive, so they refer to the parameters weakly.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        budget_bytes: int,
        device: torch.device,
        on_refused: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_refused = on_refused  # called when there is no memory left: the gradient stays where it is
        self._waiting: set[int] = set()  # parameters without a gradient yet, by id
        self._hooks: list[RemovableHandle] = []
        self._is_listening = False  # from the first step on in which gradients are pooled
        known = (parameter for parameter in parameters if not torch.nn.parameter.is_lazy(parameter))
        large = [
            (weakref.ref(parameter), parameter.nbytes)
            for parameter in known
            if parameter.requires_grad and parameter.nbytes >= SMALLEST_BYTES and parameter.device == device
        ]
        self._parameters = smallest_in_pool(large, budget_bytes)

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
        """The same tensor in the pool, or `tensor` itself where a copy would differ in some way."""
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
    driver is asked for one that nobody knows and that waits for nobody. Without it nothing is pooled, nor with an
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
