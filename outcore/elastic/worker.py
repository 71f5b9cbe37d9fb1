"""The worker: the object that a training loop holds.

`join` packs the model, waits for the other workers and returns a Worker. `Worker.step` replaces `optimizer.step();
optimizer.zero_grad()` and exchanges every `period` steps. methods.py has the table of methods.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from outcore.elastic import rules
from outcore.elastic.averagers import Averager, Local, exchange_dtype
from outcore.elastic.center import CenterConfig
from outcore.elastic.center_averagers import ElasticCenter, StepCenter
from outcore.elastic.flat import FlatModel
from outcore.elastic.frozen import Frozen, describe
from outcore.elastic.link import CenterLink, StartCenter
from outcore.elastic.methods import Method, alpha_bound, default_alpha
from outcore.elastic.muster import Fingerprint, Muster
from outcore.elastic.place import Place, find_place
from outcore.elastic.roster import Roster
from outcore.elastic.settings import Settings
from outcore.elastic.sharded import find_shard
from outcore.elastic.sync import SyncExchange
from outcore.elastic.sync_averagers import DiLoCo, ElasticSync, SyncSgd
from outcore.errors import ElasticError

_open_names: set[str] = set()  # trainings that this process takes part in


@dataclass(frozen=True)
class Stats:
    """Statistics of a worker. `wait_s` is the time its loop waited for communication; `num_ahead` steps were taken
    instead of waiting for an exchange (see `Settings.ahead`)."""

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
    """One replica, created by `join`. Use it as a context manager around an ordinary loop."""

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
        self._name: str | None = None  # of the training, if `join` found the place
        fingerprint = Fingerprint(describe(model), {**settings.in_common(), "num_ranks": place.num_ranks})
        self._flat, self._frozen = FlatModel(model), Frozen(model)
        self._mu = self.method.mu if settings.mu is None else settings.mu
        has_momentum = self.method.momentum in ("worker", "look_ahead")
        self._velocity = torch.zeros_like(self._flat.gradient) if has_momentum else None
        self._apart = self.method.momentum == "look_ahead"  # the model is then evaluated at x + delta v instead of x
        weights = self._flat.vector.clone() if self._apart else self._flat.vector
        self._local = self._make_local(weights)
        _warn_of_instability(self.method, settings, place.num_ranks)
        _warn_of_two_momenta(self.method, self._mu, optimizer)
        self._muster = Muster(place, fingerprint, min_members=settings.min_members, join_limit_s=settings.join_limit_s)
        self.num_steps = self._num_ahead = 0
        self._due_step = settings.steps_between  # the step with which the next exchange ends, or may end
        self._wait_s = 0.0
        self._hook: Any = None
        self._began_s = time.perf_counter()
        with torch.no_grad(), _named_loss(place):
            self._muster.enter()
            self._averager = self._make_averager(start_center)
            self._stand()
            self._flat.restore()
            if self._due_step == settings.steps_under_way:
                self._averager.prepare()

    @property
    def global_step(self) -> int:
        """The number of steps of this training so far: this worker's own, and before them those of the worker whose
        state it took over when it joined late. `range(worker.global_step, num_steps)` continues at the others' step."""
        return self._local.global_step

    def step(self, scaler: Any = None) -> None:
        """Runs the local step, every `period` steps (and up to `ahead` more) the exchange, and zeroes the gradients.

        With mixed precision pass the GradScaler: `worker.step(scaler)`, then `scaler.update()` as usual.
        """
        with _named_loss(self.place):
            self._step(scaler)

    @torch.no_grad()
    def _step(self, scaler: Any) -> None:
        step = self.num_steps + 1
        due = self._is_due(step)
        self._local.global_step += 1  # first: workers who join in this exchange continue with the next step
        self._flat.bind_gradients()
        if due:
            self._enter_buffers()
            self._timed(self._averager.before_step)
        self._local_step(scaler)
        if due:
            self._flat.refresh(only_parameters=True)  # the optimizer has changed them
            self._timed(self._averager.after_step)
            self._flat.restore()
        self._stand()
        self._flat.zero_gradients()
        self.num_steps = step
        if due:
            self._due_step = step + self.settings.steps_between
        elif step >= self._due_step:
            self._num_ahead += 1
        if step + self.settings.steps_under_way == self._due_step:
            self._enter_buffers()
            self._timed(self._averager.prepare)

    def center_state_dict(self) -> dict[str, Tensor]:
        """Returns the averaged model as `model.state_dict()` does; float buffers are averages over the workers."""
        with torch.no_grad(), _named_loss(self.place):
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
        """Returns the ranks that take part now: the current generation, or those that the centre serves."""
        return self._averager.members()

    def close(self, *, finished: bool = True) -> None:
        """Finishes an exchange in progress and leaves the training. Leaving the `with` block calls it.

        With `finished=False`, as after an exception in the block, the others count this worker as missing (see
        `Settings.min_members`) until it returns.
        """
        if self._hook is not None:
            self._hook.remove()
        _open_names.discard(self._name or "")
        with torch.no_grad():
            self._averager.close(finished=finished)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(finished=error is None)

    def _is_due(self, step: int) -> bool:
        """Whether the exchange ends with this step: it is due, and either over or no more steps may be taken before."""
        num_late = step - self._due_step
        return num_late >= 0 and (num_late >= self.settings.ahead or self._averager.is_over())

    def _timed(self, act: Any) -> None:
        began_s = time.perf_counter()
        act()
        self._wait_s += time.perf_counter() - began_s

    def _local_step(self, scaler: Any) -> None:
        """W_i <- W_i + s_i with the user's optimizer; with worker momentum V <- mu V + s_i, W_i <- W_i + V."""
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
        """Sets the model to the point of its next gradient: its weights, or EAMSGD's look-ahead point."""
        cut, vector = self._flat.num_params, self._flat.vector
        if self._apart and self._velocity is not None:
            rules.look_ahead(self._local.weights[:cut], self._velocity, self._mu, out=vector[:cut])

    def _enter_buffers(self) -> None:
        self._flat.refresh()
        if self._apart:
            cut = self._flat.num_params
            self._local.weights[cut:].copy_(self._flat.vector[cut:])

    def _make_local(self, weights: Tensor) -> Local:
        settings = self.settings
        return Local(
            flat=self._flat,
            frozen=self._frozen,
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
            keeps_center_on_host=settings.outer_state == "host",
        )

    def _make_averager(self, start_center: StartCenter | None) -> Averager:
        settings, local = self.settings, self._local
        if not self.method.is_sync:
            link = CenterLink(self._muster, self._center_config(), self._frozen, start_center)
            if self.method.sends == "steps":
                return StepCenter(local, link)
            whole_turn = settings.turn == "iteration"
            elastic = ElasticCenter(local, link, whole_turn=whole_turn)
            if whole_turn:
                self._hook = self._model.register_forward_pre_hook(lambda *_: elastic.begin_iteration())
            return elastic
        nccl = settings.backend == "nccl"
        streams = self.method.name == "streaming-diloco"
        fragments = self._flat.fragments(settings.fragments if streams else 1)
        level = settings.level if self.method.is_elastic else 3 if streams and settings.delay else 2
        exchange = SyncExchange(
            Roster(self._muster, settings.limit_s, nccl=nccl),
            self._flat.num_elements,
            exchange_dtype(local.weights),
            level=level,
            reduction=settings.reduction,
            wire_dtype=settings.wire_dtype,
            part_sizes=self._part_sizes(),
            device=local.weights.device,
            nccl=nccl,
            largest_part=max(part.stop - part.start for part in fragments),
        )
        if self.method.sends == "gradients":
            return SyncSgd(local, exchange)
        if self.method.momentum == "outer":
            delay, mix = (settings.delay, settings.mix) if streams else (0, 0.0)
            return DiLoCo(local, exchange, fragments, delay=delay, mix=mix)
        return ElasticSync(local, exchange)

    def _part_sizes(self) -> list[int] | None:
        return None if self.settings.packed else [part.numel() for part in self._flat.parts(self._flat.vector)]

    def _center_config(self) -> CenterConfig:
        settings, (host, port) = self.settings, self.place.address
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
            dtype=str(exchange_dtype(self._flat.vector)).removeprefix("torch."),
            frozen_bytes=self._frozen.sizes_bytes,
            limit_s=settings.limit_s,
            staleness=settings.staleness,
            checkpoint="" if settings.checkpoint is None else str(settings.checkpoint),
            keep_checkpoint=settings.checkpoint is not None,
            checkpoint_every_s=settings.checkpoint_every_s,
            part_sizes=self._part_sizes(),
            nonce=self._muster.nonce,
            model_digest=self._muster.card.model_digest,
            digest=self._muster.digest,
        )


