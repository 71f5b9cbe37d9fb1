"""Host memory -> memory that a copy engine, and a kernel, reads and writes by itself: registered where it lies."""

from __future__ import annotations

from contextlib import suppress

import torch

_FLAGS = 1 | 2  # for all contexts, and mapped into the device's address space


def pin(address: int, num_bytes: int) -> bool:
    """Whether the driver took it. A refusal leaves its code behind in the runtime, where the next kernel launch would
    stumble over it; an empty launch takes it away."""
    if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, _FLAGS)) == 0:
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
