"""CUDA's allocator, made ready for large blocks: few holes, and nothing that stays in the middle of memory."""

from __future__ import annotations

import os
from collections import deque
from contextlib import suppress

import torch

from outcore.errors import warn
from outcore.memory.settings import MEMORY


def make_ready(device: torch.device) -> None:
    """Before the first step under a budget."""
    if device.type != "cuda":
        return
    _prefer_expandable_segments()
    _ask_for_workspaces(device)


def _prefer_expandable_segments() -> None:
    """Segments that grow leave far fewer holes. A choice the user made stands."""
    if not (os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF")):
        set_them = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
        (set_them or torch.cuda.memory._set_allocator_settings)("expandable_segments:True")


def _ask_for_workspaces(device: torch.device) -> None:
    """cuBLAS gets a workspace for every thread that calls it, for good. Asked for in the middle of a step it would lie
    in the middle of memory and cut the large blocks' room in two: so both threads ask now, when there is little else.
    """
    with suppress(RuntimeError), torch.cuda.device(device), torch.inference_mode(False), torch.enable_grad():
        square = torch.ones(8, 8, device=device, requires_grad=True)
        torch.mm(square, square).sum().backward()


def places(device: torch.device) -> tuple[tuple[int, int], ...]:
    """Address and bytes of every large block there is, from the first page of its row on. Empty where segments do not
    grow: `outcore.planning.allocator.model` knows nothing of those."""
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
    """`torch.cuda.memory_allocated`, without the millisecond that it takes to list all other figures by name."""
    return int(torch._C._cuda_memoryStats(device.index)["allocated_bytes"]["all"]["current"])


def count_restarts(device: torch.device) -> int:
    """How often the allocator gave everything back and started over, so far."""
    return int(torch._C._cuda_memoryStats(device.index)["num_alloc_retries"]) if device.type == "cuda" else 0


class HostPacing:
    """A host that does not wait begins a step while copies of the last one still hold memory, and one step after the
    other needs less than both at once. Where the allocator starts over for that again and again, the host waits: a
    device that has nothing to do for a moment is cheaper than one that is drained and gives its memory back.

    A start over leaves memory laid out otherwise than the plan's first steps found it, and the next step may start over
    for that alone, waited for or not, as may every one after it. So it begins as they did, with an empty cache."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_restarts = self._num_emptied = 0
        self._fits = False  # the step before
        self._started_over = deque[bool](maxlen=MEMORY.num_restarts_looked_at)

    def begin(self, *, fits: bool) -> int:
        """A step begins. `fits`: nobody waits after it, and with a wait its plan would need no starts over. Their
        number so far: those that are new are of the step before, which may have followed another plan."""
        num_restarts = count_restarts(self._device)
        started_over = self._fits and num_restarts > self._num_restarts
        if not self.waits:
            self._started_over.append(started_over)
        self._num_emptied = self._num_emptied + 1 if started_over else 0
        self._num_restarts, self._fits = num_restarts, fits
        if self.waits:
            torch.cuda.synchronize(self._device)
        if started_over and self._num_emptied <= MEMORY.most_emptied:
            torch.cuda.empty_cache()
        return num_restarts

    @property
    def waits(self) -> bool:
        return sum(self._started_over) >= MEMORY.num_restarts_to_wait


class Refusals:
    """Around a step: memory that was refused to one of its ops, and it went on. cuDNN then takes an algorithm that
    needs less and says nothing; its sums may round otherwise than those of the one it takes where there is room."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._num_before = 0
        self._num_untold = 0  # in steps that failed: what cuDNN took then it may take in the next ones, without asking
        self._told = device.type != "cuda"

    def __enter__(self) -> None:
        self._num_before = self._count() - self._num_untold

    def excuse(self) -> None:
        """One that changed no op."""
        self._num_before += 1

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Tells the user, once, when a step ends well."""
        num, self._num_untold = self._count() - self._num_before, 0
        if kind is not None:
            self._num_untold = num - issubclass(kind, torch.OutOfMemoryError)  # that one says so itself
        elif num > 0:
            self._told = True
            warn(
                "an op asked for more memory than there is and went on with less, most likely a convolution "
                "that wants a large workspace; its results may differ in the last bits from a run with more memory "
                "(model.to(memory_format=torch.channels_last) takes smaller workspaces, as does a smaller batch)"
            )

    def _count(self) -> int:
        return 0 if self._told else int(torch._C._cuda_memoryStats(self._device.index)["num_ooms"])
