"""A lane is one device's share of a product: three streams, memory, and how blocks are copied and multiplied.

A CPU lane copies blocks into its slots with threads and sums half types in fp32. A CUDA lane copies from page-locked
memory with the copy engines and multiplies in the operands' dtype. Everything else (what is copied when, what waits for
what) is in `pipeline` and the same for both. CUDA needs one call beyond torch: torch turns a strided host slice into a
temporary and waits for it (pytorch/pytorch#111570), while the driver's pitched copy does not.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from outcore.errors import TilingError
from outcore.memory.pinning import pin, unpin
from outcore.tiling.operands import Span, Store, TensorStore, is_file_mapping
from outcore.tiling.streams import CudaStream, Stream, ThreadStream
from outcore.tiling.tiles import SHORTEST_ROW_BYTES

HALVES = (torch.float16, torch.bfloat16)
_HOST_TO_DEVICE, _DEVICE_TO_HOST = 1, 2


class CpuLane:
    """The host's cores. `compute`, `copy_in` and `copy_out` may be given, for example slowed ones."""

    def __init__(
        self,
        name: str = "cpu",
        *,
        compute: Stream | None = None,
        copy_in: Stream | None = None,
        copy_out: Stream | None = None,
        stages: bool = False,
    ) -> None:
        self.name = name
        self.device = torch.device("cpu")
        self.compute = compute or ThreadStream(f"{name} compute")
        self.copy_in = copy_in or ThreadStream(f"{name} copy in")
        self.copy_out = copy_out or ThreadStream(f"{name} copy out")
        self._stages = stages

    def slot_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in HALVES else dtype

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def allocate_slab(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def is_direct(self, store: Store, span: Span) -> bool:
        return not self._stages

    def copy_from_store(self, target: torch.Tensor, store: Store, span: Span) -> None:
        store.read_into(target, span)

    def copy_to_store(self, source: torch.Tensor, store: Store, span: Span) -> None:
        store.write_from(source, span)

    def can_copy_from(self, other: Lane) -> bool:
        return isinstance(other, CpuLane)

    def multiply(self, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> None:
        if a.dtype != target.dtype:  # a resident operand with a half type
            a, b = a.to(target.dtype), b.to(target.dtype)
        target.addmm_(a, b, beta=beta, alpha=alpha)

    def begin(self) -> None:
        pass

    def enter_thread(self) -> None:
        pass

    def close(self) -> None:
        for stream in (self.compute, self.copy_in, self.copy_out):
            stream.close()


class CudaLane:
    """One CUDA device, or a part: with a green context's stream, products use only its `num_sms` multiprocessors."""

    def __init__(
        self,
        device: str | torch.device,
        *,
        compute: torch.cuda.Stream | None = None,
        num_sms: int | None = None,
        name: str = "",
    ) -> None:
        self.device = torch.device(device)
        if self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.name = name or str(self.device)
        self.num_sms = num_sms or torch.cuda.get_device_properties(self.device).multi_processor_count
        self.compute: Stream = CudaStream(self.device, compute)
        self.copy_in: Stream = CudaStream(self.device)
        self.copy_out: Stream = CudaStream(self.device)

    def slot_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def allocate(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, device=self.device)

    def allocate_slab(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def is_direct(self, store: Store, span: Span) -> bool:
        """Whether the copy engines can read the block in place."""
        if not isinstance(store, TensorStore) or not store.is_plain or not _is_locked(store.tensor):
            return False
        row_bytes = (span[3] - span[2]) * store.dtype.itemsize
        contiguous = span[3] - span[2] == store.tensor.stride(0) or span[1] - span[0] == 1
        return contiguous or (row_bytes >= SHORTEST_ROW_BYTES and cuda_runtime() is not None)

    def copy_from_store(self, target: torch.Tensor, store: Store, span: Span) -> None:
        assert isinstance(store, TensorStore)
        self._copy(target, store.view(span), _HOST_TO_DEVICE, self.copy_in)

    def copy_to_store(self, source: torch.Tensor, store: Store, span: Span) -> None:
        assert isinstance(store, TensorStore)
        self._copy(store.view(span), source, _DEVICE_TO_HOST, self.copy_out)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, kind: int, stream: Stream) -> None:
        if target.is_contiguous() and source.is_contiguous():
            target.copy_(source, non_blocking=True)
            return
        assert isinstance(stream, CudaStream)
        copy_pitched(target, source, kind, stream.stream.cuda_stream)

    def can_copy_from(self, other: Lane) -> bool:
        if not isinstance(other, CudaLane):
            return False
        return other.device == self.device or torch.cuda.can_device_access_peer(self.device, other.device)

    def multiply(self, target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> None:
        if a.dtype == target.dtype:
            target.addmm_(a, b, beta=beta, alpha=alpha)
        elif _sums_in_fp32(self.device, a.dtype):
            torch.addmm(target, a, b, out_dtype=target.dtype, beta=beta, alpha=alpha, out=target)
        else:
            _add_in_strips(target, a, b, beta, alpha)

    def begin(self) -> None:
        """Orders earlier work of the caller (the operands, the last use of the slots' memory) before this lane's."""
        event = torch.cuda.current_stream(self.device).record_event()
        for stream in (self.compute, self.copy_in, self.copy_out):
            stream.wait(event)

    def enter_thread(self) -> None:
        """Makes the device's context current in this thread, which has none if its first call is a product.

        Reading the free memory is the cheapest call that does so; `set_device` alone has no effect if the device is
        already the thread's default.
        """
        torch.cuda.set_device(self.device)
        torch.cuda.mem_get_info(self.device)

    def close(self) -> None:
        pass


Lane = CpuLane | CudaLane


def make_lane(device: str | torch.device | Lane, *, urgent: bool = False) -> Lane:
    """Returns the device's lane; an `urgent` one has streams of its own with a higher priority."""
    if isinstance(device, (CpuLane, CudaLane)):
        return device
    try:
        kind = torch.device(device).type
    except RuntimeError:
        raise TilingError(f"{device!r} is no device; name cuda devices or 'cpu'") from None
    if kind == "cpu":
        return CpuLane()
    if kind != "cuda":
        raise TilingError(f"{device} cannot take part in a product; name cuda devices or 'cpu'")
    if not torch.cuda.is_available():
        raise TilingError(f"{device} is not there: torch sees no CUDA device; use devices=['cpu']")
    return _cuda_lane(torch.device(device), urgent)


@cache
def _cuda_lane(device: torch.device, urgent: bool) -> CudaLane:
    """Returns one lane of each kind per device: torch keeps a cuBLAS workspace for every stream that multiplied."""
    return CudaLane(device, compute=torch.cuda.Stream(device, priority=-1) if urgent else None)


def _add_in_strips(target: torch.Tensor, a: torch.Tensor, b: torch.Tensor, beta: float, alpha: float) -> None:
    """Adds a half product to fp32 sums through a strip of at most 64 MiB, if torch cannot do it in place."""
    num_rows = max(1, 64 * 1024**2 // max(1, 4 * target.shape[1]))
    for row in range(0, target.shape[0], num_rows):
        strip = torch.mm(a[row : row + num_rows], b, out_dtype=target.dtype)
        part = target[row : row + num_rows]
        if beta == 0:
            torch.mul(strip, alpha, out=part)
        else:
            part.mul_(beta).add_(strip, alpha=alpha)


@cache
def _sums_in_fp32(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this torch adds a half product to fp32 sums in place, tested once on a small product."""
    a = torch.ones(16, 16, dtype=dtype, device=device)
    sums = torch.ones(16, 16, dtype=torch.float32, device=device)
    try:
        torch.addmm(sums, a, a, out_dtype=torch.float32, out=sums)
    except (RuntimeError, TypeError):
        return False
    return bool((sums == 17).all())


def _is_locked(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_pinned())


@cache
def cuda_runtime() -> Any:
    """Returns the CUDA runtime that torch has loaded, or None; strided blocks then go through a staging slab."""
    version = (torch.version.cuda or "0").partition(".")[0]
    try:
        library = ctypes.CDLL(f"libcudart.so.{version}")
        size, pointer = ctypes.c_size_t, ctypes.c_void_p
        library.cudaMemcpy2DAsync.argtypes = [pointer, size, pointer, size, size, size, ctypes.c_int, pointer]
        library.cudaMemcpy2DAsync.restype = ctypes.c_int
        return library
    except (OSError, AttributeError):
        return None


def copy_pitched(target: torch.Tensor, source: torch.Tensor, kind: int, stream: int) -> None:
    """Copies rows of one pitch to rows of another with the copy engine; the host side is page-locked."""
    element_bytes = target.element_size()
    status = cuda_runtime().cudaMemcpy2DAsync(
        target.data_ptr(),
        _pitch(target) * element_bytes,
        source.data_ptr(),
        _pitch(source) * element_bytes,
        target.shape[1] * element_bytes,
        target.shape[0],
        kind,
        stream,
    )
    if status != 0:
        raise TilingError(f"the strided copy failed with CUDA error {status}; pass pin=False to copy through a slab")


def _pitch(tensor: torch.Tensor) -> int:
    return tensor.stride(0) if tensor.shape[0] > 1 else max(tensor.stride(0), tensor.shape[1])


class Pins:
    """Page-locks tensors in place while it is open, and counts those that could not be locked."""

    def __init__(self) -> None:
        self._locked: list[torch.Tensor] = []
        self.num_failed = 0
        self.locked_bytes = 0

    def lock(self, tensor: torch.Tensor) -> bool:
        """Locks a tensor; returns whether it is locked. Mapped files are not locked, as that would load all of them."""
        if tensor.is_pinned() or not tensor.numel():
            return True
        if is_file_mapping(tensor):
            return False
        storage = tensor.untyped_storage()
        if not pin(storage.data_ptr(), storage.nbytes()):
            self.num_failed += 1
            return False
        self._locked.append(tensor)
        self.locked_bytes += storage.nbytes()
        return True

    def close(self) -> None:
        while self._locked:
            unpin(self._locked.pop().untyped_storage().data_ptr())

    def __enter__(self) -> Pins:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
