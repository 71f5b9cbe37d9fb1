"""Who trains together: the ranks of a process group, or workers that are only planned for.

All ranks call `tune` alike. Each works by itself for a while, then all exchange their results; what is decided from
these is decided alike everywhere. A rank that cannot go on tells the others before it stops, so that nobody waits.
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
    """`speeds` of workers that are not here, relative to this device; empty: the ranks of the group."""

    rank: int
    num: int
    speeds: tuple[float, ...]
    communication_s: float | None  # None: to be measured

    @classmethod
    def read(cls, workers: Workers) -> Ranks | None:
        """None: this process trains alone."""
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
        """They are processes, and this is one of them."""
        return not self.speeds

    def all(self, mine: T) -> list[T]:
        """Every rank's on every rank, in their order. One's own where the others are not here."""
        return _from_all(mine) if self.here else [mine]

    def first(self, mine: T) -> T:
        """Rank 0's on every rank."""
        return self.all(mine)[0]

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Around work that each rank does by itself: where it fails on one, all of them stop, with that reason."""
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
        """Given, or measured for the gradients of this model; the same on every rank."""
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
        """All workers with what each knows of itself; where they are not here, this one at their speeds."""
        if self.here:
            return WorkerGroup(without_noise(self.all(worker)), communication_s)
        return WorkerGroup(tuple(worker.slower_by(1 / speed) for speed in self.speeds), communication_s)


def check_alike(arguments: dict[str, Any]) -> None:
    """Ranks that were asked for different things would never agree; this is checked before any of them works alone."""
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
