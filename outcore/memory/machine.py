"""This machine -> Machine: the capacities that this process is granted (by its cgroup, beside other ranks), and
measured rates."""

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

from outcore.errors import OutcoreError, StoreError
from outcore.memory.disk import DiskLane, SwapFile
from outcore.memory.pinning import reads_any_host_memory
from outcore.memory.settings import MEMORY
from outcore.memory.store import PinnedSlab
from outcore.units import ENDLESS_BYTES, GIB, format_bytes, parse_bytes
from outcore.values import Budget, Machine

log = logging.getLogger("outcore")


def host_bytes_granted() -> int:
    """Returns how much host memory this process may swap to: a share of what is free under the cgroup's limit, divided
    among the ranks on this host."""
    free = min(psutil.virtual_memory().available, _free_cgroup_bytes())
    num_ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return int(free * MEMORY.host_share / num_ranks)


def tiers_below(device: torch.device, host: int | str, disk: str | Path | None) -> tuple[int, str | None]:
    """Returns where steps on `device` may swap to: bytes of pinned host memory, and the folder of the swap file or
    None.

    A step on the CPU can swap only to the disk, by default to the folder of temporary files.
    """
    if disk is not None and not Path(disk).is_dir():  # a folder that is misspelt may be on another disk
        raise StoreError(f"there is no folder {str(disk)!r} to swap to; make it, or name another one with disk=...")
    if device.type == "cuda":
        granted_bytes = host_bytes_granted()
        host_bytes = granted_bytes if host == "auto" else parse_bytes(host, of_bytes=granted_bytes)
        return host_bytes, None if disk is None else str(disk)
    if host != "auto":
        parse_bytes(host, of_bytes=host_bytes_granted())  # a size that cannot be read is an error on the CPU, too
    return 0, tempfile.gettempdir() if disk is None else str(disk)


def room_for_homes(device: torch.device, host: int | str, budget: Budget, folder: str | Path | None) -> tuple[int, int]:
    """Returns the bytes of a device's home tier that training state may take, and those of files in `folder` for state
    that does not fit there. A GPU must be able to access files; on the CPU files are the home tier unless `host` says
    how much memory to use before them."""
    if device.type == "cuda":
        spills = folder is not None and reads_any_host_memory(device)
        return budget.host_bytes, budget.disk_bytes if spills else 0
    host_bytes = 0 if host == "auto" else parse_bytes(host, of_bytes=host_bytes_granted())
    return (host_bytes, budget.disk_bytes) if host_bytes else (budget.disk_bytes, 0)


def granted_bytes(model: torch.nn.Module, device: torch.device, memory: int | str) -> int:
    """Returns the budget that `memory` asks for. `"auto"` is what is allocated already plus a share of what is free."""
    if memory != "auto":
        return parse_bytes(memory, of_bytes=device_bytes(device))
    if device.type == "cuda":
        free_bytes = torch.cuda.mem_get_info(device)[0]
        allocated_bytes = torch.cuda.memory_allocated(device)
        free_bytes += torch.cuda.memory_reserved(device) - allocated_bytes
    else:
        free_bytes = min(psutil.virtual_memory().available, _free_cgroup_bytes())
        allocated_bytes = _model_bytes(model)
    granted = allocated_bytes + int(free_bytes * MEMORY.auto_share)
    log.info(
        "memory='auto': %s are free on %s, of which %s stay free; with what is already allocated the budget is %s",
        format_bytes(free_bytes),
        device,
        format_bytes(free_bytes - int(free_bytes * MEMORY.auto_share)),
        format_bytes(granted),
    )
    return granted


def weight_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of the parameters and buffers."""
    return _bytes_of([*model.parameters(), *model.buffers()])


def _model_bytes(model: torch.nn.Module) -> int:
    """Returns the bytes of the parameters, the buffers and the gradients that exist."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return _bytes_of([*model.parameters(), *model.buffers(), *gradients])


def _bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    known = [tensor for tensor in tensors if tensor.layout is torch.strided and not is_lazy(tensor)]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in known}.values())


def _free_cgroup_bytes() -> int:
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
    return min(psutil.virtual_memory().total, _free_cgroup_bytes())


@cache
def measure_machine(device: torch.device, folder: str | None) -> Machine:
    """Measures the links and the disk, once per process. It takes about a second."""
    write_rate, read_rate = _measure_disk(folder) if folder is not None else (0.0, 0.0)
    disk_bytes = int(shutil.disk_usage(folder).free * MEMORY.disk_share) if folder is not None else 0
    if device.type == "cuda":
        out_rate, in_rate, share, latency_s = _measure_links(device)
        name, host_bytes = f"cuda {torch.cuda.get_device_name(device)}", host_bytes_granted()
    else:
        out_rate, in_rate, share, latency_s = write_rate, read_rate, MEMORY.disk_duplex_share, MEMORY.disk_latency_s
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
    """Returns the rates out and in, the share of its rate that each keeps while both run, and a small copy's
    seconds."""
    num_bytes = MEMORY.link_bytes
    slab = PinnedSlab(2 * num_bytes)
    on_host = slab.bytes[:num_bytes], slab.bytes[num_bytes:]
    on_device = torch.empty(2, num_bytes, dtype=torch.uint8, device=device)
    streams = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def seconds(*, out: bool, back: bool, size: int = num_bytes, repeats: int = MEMORY.num_link_copies) -> float:
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

    seconds(out=True, back=True)  # the first copies also map memory and are not counted
    out_s, back_s, both_s = seconds(out=True, back=False), seconds(out=False, back=True), seconds(out=True, back=True)
    small_s = seconds(out=True, back=False, size=MEMORY.latency_bytes, repeats=MEMORY.num_latency_copies)
    slab.close()
    share = min(1.0, max(out_s, back_s) / both_s)
    return num_bytes / out_s, num_bytes / back_s, share, min(small_s, MEMORY.most_latency_s)


def _measure_disk(folder: str) -> tuple[float, float]:
    num_bytes = MEMORY.disk_bytes
    file = SwapFile(folder, GIB)
    cpu = torch.device("cpu")
    lane = DiskLane("measure", file, cpu)
    # One chunk is copied many times, so that measuring needs little memory; random content would advance the user's
    # generator.
    content = torch.arange(MEMORY.chunk_bytes // torch.int32.itemsize, dtype=torch.int32).view(torch.uint8)
    offset = file.take(num_bytes)
    assert offset is not None
    places = range(offset, offset + num_bytes, content.nbytes)

    def write() -> Future[float]:
        return [lane.write(content, place, content.nbytes) for place in places][-1]

    def read(after: Future[float]) -> Future[float]:
        return [lane.read(content, place, content.nbytes, after) for place in places][-1]

    def rate(start: float, done: Future[float]) -> float:
        return num_bytes / max(done.result() - start, 1e-6)

    write().result()
    write_rate = rate(time.perf_counter(), written := write())
    read_rate = rate(time.perf_counter(), read(written))
    lane.close()
    file.close()
    return write_rate, read_rate


def device_of(model: torch.nn.Module) -> torch.device:
    """Returns the device of a model's parameters."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.device.type in ("cuda", "cpu"):
            device = tensor.device
            return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")
        raise OutcoreError(f"outcore runs on CUDA and CPU; this model is on {tensor.device}")
    raise OutcoreError("this model has no parameters; limit() takes the device from them")
