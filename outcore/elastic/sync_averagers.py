"""The averagers of the collective methods, in which all members exchange at the same time.

averagers.py describes the three methods of an averager, and sync.py how vectors are summed.
"""

from __future__ import annotations

import io
import time
from contextlib import suppress

import torch
from torch import Tensor

from outcore.elastic import rules
from outcore.elastic.averagers import Averager, Local
from outcore.elastic.checkpoint import CenterState, load_center, save_center
from outcore.elastic.methods import default_alpha
from outcore.elastic.sync import SyncExchange
from outcore.elastic.wire import PeerLost, Traffic, pieces
from outcore.errors import ElasticError

_MAX_REGROUPS = 8


class _SyncAverager(Averager):
    """The common part of the collective methods: agreeing on a state with the present members, and checkpoints."""

    def __init__(self, local: Local, exchange: SyncExchange) -> None:
        self.local, self.exchange = local, exchange
        device = torch.device("cpu") if local.keeps_center_on_host else local.weights.device
        pinned = device.type == "cpu" and local.weights.is_cuda
        num, num_outer = local.weights.numel(), local.flat.num_params if local.method.momentum == "outer" else 0
        self.center = torch.zeros(num, dtype=exchange.dtype, device=device, pin_memory=pinned)
        self.velocity = torch.zeros(num_outer, dtype=exchange.dtype, device=device, pin_memory=pinned)
        self.num_exchanges = -1
        self._is_newcomer = True
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
        return self.center.to(self.local.weights.device)

    def close(self, *, finished: bool) -> None:
        if self.local.checkpoint is not None and self.exchange.group.index == 0:
            self._save()
        self.exchange.close(finished=finished)

    def _begin_from_center(self) -> None:
        self.local.weights.copy_(self.center)

    def _states(self) -> list[Tensor]:
        return [self.center, self.velocity] if self.local.method.momentum == "outer" else [self.center]

    def _agree(self) -> None:
        """Takes over the state of the member that is furthest; regroups when members are lost meanwhile."""
        for _ in range(_MAX_REGROUPS):
            try:
                if self.num_exchanges < 0:
                    self.center.copy_(self.local.weights)
                agreed = self.exchange.agree(
                    self._states(), self.num_exchanges, self.local.global_step, is_newcomer=self._is_newcomer
                )
                if agreed.has_newcomers:
                    self.local.frozen.share(self.exchange.group, agreed.best, is_newcomer=self._is_newcomer)
                self._share_more(agreed.best)
                if agreed.is_behind:
                    self.local.global_step = agreed.global_step
                self.num_exchanges, self._is_newcomer = max(agreed.num_exchanges, 0), False
                return
            except PeerLost:
                self.exchange.regroup()
        raise ElasticError(
            f"members vanished during {_MAX_REGROUPS} attempts to regroup (last with ranks {self.members()}); "
            "see why workers die, then start again from the checkpoint"
        )

    def _share_more(self, best: int) -> None:
        """Shares further state that members must have in common."""

    def on_lost(self) -> None:
        self.exchange.regroup()
        self._agree()

    def _settle(self) -> None:
        """Called after a successful exchange: counts it, saves a checkpoint if due, and admits newcomers."""
        self.num_exchanges += 1
        due = time.monotonic() - self._saved_s > self.local.checkpoint_every_s
        if due and self.local.checkpoint is not None and self.exchange.group.index == 0:
            self._save()
        if self.exchange.newcomers_wait:
            self.on_lost()

    def _save(self) -> None:
        assert self.local.checkpoint is not None
        state = CenterState(self.center.cpu(), self.velocity.cpu(), self.num_exchanges, self.local.global_step)
        muster = self.exchange.roster.muster
        save_center(self.local.checkpoint, state, nonce=muster.nonce, model=muster.card.model_digest)
        self._saved_s = time.monotonic()

    def _load(self) -> None:
        if self.local.checkpoint is None:
            return
        model = self.exchange.roster.muster.card.model_digest
        saved = load_center(self.local.checkpoint, self.center.numel(), self.center.dtype, model=model)
        if saved is not None:
            self.center.copy_(saved.center)
            if saved.velocity.numel() >= self.velocity.numel():
                self.velocity.copy_(saved.velocity[: self.velocity.numel()])
            self.num_exchanges, self.local.global_step = saved.num_exchanges, saved.global_step

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

    A worker may take more local steps before `before_step` (see Settings.ahead). The pull uses the difference that was
    sent, which is stored separately from the weights until the next `prepare`.

    The new centre is computed beside the old one and replaces it when the exchange has succeeded, so that reading the
    centre meanwhile, or after losing a member, gives the complete old one.
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
            self.on_lost()
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

    def close(self, *, finished: bool) -> None:
        if self._begun and finished:  # all remaining members have begun the same exchange
            with suppress(PeerLost):
                self._finish()
        super().close(finished=finished)

    def _alpha(self) -> float:
        given = self.local.alpha
        return default_alpha(self.local.method, self.exchange.num_members) if given is None else given

    def _begin(self) -> None:
        """Computes the difference in the caller's thread. Between two steps the user may replace the weights by the
        centre to evaluate it, and the forward changes BatchNorm's statistics."""
        self._begun = True
        rules.difference(self.local.weights, self.center, out=self.difference)
        then = self._turn_into_center if self.exchange.level == 1 else self.move_center
        self.exchange.begin(self._write_difference, may_abstain=True, then=then)

    def _finish(self) -> None:
        self._begun = False
        result = self.exchange.finish()
        if self.exchange.level == 1:
            self._moved.copy_(result)
        self.center, self._moved = self._moved, self.center

    def _write_difference(self, place: Tensor) -> None:
        """Copies the difference into the message, which becomes the sum, while eq. 1 needs the worker's own."""
        for part, difference in pieces(place, self.difference):
            part.copy_(difference)

    def move_center(self, sum_difference: Tensor) -> None:
        total = sum_difference.to(self.center.device)
        cut, alpha = self.local.flat.num_params, self._alpha()
        for center, part, moved in pieces(self.center[:cut], total[:cut], self._moved[:cut]):
            rules.center_elastic(center, part, alpha, out=moved)
        self._add_buffers(total, out=self._moved)

    def _turn_into_center(self, sum_difference: Tensor) -> None:
        self.move_center(sum_difference)
        sum_difference.copy_(self._moved)


