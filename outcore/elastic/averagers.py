"""Local weights + the others' -> averaged weights: one small class per way of exchanging.

Each has three moments. `prepare` runs at the end of the step before an exchange (what may overlap starts here),
`before_step` just before the local step (weights are still those of the gradient: the OLD pair of the equations),
`after_step` just after it. The numbers are in rules.py, the messages in sync.py and link.py.

A worker whose weights are no longer finite would end everybody: alpha times NaN is NaN in the centre, and from there in
all. So it abstains, and starts again from the centre. The published methods do not speak of it.
"""

from __future__ import annotations

import io
import time
import warnings
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from outcore.elastic import rules
from outcore.elastic.checkpoint import CenterState, load_center, save_center
from outcore.elastic.flat import FlatModel
from outcore.elastic.link import CenterLink
from outcore.elastic.methods import Method, default_alpha
from outcore.elastic.sync import SyncExchange
from outcore.elastic.wire import PeerLost, Traffic, is_finite, pieces
from outcore.errors import ElasticError

_MAX_REGROUPS = 8


@dataclass
class Local:
    """What an averager may read and write of its worker. `weights` is the vector the equations call W_i."""

    flat: FlatModel
    weights: Tensor
    velocity: Tensor | None
    method: Method
    alpha: float | None
    mu: float
    outer_rate: float
    num_ranks: int
    optimizer: torch.optim.Optimizer
    checkpoint: Path | None
    checkpoint_every_s: float

    def start_again(self, center: Tensor) -> None:
        """This worker diverged: back to the centre, without momentum's memory of how it got lost."""
        if not is_finite(center):
            raise ElasticError("the centre is no longer finite: training diverged; lower the learning rate")
        warnings.warn(
            "this worker's weights are no longer finite: it starts again from the centre; lower the learning rate",
            stacklevel=2,
        )
        for place in (self.weights, self.flat.vector):
            place.copy_(center)
        self.optimizer.state.clear()
        if self.velocity is not None:
            self.velocity.zero_()


def exchange_dtype(weights: Tensor) -> torch.dtype:
    """Half-precision weights meet a float32 centre: a small pull on a bfloat16 centre would round to nothing."""
    return torch.float32 if weights.dtype in (torch.float16, torch.bfloat16) else weights.dtype


