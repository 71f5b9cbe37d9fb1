"""Measures how fast a lane multiplies and moves data, once per process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from statistics import median

import torch

from outcore.tiling.lanes import HALVES, CpuLane, CudaLane, Lane
from outcore.tiling.tiles import Rates, wave_excess
from outcore.units import MIB

LINK_BYTES = 256 * MIB
SUSTAINED_S = 0.3
SAME_ROUNDS = 4
LOPSIDED = 1.3
UNSETTLED_S = 0.5


def measure_rates(lane: Lane, dtype: torch.dtype, budget_bytes: int) -> Rates:
    """Returns a lane's rates, measured once per process (about half a second on a GPU) within the budget."""
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
    """Measures products on the lane's own stream. `tf32` is a key of the cache because it changes the result."""
    device = lane.device
    a = torch.randn(side, side, device=device).to(dtype)
    c = torch.empty_like(a)
    host = torch.empty(min(a.nbytes, LINK_BYTES), dtype=torch.uint8, pin_memory=True)
    block = c.view(torch.uint8).view(-1)[: host.numel()]

    def finish() -> None:
        lane.compute.synchronize()
        torch.cuda.synchronize(device)

    def seconds(action: Callable[[], object]) -> Callable[[], float]:
        return lambda: _best_s(action, finish, num_times=1)

    finish()
    mm_s = sustained_s(seconds(lambda: lane.compute.run(lambda: torch.mm(a, a, out=c))))
    in_s, out_s = settled_s(
        seconds(lambda: block.copy_(host, non_blocking=True)), seconds(lambda: host.copy_(block, non_blocking=True))
    )
    copy_s = _best_s(lambda: c.copy_(a), finish)
    return Rates(
        2 * side**3 * wave_excess(side, side, lane.num_sms) / mm_s,
        host.nbytes / in_s,
        host.nbytes / out_s,
        memory_bytes_per_s=2 * a.nbytes / copy_s,
        num_sms=lane.num_sms,
        origin=f"measured on {torch.cuda.get_device_name(device)}",
    )


def sustained_s(run_once: Callable[[], float]) -> float:
    """Returns the seconds of a product on a device that has been busy for a while.

    The first products run at clocks that the device does not sustain: too low after idling, too high before its power
    limit takes effect (tf32 on an H200: 395 TFLOP/s in three products of 8192 cubed, 315 over seconds of 65536 cubed).
    Therefore only the later half counts.
    """
    run_once()
    times: list[float] = []
    while len(times) < 4 or sum(times) < SUSTAINED_S:
        times.append(run_once())
    return median(times[len(times) // 2 :])


def settled_s(load_once: Callable[[], float], store_once: Callable[[], float]) -> tuple[float, float]:
    """Returns the best seconds of a load and of a store, tried alternately until neither has improved for some rounds.

    Loads timed shortly after 24 and 48 GiB had been freed once showed half the link rate, and the stores after them the
    whole. The cause is unknown (the driver clearing freed memory would explain it). Therefore the directions alternate,
    and while they differ by more than usual, the slower result is not accepted before `UNSETTLED_S` have passed; an
    asymmetric link stays asymmetric.
    """
    load_once(), store_once()
    best, spent_s, num_same = (math.inf, math.inf), 0.0, 0
    while num_same < SAME_ROUNDS or (max(best) > LOPSIDED * min(best) and spent_s < UNSETTLED_S):
        found = load_once(), store_once()
        spent_s += sum(found)
        improved = any(new < 0.98 * old for new, old in zip(found, best))
        best = min(found[0], best[0]), min(found[1], best[1])
        num_same = 0 if improved else num_same + 1
    return best
