"""The disk tier: one unnamed swap file, and one thread for each direction that copies to or from it.

The file is unlinked as soon as it is open, so a killed process leaves nothing behind. Reads and writes bypass the page
cache (O_DIRECT) where the file system supports that, because the page cache would keep in host memory the bytes that
are meant to leave it. Space is reserved before the first byte is copied, so a full disk raises an error at once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import queue
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import torch

from outcore.errors import StoreError
from outcore.memory.extents import Extents
from outcore.memory.settings import MEMORY
from outcore.memory.tensors import data_ptr
from outcore.units import format_bytes

Copy = Callable[["torch.cuda.Event | None"], None]


class SwapFile:
    """An unnamed file of at most `capacity_bytes`."""

    def __init__(self, folder: str | Path, capacity_bytes: int) -> None:
        self.folder = Path(folder)
        self.capacity_bytes = capacity_bytes
        self.extents = Extents(0, MEMORY.page_bytes)
        self._lock = threading.Lock()
        self._given: deque[tuple[int, int]] = deque()
        self.direct = True
        self.fd = self._open()
        self._close = weakref.finalize(
            self, os.close, self.fd
        )  # also without a call of `close`, to free the disk's blocks

    def _open(self) -> int:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe, name = tempfile.mkstemp(prefix="outcore-", suffix=".swap", dir=self.folder)
        except OSError as error:
            raise StoreError(
                f"cannot make a swap file in {self.folder} ({error.strerror}); name a writable folder with disk=..."
            ) from None
        try:
            try:
                return os.open(name, os.O_RDWR | os.O_DIRECT)
            except OSError:  # tmpfs and some network file systems have no direct I/O
                self.direct = False
                return os.open(name, os.O_RDWR)
        finally:
            os.close(probe)
            os.unlink(name)

    def take(self, num_bytes: int) -> int | None:
        """Reserves a range of the file and returns its offset, or None when the limit is reached. Raises StoreError
        when the disk is full."""
        with self._lock:
            self._take_back()
            offset = self.extents.take(num_bytes)
            if offset is None:
                size = max(
                    self.extents.round_up(num_bytes),
                    min(MEMORY.file_growth_bytes, self.capacity_bytes // MEMORY.file_growth_parts),
                )
                size = min(self.extents.round_up(size), self.capacity_bytes - self.extents.capacity_bytes)
                if size < self.extents.round_up(num_bytes):
                    return None
                size = self._reserve(self.extents.capacity_bytes, size, self.extents.round_up(num_bytes))
                self.extents.grow(size)
                offset = self.extents.take(num_bytes)
            return offset

    def give(self, offset: int, num_bytes: int) -> None:
        """Frees a range. It takes no lock because it is called when an object dies, which may happen inside `take`."""
        self._given.append((offset, num_bytes))

    def used_bytes(self) -> int:
        with self._lock:
            self._take_back()
            return self.extents.used_bytes

    def _take_back(self) -> None:
        while self._given:
            self.extents.give(*self._given.popleft())

    def _reserve(self, offset: int, num_bytes: int, at_least_bytes: int) -> int:
        """Reserves blocks of the disk for the file: `num_bytes`, or only `at_least_bytes` if the disk has no more."""
        try:
            os.posix_fallocate(self.fd, offset, num_bytes)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
                os.ftruncate(self.fd, offset + num_bytes)
            elif num_bytes > at_least_bytes:
                return self._reserve(offset, at_least_bytes, at_least_bytes)
            else:
                raise StoreError(
                    f"the disk at {self.folder} has no room for {format_bytes(num_bytes)} more of swap "
                    f"({error.strerror}); free some space, name another folder with disk=..., or raise the budget"
                ) from None
        return num_bytes

    def close(self) -> None:
        self.fd = -1
        self._close()


class DiskLane:
    """A thread that copies device tensors to the swap file, or back, one after the other."""

    def __init__(self, name: str, file: SwapFile, device: torch.device) -> None:
        self.file = file
        self.device = device
        self.delay_s = 0.0  # tests slow the lane down to provoke races
        self._staging = mmap.mmap(-1, MEMORY.chunk_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._staging))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self.work, name=f"outcore-{name}", daemon=True)
        self._thread.start()

    def write(self, source: torch.Tensor, offset: int, num_bytes: int) -> Future[float]:
        """Starts copying a byte tensor into the file. The result of the future is the time when the copy ended."""
        return self._submit(lambda ready: self._write(source, offset, num_bytes, ready))

    def read(self, target: torch.Tensor, offset: int, num_bytes: int, after: Future[float]) -> Future[float]:
        """Starts copying from the file into a byte tensor, after the write `after` has ended."""

        def copy(ready: torch.cuda.Event | None) -> None:
            after.result()
            self._read(target, offset, num_bytes, ready)

        return self._submit(copy)

    def _submit(self, copy: Copy) -> Future[float]:
        done: Future[float] = Future()
        ready = torch.cuda.current_stream(self.device).record_event() if self._stream is not None else None
        work: list[Copy] = [copy]

        def job() -> None:
            """Drops the tensor before it sets `done`, so that its memory is free for those that wait."""
            failure = self._attempt(work.pop(), ready)
            if failure is None:
                done.set_result(time.perf_counter())
            else:
                done.set_exception(failure)

        self._jobs.put(job)
        return done

    def _attempt(self, copy: Copy, ready: torch.cuda.Event | None) -> StoreError | None:
        """Copies, and returns the error if there is one, without its traceback, whose frames would hold the tensor."""
        try:
            if self.delay_s:
                time.sleep(self.delay_s)
            copy(ready)
        except BaseException as error:
            return StoreError(f"swapping to {self.file.folder} failed ({error}); free space or raise memory")
        return None

    def work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job

    def _write(self, source: torch.Tensor, offset: int, num_bytes: int, ready: torch.cuda.Event | None) -> None:
        for start in range(0, num_bytes, MEMORY.chunk_bytes):
            size = min(MEMORY.chunk_bytes, num_bytes - start)
            self._move(source, start, size, ready, out=True)
            self._all(os.pwritev, size, offset + start)

    def _read(self, target: torch.Tensor, offset: int, num_bytes: int, ready: torch.cuda.Event | None) -> None:
        for start in range(0, num_bytes, MEMORY.chunk_bytes):
            size = min(MEMORY.chunk_bytes, num_bytes - start)
            self._all(os.preadv, size, offset + start)
            self._move(target, start, size, ready, out=False)

    def _all(self, transfer: Callable[[int, list[memoryview], int], int], size: int, offset: int) -> None:
        size = -(-size // MEMORY.page_bytes) * MEMORY.page_bytes
        done = 0
        while done < size:
            moved = transfer(self.file.fd, [memoryview(self._staging)[done:size]], offset + done)
            if moved <= 0:
                raise OSError(errno.EIO, "the swap file ended early")
            done += moved

    def _move(self, tensor: torch.Tensor, start: int, size: int, ready: torch.cuda.Event | None, *, out: bool) -> None:
        if self._stream is None:
            pointer = data_ptr(tensor) + start
            ctypes.memmove(*((self._address, pointer) if out else (pointer, self._address)), size)
            return
        staged = torch.frombuffer(self._staging, dtype=torch.uint8, count=size)
        with torch.cuda.stream(self._stream):
            if ready is not None:
                self._stream.wait_event(ready)
            if out:
                staged.copy_(tensor[start : start + size])
            else:
                tensor[start : start + size].copy_(staged)
        self._stream.synchronize()

    def close(self) -> None:
        self._jobs.put(None)
        if (
            threading.current_thread() is not self._thread
        ):  # this thread itself may drop the last reference to the store
            self._thread.join(timeout=MEMORY.lane_end_s)