class DiLoCo(_SyncAverager):
    """An outer Nesterov step on the mean difference, of the whole vector or of one fragment after the other.

    DiLoCo (2311.08105) has one fragment and waits for its result: workers continue from the new centre. Streaming
    DiLoCo (2501.18512) has several fragments and sends each `delay` steps before its result is applied. The difference
    is computed when it is sent, and the share `mix` of the weights reached meanwhile is kept. The number of exchanges,
    on which all members agree, determines the next fragment. A failed exchange is dropped: the members take over the
    centre of the furthest one, and the fragment's steps since then become part of its next difference.
    """

    def __init__(self, local: Local, exchange: SyncExchange, fragments: list[slice], *, delay: int, mix: float) -> None:
        self._fragments, self._delay, self._mix = fragments, delay, mix
        self._begun = False
        super().__init__(local, exchange)

    def prepare(self) -> None:
        if self._delay:
            self._begin()

    def after_step(self) -> None:
        part = self._part()
        try:
            if not self._begun:
                self._begin()
            total = self.exchange.finish().to(self.center.device)
        except PeerLost:
            self._begun = False
            self.on_lost()
            return
        self._begun = False
        self._check_present()
        self.move_center(part, total)
        if self.exchange.abstained:
            self.local.start_again(self.center)
        self._mix_in(part)
        self._settle()

    def close(self, *, finished: bool) -> None:
        if self._begun and finished:  # all remaining members have begun the same exchange
            with suppress(PeerLost):
                self.exchange.finish()
        super().close(finished=finished)

    def _part(self) -> slice:
        return self._fragments[self.num_exchanges % len(self._fragments)]

    def _begin(self) -> None:
        """Computes the difference now, because the exchange may run in parallel with the next steps."""
        self._begun = True
        part = self._part()
        weights, center, place = self.local.weights[part], self.center[part], self.exchange.room(part)
        if weights.device == center.device:
            place.copy_(rules.difference(weights, center))
        else:  # the centre is on the host, where the message is
            place.copy_(weights)
            place.sub_(center)
        self.exchange.begin(_write_nothing, may_abstain=True, part=part)

    def move_center(self, part: slice, total: Tensor) -> None:
        cut, num_present = self.local.flat.num_params, self.exchange.num_present
        learned = slice(part.start, min(part.stop, cut))
        num = learned.stop - learned.start
        moved = rules.outer_nesterov(
            self.center[learned],
            self.velocity[learned],
            total[:num] / num_present,
            self.local.outer_rate,
            self.local.mu,
        )
        self.center[learned], self.velocity[learned] = moved
        self.center[learned.stop : part.stop].add_(total[num:], alpha=1 / num_present)  # buffers: their mean

    def _mix_in(self, part: slice) -> None:
        cut, weights = self.local.flat.num_params, self.local.weights
        if self._mix:
            learned = slice(part.start, min(part.stop, cut))
            center = self.center[learned].to(weights.device)
            weights[learned].copy_(rules.mixed(weights[learned].to(center.dtype), center, self._mix))
            part = slice(learned.stop, part.stop)
        weights[part].copy_(self.center[part])


class SyncSgd(_SyncAverager):
    """Synchronous SGD: averages the gradients before every step. The centre is the weights, equal at all members."""

    def before_step(self) -> None:
        flat, alone = self.local.flat, self.exchange.num_members == 1
        try:
            self.exchange.begin(_write_nothing if alone else self._write_gradient)
            total = self.exchange.finish()
        except PeerLost:
            self.on_lost()
            flat.gradient.zero_()  # computed at other weights than the present ones
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

    def on_lost(self) -> None:
        super().on_lost()
        self.local.weights.copy_(self.center)

    def _share_more(self, best: int) -> None:
        """Shares the optimizer's state, which must stay equal, or replicas with equal weights would diverge."""
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
    """Writes nothing: the vector is already in the message, or a single member's gradient is the mean."""
