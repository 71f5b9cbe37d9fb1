"""This machine -> Machine: capacities as they are granted (cgroup, ranks), rates as they are measured."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future
from datetime import date
from functools import cache
from pathlib import Path

import psutil
import torch
from torch.nn.parameter import is_lazy

from outcore.errors import OutcoreError
from outcore.memory.disk import DiskLane, SwapFile
from outcore.memory.settings import MEMORY
from outcore.memory.store import PinnedSlab
from outcore.units import ENDLESS_BYTES, GIB, MIB, format_bytes, parse_bytes
from outcore.values import Machine

log = logging.getLogger("outcore")
AUTO_SHARE = (
    0.9  # of what is free, for memory="auto": others on the device, and kernels' workspaces, want some (guessed)
)


def host_bytes_granted() -> int:
    """RAM this process may swap to: what is free, under the cgroup's limit, shared by the ranks on this host."""
    free = min(psutil.virtual_memory().available, _cgroup_room_bytes())
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(free * MEMORY.host_share / num_ranks)


def tiers_below(device: torch.device, host: int | str, disk: str | Path | None) -> tuple[int, str | None]:
    """Where steps on `device` may swap to: bytes of pinned host memory, and the folder of the swap file if there is
    one. On the CPU the disk is the only place, by default where temporary files are."""
    if device.type == "cuda":
        granted_bytes = host_bytes_granted()
        host_bytes = granted_bytes if host == "auto" else parse_bytes(host, of_bytes=granted_bytes)
        return host_bytes, None if disk is None else str(disk)
    if host != "auto":
        parse_bytes(host, of_bytes=host_bytes_granted())  # nonsense is refused here, too
    return 0, tempfile.gettempdir() if disk is None else str(disk)


def granted_bytes(model: torch.nn.Module, device: torch.device, memory: int | str) -> int:
    """The budget that `memory` asks for. `"auto"`: what is free now, less a margin, and what the model has."""
    if memory != "auto":
        return parse_bytes(memory, of_bytes=device_bytes(device))
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
        there_bytes = torch.cuda.memory_allocated(device)
        free_bytes += torch.cuda.memory_reserved(device) - there_bytes
    else:
        free_bytes = min(psutil.virtual_memory().available, _cgroup_room_bytes())
        there_bytes = _bytes_there(model)
    granted = there_bytes + int(free_bytes * AUTO_SHARE)
    log.info(
        "memory='auto': %s are free on %s, of which %s stay free; with what is there already the budget is %s",
        format_bytes(free_bytes),
        device,
        format_bytes(free_bytes - int(free_bytes * AUTO_SHARE)),
        format_bytes(granted),
    )
    return granted


def weight_bytes(model: torch.nn.Module) -> int:
    """Parameters and buffers."""
    return _bytes_of([*model.parameters(), *model.buffers()])


def _bytes_there(model: torch.nn.Module) -> int:
    """Parameters, buffers and the gradients that are there."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return _bytes_of([*model.parameters(), *model.buffers(), *gradients])


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    known = [tensor for tensor in tensors if tensor.layout is torch.strided and not is_lazy(tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in known}.values())


def _cgroup_room_bytes() -> int:
    for limit_file, used_file in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limit = Path(limit_file).read_text().strip()
            if limit.isdigit():
                return max(0, int(limit) - int(Path(used_file).read_text()))
        except OSError:
            continue
    return ENDLESS_BYTES


def device_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return min(psutil.virtual_memory().total, _cgroup_room_bytes())


@cache
def measure_machine(device: torch.device, folder: str | None) -> Machine:
    """Measures links and disk (about a second) once per process."""
    write_rate, read_rate = _measure_disk(folder) if folder is not None else (0.0, 0.0)
    disk_bytes = int(shutil.disk_usage(folder).free * 0.9) if folder is not None else 0
    if device.type == "cuda":
        out_rate, in_rate, share, latency_s = _measure_links(device)
        name, host_bytes = f"cuda {torch.cuda.get_device_name(device)}", host_bytes_granted()
    else:
        out_rate, in_rate, share, latency_s = write_rate, read_rate, 0.7, 100e-6
        name, host_bytes = "cpu", 0
    return Machine(
        device=name,
        device_bytes=device_bytes(device),
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
        swap_out_bytes_per_s=max(out_rate, 1.0),
        swap_in_bytes_per_s=max(in_rate, 1.0),
        disk_write_bytes_per_s=max(write_rate, 1.0),
        disk_read_bytes_per_s=max(read_rate, 1.0),
        duplex_share=share,
        copy_latency_s=latency_s,
        measured_at=date.today().isoformat(),
        given=() if device.type == "cuda" else ("duplex_share", "copy_latency_s"),
    )


def _measure_links(device: torch.device) -> tuple[float, float, float, float]:
    """Rates out and in, the share each keeps when both run, and a small copy's cost."""
    num_bytes = 256 * MIB
    slab = PinnedSlab(2 * num_bytes)
    on_host = slab.bytes[:num_bytes], slab.bytes[num_bytes:]
    on_device = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def seconds(*, out: bool, back: bool, size: int = num_bytes, repeats: int = 4) -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        for _ in range(repeats):
            if out:
                with torch.cuda.stream(streams[0]):
                    on_host[0][:size].copy_(on_device[0][:size], non_blocking=True)
            if back:
                with torch.cuda.stream(streams[1]):
                    on_device[1][:size].copy_(on_host[1][:size], non_blocking=True)
        torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / repeats

    seconds(out=True, back=True)  # warm
    out_s, back_s, both_s = seconds(out=True, back=False), seconds(out=False, back=True), seconds(out=True, back=True)
    small_s = seconds(out=True, back=False, size=4096, repeats=32)
    slab.close()
    share = min(1.0, max(out_s, back_s) / both_s)
    return num_bytes / out_s, num_bytes / back_s, share, min(small_s, 50e-6)


def _measure_disk(folder: str) -> tuple[float, float]:
    num_bytes = 64 * MIB
    file = SwapFile(folder, GIB)
    cpu = torch.device("cpu")
    lane = DiskLane("measure", file, cpu)
    content = torch.arange(num_bytes, dtype=torch.int32).view(torch.uint8)[:num_bytes]  # draws no random numbers
    offset = file.take(num_bytes)
    assert offset is not None

    def rate(start: float, done: Future[float]) -> float:
        return num_bytes / max(done.result() - start, 1e-6)

    lane.write(content, offset, num_bytes).result()
    write_rate = rate(time.perf_counter(), written := lane.write(content, offset, num_bytes))
    read_rate = rate(time.perf_counter(), lane.read(content, offset, num_bytes, written))
    lane.close()
    file.close()
    return write_rate, read_rate


def device_of(model: torch.nn.Module) -> torch.device:
    """Where a model lives."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type in ("cuda", "cpu"):
            device = tensor.device
            return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")
        raise OutcoreError(f"outcore runs on CUDA and CPU; this model is on {tensor.device}")
    raise OutcoreError("this model has no parameters; limit() takes the device from them")
