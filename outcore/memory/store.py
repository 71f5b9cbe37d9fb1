"""Device -> Store: where swapped bytes are kept, in pinned host memory first and then in the swap file.

Pinned memory is mapped with huge pages, touched by all cores and registered once. Parcels are ranges of it, so nothing
is pinned while a planned step runs, and nothing is rounded up to powers of two. There is one copy stream per direction.

Three rules prevent wrong gradients:
- the target of a swap-in is allocated on the compute stream, and the copy stream waits for it before it writes;
- a swap-in waits for its own swap-out, and a host range is reused only after the last copy that reads it;
- the compute stream is looked up at each use, because users train on streams of their own.
"""

from __future__ import annotations

import mmap
import sys
import warnings
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from outcore.errors import StoreError
from outcore.memory.clock import delay_stream
from outcore.memory.disk import DiskLane, SwapFile
from outcore.memory.extents import Extents
from outcore.memory.pinning import pin, unpin
from outcore.memory.settings import MEMORY
from outcore.units import format_bytes


class PinnedSlab:
    """One piece of pinned host memory."""

    def __init__(self, num_bytes: int, device: torch.device | None = None) -> None:
        self.map = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.map.madvise(mmap.MADV_HUGEPAGE)  # far fewer pages to fault in and to pin
        self.bytes = torch.frombuffer(self.map, dtype=torch.uint8)
        self.bytes.zero_()  # PyTorch's threads touch it in parallel, so every core maps a part
        self.extents = Extents(num_bytes, MEMORY.page_bytes)
        self.given: deque[tuple[int, int]] = deque()  # freed ranges; an object may die, and append here, during `take`
        if pin(self.bytes.data_ptr(), num_bytes):
            # Also without a call of `close`: memory that is unmapped but still registered can never be registered
            # again.
            self._unpin: weakref.finalize[..., PinnedSlab] | None = weakref.finalize(self, _unpin, self.bytes, device)
            self._unpin.atexit = False
        else:
            self._unpin = None
            warnings.warn(
                f"outcore: {format_bytes(num_bytes)} of host memory could not be pinned; copies from pageable memory "
                "are about four times slower (lower host=..., or raise the locked-memory limit)",
                stacklevel=2,
            )

    def take(self, num_bytes: int) -> int | None:
        self._take_back()
        return self.extents.take(num_bytes)

    def used_bytes(self) -> int:
        self._take_back()
        return self.extents.used_bytes

    def _take_back(self) -> None:
        while self.given:
            self.extents.give(*self.given.popleft())

    def close(self) -> None:
        if self._unpin is not None:
            self._unpin()


class Parcel:
    """The bytes of one value outside the device. They are freed with the last reference to the parcel."""

    __slots__ = ("file", "in_done", "num_bytes", "offset", "out_done", "slab", "source", "store", "stream", "tier")

    def __init__(self, store: Store, num_bytes: int) -> None:
        self.store = store
        self.num_bytes = num_bytes
        self.tier = ""
        self.slab: PinnedSlab | None = None
        self.file: SwapFile | None = None
        self.offset = 0
        self.source: torch.Tensor | None = None  # kept alive until compute has waited for the swap-out
        self.out_done: torch.cuda.Event | Future[float] | None = None
        self.in_done: torch.cuda.Event | Future[float] | None = None
        self.stream: torch.cuda.Stream | None = None  # the stream on which a swap-in's target was allocated

    def wait_out(self) -> None:
        """Makes the compute stream wait for the swap-out, and drops the source."""
        self.store.wait(self.out_done)
        self.source = None

    def wait_in(self) -> None:
        """Makes the compute stream wait for the swap-in."""
        self.store.wait(self.in_done)

    def abandon_in(self) -> None:
        """Called when the target of a swap-in dies unread: the stream that owns its memory waits for the copy. A disk
        lane needs no wait because it keeps the target alive."""
        if self.stream is not None and isinstance(self.in_done, torch.cuda.Event):
            self.stream.wait_event(self.in_done)

    def __del__(self) -> None:
        if self.tier:
            self.store.release(self)


