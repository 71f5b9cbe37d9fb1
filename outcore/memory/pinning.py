"""Host memory -> pinned host memory, which copy engines and kernels access directly. It is registered in place."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

_PAGEABLE_MEMORY_ACCESS = 88  # CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS
_FLAGS = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped: for all contexts, and addressable by the device


def pin(address: int, num_bytes: int) -> bool:
    """Registers host memory and returns whether the driver accepted it. A refusal leaves its error code in the runtime,
    where the next kernel launch would report it, so a launch is made here to clear it."""
    if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _FLAGS)) == 0:
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def reads_any_host_memory(device: torch.device) -> bool:
    """Whether a GPU can access host memory that is not pinned, mapped files included: heterogeneous memory management,
    or a processor that shares its page tables."""
    found = ctypes.c_int(0)
    try:
        ask = ctypes.CDLL("libcuda.so.1").cuDeviceGetAttribute
        refused = ask(ctypes.byref(found), _PAGEABLE_MEMORY_ACCESS, device.index or 0)
    except (OSError, AttributeError):
        return False
    return not refused and found.value == 1


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
