"""CUDA's caching allocator: prepared for large blocks, and watched for restarts and refused requests."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress

import torch

from outcore.errors import warn
from outcore.memory.settings import MEMORY


def make_ready(device: torch.device) -> None:
    """Prepares the allocator before the first step under a budget."""
    if device.type != "cuda":
        return
    _prefer_expandable_segments()
    _ask_for_workspaces(device)


def _prefer_expandable_segments() -> None:
    """Turns expandable segments on, which fragment far less, unless the user configured the allocator."""
    if not (os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")):
        set_them = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (set_them or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _ask_for_workspaces(device: torch.device) -> None:
    """Makes cuBLAS allocate its workspaces now.

    cuBLAS allocates a workspace for each thread that calls it, and keeps it. Allocated in the middle of a step, it
    would stay in the middle of memory and split the space for large blocks. So the thread of the forward and the thread
    of the backward each multiply two matrices while little else is allocated.
    """
    with suppress(RuntimeError), torch.cuda.device(device), torch.inference_mode(False), torch.enable_grad():
        square = torch.ones(8, 8, device=device, requires_grad=True)
        torch.mm(square, square).sum().backward()


def places(device: torch.device) -> tuple[tuple[int, int], ...]:
    """Returns offset and size of every large block in the expandable segment. Empty without expandable segments, which
    is all that `outcore.planning.allocator.model` covers."""
    if device.type != "cuda":
        return ()
    stream = torch.cuda.current_stream(device).cuda_stream
    rows = [
        segment
        for segment in torch.cuda.memory_snapshot()
        if (segment["device"], segment["stream"], segment["segment_type"]) == (device.index, stream, "large")
        and segment.get("is_expandable")
        and tuple(segment.get("segment_pool_id", (0, 0))) == (0, 0)
    ]
    first = min((segment["address"] for segment in rows), default=0)
    blocks = [block for segment in rows for block in segment["blocks"] if block["state"] != "inactive"]
    return tuple((block["address"] - first, block["size"]) for block in blocks)


def allocated_bytes(device: torch.device) -> int:
    """Returns `torch.cuda.memory_allocated` without formatting all other statistics, which takes a millisecond."""
    return int(torch._C._cuda_memoryStats(device.index)["allocated_bytes"]["all"]["current"])


def count_restarts(device: torch.device) -> int:
    """Returns how often the allocator has restarted so far: it freed its whole cache and tried again."""
    return int(torch._C._cuda_memoryStats(device.index)["num_alloc_retries"]) if device.type == "cuda" else 0


class HostPacing:
    """Decides whether the host waits for the device before a step.

    A host that does not wait starts a step while copies of the previous one still hold memory, and both together may
    need more than there is. If the allocator restarts for that reason again and again, the host waits: an idle moment
    of the device is cheaper than a restart, which synchronizes the device and frees the cache.

    After a restart, memory is laid out differently than in the first steps of the plan, and the next steps may restart
    for that reason alone. So the step after a restart begins with an empty cache, as the first steps did.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_restarts = self._num_emptied = 0
        self._fits = False  # whether the previous step's plan fits
        self._restarted = deque[bool](maxlen=MEMORY.num_restarts_looked_at)

    def begin(self, *, fits: bool) -> int:
        """Called when a step begins. `fits` says that its plan was measured without a restart while the host waited.
        Returns the number of restarts so far; new ones belong to the previous step, which may have had another plan."""
        num_restarts = count_restarts(self._device)
        restarted = self._fits and num_restarts > self._num_restarts
        if not self.waits:
            self._restarted.append(restarted)
        self._num_emptied = self._num_emptied + 1 if restarted else 0
        self._num_restarts, self._fits = num_restarts, fits
        if self.waits:
            torch.cuda.synchronize(self._device)
        if restarted and self._num_emptied <= MEMORY.most_emptied:
            torch.cuda.empty_cache()
        return num_restarts

    @property
    def waits(self) -> bool:
        return sum(self._restarted) >= MEMORY.num_restarts_to_wait


class Refusals:
    """A context manager around a step that warns if an op was refused memory and continued.

    cuDNN then silently chooses an algorithm with a smaller workspace, whose sums may round differently.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_before = 0
        self._num_untold = (
            0  # refusals in failed steps: cuDNN may keep the algorithm it chose then without asking again
        )
        self._told = device.type != "cuda"

    def __enter__(self) -> None:
        self._num_before = self._count() - self._num_untold

    def excuse(self) -> None:
        """Discounts a refusal that changed no op."""
        self._num_before += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Warns the user once, when a step has succeeded."""
        num, self._num_untold = self._count() - self._num_before, 0
        if kind is not None:
            self._num_untold = num - issubclass(kind, torch.OutOfMemoryError)  # the error itself tells the user
        elif num > 0:
            self._told = True
            warn(
                "an op asked for more memory than there is and went on with less, most likely a convolution "
                "that wants a large workspace; its results may differ in the last bits from a run with more memory "
                "(model.to(memory_format=torch.channels_last) takes smaller workspaces, as does a smaller batch)"
            )

    def _count(self) -> int:
        return 0 if self._told else int(torch._C._cuda_memoryStats(self._device.index)["num_ooms"])