class Store:
    """The tiers below one device."""

    def __init__(
        self, device: torch.device, host_bytes: int, disk_bytes: int = 0, folder: str | Path | None = None
    ) -> None:
        self.device = device
        self.host_bytes = host_bytes if device.type == "cuda" else 0
        self.disk_bytes = disk_bytes
        self.folder = folder
        self.delay_s = 0.0  # tests slow copies down to provoke races
        self.slabs: list[PinnedSlab] = []
        self.file: SwapFile | None = None
        self.num_parcels = 0
        self._is_forsaken = False  # `close` was called while parcels were in use
        self.peak_bytes = {"host": 0, "disk": 0}
        self._lanes: dict[str, DiskLane] = {}
        self._late: list[tuple[list[Future[float]], int, int]] = []
        self._pinning: ThreadPoolExecutor | None = None
        if device.type == "cuda":
            self.out_stream = torch.cuda.Stream(device)
            self.in_stream = torch.cuda.Stream(device)

    # -- space --------------------------------------------------------------------------------------------------------

    def used_bytes(self, tier: str) -> int:
        self._sweep()
        if tier == "host":
            return sum(slab.used_bytes() for slab in self.slabs)
        return self.file.used_bytes() if self.file else 0

    @property
    def pinned_bytes(self) -> int:
        """Bytes of pinned host memory, whether in use or not."""
        return sum(slab.extents.capacity_bytes for slab in self.slabs)

    def reserve(self, num_bytes: int) -> None:
        """Pins host memory until there are `num_bytes` in all, or as many as the host budget allows."""
        if missing_bytes := self.missing_bytes(num_bytes):
            self._add_slab(missing_bytes)

    def reserve_beside(self, num_bytes: int) -> Future[None]:
        """Calls `reserve` in a thread, because pinning takes half a second per GiB and training can continue
        meanwhile."""
        if not self.missing_bytes(num_bytes):
            done: Future[None] = Future()
            done.set_result(None)
            return done
        if self._pinning is None:
            self._pinning = ThreadPoolExecutor(1, "outcore-pinning")
        return self._pinning.submit(self.reserve, num_bytes)

    def missing_bytes(self, num_bytes: int) -> int:
        """Returns how many of `num_bytes` are not pinned yet."""
        if self.device.type != "cuda":
            return 0
        return max(0, min(num_bytes, self.host_bytes) - self.pinned_bytes)

    def shrink(self, host_bytes: int) -> None:
        """From now on `host_bytes` may be pinned. What is more is given back where nothing is in use."""
        self.host_bytes = host_bytes
        if self.pinned_bytes > host_bytes and not self.num_parcels:
            torch.cuda.synchronize(self.device)
            while self.slabs:
                self.slabs.pop().close()

    def _add_slab(self, num_bytes: int) -> PinnedSlab:
        page_bytes = MEMORY.huge_page_bytes
        self.slabs.append(PinnedSlab(-(-num_bytes // page_bytes) * page_bytes, self.device))
        return self.slabs[-1]

    def _take(self, num_bytes: int, tiers: tuple[str, ...]) -> Parcel | None:
        parcel = Parcel(self, num_bytes)
        if "host" in tiers and self._take_host(parcel):
            parcel.tier = "host"
        elif "disk" in tiers and self._take_disk(parcel):
            parcel.tier = "disk"
        if not parcel.tier:
            return None
        self.num_parcels += 1
        self.peak_bytes[parcel.tier] = max(self.peak_bytes[parcel.tier], self.used_bytes(parcel.tier))
        return parcel

    def _take_host(self, parcel: Parcel) -> bool:
        for slab in self.slabs:
            offset = slab.take(parcel.num_bytes)
            if offset is not None:
                parcel.slab, parcel.offset = slab, offset
                return True
        free_bytes = self.host_bytes - self.pinned_bytes
        if free_bytes < parcel.num_bytes:
            return False
        slab = self._add_slab(max(parcel.num_bytes, min(free_bytes, MEMORY.slab_bytes)))
        offset = slab.take(parcel.num_bytes)
        if offset is None:
            return False
        parcel.slab, parcel.offset = slab, offset
        return True

    def _take_disk(self, parcel: Parcel) -> bool:
        if not self.disk_bytes or self.folder is None:
            return False
        if self.file is None:
            self.file = SwapFile(self.folder, self.disk_bytes)
            self._lanes = {name: DiskLane(name, self.file, self.device) for name in ("swap_out", "swap_in")}
            weakref.finalize(self, _close_lanes, tuple(self._lanes.values()))  # also when the interpreter ends
        self._sweep()
        offset = self.file.take(parcel.num_bytes)
        if offset is None:
            return False
        parcel.file, parcel.offset = self.file, offset
        return True

    def release(self, parcel: Parcel) -> None:
        """Frees a parcel's range once no copy reads or writes it. Never blocks, because any thread may call it."""
        self.num_parcels -= 1
        if self._is_forsaken and not self.num_parcels:
            self.slabs = []
        dones = (parcel.out_done, parcel.in_done)
        lanes = [done for done in dones if isinstance(done, Future) and not done.done()]
        if lanes:
            self._late.append((lanes, parcel.offset, parcel.num_bytes))
            return
        if isinstance(parcel.in_done, torch.cuda.Event) and not parcel.in_done.query():
            self.out_stream.wait_event(parcel.in_done)
        if parcel.source is not None and isinstance(parcel.out_done, torch.cuda.Event):
            self.wait(parcel.out_done)
        if parcel.slab is not None:
            parcel.slab.given.append((parcel.offset, parcel.num_bytes))
        elif parcel.file is not None:
            parcel.file.give(parcel.offset, parcel.num_bytes)

    def _sweep(self) -> None:
        """Frees the ranges of parcels that were released while a disk lane was still copying them."""
        late, self._late = self._late, []
        for lanes, offset, num_bytes in late:
            if all(done.done() for done in lanes) and self.file is not None:
                self.file.give(offset, num_bytes)
            else:
                self._late.append((lanes, offset, num_bytes))

    # -- copies -------------------------------------------------------------------------------------------------------

    def send(self, source: torch.Tensor, tiers: tuple[str, ...] = ("host", "disk")) -> Parcel | None:
        """Starts copying a byte tensor out of the device. Returns None if no tier has enough space."""
        parcel = self._take(source.numel(), tiers)
        if parcel is None:
            return None
        parcel.source = source
        if parcel.slab is None:
            lane = self._lanes["swap_out"]
            lane.delay_s = self.delay_s
            parcel.out_done = lane.write(source, parcel.offset, parcel.num_bytes)
            return parcel
        self.out_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.out_stream):
            delay_stream(self.delay_s)
            self._bytes_of(parcel).copy_(source, non_blocking=True)
            parcel.out_done = self.out_stream.record_event()
        return parcel

    def fetch(self, parcel: Parcel) -> torch.Tensor:
        """Starts copying a parcel back. Returns its byte tensor on the device, which may be read after `wait_in`."""
        target = torch.empty(parcel.num_bytes, dtype=torch.uint8, device=self.device)
        if parcel.slab is None:
            assert isinstance(parcel.out_done, Future)
            lane = self._lanes["swap_in"]
            lane.delay_s = self.delay_s
            parcel.in_done = lane.read(target, parcel.offset, parcel.num_bytes, parcel.out_done)
            return target
        parcel.stream = torch.cuda.current_stream(self.device)
        self.in_stream.wait_stream(parcel.stream)
        if isinstance(parcel.out_done, torch.cuda.Event):
            self.in_stream.wait_event(parcel.out_done)
        with torch.cuda.stream(self.in_stream):
            delay_stream(self.delay_s)
            target.copy_(self._bytes_of(parcel), non_blocking=True)
            parcel.in_done = self.in_stream.record_event()
        return target

    def _bytes_of(self, parcel: Parcel) -> torch.Tensor:
        assert parcel.slab is not None
        return parcel.slab.bytes[parcel.offset : parcel.offset + parcel.num_bytes]

    def wait(self, done: torch.cuda.Event | Future[float] | None) -> None:
        if isinstance(done, Future):
            done.result()
        elif done is not None:
            torch.cuda.current_stream(self.device).wait_event(done)

    def close(self) -> None:
        """Frees everything. Raises StoreError if parcels are in use, unless an exception is being handled: the frames
        of a failed step still hold parcels, and a StoreError would hide its error. In that case host memory is freed
        with the last parcel, and the rest with this store or by another call."""
        if self._pinning is not None:
            self._pinning.shutdown(cancel_futures=True)
            self._pinning = None
        if self.num_parcels and sys.exc_info()[1] is not None:
            self.forsake()
            return
        if self.num_parcels:
            raise StoreError(f"{self.num_parcels} swapped values are still in use; end their step before closing")
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for lane in self._lanes.values():
            lane.close()
        self._sweep()
        for slab in self.slabs:
            slab.close()
        if self.file is not None:
            self.file.close()
        self.slabs, self.file, self._lanes = [], None, {}

    def forsake(self) -> None:
        """Stops using the store: host memory is freed with the last parcel, the rest with this store."""
        self._is_forsaken = True


def _unpin(host: torch.Tensor, device: torch.device | None) -> None:
    try:
        torch.cuda.synchronize(device)  # a copy may still be running
    finally:
        unpin(host.data_ptr())


def _close_lanes(lanes: tuple[DiskLane, ...]) -> None:
    for lane in lanes:
        lane.close()
