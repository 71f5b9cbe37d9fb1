"""A planning function and its arguments -> a future: planning in parallel to training, in a process of its own.

Training continues with the current plan while a better one is searched for. The process is started when it is first
needed, serves all kinds of steps of its owner, and ends when the owner closes it or is garbage collected.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from outcore.errors import OutcoreError

T = TypeVar("T")


class PlanningProcess:
    """Runs functions of `outcore.planning`, one after the other, in another process."""

    def __init__(self) -> None:
        self._worker: _Worker | None = None

    def submit(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
        """Starts `function(*args, **kwargs)`. The future raises what the function raises."""
        if self._worker is not None and not self._worker.is_alive:
            self.close()  # it was killed: reap it and start another one
        if self._worker is None:
            self._worker = _Worker()
            weakref.finalize(self, self._worker.stop)
        return self._worker.submit(function, args, kwargs)

    def close(self) -> None:
        """Ends the process and cancels unfinished requests."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None


class _Worker:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outcore.planning.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
            start_new_session=True,  # so that an interrupt at the terminal reaches only the training process
        )
        self._waiting: deque[Future[Any]] = deque()
        self._requests: SimpleQueue[bytes | None] = SimpleQueue()
        self._lock = threading.Lock()
        self.is_alive = True  # until its output ends, which is known before its exit status
        for target in (self._read, self._write):
            threading.Thread(target=target, name="outcore-planning", daemon=True).start()

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Future[Any]:
        """Queues a request and returns at once. A thread writes it, because the process reads a request only after it
        has answered the previous one, and a pipe holds only 64 KiB, less than one trace."""
        future: Future[Any] = Future()
        request = pickle.dumps((function, args, kwargs), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            self._waiting.append(future)
            if self.is_alive:
                self._requests.put(request)
            else:
                self._fail()
        return future

    def _write(self) -> None:
        assert self._process.stdin is not None
        while (request := self._requests.get()) is not None:
            try:
                self._process.stdin.write(request)
                self._process.stdin.flush()
            except (OSError, ValueError):
                with self._lock:
                    self._fail()
                return

    def _read(self) -> None:
        assert self._process.stdout is not None
        while True:
            try:
                succeeded, result = pickle.load(self._process.stdout)
            except (EOFError, OSError, ValueError, pickle.UnpicklingError):
                with self._lock:
                    self._fail()
                return
            with self._lock:
                future = self._waiting.popleft() if self._waiting else None
            if future is not None and future.set_running_or_notify_cancel():
                if succeeded:
                    future.set_result(result)
                else:
                    future.set_exception(result)

    def _fail(self) -> None:
        self.is_alive = False
        self._requests.put(None)
        while self._waiting:
            future = self._waiting.popleft()
            if future.set_running_or_notify_cancel():
                future.set_exception(
                    OutcoreError("the planning process ended before it answered; plan in this process")
                )

    def stop(self) -> None:
        with suppress(OSError):
            self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError, ValueError):
                if pipe is not None:
                    pipe.close()
