"""Host memory -> pinned host memory, which copy engines and kernels access directly. It is registered in place."""

from __future__ import annotations

from contextlib import suppress

import torch

_FLAGS = 1 | 2  # cudaHostRegisterPortable | cudaHostRegisterMapped: for all contexts, and addressable by the device


def pin(address: int, num_bytes: int) -> bool:
    """Registers host memory and returns whether the driver accepted it. A refusal leaves its error code in the runtime,
    where the next kernel launch would report it, so a launch is made here to clear it."""
    if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _FLAGS)) == 0:
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