def join(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    method: str = "sync-easgd",
    *,
    name: str = "default",
    place: Place | None = None,
    **settings: Any,
) -> Worker:
    """Makes this process one of the elastic workers that its launcher started; `Settings` lists the other settings.

    All workers start from the centre: rank 0's weights, the checkpoint's, or, for a late worker, those of the running
    centre. Frozen parameters and integer buffers are taken over once, with the weights. A process may take part in
    several trainings at once, each with its own `name`; the two networks of a GAN are two trainings.

    A model that FSDP2 has sharded over the ranks of a replica is averaged over the replicas (sharded.py).
    """
    try:
        chosen = Settings(method=method, **settings)
    except TypeError as error:
        known = ", ".join(Settings.__dataclass_fields__)
        raise ElasticError(f"join got a setting it does not know ({error}); it knows {known}") from None
    chosen.check()
    if chosen.backend == "nccl" and not next(model.parameters()).is_cuda:
        raise ElasticError("backend='nccl' needs the model on a CUDA device; move it there first, or use 'gloo'")
    if place is not None:
        return Worker(model, optimizer, chosen, place)
    if not name or "/" in name:
        raise ElasticError(f"name {name!r} must be one character or more, and have no slash")
    if name in _open_names:
        raise ElasticError(
            f"this process takes part in the training {name!r} already; close the first worker, or give the second "
            "model a name of its own: join(..., name='discriminator')"
        )
    place = find_place(chosen.limit_s, name, partial(find_shard, model, chosen.check()))
    if place.shard is not None and chosen.checkpoint is not None:
        chosen = replace(chosen, checkpoint=f"{chosen.checkpoint}.{place.shard.index}-of-{place.shard.count}")
    worker = Worker(model, optimizer, chosen, place)
    worker._name = name
    _open_names.add(name)
    return worker


@contextmanager
def _named_loss(place: Place) -> Iterator[None]:
    """Reports a lost store in one sentence."""
    try:
        yield
    except dist.DistError as error:
        host, port = place.address
        what = str(error).strip().splitlines()[0]
        raise ElasticError(
            f"rank {place.rank} lost the store at {host}:{port} ({what}); its launcher ended or is out of reach: start "
            "again"
        ) from None


def _warn_of_two_momenta(method: Method, mu: float, optimizer: torch.optim.Optimizer) -> None:
    if method.momentum not in ("worker", "look_ahead", "center") or mu == 0:
        return
    for group in optimizer.param_groups:
        own = group.get("momentum") or (group["betas"][0] if "betas" in group else 0.0)
        if own:
            warnings.warn(
                f"{method.name} has a momentum of {mu:g} and so has {type(optimizer).__name__} ({own:g}): "
                "steps grow by both; set mu=0 or take plain SGD",
                stacklevel=4,
            )
            return


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
