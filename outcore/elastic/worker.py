"""Model + optimizer + method -> Worker: the object a training loop holds.

`join` packs the model, meets the other workers and returns a Worker; `Worker.step` takes the place of
`optimizer.step(); optimizer.zero_grad()` and exchanges every `period` steps. See methods.py for the table of methods.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outcore.elastic import rules
from outcore.elastic.averagers import (
    Averager,
    DiLoCo,
    ElasticCenter,
    ElasticSync,
    Local,
    StepCenter,
    SyncSgd,
    exchange_dtype,
)
from outcore.elastic.center import CenterConfig
from outcore.elastic.flat import FlatModel
from outcore.elastic.link import CenterLink, StartCenter
from outcore.elastic.methods import OUTER_RATE, Method, alpha_bound, default_alpha, find_method
from outcore.elastic.place import Place, find_place
from outcore.elastic.roster import Roster
from outcore.elastic.sync import Reduction, SyncExchange
from outcore.errors import ElasticError


@dataclass(frozen=True)
class Settings:
    """Everything `join` can be told; the defaults are safe for any number of workers.

    `ahead` is how many more local steps in a row a worker of `sync-easgd` may take while the exchange it has begun is
    not over, be it that a slower one has not begun it or that it lasts longer than a step; then it stands still, too.
    0 (the default) keeps everybody in step, and runs repeatable: with more, how many steps lie between two exchanges
    depends on the clock. The difference is taken after the last pull, and what is sent is what is pulled, however much
    later. Steps in between may have undone it by then, so alpha must be smaller: below 2 / (P + 2) instead of
    2 / (P + 1). The default 0.9 / P is, for 2 workers or more.
    """

    method: str = "sync-easgd"
    period: int = 4
    level: Literal[1, 2, 3] = 3
    ahead: int = 0
    alpha: float | None = None
    mu: float | None = None
    outer_rate: float = OUTER_RATE
    staleness: int | None = None
    packed: bool = True
    wire_dtype: torch.dtype | None = None
    reduction: Reduction = "tree"
    turn: Literal["exchange", "iteration"] = "exchange"
    backend: Literal["gloo", "nccl"] = "gloo"
    checkpoint: str | Path | None = None
    checkpoint_every_s: float = 5.0
    limit_s: float = 30.0
    join_limit_s: float = 300.0

    def check(self) -> Method:
        """The method, once every setting makes sense together; ElasticError otherwise."""
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
        if self.staleness is not None and (method.is_sync or method.order == "turns" or self.staleness < 0):
            raise ElasticError(f"staleness {self.staleness} bounds asynchronous methods (0 or more), not {method.name}")
        if self.wire_dtype is not None and (not method.is_sync or self.reduction == "ring" or self.level == 1):
            raise ElasticError("wire_dtype rounds tree sums of synchronous methods at level 2 or 3 only")
        if self.turn == "iteration" and method.order != "turns":
            raise ElasticError(f"turn='iteration' belongs to original-easgd, not {method.name}")
        if self.backend == "nccl" and not method.is_sync:
            raise ElasticError(f"{method.name} keeps its centre in host memory; use backend='gloo'")
        if self.backend == "nccl" and (self.level == 1 or self.reduction == "ring"):
            raise ElasticError("level 1 and reduction='ring' run over gloo; with backend='nccl' leave both out")
        if min(self.limit_s, self.join_limit_s) <= 0:
            raise ElasticError("limit_s and join_limit_s must be above zero: every wait needs a limit")
        return method


@dataclass(frozen=True)
class Stats:
    """What a worker did so far. `wait_s` is the time its loop stood still for communication; `num_ahead` of its steps
    were taken instead of waiting for an exchange (see `Settings.ahead`)."""

    num_steps: int
    num_ahead: int
    num_exchanges: int
    num_messages: int
    sent_bytes: int
    wait_s: float
    exchange_s: float
    elapsed_s: float

    @property
    def communication_share(self) -> float:
        return self.wait_s / self.elapsed_s if self.elapsed_s else 0.0


class Worker:
    """One replica. Use it as a context manager around an ordinary loop; `join` makes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        place: Place,
        start_center: StartCenter | None = None,
    ) -> None:
        self.settings, self.place = settings, place
        self.method = settings.check()
        self._model, self._optimizer = model, optimizer
        self._flat = FlatModel(model)
        self._mu = self.method.mu if settings.mu is None else settings.mu
        has_momentum = self.method.momentum in ("worker", "look_ahead")
        self._velocity = torch.zeros_like(self._flat.gradient) if has_momentum else None
        self._apart = self.method.momentum == "look_ahead"  # the model then stands at x + delta v, not at x
        weights = self._flat.vector.clone() if self._apart else self._flat.vector
        self._local = self._make_local(weights)
        _warn_of_instability(self.method, settings, place.num_ranks)
        self.num_steps = self._num_ahead = 0
        self._due_step = settings.period  # the step with which the next exchange ends, unless this worker goes ahead
        self._wait_s = 0.0
        self._hook: Any = None
        self._began_s = time.perf_counter()
        with torch.no_grad():
            self._averager = self._make_averager(start_center)
            self._stand()
            self._flat.restore_buffers()
            if self._due_step == 1:
                self._averager.prepare()

    def step(self, scaler: Any = None) -> None:
        """The local step, every `period` steps (and up to `ahead` more) the exchange, and zeroed gradients.

        With mixed precision pass the GradScaler: `worker.step(scaler)`, then `scaler.update()` as usual.
        """
        try:
            self._step(scaler)
        except dist.DistError as error:
            host, port = self.place.address
            raise ElasticError(
                f"rank {self.place.rank} lost the store at {host}:{port} ({error}); its launcher ended: start again"
            ) from None

    @torch.no_grad()
    def _step(self, scaler: Any) -> None:
        step = self.num_steps + 1
        due = self._is_due(step)
        self._flat.bind_gradients()
        if due:
            self._enter_buffers()
            self._timed(self._averager.before_step)
        self._local_step(scaler)
        if due:
            self._timed(self._averager.after_step)
            self._flat.restore_buffers()
        self._stand()
        self._flat.gradient.zero_()
        self.num_steps = step
        if due:
            self._due_step = step + self.settings.period
        elif step >= self._due_step:
            self._num_ahead += 1
        if step + 1 == self._due_step:
            self._enter_buffers()
            self._timed(self._averager.prepare)

    def center_state_dict(self) -> dict[str, Tensor]:
        """The averaged model, in the form of `model.state_dict()`; float buffers are averages over the workers."""
        with torch.no_grad():
            return self._flat.state_dict(self._model, self._averager.read_center())

    def stats(self) -> Stats:
        traffic = self._averager.traffic
        return Stats(
            num_steps=self.num_steps,
            num_ahead=self._num_ahead,
            num_exchanges=self._averager.num_exchanges,
            num_messages=traffic.num_messages,
            sent_bytes=traffic.num_bytes,
            wait_s=self._wait_s,
            exchange_s=self._averager.busy_s(),
            elapsed_s=time.perf_counter() - self._began_s,
        )

    def members(self) -> list[int]:
        """Ranks of the present generation (synchronous methods; empty for the others)."""
        return self._averager.members()

    def close(self) -> None:
        """Finishes an exchange under way and says goodbye. Leaving the `with` block does it."""
        if self._hook is not None:
            self._hook.remove()
        with torch.no_grad():
            self._averager.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _is_due(self, step: int) -> bool:
        """Whether the exchange ends with this step: it is time, and it is over or no more steps may be taken before."""
        num_late = step - self._due_step
        return num_late >= 0 and (num_late >= self.settings.ahead or self._averager.is_over())

    def _timed(self, act: Any) -> None:
        began_s = time.perf_counter()
        act()
        self._wait_s += time.perf_counter() - began_s

    def _local_step(self, scaler: Any) -> None:
        """W_i <- W_i + s_i by the user's optimizer; with worker momentum V <- mu V + s_i, W_i <- W_i + V."""
        cut, model = self._flat.num_params, self._flat.vector
        before = model[:cut].clone() if self._velocity is not None else None
        if scaler is None:
            self._optimizer.step()
        else:
            scaler.step(self._optimizer)
        if before is not None and self._velocity is not None:
            step = model[:cut] - before
            rules.momentum(self._velocity, step, self._mu, out=self._velocity)
            weights = self._local.weights[:cut]
            torch.add(weights if self._apart else before, self._velocity, out=weights)

    def _stand(self) -> None:
        """Puts the model where its next gradient is taken: EAMSGD's look-ahead point, or just its weights."""
        cut, vector = self._flat.num_params, self._flat.vector
        if self._apart and self._velocity is not None:
            rules.look_ahead(self._local.weights[:cut], self._velocity, self._mu, out=vector[:cut])

    def _enter_buffers(self) -> None:
        self._flat.refresh_buffers()
        if self._apart:
            cut = self._flat.num_params
            self._local.weights[cut:].copy_(self._flat.vector[cut:])

    def _make_local(self, weights: Tensor) -> Local:
        settings = self.settings
        return Local(
            flat=self._flat,
            weights=weights,
            velocity=self._velocity,
            method=self.method,
            alpha=settings.alpha,
            mu=self._mu,
            outer_rate=settings.outer_rate,
            num_ranks=self.place.num_ranks,
            optimizer=self._optimizer,
            checkpoint=None if settings.checkpoint is None else Path(settings.checkpoint),
            checkpoint_every_s=settings.checkpoint_every_s,
        )

    def _make_averager(self, start_center: StartCenter | None) -> Averager:
        settings, local = self.settings, self._local
        if not self.method.is_sync:
            link = CenterLink(self.place, self._center_config(), start_center)
            if self.method.sends == "steps":
                return StepCenter(local, link, settings.join_limit_s)
            whole_turn = settings.turn == "iteration"
            elastic = ElasticCenter(local, link, settings.join_limit_s, whole_turn=whole_turn)
            if whole_turn:
                self._hook = self._model.register_forward_pre_hook(lambda *_: elastic.begin_iteration())
            return elastic
        nccl = settings.backend == "nccl"
        exchange = SyncExchange(
            Roster(self.place, settings.limit_s, settings.join_limit_s, nccl=nccl),
            self._flat.num_elements,
            exchange_dtype(local.weights),
            level=settings.level if self.method.is_elastic else 2,
            reduction=settings.reduction,
            wire_dtype=settings.wire_dtype,
            part_sizes=self._part_sizes(),
            device=local.weights.device,
            nccl=nccl,
        )
        if self.method.sends == "gradients":
            return SyncSgd(local, exchange)
        return DiLoCo(local, exchange) if self.method.momentum == "outer" else ElasticSync(local, exchange)

    def _part_sizes(self) -> list[int] | None:
        return None if self.settings.packed else [part.numel() for part in self._flat.parts(self._flat.vector)]

    def _center_config(self) -> CenterConfig:
        settings, (host, port) = self.settings, self.place.address
        name = f"outcore-center-{port}-{self.place.prefix.replace('/', '-')}.npz"
        path = Path(tempfile.gettempdir()) / name if settings.checkpoint is None else Path(settings.checkpoint)
        return CenterConfig(
            epoch=0,
            host=host,
            port=port,
            prefix=self.place.prefix,
            method=self.method.name,
            mu=self._mu,
            num_ranks=self.place.num_ranks,
            num_elements=self._flat.num_elements,
            num_params=self._flat.num_params,
            limit_s=settings.limit_s,
            staleness=settings.staleness,
            checkpoint=str(path),
            keep_checkpoint=settings.checkpoint is not None,
            checkpoint_every_s=settings.checkpoint_every_s,
            part_sizes=self._part_sizes(),
        )


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: str = "sync-easgd",
    *,
    place: Place | None = None,
    **settings: Any,
) -> Worker:
    """Makes this process one of the elastic workers its launcher started; see `Settings` for what else can be set.

    All workers start from the centre: rank 0's weights, or the checkpoint's, or the running centre's for a late comer.
    """
    try:
        chosen = Settings(method=method, **settings)
    except TypeError as error:
        known = ", ".join(Settings.__dataclass_fields__)
        raise ElasticError(f"join got a setting it does not know ({error}); it knows {known}") from None
    chosen.check()
    if chosen.backend == "nccl" and not next(model.parameters()).is_cuda:
        raise ElasticError("backend='nccl' needs the model on a CUDA device; move it there first, or use 'gloo'")
    return Worker(model, optimizer, chosen, place or find_place(chosen.limit_s))


def _warn_of_instability(method: Method, settings: Settings, num_workers: int) -> None:
    alpha, bound = settings.alpha, alpha_bound(method, num_workers, settings.ahead)
    if alpha is None or not method.is_elastic or alpha < bound:
        return
    ahead = f" that may go {settings.ahead} steps ahead" if settings.ahead else ""
    warnings.warn(
        f"alpha {alpha:g} is past the stability bound {bound:.3g} of {method.name} with {num_workers} workers{ahead}; "
        f"leave it out for {default_alpha(method, num_workers):.3g}",
        stacklevel=4,
    )