class Averager(ABC):
    """The three moments; a method fills in those it needs."""

    num_exchanges: int

    def prepare(self) -> None:  # noqa: B027
        """End of the step before an exchange."""

    def is_over(self) -> bool:
        """Whether `before_step` would not have to wait for the exchange that `prepare` began."""
        return True

    def before_step(self) -> None:  # noqa: B027
        """Before the local step: the weights are those of the gradient."""

    def after_step(self) -> None:  # noqa: B027
        """After the local step."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic: ...

    @abstractmethod
    def read_center(self) -> Tensor: ...

    @abstractmethod
    def members(self) -> list[int]: ...

    @abstractmethod
    def busy_s(self) -> float: ...

    @abstractmethod
    def close(self) -> None: ...


class _SyncAverager(Averager):
    """What the collective methods share: agreeing on a state with whoever is present, and the centre's checkpoint."""

    def __init__(self, local: Local, exchange: SyncExchange) -> None:
        self.local, self.exchange = local, exchange
        self.center = torch.zeros_like(local.weights, dtype=exchange.dtype)
        self.velocity = torch.zeros_like(self.center)
        self.num_exchanges = -1
        self._saved_s = time.monotonic()
        self._load()
        self._agree()
        self._begin_from_center()

    @property
    def traffic(self) -> Traffic:
        return self.exchange.traffic

    def members(self) -> list[int]:
        return list(self.exchange.roster.ranks)

    def busy_s(self) -> float:
        return self.exchange.busy_s

    def read_center(self) -> Tensor:
        return self.center

    def close(self) -> None:
        if self.local.checkpoint is not None and self.exchange.group.index == 0:
            self._save()
        self.exchange.close()

    def _begin_from_center(self) -> None:
        self.local.weights.copy_(self.center)

    def _states(self) -> list[Tensor]:
        return [self.center, self.velocity] if self.local.method.momentum == "outer" else [self.center]

    def _agree(self) -> None:
        """Takes over the state of the member that is furthest; regroups while members go on vanishing."""
        for _ in range(_MAX_REGROUPS):
            try:
                newcomer = self.num_exchanges < 0
                if newcomer:
                    self.center.copy_(self.local.weights)
                count, best = self.exchange.agree(self._states(), self.num_exchanges)
                self._share_more(best)
                self.num_exchanges = max(count, 0)
                return
            except PeerLost:
                self.exchange.regroup()
        raise ElasticError(
            f"members vanished during {_MAX_REGROUPS} attempts to regroup (last with ranks {self.members()}); "
            "see why workers die, then start again from the checkpoint"
        )

    def _share_more(self, best: int) -> None:
        """What else members must have in common."""

    def _lost(self) -> None:
        self.exchange.regroup()
        self._agree()

    def _settle(self) -> None:
        """After a finished exchange: count it, save now and then, let those who wait in."""
        self.num_exchanges += 1
        due = time.monotonic() - self._saved_s > self.local.checkpoint_every_s
        if due and self.local.checkpoint is not None and self.exchange.group.index == 0:
            self._save()
        if self.exchange.newcomers_wait:
            self._lost()

    def _save(self) -> None:
        assert self.local.checkpoint is not None
        save_center(self.local.checkpoint, CenterState(self.center.cpu(), self.velocity.cpu(), self.num_exchanges))
        self._saved_s = time.monotonic()

    def _load(self) -> None:
        saved = load_center(self.local.checkpoint, self.center.numel()) if self.local.checkpoint else None
        if saved is not None:
            self.center.copy_(saved.center)
            self.velocity.copy_(saved.velocity)
            self.num_exchanges = saved.num_exchanges

    def _add_buffers(self, sum_difference: Tensor, out: Tensor) -> None:
        cut, share = self.local.flat.num_params, 1 / max(1, self.exchange.num_present)
        torch.add(self.center[cut:], sum_difference[cut:], alpha=share, out=out[cut:])

    def _check_present(self) -> None:
        if self.exchange.num_present == 0:
            raise ElasticError(
                f"no worker of {self.members()} has finite weights: training diverged; lower the learning rate"
            )


