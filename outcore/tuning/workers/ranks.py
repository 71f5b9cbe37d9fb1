"""The workers that train together: ranks of a process group, or workers that are only planned for.

All ranks call `tune` with the same arguments. Each works alone for a while, then all exchange results, so that all make
the same decisions. A rank that fails informs the others before it stops, so that none waits for it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outcore.errors import TuningError
from outcore.tuning.options import Workers
from outcore.tuning.workers.shares import measure_communication_s
from outcore.tuning.workers.split import Worker, WorkerGroup, without_noise

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The ranks of the group. `speeds` are those of planned workers, relative to this device; empty in a group."""

    rank: int
    num: int
    speeds: tuple[float, ...]
    communication_s: float | None  # None: to be measured

    @classmethod
    def read(cls, workers: Workers) -> Ranks | None:
        """Returns the ranks, or None if this process trains alone."""
        communication_s = workers.communication_s
        speeds = _speeds(workers.speeds) if workers.speeds is not None else ()
        if _in_group():
            return cls._of_group(workers.speeds, len(speeds), communication_s)
        if not speeds:
            if communication_s is not None:
                raise TuningError("communication is between workers; say how many with workers=..., such as workers=8")
            return None
        if len(speeds) == 1:
            return None
        if communication_s is None:
            raise TuningError(
                f"{len(speeds)} workers are not here to measure how long they communicate; give communication_s=..., "
                "the seconds to sum their gradients, or run this on all of them with torchrun"
            )
        return cls(0, len(speeds), speeds, communication_s)

    @classmethod
    def _of_group(
        cls, workers: int | Sequence[float] | None, num_wanted: int, communication_s: float | None
    ) -> Ranks | None:
        num = dist.get_world_size()
        if workers is not None and not isinstance(workers, int):
            raise TuningError("the speeds of ranks are measured; leave workers=... out in a process group")
        if workers is not None and num_wanted != num:
            raise TuningError(f"workers={workers}, and the process group has {num} ranks; leave workers=... out")
        return cls(dist.get_rank(), num, (), communication_s) if num > 1 else None

    @property
    def here(self) -> bool:
        """Whether the workers are processes, and this is one of them."""
        return not self.speeds

    def all(self, mine: T) -> list[T]:
        """Returns every rank's value on every rank, in order; only its own if the workers are planned."""
        return _from_all(mine) if self.here else [mine]

    def first(self, mine: T) -> T:
        """Returns rank 0's value on every rank."""
        return self.all(mine)[0]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Wraps work that each rank does alone: if it fails on one, all stop with that reason."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        said = self.all(None if error is None else f"{error}" or type(error).__name__)
        if error is not None:
            raise error
        for rank, reason in enumerate(said):
            if reason is not None:
                raise TuningError(f"rank {rank} cannot go on, so the others do not either: {reason}")

    def communicating_s(self, model: torch.nn.Module) -> float:
        """Returns the given seconds, or measures them for this model's gradients; the same on every rank."""
        with self.all_or_none():
            for module in model.modules():
                if isinstance(module, DistributedDataParallel | torch.nn.SyncBatchNorm) and self.here:
                    raise TuningError(
                        f"{type(module).__name__} waits for other ranks in every step, and each rank is measured by "
                        "itself; give the model without it, communication is added"
                    )
        if self.communication_s is not None:
            return self.communication_s
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        num_bytes = max(self.all(sum(parameter.nbytes for parameter in trained)))
        return measure_communication_s(num_bytes, device=str(trained[0].device) if trained else "cpu")

    def worker_group(self, worker: Worker, communication_s: float) -> WorkerGroup:
        """Returns all workers with their curves; planned workers have this one's, at their speeds."""
        if self.here:
            return WorkerGroup(without_noise(self.all(worker)), communication_s)
        return WorkerGroup(tuple(worker.slower_by(1 / speed) for speed in self.speeds), communication_s)


def check_alike(arguments: dict[str, Any]) -> None:
    """Raises `TuningError` if ranks were called with different arguments, before any of them works alone."""

    if not _in_group():
        return
    told = _from_all({name: repr(value) for name, value in arguments.items()})
    for name in arguments:
        given = [words[name] for words in told]
        if len(set(given)) > 1:
            raise TuningError(f"the ranks were given different values of {name}, {', '.join(given)}; give all one")


def _in_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _from_all(mine: T) -> list[T]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return gathered


def _speeds(workers: int | Sequence[float]) -> tuple[float, ...]:
    if isinstance(workers, bool) or (isinstance(workers, int) and workers < 1):
        raise TuningError(f"workers={workers!r} cannot train; give a whole number above zero, or their relative speeds")
    if isinstance(workers, int):
        return (1.0,) * workers
    try:
        speeds = tuple(float(speed) for speed in workers)
    except (TypeError, ValueError):
        raise TuningError(f"workers={workers!r} are no speeds; give numbers such as [1, 1, 0.5]") from None
    if not speeds or not all(0 < speed < math.inf for speed in speeds):
        raise TuningError(f"workers={list(workers)!r} are no speeds; give numbers above zero such as [1, 1, 0.5]")
    return speeds
