"""Host memory -> memory that a copy engine reads and writes by itself: registered where it lies."""

from __future__ import annotations

from contextlib import suppress

import torch


def pin(address: int, num_bytes: int) -> bool:
    """Whether the driver took it. A refusal leaves its code behind in the runtime, where the next kernel launch would
    stumble over it; an empty launch takes it away."""
    if int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 1)) == 0:  # 1: for all contexts
        return True
    with suppress(RuntimeError):
        torch.zeros(1, device="cuda")
    return False


def unpin(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)
