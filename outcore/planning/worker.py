"""Requests on standard input -> answers on standard output: planning in a process of its own.

`python -m outcore.planning.worker` reads pickled (function, arguments) pairs and writes pickled (succeeded, result)
pairs, in order, until its input ends. Planning needs no torch, so the process starts in a fraction of a second and
holds no device memory. It runs at a low priority: training goes first.
"""

from __future__ import annotations

import os
import pickle
import sys
from contextlib import suppress
from typing import IO

from outcore.planning.settings import WORKER


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answers requests, one after the other, until the input ends."""
    while True:
        try:
            function, args, kwargs = pickle.load(requests)
        except EOFError:
            return
        answer: tuple[bool, object]
        try:
            answer = True, function(*args, **kwargs)
        except Exception as error:
            answer = False, error
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def main() -> None:
    with suppress(OSError):
        os.nice(WORKER.niceness)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # printed text must not mix with the answers
    with suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
