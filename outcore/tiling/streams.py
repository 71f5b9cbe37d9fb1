"""Streams, which run operations in order, and events between them: one interface for CUDA and for threads.

The executor uses only `Stream` and `Event`. On CUDA, `run` enqueues kernels and copies and the device orders them. On
the CPU, a stream is a thread that takes closures from a queue, so that the schedule, the waits and possible races are
the same. A thread stream can be slowed down (`delay_s` per operation, `rate_per_s` for the given work): tests use this
to provoke races, and the benchmark with simulated devices to make devices of any speed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Protocol

import torch


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Stream(Protocol):
    """Runs operations in order. `work` (bytes or flop) determines the delay of a slowed stream; devices ignore it."""

    def run(self, operation: Callable[[], object], work: float = 0.0) -> None: ...

    def record(self) -> Event: ...

    def wait(self, event: Any, *, forgiving: bool = False) -> None: ...

    def synchronize(self) -> None: ...

    def close(self) -> None: ...


class ThreadEvent:
    """Is set when its thread stream reaches it, also if the stream has failed; waiting then raises the failure."""

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
    """A thread that runs closures in order. After a failure it runs nothing more, and every waiter gets the error."""

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
            if self._thread is None:  # started late, because planning needs no thread
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
            # A sleep that takes too long shortens the next one, so that the average speed is exact.
            self._debt_s += work / self._rate_per_s - (time.perf_counter() - started_s)
            if self._debt_s > 0:
                slept_from_s = time.perf_counter()
                time.sleep(self._debt_s)
                self._debt_s -= time.perf_counter() - slept_from_s


class CudaStream:
    """A torch CUDA stream with the same interface; also for a green context's stream, as an external stream."""

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
        if isinstance(event, ThreadEvent):  # of a CPU lane; the host waits, as the device cannot
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
