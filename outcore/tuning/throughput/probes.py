"""Runs the few batches from which the step of every other batch is predicted.

Two laws are fitted, which hold in different ranges of the batch. *Bytes* lie on a line from the first samples on: three
small batches are recorded, far apart, so that rounding by the allocator is divided by many samples. *Seconds* lie on a
line only where the device and not the host is the bottleneck: an H200 takes 23 ms for 8 samples of ResNet-50 and 27 ms
for 32, which is the time to launch the step's kernels. Therefore real steps continue up to the largest batch that is
in-core or that takes `longest_probe_s`: with small strides while the seconds hardly grow, so that the last two batches
lie beyond the bend, then with large strides, to find out whether caches bend the line again.

A step takes the maximum of the host's and the device's seconds, either op by op or in total. Such a curve never falls
and is convex: between two batches it lies below their chord and above the lines of their neighbours. If these bounds
are far apart, a batch in between is run. A batch that took longer than a larger one was disturbed, because noise only
adds time.
"""

from __future__ import annotations

import bisect
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outcore.errors import BudgetTooSmall, TuningError
from outcore.planning.families.scaling import Family, Recorded, difference
from outcore.planning.settings import FAMILIES
from outcore.tuning.settings import SETTINGS
from outcore.tuning.throughput.bench import Bench, Measurement, Progress
from outcore.units import format_bytes

PROBES, TIMING = SETTINGS.probes, SETTINGS.timing


@dataclass
class Probes:
    """The measured batches, in ascending order."""

    bench: Bench
    largest: int  # the largest batch that is wanted or that the samples allow
    measured: list[Measurement]

    @property
    def family(self) -> Family | None:
        """The batches that do the same work as the largest one; very small ones may run other ops."""
        if not self.measured:
            return None
        last = self.measured[-1]
        alike = [one for one in self.measured if not difference(one.trace, last.trace)]
        rising = never_falling(alike, self.bench.optimizer_s)
        return Family(tuple(Recorded(m.batch, m.trace) for m in rising)) if len(rising) > 1 else None

    def next_recorded(self) -> int:
        """Returns the next batch to record, or the last one if there is no other.

        Once two batches are known, it does not exceed the largest batch with everything kept: steps that swap or
        recompute say less about the seconds of their ops.
        """
        last, family = self.measured[-1], self.family
        wide = last.step_s < PROBES.long_step_s and PROBES.stride * last.batch <= self.largest
        batch = min(self.largest, last.batch * (PROBES.stride if wide else 2))
        if family is None:
            return batch
        return max(last.batch, self.bench.planner(family).largest_in_core(batch))

    def run(self, family: Family, batch: int) -> bool:
        """Runs real steps of an in-core batch that is not recorded; returns whether they ran the expected ops."""
        try:
            measured = self.bench.run_planned(self.bench.planner(family).predict(batch), brief=True)
        except (torch.OutOfMemoryError, BudgetTooSmall):
            self.largest = batch - 1
            return False
        if measured.followed:
            bisect.insort(self.measured, measured, key=lambda one: one.batch)
        return measured.followed

    def retime(self, batches: tuple[int, ...], *, for_s: float = 0.0) -> None:
        """Times recorded batches once more, alternately."""
        retimed = self.bench.retime([one for one in self.measured if one.batch in batches], for_s=for_s)
        again = {one.batch: one for one in retimed}
        self.measured = [again.get(one.batch, one) for one in self.measured]


def probe_batches(bench: Bench, largest: int, progress: Progress, why_one: tuple[str, str] | None = None) -> Probes:
    """Records small batches, then runs larger ones until the next would add no information.

    `why_one` is the reason why `largest` is 1, and what to change about that.
    """
    began_s, probes = time.perf_counter(), Probes(bench, largest, [])
    _record_first(bench, probes, progress, why_one)
    while not _is_recorded(probes, time.perf_counter() - began_s):
        batch = probes.next_recorded()
        if batch == probes.measured[-1].batch:
            break
        progress(f"recording a batch of {batch}", len(probes.measured) / (PROBES.num_recorded + 3))
        try:
            probes.measured.append(bench.record(batch))
        except BudgetTooSmall:
            probes.largest = (probes.measured[-1].batch + batch) // 2
    recorded = tuple(measured.batch for measured in probes.measured)
    probes.retime(recorded[-2:])
    waits_for_host = probes.family is not None and is_flat(probes.family)
    _run_larger(probes, progress)
    if waits_for_host:  # disturbances of the host are more frequent and longer
        probes.retime(recorded, for_s=TIMING.timed_s)
    probes.measured = bench.retime_interleaved(probes.measured)
    return probes


def _is_recorded(probes: Probes, spent_s: float) -> bool:
    num = len(probes.measured)
    if probes.measured[-1].batch >= probes.largest:
        return True
    if probes.family is None:
        return num >= PROBES.max_unlike
    return num >= PROBES.num_recorded or 3 * spent_s > PROBES.recording_limit_s


