"""Adapts the batch and learning rate of a training loop to the gradient noise, for the most progress per second.

    adaptive = Adaptive(model, optimizer, batch=256, micro_batch=64, largest_batch=8192)
    for x, y in adaptive.batches(loader):        # micro-batches; the loader's own batch size does not matter
        with ooc.step():                         # only if the model is under outcore.limit
            loss_fn(model(x), y).backward()      # a mean over samples, not divided by anything
        adaptive.step()                          # in place of optimizer.step() and optimizer.zero_grad()

Two lines of the loop change. `batches` regroups the loader's samples into micro-batches and `step` counts them: when a
batch is complete, `step` averages the gradients, lets the optimizer step and returns True. Gradient noise is measured
during training (noise.py). Seconds of a step are measured, or given by `step_s`. Every `interval_steps` steps (at least
six if steps are timed, so that one of them is) the batch may double or halve towards the highest goodput (goodput.py).
The learning rate is multiplied by the rule's factor during the optimizer's step only: a scheduler continues to see, and
to change, the rate of the first batch. Additions for special cases:

- clipping: `optimizer.register_step_pre_hook(lambda *_: clip_grad_norm_(model.parameters(), 1.0))`
- a schedule in steps of the first batch: pass `scheduler=...`; it advances by each step's gain, as in AdaScale
- several ranks: wrap the model in DistributedDataParallel; `batch` is the sum over all ranks, and all decide alike

The objective follows Pollux (arXiv 2008.12260), the rate AdaScale (arXiv 2007.05105). In contrast to Pollux no model of
the hardware is fitted: the next larger batch is tried for a few steps, which are at least nearly worth their cost, and
is kept if it pays off. If `largest_batch` equals `batch`, nothing is adapted, and the training is bitwise the same as
plain accumulation.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from outcore.errors import TuningError
from outcore.tuning.data.batches import Regrouped
from outcore.tuning.gradients.goodput import RULES, beta2_for, gain, goodput, lr_factor, warm_up
from outcore.tuning.gradients.noise import Noise, Norms, RunningNoise, squared_length
from outcore.tuning.settings import SETTINGS
from outcore.tuning.workers.shares import mean_over_ranks
from outcore.units import two_digits

log = logging.getLogger("outcore")

ADAPTIVE = SETTINGS.adaptive


@dataclass(frozen=True)
class RateRule:
    """How the learning rate follows the batch.

    `name` is "adascale", "sqrt", "linear", "legw" or "fixed". Every change of the batch is followed by `warm_up_steps`
    steps of warm-up. With `scale_beta2` the half-life of Adam's second moment stays constant in samples.
    """

    name: str = "adascale"
    warm_up_steps: int = 0
    scale_beta2: bool = False


@dataclass(frozen=True)
class Change:
    """A change of the batch, after `num_samples` samples of training. `why` gives the reason in one sentence."""

    num_steps: int
    num_samples: int
    batch_before: int
    batch: int
    noise: float
    lr_factor: float
    why: str


class Adaptive:
    """Controls the batch and the learning rate of a training loop; the module's docstring shows the loop.

    `batch` is the batch that the optimizer's learning rate was chosen for, and the smallest batch that is used.
    `micro_batch` is the maximum number of samples of one forward and backward on this rank (`outcore.tune` finds it).
    `rule` determines how the rate follows the batch. `step_s(batch)` returns the seconds of a whole step, if they are
    known in advance.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        batch: int,
        micro_batch: int,
        largest_batch: int | None = None,
        rule: str | RateRule = "adascale",
        step_s: Callable[[int], float] | None = None,
        scheduler: Any = None,
        interval_steps: int = 25,
        group: Any = None,
    ) -> None:
        rule = rule if isinstance(rule, RateRule) else RateRule(rule)
        if rule.name not in RULES:
            raise TuningError(f"there is no learning-rate rule {rule.name!r}; choose one of {', '.join(RULES)}")
        self.model, self.optimizer, self.scheduler, self.group = model, optimizer, scheduler, group
        self.rule, self.interval_steps = rule, interval_steps
        self.num_ranks = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
        self.first_batch = self.batch = batch
        self.micro_batch = micro_batch
        self.candidates = self._candidates(batch, largest_batch or batch)
        self.running = RunningNoise()
        self.changes: list[Change] = []
        self.num_steps = self.num_samples = 0
        self.progress = 0.0  # in steps of the first batch
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._normalised = any("betas" in group for group in optimizer.param_groups)
        self._norms = Norms(self._parameters)
        self._times = _Times(step_s)
        self._regrouped = Regrouped()
        self._small: list[torch.Tensor] = []
        self._pending: tuple[torch.Tensor, int, int] | None = None
        self._num_micro = self._since_change = 0
        self._handed_out = False
        self._factor_before = 1.0
        self._lay_out()

    # -- the loop's two lines ------------------------------------------------------------------------------------------

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yields the loader's samples in micro-batches. Samples left at the end are kept for the next call."""
        if self._handed_out:
            self._start_over()
        for loaded in loader:
            self._regrouped.add(loaded)
            while self._regrouped.num_samples >= self._micro:
                if self._handed_out:
                    raise TuningError("a micro-batch went by without adaptive.step(); call it at the end of each one")
                self._sync_ranks(self._num_micro + 1 == self._num_parts)
                self._handed_out = True
                yield self._regrouped.take(self._micro)

    def _start_over(self) -> None:
        """Discards an incomplete batch: the last loop was left before `step`, and it is unknown whether the micro-batch
        had its backward."""
        self._handed_out, self._num_micro, self._small = False, 0, []
        self._norms.drop()
        self.optimizer.zero_grad(set_to_none=True)

    def step(self) -> bool:
        """Call after each backward. Returns True if a batch was complete and the optimizer stepped."""
        if not self._handed_out:
            raise TuningError("adaptive.step() goes with adaptive.batches(loader): once after each micro-batch of it")
        self._handed_out = False
        self._num_micro += 1
        if self._norms.on:
            self._small.append(self._norms.take())
        if self._num_micro < self._num_parts:
            return False
        self._finish_batch()
        return True

    def _finish_batch(self) -> None:
        if self._num_parts > 1:
            grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
            torch._foreach_div_(grads, float(self._num_parts))
        self._note_noise()
        self._step_optimizer()
        self.num_steps += 1
        self.num_samples += self.batch
        self._since_change += 1
        self._times.tick()
        self._advance(gain(self.batch, self.first_batch, self.noise_scale()))
        if len(self.candidates) > 1 and self._since_change >= self._patience():
            self._decide()
        self._num_micro = 0
        self._lay_out()

    def _step_optimizer(self) -> None:
        """Steps the optimizer with changed groups and restores them afterwards, so that others see their own values."""
        kept = [dict(group) for group in self.optimizer.param_groups]
        factor = self.lr_factor
        for group in self.optimizer.param_groups:
            if factor != 1.0:
                group["lr"] = group["lr"] * factor
            if self.rule.scale_beta2 and "betas" in group and self.batch != self.first_batch:
                beta1, beta2 = group["betas"]
                group["betas"] = (beta1, beta2_for(beta2, self.batch, self.first_batch))
        try:
            self.optimizer.step()
        finally:
            for group, before in zip(self.optimizer.param_groups, kept):
                group.update({key: before[key] for key in ("lr", "betas") if key in before})
        self.optimizer.zero_grad(set_to_none=True)

    def _advance(self, gained: float) -> None:
        whole = math.floor(self.progress)
        self.progress += gained
        if self.scheduler is not None:
            for _ in range(math.floor(self.progress) - whole):
                self.scheduler.step()

    def _sync_ranks(self, last: bool) -> None:
        """Lets DistributedDataParallel communicate in the last micro-batch of a batch only, as `no_sync` does."""
        if isinstance(self.model, DistributedDataParallel):
            self.model.require_backward_grad_sync = last

    # -- how a batch is cut --------------------------------------------------------------------------------------------

    def _candidates(self, batch: int, largest: int) -> list[int]:
        if batch < 1 or self.micro_batch < 1 or largest < batch:
            raise TuningError(
                f"batch {batch}, micro_batch {self.micro_batch} and largest_batch {largest} do not fit together; take "
                "batch <= largest_batch and all of them above zero"
            )
        candidates = [batch << power for power in range((largest // batch).bit_length())]
        for candidate in candidates:
            self._parts_of(candidate, split=len(candidates) > 1)
        return candidates

    def _parts_of(self, batch: int, *, split: bool) -> int:
        """Returns the number of equal micro-batches per rank: as few as fit, but at least two if noise is measured."""
        mine, rest = divmod(batch, self.num_ranks)
        if rest or not mine:
            raise TuningError(f"a batch of {batch} cannot be shared by {self.num_ranks} ranks; take a multiple of them")
        least = max(math.ceil(mine / self.micro_batch), 2 if split and self.num_ranks == 1 else 1)
        for num_parts in range(least, 2 * least + 1):
            if mine % num_parts == 0:
                return num_parts
        raise TuningError(
            f"a batch of {mine} cannot be cut into equal micro-batches of at most {self.micro_batch} samples (at least "
            f"two, to see noise); take a multiple of {min(self.micro_batch, max(1, mine // 2))}"
        )

    def _lay_out(self) -> None:
        """Splits the next batch, and decides whether its noise is measured: if that costs nothing, or once in a
        while."""
        adapting = len(self.candidates) > 1
        num_parts = self._parts_of(self.batch, split=False)
        if num_parts * self.num_ranks == 1 and adapting and self.num_steps % ADAPTIVE.split_every == 0:
            num_parts = self._parts_of(self.batch, split=True)
        self._num_parts = num_parts
        self._micro = self.batch // self.num_ranks // num_parts
        self._norms.on = num_parts * self.num_ranks > 1

    # -- noise ---------------------------------------------------------------------------------------------------------

    @property
    def noise(self) -> Noise | None:
        """The noise over the last steps; None as long as no step had two micro-batches."""
        return self.running.now

    def noise_scale(self) -> float:
        noise = self.noise
        return noise.scale if noise is not None else 0.0

    def _note_noise(self) -> None:
        """Stores this step's gradient norms. They are read one step later, when the device has computed them."""
        self._read_pending()
        if self._norms.on:
            small, self._small = torch.stack(self._small).mean(), []
            lengths = torch.stack([small, squared_length(self._parameters).to(small.device)])
            self._pending = lengths, self._micro, self.batch

    def _read_pending(self) -> None:
        pending, self._pending = self._pending, None
        if pending is not None:
            small_sqr, large_sqr = mean_over_ranks(pending[0].tolist(), self.group)
            self.running.add(small_sqr, pending[1], large_sqr, pending[2])

    # -- deciding ------------------------------------------------------------------------------------------------------

    @property
    def lr_factor(self) -> float:
        """The factor that the optimizer's learning rate is multiplied by in the next step."""
        factor = lr_factor(
            self.rule.name, self.batch, self.first_batch, self.noise_scale(), normalised=self._normalised
        )
        num_steps = self.rule.warm_up_steps
        if self.changes and self._since_change < num_steps:
            return factor * warm_up(self._since_change, num_steps, self._factor_before / factor)
        return factor

    def _patience(self) -> int:
        """Returns the steps between two decisions: fewer while a batch is only tried, but enough to time one."""
        on_trial = bool(self.changes) and not self._times.known(self.batch)
        num_trial_steps = ADAPTIVE.num_settling + ADAPTIVE.num_tried
        wanted = min(num_trial_steps, self.interval_steps) if on_trial else self.interval_steps
        return max(wanted, self._times.num_until_timed)

    def _decide(self) -> None:
        if self.running.num_measured < ADAPTIVE.min_measurements:
            return
        noise = self.noise_scale()
        seconds = self._times.agree(self.batch, self.group)
        place = self.candidates.index(self.batch)
        near = self.candidates[max(0, place - 1) : place + 2]
        worth = {
            batch: goodput(batch / second, batch, self.first_batch, noise)
            for batch in near
            if (second := seconds(batch)) is not None
        }
        if self.batch not in worth:  # no step of it was timed yet
            return
        best = max(worth, key=lambda batch: worth[batch] * (ADAPTIVE.worth_factor if batch == self.batch else 1.0))
        self._since_change = 0
        if best != self.batch:
            self._change_to(best, noise, worth[best] / worth[self.batch])

    def _change_to(self, batch: int, noise: float, better: float) -> None:
        known = "" if self._times.known(batch) else "at most "
        why = (
            f"batch {self.batch} -> {batch}: the noise scale is about {two_digits(noise)} samples, so that one step "
            f"of {batch} is worth {gain(batch, self.batch, noise):.2f} of {self.batch}: {known}"
            f"{100 * (better - 1):.0f} % more progress per second"
        )
        self._factor_before = self.lr_factor
        before, self.batch = self.batch, batch
        self._times.settle()
        self.changes.append(Change(self.num_steps, self.num_samples, before, batch, noise, self.lr_factor, why))
        log.info("%s; learning rate x %.3g", why, self.lr_factor)

    # -- what a user looks at and keeps --------------------------------------------------------------------------------

    def __str__(self) -> str:
        noise = f"about {two_digits(self.noise_scale())} samples" if self.noise else "not measured yet"
        lines = [
            f"step {self.num_steps}, {self.num_samples} samples: batch {self.batch} in micro-batches of {self._micro}, "
            f"learning rate x {self.lr_factor:.3g} ({self.rule.name}), noise scale {noise}, worth "
            f"{self.progress:.0f} steps of batch {self.first_batch}"
        ]
        return "\n".join(lines + [f"  step {change.num_steps}: {change.why}" for change in self.changes])

    def state_dict(self) -> dict[str, Any]:
        """Returns the state between two batches, without gradients and samples of an incomplete batch."""
        names = ("batch", "num_steps", "num_samples", "progress")
        return {name: getattr(self, name) for name in names} | {"running": self.running.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["batch"] not in self.candidates:
            raise TuningError(f"the saved batch {state['batch']} is none of {self.candidates}; keep batch= as it was")
        self.running.load_state_dict(state["running"])
        for name in ("batch", "num_steps", "num_samples", "progress"):
            setattr(self, name, state[name])
        self._lay_out()

    def close(self) -> None:
        """Removes the hooks from the parameters."""
        self._norms.close()


class _Times:
    """Seconds of a step at each batch: predicted if a prediction was given, otherwise measured."""

    def __init__(self, step_s: Callable[[int], float] | None) -> None:
        self._given = step_s
        self._known_s: dict[int, float] = {}
        self._steps_s: list[float] = []
        self._last_s: float | None = None
        self._num_settling = ADAPTIVE.num_settling

    def tick(self) -> None:
        now_s = time.perf_counter()
        if self._num_settling > 0:
            self._num_settling -= 1
        elif self._last_s is not None:
            self._steps_s.append(now_s - self._last_s)
        self._last_s = now_s

    def settle(self) -> None:
        """Restarts the measurement, because the following steps have another batch."""
        self._steps_s, self._num_settling = [], ADAPTIVE.num_settling

    @property
    def num_until_timed(self) -> int:
        """The number of steps of a new batch until one of them is timed."""
        return 1 if self._given is not None else ADAPTIVE.num_settling + 1

    def known(self, batch: int) -> bool:
        return self._given is not None or batch in self._known_s

    def agree(self, batch: int, group: Any) -> Callable[[int], float | None]:
        """Returns a function batch -> seconds that is the same on every rank; None for an unknown batch."""
        if self._given is not None:
            return self._given
        if self._steps_s:
            (new_s,) = mean_over_ranks([_typical_s(self._steps_s)], group)
            old_s = self._known_s.get(batch, new_s)
            self._known_s[batch] = (old_s + new_s) / 2
            self._steps_s = []
        return self._estimate

    def _estimate(self, batch: int) -> float | None:
        """Returns the seconds of a batch. A batch that was not tried yet is estimated optimistically, on the straight
        line through two smaller ones, or with the seconds of half the batch."""
        if batch in self._known_s:
            return self._known_s[batch]
        half, quarter = self._known_s.get(batch // 2), self._known_s.get(batch // 4)
        if half is None:
            return None
        return half if quarter is None else min(2 * half, max(half, 3 * half - 2 * quarter))


def _typical_s(steps_s: list[float]) -> float:
    """Returns the mean without pauses such as evaluations or checkpoints. A median would miss the steps in which the
    host waits for the device."""
    limit_s = 4 * statistics.median(steps_s)
    return statistics.fmean(second for second in steps_s if second <= limit_s)
