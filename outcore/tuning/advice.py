"""What the tuner says: Advice, as a value, as JSON, and as a table for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from rich.table import Table
from torch.optim.lr_scheduler import LambdaLR

from outcore.reporting.text import render, rows_table
from outcore.tuning.annealing import rate_factor
from outcore.tuning.curve import Curve
from outcore.tuning.goodput import goodput
from outcore.units import format_bytes, format_seconds, two_digits
from outcore.values.codec import Saved

MAX_SHARES = 4  # different ones that a table lists


class HasLength:
    """What has a length says how its rate goes up, and down to zero at the end."""

    num_steps: int
    num_warm_up_steps: int

    def rate_factor(self, step: int) -> float:
        """Of the learning rate at an optimizer step, counted from 0; beyond the length, too (annealing.py)."""
        return rate_factor(step, self.num_steps, self.num_warm_up_steps)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The same for an optimizer made with `learning_rate`: call its `step()` after each step of the optimizer."""
        return LambdaLR(optimizer, self.rate_factor)


@dataclass(frozen=True)
class Soonest(HasLength):
    """What comes to the target first, where the advice is what is best at the end of a longer training."""

    micro_batch: int
    accumulation: int
    learning_rate: float
    num_steps: int  # the rate falling to zero over the last third of them
    num_warm_up_steps: int = 0
    beta2: float | None = None

    @property
    def effective_batch(self) -> int:
        return self.micro_batch * self.accumulation


@dataclass(frozen=True)
class Advice(Saved, HasLength):
    """Train with `accumulation` micro-batches of `micro_batch` samples per optimizer step."""

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
    beta2: float | None = None  # for Adam and its kin, None: leave it
    noise: float | None = None  # the gradient noise scale, in samples
    first_batch: int = 0  # the batch that noise and learning rate are compared with
    target: str = ""
    target_s: float | None = None  # predicted seconds of training to the target
    num_steps: int = 0  # the rate falling to zero over the last third of them: to the target, or as long as the user
    # means to train, where they said so; 0: not known
    soonest: Soonest | None = None  # only where they said so, and the target was reached: how to come to it first
    noise_told: str = ""  # the noise scale in words, with how sure it is
    spent_s: float = 0.0  # tuning took
    workers: int = 1
    shares: tuple[int, ...] = ()  # samples of each worker in a step, where there are several
    communication_s: float = 0.0  # of a step
    scaling: float = 1.0  # samples per second against the sum of what the workers would do alone

    @property
    def effective_batch(self) -> int:
        """Of all workers together."""
        return sum(self.shares) or self.micro_batch * self.accumulation

    def to_json(self) -> str:
        """Of one worker nothing is said about workers: programs that know nothing of them read what they always did."""
        text = super().to_json()
        return text if self.workers > 1 else text[: text.rindex(',"workers":')] + "}"

    def __str__(self) -> str:
        return render(advice_table(self)) + "\n\n" + render(curve_table(self))


def alone(advice: Advice) -> Advice:
    """One worker training the batch of all of them, as closely as its micro-batches allow."""
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


def advice_table(advice: Advice) -> Table:
    curve = advice.curve
    point = curve.point(advice.micro_batch)
    how = "in-core" if point.in_core else "swapping and recomputing"
    rows = [
        ("micro-batch", f"{advice.micro_batch} ({how}; the largest in-core is {curve.largest_in_core})"),
        (
            "accumulation",
            f"{advice.accumulation} micro-batches per optimizer step" if advice.accumulation > 1 else "none",
        ),
        ("effective batch", str(advice.effective_batch)),
        *_worker_rows(advice),
    ]
    if advice.learning_rate is not None:
        rows.append(("learning rate", f"{advice.learning_rate:.3g}" + _warm_up(advice)))
    if advice.beta2 is not None:
        rows.append(("beta2", f"{advice.beta2:.5g} (as many samples are remembered as before)"))
    if advice.noise is not None:
        rows.append(("gradient noise scale", advice.noise_told or f"about {two_digits(advice.noise)} samples"))
    rows += [
        ("samples per second", f"{advice.samples_per_s:.4g}, a step takes {format_seconds(advice.step_s)}"),
        ("peak memory", f"{format_bytes(advice.peak_bytes)} of {format_bytes(curve.memory_bytes)}"),
    ]
    if advice.num_steps:
        how = "the rate falling to zero over the last third of them: advice.scheduler(optimizer)"
        rows.append(("length", f"{advice.num_steps} steps, {how}"))
    if advice.target:
        reached = "not predicted, see below" if advice.target_s is None else format_seconds(advice.target_s)
        rows.append((f"time to {advice.target}", reached + _with(advice.soonest)))
    rows += [("why" if at == 0 else "", sentence) for at, sentence in enumerate(advice.why)]
    return rows_table(f"outcore tune: advice for {curve.device}, found in {format_seconds(advice.spent_s)}", rows)


def _worker_rows(advice: Advice) -> list[tuple[str, str]]:
    if advice.workers == 1:
        return []
    counts = Counter(advice.shares)
    shares = [f"{share} samples" + (f" on {num} of them" if len(counts) > 1 else "") for share, num in counts.items()]
    many = len(counts) > MAX_SHARES
    each = f"{min(counts)} to {max(counts)} samples" if many else ", ".join(shares)
    part = advice.communication_s / advice.step_s
    return [
        ("workers", f"{advice.workers}, in each step {each}" + (" each" if len(counts) == 1 else "")),
        ("communication", f"{format_seconds(advice.communication_s)}, {100 * part:.0f} % of a step"),
        ("scaling", f"{100 * advice.scaling:.0f} % of what {advice.workers} workers would do each by itself"),
    ]


def _warm_up(advice: Advice) -> str:
    num = advice.num_warm_up_steps
    return f", reached over {num} step{'s' if num > 1 else ''} of warm-up" if num else ""


def _with(soonest: Soonest | None) -> str:
    if soonest is None:
        return ""
    batch, lr = soonest.effective_batch, soonest.learning_rate
    return f", with a batch of {batch} at a rate of {lr:.3g} over {soonest.num_steps} steps instead"


def curve_table(advice: Advice) -> Table:
    """The curve as text: a bar per batch. What does not fit has no samples per second."""
    curve = advice.curve
    top = max(curve.rate(point.micro_batch) for point in curve.fitting)
    with_goodput = advice.noise is not None and advice.workers == 1  # it belongs to global batches
    headings = ["batch", "peak", "samples/s", "", "swapped", "recomputed", "real steps", "goodput"]
    table = Table(title="samples per second over the micro-batch", title_justify="left")
    for heading in headings if with_goodput else headings[:-1]:
        table.add_column(heading, justify="left" if heading == "" else "right", no_wrap=True)
    for point in curve.points:
        rate = curve.rate(point.micro_batch)
        mark = " <" if point.micro_batch == advice.micro_batch else ""
        bar = "█" * max(1, round(20 * rate / top)) if point.fits else "does not fit"
        cells = [
            f"{point.micro_batch}",
            format_bytes(point.peak_bytes),
            f"{rate:.4g}" if point.fits else "",
            bar + mark,
        ]
        cells += [format_bytes(n) if n else "" for n in (point.swapped_bytes, point.recomputed_bytes)]
        off = "" if point.error is None else f"{100 * (1 / point.error - 1):+.1f} %"
        cells.append("in a loop" if point.micro_batch in curve.looped else off)
        if with_goodput and advice.noise is not None:
            worth = goodput(rate, point.micro_batch, advice.first_batch, advice.noise)
            cells.append(f"{worth:.4g}" if point.fits else "")
        table.add_row(*cells)
    return table