def _run_larger(probes: Probes, progress: Progress) -> None:
    """Runs real steps up to where the device is the bottleneck, and where the curve bends."""
    family, longest_s = probes.family, 2 * probes.measured[-1].step_s
    while family is not None:
        planner = probes.bench.planner(family)
        edge = planner.largest_in_core(min(probes.largest, PROBES.stride**2 * family.largest))
        batch = next_probe(family, edge, max(PROBES.longest_probe_s, longest_s))
        if batch == family.largest:
            break
        progress(f"real steps with a batch of {batch}", 0.7)
        if not probes.run(family, batch):
            return
        before, family, longest_s = family, probes.family, 0.0
        assert family is not None  # the same work, at one more batch
        error = abs(before.step_s(batch) / family.recorded[-1].total_s - 1)
        if error < PROBES.settled_share and not is_flat(family):
            break
    for _ in range(PROBES.max_bends):
        if family is None or not (batch := least_known_batch(family)):
            break
        progress(f"real steps with a batch of {batch}", 0.9)
        family = probes.family if probes.run(family, batch) else None


def never_falling(measured: Sequence[Measurement], optimizer_s: float) -> list[Measurement]:
    """Returns the measurements in ascending order of their batch, none with more seconds than a larger one."""
    rising: list[Measurement] = []
    for one in reversed(measured):
        longer = bool(rising) and one.step_s > rising[-1].step_s
        rising.append(one.with_seconds(rising[-1].step_s, optimizer_s) if longer else one)
    return rising[::-1]


def is_flat(family: Family) -> bool:
    """Whether a batch larger than the last would still take hardly longer."""
    before, last = family.recorded[-2:]
    gain = (last.batch / last.total_s) / (before.batch / before.total_s)
    return bool(gain > PROBES.flat_gain ** math.log2(last.batch / before.batch))


def next_probe(family: Family, edge: int, longest_s: float) -> int:
    """Returns the next batch for real steps, at most `edge`, the largest in-core batch; the last one if none is worth
    it."""
    last = family.largest
    batch = min(edge, PROBES.far_stride * last)
    if is_flat(family):
        half = math.sqrt(last * edge)  # near the edge: two strides that are alike
        batch = edge if half < PROBES.min_stride * last else round_batch(int(min(PROBES.stride * last, half)))
    while batch > last and family.step_s(batch) > longest_s:
        batch = round_batch(batch * 9 // 10)
    return batch if batch >= PROBES.min_stride * last else last


def least_known_batch(family: Family) -> int:
    """Returns the batch between two others whose seconds are least certain; 0 if all are known well enough."""
    widest, batch = 1 + FAMILIES.bend_share, 0
    for low, high in zip(family.recorded, family.recorded[1:]):
        middle = round_batch(int(math.sqrt(low.batch * high.batch)))
        least_s, most_s = family.bounds_s(middle)
        if most_s > TIMING.busy_step_s and most_s / least_s > widest and middle > low.batch:
            widest, batch = most_s / least_s, middle
    return batch


def round_batch(batch: int) -> int:
    """Rounds down to a multiple of 8, a size that suits every kernel."""
    return batch if batch < 24 else batch // 8 * 8


def _record_first(bench: Bench, probes: Probes, progress: Progress, why_one: tuple[str, str] | None) -> None:
    """Records two samples, or one if two do not fit. Optimizer state exists afterwards."""
    too_small: BudgetTooSmall | None = None
    for batch in (2, 1) if probes.largest > 1 else (1,):
        progress(f"recording a batch of {batch}", 0.0)
        try:
            bench.warm_up(batch)
            probes.measured.append(bench.record(batch))
            return
        except BudgetTooSmall as error:
            too_small, probes.largest = error, batch - 1
        except ValueError as error:
            if "more than 1 value per channel" in str(error):
                if too_small is not None:
                    why_one = two_do_not_fit(bench.budget.device_bytes, too_small.needed_bytes)
                raise cannot_train_one(why_one) from None
            raise
    assert too_small is not None
    needed, enough = format_bytes(too_small.needed_bytes), format_bytes(1.02 * too_small.needed_bytes)
    raise TuningError(
        f"even one sample needs {needed} with everything swapped or recomputed, and memory is "
        f"{format_bytes(bench.budget.device_bytes)}; raise it to {enough} or make the model or its input smaller"
    )


def two_do_not_fit(budget_bytes: int, needed_bytes: float) -> tuple[str, str]:
    """Returns why the batch is 1, and what to change about that."""
    why = f"two samples need {format_bytes(needed_bytes)}, where memory is {format_bytes(budget_bytes)}"
    return why, f"raise memory to {format_bytes(1.02 * needed_bytes)}"


def cannot_train_one(why_one: tuple[str, str] | None) -> TuningError:
    why, change = (f"{why_one[0]}, and ", why_one[1]) if why_one is not None else ("", "allow a batch of 2 or more")
    return TuningError(
        f"{why}this model cannot train on a batch of 1: its BatchNorm needs more than one value per channel; {change}, "
        "or use GroupNorm"
    )
