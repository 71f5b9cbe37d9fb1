"""Device -> Homes: memory outside the device that the device can address. Unused training state is kept there.

A tensor at home is an ordinary tensor of the device whose bytes are elsewhere. On CUDA they are in pinned host memory
that is mapped into the device's address space, so a kernel that reads the tensor reads over the bus. On the CPU they
are in a mapped file. Code that reads a parameter at home therefore gets its bytes, slowly, and nothing is freed while
it is read. Copies between home and device run in two lanes, one per direction.

A GPU that can access files (`outcore.memory.pinning`) may have both tiers: files hold the tensors that do not fit into
host memory. Threads copy these, because such a copy waits for the disk.

Three rules keep the copies correct:
- the target of a copy to the device is allocated on the compute stream, and the copy waits for compute before it
  writes;
- a copy waits for the work that was queued on the compute stream before it, so it sees every write to its source and
  does not overwrite a target that is still read;
- source and target of a copy are kept alive until the copy has ended.

Every allocation has exactly the bytes it was asked for, rounded up to pages.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import tempfile
import time
import weakref
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch

from outcore.errors import StoreError
from outcore.memory.clock import delay_stream
from outcore.memory.device_kind import kind_of
from outcore.memory.meter import BESIDE, see_brought
from outcore.memory.pinning import pin, unpin
from outcore.memory.settings import MEMORY
from outcore.memory.tensors import as_bytes, below_everything, data_ptr
from outcore.units import format_bytes

_HOME = BESIDE

Tier = Literal["host", "disk"]
Done = torch.cuda.Event | Future[torch.cuda.Event | None]  # a copy that was started


class _Memory:
    """The bytes of one tensor at home. They are freed with the last tensor that uses them."""

    __slots__ = ("__weakref__", "host", "num_bytes", "tier")

    def __init__(self, num_bytes: int, host: torch.Tensor | None, tier: Tier) -> None:
        self.num_bytes, self.tier = num_bytes, tier
        self.host = host  # the same bytes as a CPU tensor, where the device is another one


def is_at_home(tensor: torch.Tensor) -> bool:
    """Whether the bytes of `tensor` are outside the device."""
    return tensor.layout is torch.strided and _HOME in tensor.untyped_storage().__dict__


def tier_of(tensor: torch.Tensor) -> Tier | None:
    """Returns the tier of a tensor at home, and None for other tensors."""
    memory = tensor.untyped_storage().__dict__.get(_HOME) if tensor.layout is torch.strided else None
    return memory.tier if memory is not None else None


def host_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns the bytes of a dense tensor as a CPU tensor without copying them, or None if they are on another device.
    Waits until the device has done what was queued."""
    memory = tensor.untyped_storage().__dict__.get(_HOME) if tensor.layout is torch.strided else None
    if tensor.device.type != "cpu" and memory is None:
        return None
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)
    with below_everything():
        return _host_bytes(tensor.detach())


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a one-dimensional view of a dense tensor, in the order of its memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


