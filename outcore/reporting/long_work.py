"""Work that the user waits for -> a bar on stderr and a line in the log, if it takes longer than two seconds.

Most plans are made in less, and then nothing is shown. Where stderr is no terminal there is only the log.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

log = logging.getLogger("outcore")

LONG_S = 2.0  # that one waits without wondering (guessed)


@contextmanager
def shown_if_long(what: str, *, after_s: float = LONG_S) -> Iterator[Callable[[str, float], None]]:
    """`what` is done while this is open. Yields what tells about parts of it, and how far it is from 0 to 1."""
    bar = _Bar(what)
    timer = threading.Timer(after_s, bar.show)
    timer.daemon = True
    started_s = time.perf_counter()
    timer.start()
    try:
        yield bar.tell
    finally:
        timer.cancel()
        timer.join()
        bar.close()
        seconds = time.perf_counter() - started_s
        if seconds > after_s:
            log.info("%s took %.1f s", what, seconds)


class _Bar:
    """Not to be seen before `show`."""

    def __init__(self, what: str) -> None:
        self._what, self._part, self._done = what, "", 0.0
        self._progress: Progress | None = None

    def tell(self, part: str, done: float) -> None:
        self._part, self._done = part, done
        if self._progress is not None:
            self._update(self._progress)

    def show(self) -> None:
        log.info("%s takes more than a moment", self._what)
        console = Console(stderr=True)
        if console.is_terminal:
            columns = SpinnerColumn(), TextColumn("outcore: {task.description}"), BarColumn(), TimeElapsedColumn()
            progress = Progress(*columns, console=console, transient=True)
            progress.add_task(self._what, total=1.0 if self._part else None)
            progress.start()
            self._update(progress)
            self._progress = progress

    def _update(self, progress: Progress) -> None:
        if self._part:
            description = f"{self._what}: {self._part}"
            progress.update(progress.task_ids[0], description=description, total=1.0, completed=self._done)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
