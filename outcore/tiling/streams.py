"""Work in order, and order between works: one surface, a CUDA and a thread implementation.

The executor is written once against `Stream` and `Event`. On CUDA `run` enqueues kernels and copies at once and the
device orders them; on CPU a stream is a thread that takes closures from a queue, so the same schedule, the same
waits and the same races exist there. A thread stream can be slowed (`delay_s` per operation, `rate_per_s` for the
stated work): tests use it to open races that speed hides, and the simulated-devices benchmark to make devices of any
speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point on a stream."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    """Operations in order. `work` (bytes or flop) is what a slowed stream is slowed by; a device ignores it."""

    def run(self, operation: Callable[[], object], work: float = 0.0) -> None: ...

    def record(self) -> Event: ...

    def wait(self, event: Any, *, forgiving: bool = False) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class ThreadEvent:
    """Set when its thread stream gets there, also when the stream has failed: then waiting raises that failure."""

    def __init__(self) -> None:
        self._reached = threading.Event()
        self.error: BaseException | None = None

    def reach(self, error: BaseException | None) -> None:
        self.error = error
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait()
        if self.error is not None:
            raise self.error

    def query(self) -> bool:
        return self._reached.is_set() and self.error is None


class ThreadStream:
    """A thread that runs closures in order. After a failure it runs nothing more and says so to every waiter."""

    def __init__(self, name: str, *, delay_s: float = 0.0, rate_per_s: float | None = None) -> None:
        self._delay_s = delay_s
        self._rate_per_s = rate_per_s
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._debt_s = 0.0
        self._name = f"outcore {name}"
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def run(self, operation: Callable[[], object], work: float = 0.0) -> None:
        self._put(lambda: self._paced(operation, work))

    def record(self) -> ThreadEvent:
        event = ThreadEvent()
        self._put(lambda: event.reach(self._error))
        return event

    def wait(self, event: Any, *, forgiving: bool = False) -> None:
        def wait_for_event() -> None:
            try:
                event.synchronize()
            except BaseException:
                if not forgiving:
                    raise

        self._put(lambda: self._guarded(wait_for_event))

    def synchronize(self) -> None:
        self.record().synchronize()

    def close(self) -> None:
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _put(self, operation: Callable[[], None]) -> None:
        with self._starting:
            if self._thread is None:  # a product that is only planned needs no thread
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._queue.put(operation)

    def _serve(self) -> None:
        while (operation := self._queue.get()) is not None:
            operation()

    def _guarded(self, operation: Callable[[], object]) -> None:
        if self._error is None:
            try:
                operation()
            except BaseException as error:
                self._error = error

    def _paced(self, operation: Callable[[], object], work: float) -> None:
        started_s = time.perf_counter()
        if self._delay_s:
            time.sleep(self._delay_s)
        self._guarded(operation)
        if self._rate_per_s is not None and self._error is None:
            # What a sleep oversleeps is taken off the next one, so that the average speed is exact.
            self._debt_s += work / self._rate_per_s - (time.perf_counter() - started_s)
            if self._debt_s > 0:
                slept_from_s = time.perf_counter()
                time.sleep(self._debt_s)
                self._debt_s -= time.perf_counter() - slept_from_s


class CudaStream:
    """A torch CUDA stream behind the same surface; also a stream of a green context, wrapped as an external stream."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None) -> None:
        self.stream: torch.cuda.Stream = stream or torch.cuda.Stream(device)

    def run(self, operation: Callable[[], object], work: float = 0.0) -> None:
        with torch.cuda.stream(self.stream):
            operation()

    def record(self) -> torch.cuda.Event:
        event: torch.cuda.Event = torch.cuda.Event(blocking=True)
        event.record(self.stream)
        return event

    def wait(self, event: Any, *, forgiving: bool = False) -> None:
        if isinstance(event, ThreadEvent):  # a CPU lane's: the device cannot wait for a thread, so the host does
            event.synchronize()
            return
        try:
            self.stream.wait_event(event)
        except RuntimeError:
            if not forgiving:
                raise

    def synchronize(self) -> None:
        self.stream.synchronize()

    def close(self) -> None:
        pass
