"""A link to the centre -> averaged weights: the methods whose centre is a process and serves one worker at a time.

See averagers.py for the three moments that each of them fills in, link.py and center.py for the two ends of a message.
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
    """What the methods with a centre process share."""

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
        """Ranks that the centre serves at the moment."""
        return self.link.members()

    def busy_s(self) -> float:
        return self.link.busy_s

    def read_center(self) -> Tensor:
        """The centre now. What this worker was answered last stays as it is: its own steps are counted from there."""
        return self.link.read().to(self.center.device)

    def close(self, *, finished: bool) -> None:
        self.link.close(finished=finished)


class ElasticCenter(_CenterAverager):
    """Original, Async and Hogwild EASGD, MEASGD, EAMSGD: W_i out, C back, both sides move from the old pair."""

    def __init__(self, local: Local, link: CenterLink, *, whole_turn: bool) -> None:
        super().__init__(local, link)
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
        if self._diverged:  # the centre as last seen, with no weight, moves nothing
            self.link.begin(self.center, self._clock, 0.0, self.local.global_step)
        else:
            self.link.begin(self.local.weights, self._clock, self._alpha(), self.local.global_step)


class StepCenter(_CenterAverager):
    """Async SGD, Async MSGD, Hogwild SGD: the steps taken since the last answer go out, the new centre comes back."""

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
