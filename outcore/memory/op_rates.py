"""A device -> OpRates: how fast it multiplies matrices, moves bytes within its own memory and starts an op.

Measuring takes less than a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from outcore.memory.settings import MEMORY
from outcore.values import OpRates, StateUnit


@cache
def measure_op_rates(device: torch.device) -> OpRates:
    """Measures once per process. The fastest of several tries counts: other processes can only slow one down."""
    copied_bytes = MEMORY.cuda_copy_bytes if device.type == "cuda" else MEMORY.cpu_copy_bytes
    with torch.no_grad():
        float64, float32, half = (
            _flops_per_s(device, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)
        )
        tf32 = _with_tf32(lambda: _flops_per_s(device, torch.float32)) if device.type == "cuda" else float32
        source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
        target, scalar = torch.zeros_like(source), torch.zeros(1, device=device)
        memory = 2 * source.nbytes / _best_s(device, lambda: target.copy_(source))
        launch_s = _best_s(device, lambda: scalar.add_(1), repeats=MEMORY.num_launches)
    return OpRates(float64, float32, tf32, half, memory, launch_s)


@cache
def measure_update_rate() -> float:
    """Measures how many bytes a second the CPU reads and writes in PyTorch's fused AdamW, once per process."""
    parameter = torch.nn.Parameter(torch.zeros(MEMORY.num_updated))
    parameter.grad = torch.zeros_like(parameter)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    unit = StateUnit("", parameter.nbytes, parameter.nbytes, 2 * parameter.nbytes)
    return unit.update_bytes / _best_s(parameter.device, optimizer.step)


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    if device.type == "cuda":
        side = MEMORY.cuda_side
    else:
        side = MEMORY.cpu_side // (1 if dtype is torch.float32 else 2)  # a CPU is slow in the other types
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    return float(2 * side**3 / _best_s(device, lambda: matrix @ matrix))


def _with_tf32(measure: Callable[[], float]) -> float:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return measure()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _best_s(device: torch.device, work: Callable[[], object], *, repeats: int = 1) -> float:
    def once() -> float:
        began_s = time.perf_counter()
        for _ in range(repeats):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began_s) / repeats

    once()
    return max(min(once() for _ in range(MEMORY.num_tries)), 1e-9)
