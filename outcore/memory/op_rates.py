"""A device -> OpRates: how fast it multiplies, moves bytes in its own memory and begins an op. Under a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from outcore.units import MIB
from outcore.values import OpRates

_SIDE = {"cpu": 768, "cuda": 4096}  # of the matrices that are multiplied
_COPY_BYTES = {"cpu": 64 * MIB, "cuda": 512 * MIB}
_NUM_TRIES = 5


@cache
def measure_op_rates(device: torch.device) -> OpRates:
    """Measured once per process: the best of a few tries each, since others only ever slow a try down."""
    with torch.no_grad():
        float64, float32, half = (
            _flops_per_s(device, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)
        )
        tf32 = _with_tf32(lambda: _flops_per_s(device, torch.float32)) if device.type == "cuda" else float32
        source = torch.zeros(_COPY_BYTES[device.type], dtype=torch.uint8, device=device)
        target, one = torch.zeros_like(source), torch.zeros(1, device=device)
        memory = 2 * source.nbytes / _best_s(device, lambda: target.copy_(source))
        launch_s = _best_s(device, lambda: one.add_(1), repeats=200)
    return OpRates(float64, float32, tf32, half, memory, launch_s)


def _flops_per_s(device: torch.device, dtype: torch.dtype) -> float:
    side = _SIDE[device.type] // (1 if dtype is torch.float32 or device.type == "cuda" else 2)
    one = torch.ones(side, side, dtype=dtype, device=device)
    return float(2 * side**3 / _best_s(device, lambda: one @ one))


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
    return max(min(once() for _ in range(_NUM_TRIES)), 1e-9)
