"""The settings of `join` with their defaults, checked before a worker meets the others."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from outcore.elastic.methods import OUTER_RATE, Method, find_method
from outcore.errors import ElasticError

Reduction = Literal["tree", "ring"]
WIRE_DTYPES = (torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)  # the last two with error feedback
_OWN = ("checkpoint", "checkpoint_every_s", "limit_s", "join_limit_s")  # settings in which workers may differ


@dataclass(frozen=True)
class Settings:
    """The settings of `join`; the defaults are safe for any number of workers.

    `min_members` is the number of workers that must be present for training to continue. By default a training begins
    with all of them and continues with a majority of those that have not finished. A worker waits `join_limit_s` for
    that many, then it raises an ElasticError that names the missing ones. A given number is required at the start and
    afterwards; with 1, a single worker trains on.

    `ahead` is the number of additional local steps in a row that a worker of `sync-easgd` may take while the exchange
    that it began is not over, because a slower worker has not begun it or because it takes longer than a step. Then the
    worker waits, too. 0 (the default) keeps all workers in step and runs repeatable; with more, the number of steps
    between two exchanges depends on timing. The difference is computed after the last pull, and the pull uses exactly
    the difference that was sent, however much later. Steps in between may have undone it by then, so alpha must be
    smaller: below 2 / (P + 2) instead of 2 / (P + 1). The default 0.9 / P satisfies this for 2 workers or more.

    `streaming-diloco` exchanges its weights in `fragments` parts, one after the other, each once in `period` steps. A
    part is sent `delay` steps before its result is applied, in parallel with those steps. The result is mixed with the
    weights reached meanwhile: `mix` is the share of the local weights that is kept (1 would ignore the others).

    `wire_dtype` rounds the messages: torch.bfloat16, or torch.int8 and torch.float8_e4m3fn with a scale for every 256
    elements and error feedback. `outer_state="host"` keeps the centre and the outer momentum of the two DiLoCo methods
    in host memory, so that a device holds only the model, its gradients and its optimizer.
    """

    method: str = "sync-easgd"
    period: int = 4
    level: Literal[1, 2, 3] = 3
    ahead: int = 0
    alpha: float | None = None
    mu: float | None = None
    outer_rate: float = OUTER_RATE
    outer_state: Literal["device", "host"] = "device"
    fragments: int = 2
    delay: int = 1
    mix: float = 0.5
    staleness: int | None = None
    packed: bool = True
    wire_dtype: torch.dtype | None = None
    reduction: Reduction = "tree"
    turn: Literal["exchange", "iteration"] = "exchange"
    backend: Literal["gloo", "nccl"] = "gloo"
    min_members: int | None = None
    checkpoint: str | Path | None = None
    checkpoint_every_s: float = 5.0
    limit_s: float = 30.0
    join_limit_s: float = 300.0

    def check(self) -> Method:
        """Returns the method if the settings are consistent; raises ElasticError otherwise."""
        method = find_method(self.method)
        if self.period < 1 or self.level not in (1, 2, 3):
            raise ElasticError(f"period {self.period} and level {self.level} must be at least 1 and one of 1, 2, 3")
        if method.sends == "gradients" and self.period != 1:
            raise ElasticError(f"sync-sgd exchanges every step: period {self.period} must be 1")
        if self.ahead < 0 or (self.ahead > 0 and not (method.is_sync and method.is_elastic and self.level == 3)):
            raise ElasticError(
                f"ahead {self.ahead} must be 0 or more steps, and 0 for {method.name} at level {self.level}: "
                "only workers of sync-easgd at level 3 can go on while an exchange waits"
            )
        self._check_outer(method)
        if self.min_members is not None and self.min_members < 1:
            raise ElasticError(f"min_members {self.min_members} must be 1 or more workers, or None for a majority")
        if min(self.limit_s, self.join_limit_s) <= 0:
            raise ElasticError("limit_s and join_limit_s must be above zero: every wait needs a limit")
        self._check_messages(method)
        return method

    def _check_outer(self, method: Method) -> None:
        if self.outer_state == "host" and (method.momentum != "outer" or self.backend == "nccl"):
            raise ElasticError(
                f"outer_state='host' is for diloco and streaming-diloco over gloo, not for {method.name} over "
                f"{self.backend}"
            )
        if method.name != "streaming-diloco":
            return
        if self.fragments < 1 or self.period % self.fragments or not 0 <= self.delay < self.period // self.fragments:
            raise ElasticError(
                f"{self.fragments} fragments in a period of {self.period} steps with a delay of {self.delay}: the "
                "period must be a multiple of the fragments, and the delay less than the steps from one fragment to "
                "the next"
            )
        if not 0 <= self.mix < 1 or not self.packed:
            raise ElasticError(f"mix {self.mix:g} must be from 0 to below 1, and streaming-diloco sends packed parts")

    @property
    def steps_between(self) -> int:
        """The number of steps from one exchange to the next."""
        return self.period // self.fragments if self.method == "streaming-diloco" else self.period

    @property
    def steps_under_way(self) -> int:
        """The number of steps before the end of an exchange at which `Averager.prepare` may begin it."""
        return self.delay if self.method == "streaming-diloco" else 1

    def _check_messages(self, method: Method) -> None:
        if self.staleness is not None and (method.is_sync or method.order == "turns" or self.staleness < 0):
            raise ElasticError(f"staleness {self.staleness} bounds asynchronous methods (0 or more), not {method.name}")
        if self.wire_dtype is not None and (not method.is_sync or self.reduction == "ring" or self.level == 1):
            raise ElasticError("wire_dtype rounds tree sums of synchronous methods at level 2 or 3 only")
        if self.wire_dtype is not None and self.wire_dtype not in WIRE_DTYPES:
            names = ", ".join(str(dtype) for dtype in WIRE_DTYPES)
            raise ElasticError(f"wire_dtype {self.wire_dtype} cannot travel; choose one of {names}")
        if self.wire_dtype in WIRE_DTYPES[2:] and (not self.packed or self.backend == "nccl"):
            raise ElasticError(
                f"wire_dtype {self.wire_dtype} travels packed and over gloo; leave packed and backend out"
            )
        if self.turn == "iteration" and method.order != "turns":
            raise ElasticError(f"turn='iteration' belongs to original-easgd, not {method.name}")
        if self.backend == "nccl" and not method.is_sync:
            raise ElasticError(f"{method.name} keeps its centre in host memory; use backend='gloo'")
        if self.backend == "nccl" and (self.level == 1 or self.reduction == "ring"):
            raise ElasticError("level 1 and reduction='ring' run over gloo; with backend='nccl' leave both out")

    def in_common(self) -> dict[str, Any]:
        """Returns the settings that all workers of a training must have in common."""
        return {name: value for name, value in asdict(self).items() if name not in _OWN}