class ElasticSync(_SyncAverager):
    """Sync EASGD, levels 1 to 3: eq. 1 at every worker, eq. 2 at the centre (member 0 at level 1, everyone above).

    A worker may take more local steps before `before_step` (see Settings.ahead): the pull is of the difference that was
    sent, which stands apart from the weights until the next `prepare`.

    The new centre is made beside the old one and takes its place when the exchange has ended well: whoever reads the
    centre meanwhile, or loses a member, has the old one whole.
    """

    def __init__(self, local: Local, exchange: SyncExchange) -> None:
        self.difference = torch.zeros_like(local.weights, dtype=exchange.dtype)
        self._moved = torch.zeros_like(self.difference)
        self._begun = self._pull = False
        super().__init__(local, exchange)

    def prepare(self) -> None:
        if self.exchange.level == 3:
            self._begin()

    def is_over(self) -> bool:
        return self.exchange.is_over()

    def before_step(self) -> None:
        try:
            if not self._begun:
                self._begin()
            self._finish()
        except PeerLost:
            self._begun = False
            self._lost()
            return
        self._pull = True
        self._check_present()

    def after_step(self) -> None:
        if not self._pull:
            return
        self._pull = False
        if self.exchange.abstained:
            self.local.start_again(self.center)
        else:
            cut = self.local.flat.num_params
            weights = self.local.weights[:cut]
            rules.worker_elastic(weights, self.difference[:cut], self._alpha(), out=weights)
        self._settle()

    def close(self) -> None:
        if self._begun:  # everyone who is still here has begun the same exchange
            with suppress(PeerLost):
                self._finish()
        super().close()

    def _alpha(self) -> float:
        given = self.local.alpha
        return default_alpha(self.local.method, self.exchange.num_members) if given is None else given

    def _begin(self) -> None:
        """Takes the difference here and now, not in the exchange's thread: between two steps the weights are the
        user's, who may put the centre in their place to evaluate it, and the forward moves BatchNorm's statistics."""
        self._begun = True
        rules.difference(self.local.weights, self.center, out=self.difference)
        then = self._turn_into_center if self.exchange.level == 1 else self._move_center
        self.exchange.begin(self._write_difference, may_abstain=True, then=then)

    def _finish(self) -> None:
        self._begun = False
        result = self.exchange.finish()
        if self.exchange.level == 1:
            self._moved.copy_(result)
        self.center, self._moved = self._moved, self.center

    def _write_difference(self, place: Tensor) -> None:
        """A copy: the message becomes the sum, and eq. 1 needs the worker's own."""
        for part, difference in pieces(place, self.difference):
            part.copy_(difference)

    def _move_center(self, sum_difference: Tensor) -> None:
        total = sum_difference.to(self.center.device)
        cut, alpha = self.local.flat.num_params, self._alpha()
        for center, part, moved in pieces(self.center[:cut], total[:cut], self._moved[:cut]):
            rules.center_elastic(center, part, alpha, out=moved)
        self._add_buffers(total, out=self._moved)

    def _turn_into_center(self, sum_difference: Tensor) -> None:
        self._move_center(sum_difference)
        sum_difference.copy_(self._moved)


class DiLoCo(_SyncAverager):
    """Every `period` steps an outer Nesterov step on the mean difference; workers go on from the new centre."""

    def after_step(self) -> None:
        local = self.local
        try:
            self.exchange.begin(self._write_difference, may_abstain=True)
            total = self.exchange.finish().to(self.center.device)
        except PeerLost:
            self._lost()
            return
        self._check_present()
        cut, num_present = local.flat.num_params, self.exchange.num_present
        moved = rules.outer_nesterov(
            self.center[:cut], self.velocity[:cut], total[:cut] / num_present, local.outer_rate, local.mu
        )
        self.center[:cut], self.velocity[:cut] = moved
        self._add_buffers(total, out=self.center)
        if self.exchange.abstained:
            local.start_again(self.center)
        local.weights.copy_(self.center)
        self._settle()

    def _write_difference(self, place: Tensor) -> None:
        place.copy_(rules.difference(self.local.weights, self.center))


class SyncSgd(_SyncAverager):
    """Plain synchronous SGD: the mean gradient before every step. The centre is the weights everyone holds."""

    def before_step(self) -> None:
        flat, alone = self.local.flat, self.exchange.num_members == 1
        try:
            self.exchange.begin(_write_nothing if alone else self._write_gradient)
            total = self.exchange.finish()
        except PeerLost:
            self._lost()
            flat.gradient.zero_()  # taken at weights that are no longer these
            return
        if not alone:
            total, num, cut = total.to(flat.gradient.device), self.exchange.num_members, flat.num_params
            torch.div(total[:cut], num, out=flat.gradient)
            self.local.weights[cut:].copy_(total[cut:] / num)

    def _write_gradient(self, place: Tensor) -> None:
        cut = self.local.flat.num_params
        place[:cut].copy_(self.local.flat.gradient)
        place[cut:].copy_(self.local.weights[cut:])

    def after_step(self) -> None:
        self.center.copy_(self.local.weights)
        self._settle()

    def _lost(self) -> None:
        super()._lost()
        self.local.weights.copy_(self.center)

    def _share_more(self, best: int) -> None:
        """Momentum and the like must stay equal too, or replicas with equal weights drift apart."""
        group, mine = self.exchange.group, io.BytesIO()
        torch.save(self.local.optimizer.state_dict(), mine)
        is_best = group.index == best
        size = torch.tensor([float(mine.tell()) if is_best else 0.0], dtype=torch.float64)
        group.tree_broadcast(size, root=best)
        raw = torch.frombuffer(bytearray(mine.getvalue()), dtype=torch.uint8) if is_best else None
        packed = raw if raw is not None else torch.zeros(int(size), dtype=torch.uint8)
        group.tree_broadcast(packed, root=best)
        if not is_best:
            state = torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
            self.local.optimizer.load_state_dict(state)


