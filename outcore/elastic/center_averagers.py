"""The averagers of methods whose centre is a process that serves one worker at a time.

averagers.py describes the three methods of an averager; link.py and center.py are the two ends of a message.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outcore.elastic import rules
from outcore.elastic.averagers import Averager, Local, exchange_dtype
from outcore.elastic.link import CenterLink
from outcore.elastic.methods import default_alpha
from outcore.elastic.wire import Traffic, is_finite


class _CenterAverager(Averager):
    """The common part of the methods with a centre process."""

    def __init__(self, local: Local, link: CenterLink) -> None:
        self.local, self.link = local, link
        self.num_exchanges = 0
        self._clock = 0
        self.center = torch.zeros_like(local.weights, dtype=exchange_dtype(local.weights))
        self.center.copy_(link.connect(local.weights, local.global_step))
        link.keep(self.center)
        local.weights.copy_(self.center)
        local.global_step = link.global_step

    @property
    def traffic(self) -> Traffic:
        return self.link.traffic

    def members(self) -> list[int]:
        """Returns the ranks that the centre serves now."""
        return self.link.members()

    def busy_s(self) -> float:
        return self.link.busy_s

    def read_center(self) -> Tensor:
        """Returns the present centre. The last answer stays unchanged, because this worker's steps refer to it."""
        return self.link.read().to(self.center.device)

    def close(self, *, finished: bool) -> None:
        self.link.close(finished=finished)


class ElasticCenter(_CenterAverager):
    """Original, Async and Hogwild EASGD, MEASGD, EAMSGD: sends W_i, receives C; both sides use the old pair."""

    def __init__(self, local: Local, link: CenterLink, *, whole_turn: bool) -> None:
        super().__init__(local, link)
        self._whole_turn, self._turn_due = whole_turn, False
        self._overlaps = local.method.order != "turns"
        self._begun = self._diverged = False
        self._difference: Tensor | None = None

    def prepare(self) -> None:
        if self._whole_turn:
            self._turn_due = True  # taken when the next forward begins, if there is one
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

    def close(self, *, finished: bool) -> None:
        if self._begun and finished:
            self.link.finish()
        super().close(finished=finished)

    def _alpha(self) -> float:
        given = self.local.alpha
        return default_alpha(self.local.method, self.local.num_ranks) if given is None else given

    def _begin(self) -> None:
        self._begun = True
        self._clock += 1
        self._diverged = not is_finite(self.local.weights)
        if self._diverged:  # the last centre with a weight of zero changes nothing
            self.link.begin(self.center, self._clock, 0.0, self.local.global_step)
        else:
            self.link.begin(self.local.weights, self._clock, self._alpha(), self.local.global_step)


class StepCenter(_CenterAverager):
    """Async SGD, Async MSGD, Hogwild SGD: sends the steps since the last answer and receives the new centre."""

    def after_step(self) -> None:
        self._clock += 1
        steps = rules.difference(self.local.weights, self.center)
        diverged = not is_finite(steps)
        self.link.begin(steps.zero_() if diverged else steps, self._clock, 0.0, self.local.global_step)
        answer = self.link.finish()
        if answer is not None:
            self.center.copy_(answer)
            if diverged:
                self.local.start_again(self.center)
            self.local.weights.copy_(self.center)
            self.num_exchanges += 1
