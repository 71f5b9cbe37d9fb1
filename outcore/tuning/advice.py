"""The result of the tuner, as a value and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch.optim.lr_scheduler import LambdaLR

from outcore.tuning.throughput.curve import Curve
from outcore.tuning.trainings.schedule import rate_factor
from outcore.values.codec import Saved


class HasSchedule:
    """A training with a length. Its rate rises over the warm-up and falls to zero over the last third."""

    num_steps: int
    num_warm_up_steps: int

    def rate_factor(self, step: int) -> float:
        """Returns the factor of the learning rate at an optimizer step, counted from 0, also beyond the length."""
        return rate_factor(step, self.num_steps, self.num_warm_up_steps)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """Returns a scheduler with this factor, for an optimizer whose rate is `learning_rate`. Call its `step()` after
        each optimizer step."""
        return LambdaLR(optimizer, self.rate_factor)


@dataclass(frozen=True)
class Setting(HasSchedule):
    """A setting that is reported beside the advice."""

    micro_batch: int
    accumulation: int
    learning_rate: float | None
    num_steps: int  # the rate falls to zero over the last third of them; 0: unknown
    num_warm_up_steps: int = 0
    beta2: float | None = None

    @property
    def effective_batch(self) -> int:
        return self.micro_batch * self.accumulation

    def __str__(self) -> str:
        rate = "" if self.learning_rate is None else f" at a rate of {self.learning_rate:.3g}"
        return f"a batch of {self.effective_batch}{rate}"


@dataclass(frozen=True)
class Advice(Saved, HasSchedule):
    """Train with `accumulation` micro-batches of `micro_batch` samples per optimizer step.

    Advice that could not be checked is today's setting: `unchecked` then says why, and `proposal` what would have been
    advised.

    ```python
    import outcore
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    dataset = TensorDataset(torch.randn(512, 16), torch.randint(0, 4, (512,)))
    advice = outcore.tune(model, torch.nn.functional.cross_entropy, dataset, memory="16MiB")
    loader = DataLoader(dataset, batch_size=advice.micro_batch)  # the optimizer steps after advice.accumulation of them
    advice.save("advice.json")
    ```
    """

    KIND: ClassVar[str] = "advice"

    micro_batch: int
    accumulation: int
    learning_rate: float | None  # None: no optimizer was given
    samples_per_s: float
    step_s: float  # of the effective batch, optimizer included
    peak_bytes: int
    curve: Curve
    why: tuple[str, ...]
    rule: str = "fixed"  # how the learning rate followed the batch
    num_warm_up_steps: int = 0
    beta2: float | None = None  # for Adam and its relatives; None: leave it
    noise: float | None = None  # the gradient noise scale, in samples
    first_batch: int = 0  # the batch that noise and learning rate are compared with
    target: str = ""
    target_s: float | None = None  # predicted seconds of training to the target
    num_steps: int = 0  # to the target, or the user's length; the rate falls to zero over the last third; 0: unknown
    soonest: Setting | None = None  # what reaches the target first, if a length was given and the target was reached
    noise_told: str = ""  # the noise scale in words, with how sure it is
    spent_s: float = 0.0  # seconds that tuning took
    unchecked: str = ""  # why today's setting is advised instead of what was proposed; "": the advice was checked
    proposal: Setting | None = None  # what was proposed and not checked
    workers: int = 1
    shares: tuple[int, ...] = ()  # samples of each worker in a step, where there are several
    communication_s: float = 0.0  # of a step
    scaling: float = 1.0  # samples per second, relative to the sum over workers that train alone

    @property
    def effective_batch(self) -> int:
        """The batch of all workers together."""
        return sum(self.shares) or self.micro_batch * self.accumulation

    @property
    def setting(self) -> Setting:
        return Setting(
            self.micro_batch,
            self.accumulation,
            self.learning_rate,
            self.num_steps,
            self.num_warm_up_steps,
            self.beta2,
        )

    def to_json(self) -> str:
        """Returns JSON. With one worker the fields about workers are left out, for programs that do not know them."""
        text = super().to_json()
        return text if self.workers > 1 else text[: text.rindex(',"workers":')] + "}"

    def __str__(self) -> str:
        from outcore.tuning.report import advice_text

        return advice_text(self)


def on_one_device(advice: Advice) -> Advice:
    """Returns the advice for one worker that trains the global batch, as closely as its micro-batches allow."""
    accumulation = max(1, round(advice.effective_batch / advice.micro_batch))
    return replace(
        advice,
        accumulation=accumulation,
        samples_per_s=advice.curve.rate(advice.micro_batch, accumulation),
        step_s=advice.curve.seconds(advice.micro_batch, accumulation),
        workers=1,
        shares=(),
        communication_s=0.0,
        scaling=1.0,
    )