class Homes:
    """Allocates homes for tensors of one device, and copies between them and the device in two lanes."""

    def __init__(
        self, device: torch.device, limit_bytes: int, folder: str | Path | None = None, *, spill_bytes: int = 0
    ) -> None:
        """`limit_bytes` of the device's home tier may be used. With `spill_bytes`, they are of the host, and so many
        bytes of files in `folder` hold what does not fit there."""
        self.device = device
        self.tier: Tier = "host" if spill_bytes else kind_of(device).home_tier
        self.limit_bytes, self.spill_bytes = limit_bytes, spill_bytes
        self.folder = Path(folder) if folder is not None else None
        self.used_on: dict[str, int] = {"host": 0, "disk": 0}
        self.peak_bytes = 0
        self.written_bytes = 0  # to files
        self.copied_bytes = {"in": 0, "out": 0}
        self.delay_s = 0.0  # tests slow copies down to provoke races
        self._flying: deque[tuple[Done, torch.Tensor]] = deque()
        self._uses: deque[torch.cuda.Event] = deque()  # in compute, where the last ones began
        self._streams: dict[str, torch.cuda.Stream] = {}
        self._threads: dict[str, ThreadPoolExecutor] = {}
        if device.type == "cuda":
            self._streams = {way: torch.cuda.Stream(device) for way in ("in", "out")}
        if device.type != "cuda" or spill_bytes:
            self._threads = {way: ThreadPoolExecutor(1, f"outcore-{way}") for way in ("in", "out")}
            weakref.finalize(self, _stop, tuple(self._threads.values()))

    # -- space --------------------------------------------------------------------------------------------------------

    def check_room(self, num_bytes: int, what: str) -> None:
        """Raises StoreError when `num_bytes` more would exceed the limit. Nothing is allocated."""
        room_bytes = self.limit_bytes + self.spill_bytes
        if self.used_bytes + num_bytes > room_bytes:
            where = "host and disk" if self.spill_bytes else self.tier
            raise StoreError(
                f"{what} needs {format_bytes(num_bytes)} of {where} memory and {format_bytes(self.used_bytes)} are "
                f"in use, but {format_bytes(room_bytes)} may be used; raise {self.tier}=..., or free some"
            )

    @property
    def used_bytes(self) -> int:
        return sum(self.used_on.values())

    def _tier_for(self, num_bytes: int, preferred: Tier) -> Tier:
        """Returns a tier that has room, the preferred one if it does."""
        room_bytes: dict[Tier, int] = {"disk": self.spill_bytes} if self.spill_bytes else {}
        room_bytes[self.tier] = self.limit_bytes
        has_room = [tier for tier in room_bytes if self.used_on[tier] + num_bytes <= room_bytes[tier]]
        return preferred if preferred in has_room or not has_room else has_room[0]

    def empty_like(
        self, tensor: torch.Tensor, dtype: torch.dtype | None = None, tier: Tier | None = None
    ) -> torch.Tensor:
        """Returns a tensor of the device with the size and strides of the dense `tensor` and its bytes at home, on
        `tier` or where those of `tensor` are. Its content is undefined."""
        return self.empty(tensor.size(), tensor.stride(), dtype or tensor.dtype, tier or tier_of(tensor))

    def empty(
        self, size: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, tier: Tier | None = None
    ) -> torch.Tensor:
        num_bytes = size.numel() * dtype.itemsize
        self.check_room(num_bytes, "a tensor of the training state")
        with below_everything():
            storage = self._storage_of(num_bytes, self._tier_for(num_bytes, tier or self.tier))
            return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, size, stride)

    def _storage_of(self, num_bytes: int, tier: Tier) -> torch.UntypedStorage:
        size = -(-max(num_bytes, 1) // MEMORY.page_bytes) * MEMORY.page_bytes
        if tier == "disk":
            storage, memory = _addressed(_in_file(size, num_bytes, self.folder), num_bytes, self.device)
        elif self.device.type == "cuda":
            storage, memory = _pinned(size, num_bytes, self.device)
        else:
            storage, memory = torch.UntypedStorage(num_bytes), _Memory(num_bytes, None, "host")
        self.used_on[tier] += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        weakref.finalize(memory, _give_back, weakref.ref(self), tier, num_bytes).atexit = False
        storage.__dict__[_HOME] = memory
        return storage

    # -- copies -------------------------------------------------------------------------------------------------------

    def fetch(self, home: torch.Tensor) -> tuple[torch.Tensor, Done]:
        """Starts copying a tensor to the device. The result may be read after `wait`."""
        with below_everything(), torch.inference_mode(False):
            target = torch.empty_strided(home.size(), home.stride(), dtype=home.dtype, device=self.device)
            see_brought(target)
            return target, self._copy("in", target, home)

    def send(self, source: torch.Tensor, home: torch.Tensor) -> Done:
        """Starts copying a tensor from the device. `home` may be read after `wait`."""
        with below_everything():
            return self._copy("out", home, source)

    def fill(self, home: torch.Tensor, source: torch.Tensor) -> None:
        """Copies a tensor of the host or of the device, of any type, into `home`, and returns when the copy has
        ended."""
        with below_everything(), torch.no_grad():
            self.note_written(home)
            if source.device.type == self.device.type and tier_of(home) == self.tier:
                home.copy_(source)
                return
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)  # a kernel may still read the old content
            self.on_host(home).copy_(self.on_host(source) if is_at_home(source) else source)

    def note_written(self, home: torch.Tensor) -> None:
        """Called when the bytes of a tensor at home are written."""
        if tier_of(home) == "disk":
            self.written_bytes += home.numel() * home.dtype.itemsize

    def on_host(self, home: torch.Tensor) -> torch.Tensor:
        """Returns a CPU tensor on the bytes of a tensor at home. Neither copies nor kernels are waited for."""
        with below_everything(), torch.no_grad():
            return _host_bytes(home).view(home.dtype).as_strided(home.size(), home.stride())

    def _copy(self, way: str, target: torch.Tensor, source: torch.Tensor) -> Done:
        self._let_go_of_done()
        self.copied_bytes[way] += source.numel() * source.dtype.itemsize
        if way == "out":
            self.note_written(target)
        is_on_disk = tier_of(target if way == "out" else source) == "disk"
        in_thread = is_on_disk or not self._streams
        done = self._in_thread(way, target, source) if in_thread else self._on_stream(way, target, source)
        self._flying.append((done, target if way == "in" else source))
        return done

    def _on_stream(self, way: str, target: torch.Tensor, source: torch.Tensor) -> Done:
        stream = self._streams[way]
        stream.wait_stream(torch.cuda.current_stream(self.device))  # users train on streams of their own
        with torch.cuda.stream(stream):
            delay_stream(self.delay_s)
            _host_bytes(target).copy_(_host_bytes(source), non_blocking=True)
            event: torch.cuda.Event = stream.record_event()
            return event

    def _in_thread(self, way: str, target: torch.Tensor, source: torch.Tensor) -> Done:
        """Copies from or to a file wait for the disk, which the host's main thread must not."""
        pair, stream = [target, source], self._streams.get(way)
        ready = torch.cuda.current_stream(self.device).record_event() if stream is not None else None

        def copy(delay_s: float) -> torch.cuda.Event | None:
            """Copies, and drops both tensors afterwards."""
            try:
                if delay_s:
                    time.sleep(delay_s)
                with torch.no_grad():
                    if stream is None or ready is None:
                        pair[0].copy_(pair[1])
                        return None
                    with torch.cuda.stream(stream):
                        stream.wait_event(ready)
                        _host_bytes(pair[0]).copy_(_host_bytes(pair[1]))
                        copied: torch.cuda.Event = stream.record_event()
                        return copied
            finally:
                pair.clear()

        return self._threads[way].submit(copy, self.delay_s)

    def wait(self, done: Done | None) -> None:
        """Makes compute wait for the copy."""
        event = done.result() if isinstance(done, Future) else done
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    @staticmethod
    def is_over(done: Done) -> bool:
        return done.done() if isinstance(done, Future) else done.query()  # a thread's copy has ended when it returns

    def pace(self) -> None:
        """Compute is about to use something that came from home. A host that runs far ahead of the device sees no copy
        arrive and no room become free: it would fetch nothing ahead, and compute would wait for each copy. So it waits
        until the device has come to one of the last uses, with the work of those after it still in its queue."""
        if self._streams:
            self._uses.append(torch.cuda.current_stream(self.device).record_event())
            if len(self._uses) > MEMORY.most_uses_ahead:
                self._uses.popleft().synchronize()

    def forget(self, done: Done | None) -> None:
        """Called when compute has waited for the copy: its tensor need not be kept alive any more."""
        for at, (flying, _) in enumerate(self._flying):
            if flying is done:
                del self._flying[at]
                return

    def _let_go_of_done(self) -> None:
        while self._flying and self.is_over(self._flying[0][0]):
            self._flying.popleft()

    def close(self) -> None:
        """Waits for all copies. Tensors at home stay valid."""
        for done, _ in self._flying:
            event = done.result() if isinstance(done, Future) else done
            if event is not None:
                event.synchronize()
        self._flying.clear()
        _stop(tuple(self._threads.values()))


