"""Seeds -> a JSON file of verdicts, with several processes.

Each program is checked in a process that may crash or hang: it is then reported and the process replaced. The file is
written after every few programs, and a second call with the same file goes on where the first one ended.
"""

from __future__ import annotations

import collections
import dataclasses
import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

import outcore

HANGS_AFTER_S = 900.0  # as the clock on the wall shows it: a busy machine may stop what runs in the background
SAVED_EVERY_S = 10.0
Task = Any  # what a worker is given: a seed, or an operator's name
Work = Callable[[Task], dict[str, Any]]


def _work(work: Work, pipe: Connection) -> None:
    """Answers one task after the other."""
    torch.set_num_threads(1)
    num_done = 0
    while (task := pipe.recv()) is not None:
        pipe.send(work(task))
        num_done += 1
        if num_done in (3, 10, 30):  # what was imported and registered by now stays: it need not be walked over
            gc.collect()
            gc.freeze()


class Worker:
    """A process that works on one task at a time."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.task: Task = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(self._work, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, task: Task) -> None:
        self.task, self.since = task, time.monotonic()
        self.pipe.send(task)

    def take(self) -> dict[str, Any]:
        """Its answer; a crash is one, too."""
        try:
            answer: dict[str, Any] = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            answer = {"outcome": "process died", "detail": f"exit code {self.process.exitcode}"}
            self._start()
        return answer

    @property
    def hangs(self) -> bool:
        return time.monotonic() - self.since > HANGS_AFTER_S

    def replace(self) -> dict[str, Any]:
        self.process.kill()
        self.process.join()
        self._start()
        return {"outcome": "hangs", "detail": f"more than {HANGS_AFTER_S:.0f} s"}

    def stop(self) -> None:
        self.pipe.send(None)
        self.process.join(timeout=10)


def explore(tasks: Iterable[Task], work: Work, jobs: int, out: Path, summary: Callable[[list[Any]], Any]) -> list[Any]:
    """All answers, also those that the file had before."""
    answers: dict[str, Any] = {}
    if out.exists():
        answers = {str(item["task"]): item for item in json.loads(out.read_text())["answers"]}
    todo = collections.deque(task for task in tasks if str(task) not in answers)
    workers = [Worker(work) for _ in range(min(jobs, len(todo)))]
    idle, saved = list(workers), time.monotonic()
    while todo or len(idle) < len(workers):
        while idle and todo:
            idle.pop().give(todo.popleft())
        busy = {worker.pipe: worker for worker in workers if worker not in idle}
        ready = {busy[pipe] for pipe in wait(list(busy), timeout=1.0)}  # type: ignore[index]
        for worker in busy.values():
            if worker in ready or worker.hangs:
                answer = worker.take() if worker in ready else worker.replace()
                answers[str(worker.task)] = {"task": worker.task, **answer}
                idle.append(worker)
        if time.monotonic() - saved > SAVED_EVERY_S:
            saved = time.monotonic()
            save(out, list(answers.values()), summary)
            print(f"{len(answers)} done, {len(todo)} to go", flush=True)
    for worker in workers:
        worker.stop()
    save(out, list(answers.values()), summary)
    return list(answers.values())


def save(out: Path, answers: list[Any], summary: Callable[[list[Any]], Any]) -> None:
    content = {
        "outcore": outcore.__version__,
        "torch": torch.__version__,
        "summary": summary(answers),
        "answers": answers,
    }
    part = out.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, default=str))
    os.replace(part, out)


def as_answer(report: Any) -> dict[str, Any]:
    answer: dict[str, Any] = dataclasses.asdict(report)
    return answer
