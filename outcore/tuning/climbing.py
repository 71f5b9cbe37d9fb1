"""Bench -> Climb: the few batches from which a step is known at every other one.

Two laws are looked for, and they show at different batches. *Bytes* lie on a line from the first samples on: three
small batches are recorded, wide apart, so that what an allocator rounds up is divided by many samples. *Seconds* lie on
a line only where the device and not the host decides: an H200 takes 23 ms for 8 samples of ResNet-50 and 27 for 32, the
time in which a step's kernels are launched. So real steps climb on, up to the largest batch that is in-core or
that takes `RUNG_S`: in small strides while a step hardly grows, so that the last two are beyond the bend, and in large
ones from there on, to see whether caches bend the line once more.

A step takes the longer of the host's seconds and the device's, op by op or in all. Such a curve never falls and only
bends upward: between two batches it lies below their chord and above the lines of their neighbours. Where those leave
it open, a batch between is run. A batch that took longer than a larger one was disturbed: noise only ever adds.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outcore.errors import BudgetTooSmall, TuningError
from outcore.tuning.probing import BUSY_S, TIMED_S, Bench, Measured, Tell
from outcore.tuning.scaling import BEND, Family, Recorded, difference
from outcore.units import format_bytes

NUM_RECORDED = 3  # batches; real steps, which cost less, tell the rest
CLIMB_S = 25.0  # no further batch is recorded when it would take longer than this in all
LONG_S = 0.25  # after a step this long the next batch that is recorded is twice as large, not four times
STRIDE, FAR_STRIDE = 4, 8  # times the last batch: while a step hardly grows, and once it does
FLAT = 1.4  # times the samples per second for twice the batch: most of such a step does not depend on its batch
RUNG_S = 0.3  # no longer step is run to find the line
LEVER = 1.5  # between two batches that a line is drawn through, at least
SETTLED = 0.03  # a batch whose seconds the ones before it predicted this well ends the climb
NUM_BENDS = 2  # batches that are run between others
NUM_UNLIKE = 3  # batches whose steps do different work, before it is given up


@dataclass
class Climb:
    """What ran on the way up, in ascending order."""

    bench: Bench
    largest: int  # there are no more samples, or no more are wanted
    measured: list[Measured]

    @property
    def family(self) -> Family | None:
        """The batches that do the same work as the largest one; tiny ones may be wired differently."""
        if not self.measured:
            return None
        last = self.measured[-1]
        alike = [found for found in self.measured if not difference(found.trace, last.trace)]
        rising = never_falling(alike, self.bench.optimizer_s)
        return Family(tuple(Recorded(m.batch, m.trace) for m in rising)) if len(rising) > 1 else None

    def next(self) -> int:
        """The next batch to record; the last one: there is no other.

        Once two are known, no further than everything can be kept: a step that swaps or recomputes says less about the
        seconds of its own ops.
        """
        last, family = self.measured[-1], self.family
        wide = last.step_s < LONG_S and STRIDE * last.batch <= self.largest
        batch = min(self.largest, last.batch * (STRIDE if wide else 2))
        if family is None:
            return batch
        return max(last.batch, self.bench.planned(family).largest_in_core(batch))

    def run(self, family: Family, batch: int) -> bool:
        """Real steps of a batch that is in-core, which is not recorded; whether they did what was expected."""
        try:
            found = self.bench.confirm(self.bench.planned(family).at(batch), levelled=True)
        except (torch.OutOfMemoryError, BudgetTooSmall):
            self.largest = batch - 1
            return False
        if found.followed:
            bisect.insort(self.measured, found, key=lambda measured: measured.batch)
        return found.followed


def climb(bench: Bench, largest: int, tell: Tell, one: tuple[str, str] | None = None) -> Climb:
    """Records small batches, then runs larger ones until the next would teach nothing new. `one`: why `largest` is
    1, and what to change about that."""
    began_s, found = time.perf_counter(), Climb(bench, largest, [])
    _first_step(bench, found, tell, one)
    while not _is_recorded(found, time.perf_counter() - began_s):
        batch = found.next()
        if batch == found.measured[-1].batch:
            break
        tell(f"recording a batch of {batch}", len(found.measured) / (NUM_RECORDED + 3))
        try:
            found.measured.append(bench.record(batch))
        except BudgetTooSmall:
            found.largest = (found.measured[-1].batch + batch) // 2
    recorded = tuple(measured.batch for measured in found.measured)
    _time_again(found, recorded[-2:])
    waits = found.family is not None and is_flat(found.family)
    _reach(found, tell)
    if waits:  # a host is disturbed more often than a device, and for longer than one look; later that may be over
        _time_again(found, recorded, for_s=TIMED_S)
    found.measured = bench.level(found.measured)
    return found


def _time_again(found: Climb, batches: tuple[int, ...], *, for_s: float = 0.0) -> None:
    """Batches that were recorded, in turn."""
    timed = found.bench.time_again([m for m in found.measured if m.batch in batches], for_s=for_s)
    again = {m.batch: m for m in timed}
    found.measured = [again.get(measured.batch, measured) for measured in found.measured]


def _is_recorded(found: Climb, spent_s: float) -> bool:
    num = len(found.measured)
    if found.measured[-1].batch >= found.largest:
        return True
    if found.family is None:
        return num >= NUM_UNLIKE
    return num >= NUM_RECORDED or 3 * spent_s > CLIMB_S


def _reach(found: Climb, tell: Tell) -> None:
    """Real steps up to where the device decides, and where the curve bends."""
    family, longest_s = found.family, 2 * found.measured[-1].step_s
    while family is not None:
        edge = found.bench.planned(family).largest_in_core(min(found.largest, STRIDE**2 * family.largest))
        batch = next_rung(family, edge, max(RUNG_S, longest_s))
        if batch == family.largest:
            break
        tell(f"real steps with a batch of {batch}", 0.7)
        if not found.run(family, batch):
            return
        before, family, longest_s = family, found.family, 0.0
        assert family is not None  # the same work, at one more batch
        if abs(before.step_s(batch) / family.recorded[-1].total_s - 1) < SETTLED and not is_flat(family):
            break
    for _ in range(NUM_BENDS):
        if family is None or not (batch := open_bend(family)):
            break
        tell(f"real steps with a batch of {batch}", 0.9)
        family = found.family if found.run(family, batch) else None


def never_falling(measured: Sequence[Measured], optimizer_s: float) -> list[Measured]:
    """In ascending order of their batch, none with more seconds than a larger one took."""
    found: list[Measured] = []
    for one in reversed(measured):
        longer = bool(found) and one.step_s > found[-1].step_s
        found.append(one.retimed(found[-1].step_s, optimizer_s) if longer else one)
    return found[::-1]


def is_flat(family: Family) -> bool:
    """Whether a larger batch than the last would still be nearly free."""
    before, last = family.recorded[-2:]
    gain = (last.batch / last.total_s) / (before.batch / before.total_s)
    return bool(gain > FLAT ** math.log2(last.batch / before.batch))


def next_rung(family: Family, edge: int, longest_s: float) -> int:
    """The next batch for real steps, at most the largest in-core one; the last one: there is none worth it."""
    last = family.largest
    batch = min(edge, FAR_STRIDE * last)
    if is_flat(family):
        half = math.sqrt(last * edge)  # the edge is near: two strides that are alike
        batch = edge if half < LEVER * last else round_batch(int(min(STRIDE * last, half)))
    while batch > last and family.step_s(batch) > longest_s:
        batch = round_batch(batch * 9 // 10)
    return batch if batch >= LEVER * last else last


def open_bend(family: Family) -> int:
    """The batch between two others whose seconds are least known; 0: none is open."""
    widest, found = 1 + BEND, 0
    for low, high in zip(family.recorded, family.recorded[1:]):
        middle = round_batch(int(math.sqrt(low.batch * high.batch)))
        least_s, most_s = family.bounds_s(middle)
        if most_s > BUSY_S and most_s / least_s > widest and middle > low.batch:
            widest, found = most_s / least_s, middle
    return found


def round_batch(batch: int) -> int:
    """Multiples of 8 are kind to every kernel."""
    return batch if batch < 24 else batch // 8 * 8


def _first_step(bench: Bench, found: Climb, tell: Tell, one: tuple[str, str] | None) -> None:
    """Two samples; one where two do not fit. Optimizer state is there from here on."""
    too_small: BudgetTooSmall | None = None
    for batch in (2, 1) if found.largest > 1 else (1,):
        tell(f"recording a batch of {batch}", 0.0)
        try:
            bench.warm_up(batch)
            found.measured.append(bench.record(batch))
            return
        except BudgetTooSmall as error:
            too_small, found.largest = error, batch - 1
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                if too_small is not None:
                    one = two_do_not_fit(bench.budget.device_bytes, too_small.needed_bytes)
                raise cannot_run_one(one) from None
            raise
    assert too_small is not None
    needed, enough = format_bytes(too_small.needed_bytes), format_bytes(1.02 * too_small.needed_bytes)
    raise TuningError(
        f"even one sample needs {needed} with everything swapped or recomputed, and memory is "
        f"{format_bytes(bench.budget.device_bytes)}; raise it to {enough} or make the model or its input smaller"
    )


def two_do_not_fit(budget_bytes: int, needed_bytes: float) -> tuple[str, str]:
    """Why a batch is 1, and what to change."""
    why = f"two samples need {format_bytes(needed_bytes)}, where memory is {format_bytes(budget_bytes)}"
    return why, f"raise memory to {format_bytes(1.02 * needed_bytes)}"


def cannot_run_one(one: tuple[str, str] | None) -> TuningError:
    why, change = (f"{one[0]}, and ", one[1]) if one is not None else ("", "allow a batch of 2 or more")
    return TuningError(
        f"{why}this model cannot train on a batch of 1: its BatchNorm needs more than one value per channel; {change}, "
        "or use GroupNorm"
    )