def _host_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the bytes of a dense tensor. For a tensor at home on CUDA these are a CPU tensor, as copies need."""
    start, num_bytes = tensor.storage_offset() * tensor.dtype.itemsize, tensor.numel() * tensor.dtype.itemsize
    memory = tensor.untyped_storage().__dict__.get(_HOME)
    whole = memory.host if memory is not None and memory.host is not None else as_bytes(tensor)
    return whole[start : start + num_bytes]


def _pinned(size: int, num_bytes: int, device: torch.device) -> tuple[torch.UntypedStorage, _Memory]:
    mapped = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapped.madvise(mmap.MADV_HUGEPAGE)  # far fewer pages to fault in and to pin
    host = torch.frombuffer(mapped, dtype=torch.uint8)
    host.zero_()  # PyTorch's threads touch it in parallel, so every core maps a part
    if not pin(data_ptr(host), size):
        raise StoreError(
            f"{format_bytes(size)} of host memory could not be pinned for the training state; lower host=..., free "
            "host memory, or raise the locked-memory limit"
        )
    memory = _Memory(num_bytes, host, "host")
    weakref.finalize(memory, _unpin, data_ptr(host), mapped, device).atexit = False
    construct: Any = torch._C._construct_storage_from_data_pointer
    return construct(data_ptr(host), device, num_bytes), memory


def _unpin(address: int, mapped: mmap.mmap, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)  # a kernel may still read over the bus
    unpin(address)
    del mapped  # only now: memory that is unmapped while it is registered can never be registered again


def _addressed(
    file: torch.UntypedStorage, num_bytes: int, device: torch.device
) -> tuple[torch.UntypedStorage, _Memory]:
    """Returns a storage of the device on the bytes of a mapped file."""
    if device.type != "cuda":
        return file, _Memory(num_bytes, None, "disk")
    host = torch.empty(0, dtype=torch.uint8).set_(file)
    memory = _Memory(num_bytes, host, "disk")
    weakref.finalize(memory, _unmap, file, device).atexit = False
    construct: Any = torch._C._construct_storage_from_data_pointer
    return construct(data_ptr(host), device, num_bytes), memory


def _unmap(file: torch.UntypedStorage, device: torch.device) -> None:
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)  # a kernel may still read the file
    del file


def _in_file(size: int, num_bytes: int, folder: Path | None) -> torch.UntypedStorage:
    """Returns a storage on an unnamed file, of which a killed process leaves nothing behind."""
    where = folder or Path(tempfile.gettempdir())
    try:
        where.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix="outcore-", suffix=".state", dir=where)
    except OSError as error:
        raise StoreError(
            f"cannot make a file for the training state in {where} ({error.strerror}); name a writable folder with "
            "disk=..."
        ) from None
    try:
        _reserve(handle, size)
        from_file: Any = torch.UntypedStorage.from_file
        storage: torch.UntypedStorage = from_file(name, True, num_bytes)
        return storage
    except OSError as error:
        raise StoreError(
            f"the disk at {where} has no room for {format_bytes(size)} more of the training state ({error.strerror}); "
            "free some space, or name another folder with disk=..."
        ) from None
    finally:
        os.close(handle)
        os.unlink(name)


def _reserve(handle: int, size: int) -> None:
    """Reserves blocks of the disk, so that a full disk raises an error here instead of a bus error later."""
    try:
        os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
            raise
        os.ftruncate(handle, size)


def _give_back(homes: weakref.ref[Homes], tier: Tier, num_bytes: int) -> None:
    if (ledger := homes()) is not None:
        ledger.used_on[tier] -= num_bytes


def _stop(threads: tuple[ThreadPoolExecutor, ...]) -> None:
    for thread in threads:
        thread.shutdown(wait=False)
