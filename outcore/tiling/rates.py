"""Lane -> Rates: what a device multiplies and moves per second, measured once per process."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch

from outcore.tiling.lanes import HALVES, CpuLane, CudaLane, Lane
from outcore.tiling.tiles import Rates
from outcore.units import MIB


def measure_rates(lane: Lane, dtype: torch.dtype, budget_bytes: int) -> Rates:
    """A lane's rates, measured once per process (a few dozen milliseconds) and within the budget."""
    if isinstance(lane, CpuLane):
        return _measure_cpu(dtype)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    side = next((side for side in (8192, 4096, 2048) if 4 * side * side * dtype.itemsize <= budget_bytes), 1024)
    return _measure_cuda(lane, dtype, tf32, side)


def _best_s(action: Callable[[], object], finish: Callable[[], object], num_times: int = 3) -> float:
    times = []
    for _ in range(num_times):
        started_s = time.perf_counter()
        action()
        finish()
        times.append(time.perf_counter() - started_s)
    return min(times)


@cache
def _measure_cpu(dtype: torch.dtype) -> Rates:
    dtype = torch.float32 if dtype in HALVES else dtype
    side = 512
    a, b = torch.ones(side, side, dtype=dtype), torch.ones(side, side, dtype=dtype)
    big, copy = torch.ones(4 * MIB), torch.ones(4 * MIB)
    mm_s = _best_s(lambda: torch.mm(a, b), lambda: None)
    copy_s = _best_s(lambda: copy.copy_(big), lambda: None)
    rate = big.nbytes / copy_s
    return Rates(2 * side**3 / mm_s, rate, rate, memory_bytes_per_s=2 * rate, launch_s=3e-5, origin="measured")


@cache
def _measure_cuda(lane: CudaLane, dtype: torch.dtype, tf32: bool, side: int) -> Rates:
    """Products on the lane's own stream. `tf32` is in the key because it changes what is measured."""
    device = lane.device
    a = torch.randn(side, side, device=device).to(dtype)
    c = torch.empty_like(a)
    host = torch.empty(a.nbytes, dtype=torch.uint8, pin_memory=True)
    block = c.view(torch.uint8).view(-1)

    def finish() -> None:
        lane.compute.synchronize()
        torch.cuda.synchronize(device)

    finish()
    lane.compute.run(lambda: torch.mm(a, a, out=c))
    finish()
    mm_s = _best_s(lambda: lane.compute.run(lambda: torch.mm(a, a, out=c)), finish)
    in_s = _best_s(lambda: block.copy_(host, non_blocking=True), finish)
    out_s = _best_s(lambda: host.copy_(block, non_blocking=True), finish)
    copy_s = _best_s(lambda: c.copy_(a), finish)
    return Rates(
        2 * side**3 / mm_s,
        host.nbytes / in_s,
        host.nbytes / out_s,
        memory_bytes_per_s=2 * a.nbytes / copy_s,
        num_sms=lane.num_sms,
        origin=f"measured on {torch.cuda.get_device_name(device)}",
    )