def _write_nothing(place: Tensor) -> None:
    """A lone member's gradient is the mean already."""


class _CenterAverager(Averager):
    """What the methods with a centre process share."""

    def __init__(self, local: Local, link: CenterLink, join_limit_s: float) -> None:
        self.local, self.link = local, link
        self.num_exchanges = 0
        self._clock = 0
        self.center = torch.zeros_like(local.weights, dtype=exchange_dtype(local.weights))
        self.center.copy_(link.connect(local.weights, join_limit_s))
        local.weights.copy_(self.center)

    @property
    def traffic(self) -> Traffic:
        return self.link.traffic

    def members(self) -> list[int]:
        """The asynchronous methods know of no one but the centre."""
        return []

    def busy_s(self) -> float:
        return self.link.busy_s

    def read_center(self) -> Tensor:
        self.center.copy_(self.link.read())
        return self.center

    def close(self) -> None:
        self.link.close()


class ElasticCenter(_CenterAverager):
    """Original, Async and Hogwild EASGD, MEASGD, EAMSGD: W_i out, C back, both sides move from the old pair."""

    def __init__(self, local: Local, link: CenterLink, join_limit_s: float, *, whole_turn: bool) -> None:
        super().__init__(local, link, join_limit_s)
        self._whole_turn, self._turn_due = whole_turn, False
        self._overlaps = local.method.order != "turns"
        self._begun = self._diverged = False
        self._difference: Tensor | None = None

    def prepare(self) -> None:
        if self._whole_turn:
            self._turn_due = True  # taken when the next forward pass begins: after the last step there is none
        elif self._overlaps:
            self._begin()

    def begin_iteration(self) -> None:
        if self._turn_due:
            self._turn_due = False
            self.link.take_turn()

    def before_step(self) -> None:
        if not self._begun:
            self._begin()
        answer, self._begun = self.link.finish(), False
        if answer is not None:
            self.center.copy_(answer)
            self._difference = rules.difference(self.local.weights, self.center)
            self.num_exchanges += 1

    def after_step(self) -> None:
        if self._difference is None:
            return
        if self._diverged:
            self.local.start_again(self.center)
        else:
            cut = self.local.flat.num_params
            weights = self.local.weights[:cut]
            rules.worker_elastic(weights, self._difference[:cut], self._alpha(), out=weights)
        self._difference = None

    def close(self) -> None:
        if self._begun:
            self.link.finish()
        super().close()

    def _alpha(self) -> float:
        given = self.local.alpha
        return default_alpha(self.local.method, self.local.num_ranks) if given is None else given

    def _begin(self) -> None:
        self._begun = True
        self._clock += 1
        self._diverged = not is_finite(self.local.weights)
        if self._diverged:  # the centre as last seen, with no weight, moves nothing
            self.link.begin(self.center, self._clock, 0.0)
        else:
            self.link.begin(self.local.weights, self._clock, self._alpha())


class StepCenter(_CenterAverager):
    """Async SGD, Async MSGD, Hogwild SGD: the steps taken since the last answer go out, the new centre comes back."""

    def after_step(self) -> None:
        self._clock += 1
        steps = rules.difference(self.local.weights, self.center)
        diverged = not is_finite(steps)
        self.link.begin(steps.zero_() if diverged else steps, self._clock, 0.0)
        answer = self.link.finish()
        if answer is not None:
            self.center.copy_(answer)
            if diverged:
                self.local.start_again(self.center)
            self.local.weights.copy_(self.center)
            self.num_exchanges += 1
