"""Small gradients -> GradientPool: pages of device memory that hold nothing else.

Gradients live until the optimizer has used them, longer than anything else that a backward pass allocates, and so they
fragment the memory around them (`outcore.planning.allocator.hints`). On ResNet-50 in 16 GiB, 29 gradients of 1 to 9 MiB
made the allocator restart once or twice a step, with 3 GiB free in all. In plans made after such a restart, a small
gradient is moved to the pool as soon as autograd has stored it.

The pool consists of blocks of a stream on which nothing ever runs, because the caching allocator serves each stream
from pages of its own. Two conditions must hold. The blocks are used on the compute stream, so the allocator is told
(`record_stream`): it does not reuse them, nor their pages, before that stream is done with them. And nothing may run on
the pool's stream, not even the NaNs that `torch.empty` writes under deterministic algorithms: they would be written
after the values.
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
    """Moves the gradients of the smallest parameters, together at most `ALLOCATOR.pool_share` of the budget, during
    steps.

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
        """Called when a step begins."""
        alive = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        if not self._is_listening:
            self._is_listening = True
            for parameter in alive:
                if parameter.requires_grad:  # it may have been frozen since the pool was made
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(self._move))
        self._waiting = {id(parameter) for parameter in alive if parameter.grad is None}

    def end(self) -> None:
        self._waiting.clear()

    def remove(self) -> None:
        """Removes the hooks. The pool cannot be used again."""
        self._is_listening = True
        while self._hooks:
            self._hooks.pop().remove()

    def move(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a copy in the pool, or `tensor` itself if a copy would not behave the same in every way."""
        if not _is_plain(tensor):
            return tensor
        part = _part_of(tensor.device)
        if part is None and tensor.is_cuda:
            return tensor
        try:
            with torch.cuda.stream(part):  # has no effect on the CPU, where `part` is None
                storage = torch.UntypedStorage(tensor.nbytes, device=tensor.device)
        except torch.OutOfMemoryError:  # the step itself has all the memory it needs
            self._on_refused()
            return tensor
        with torch._C._DisableTorchDispatch():  # the copy is not an op of the step
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
    """Returns the pool's stream for the current stream, or None while a CUDA graph of that stream is captured."""
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return None
    return _own_stream(device, torch.cuda.current_stream(device).cuda_stream)


@functools.cache
def _own_stream(device: torch.device, current: int) -> torch.cuda.Stream | None:
    """Creates a stream on which nothing else ever runs.

    PyTorch hands out its streams in turn, so other code may get the same one and run kernels on it. The driver
    therefore creates a new, non-blocking stream. Returns None, and nothing is pooled, if that fails or if the allocator
    is not PyTorch's own: another allocator may give memory to a stream that must first wait before it uses it.
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
    """Whether the tensor has a storage of its own: no view of a bucket, no subclass, no graph, no lazy conjugation."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not (tensor.requires_grad or tensor._is_view() or tensor.is_conj() or tensor.is_neg())
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )
