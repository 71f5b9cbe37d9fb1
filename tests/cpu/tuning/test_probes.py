"""Which batches are tried on a device whose laws are known: from them every other batch follows.

An H200 cannot be had in a test. What it does to a step can: kernels that take the same time until they are full, a host
that takes as long for 2 samples as for 32, and what ResNet-50 and a ViT took there (docs/log/2026-11.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest

from outcore.planning import plan
from outcore.planning.families.scaling import Family
from outcore.tuning.throughput.bench import Bench, Measurement
from outcore.tuning.throughput.prediction import BatchPlanner, PredictedBatch
from outcore.tuning.throughput.probes import probe_batches
from outcore.values import Budget, Machine, Trace
from tests.pure.tuning.test_scaling import trace_of

THROUGHPUT = 0.07  # the bar
BATCHES = (32, 48, 64, 96, 128, 256, 512, 1024, 2048)
MACHINE = Machine("pretend", 1 << 40, 1 << 40, 1 << 40, 5e10, 5e10, 1e9, 1e9)
Law = Callable[[int, int], float]  # (op, batch) -> seconds on the device

# What a step took on the H200, in milliseconds, with all its memory.
RESNET50_MS = {8: 22.9, 32: 26.9, 64: 36.7, 128: 60.8, 256: 117.3, 512: 229.3, 1024: 459.0}
VIT_B_MS = {32: 28.5, 64: 32.6, 128: 58.4, 256: 109.9, 512: 204.6, 1024: 401.6}


@dataclass
class Device:
    """Stands for a Bench: the same questions, answered by a law instead of by steps."""

    law: Law
    host_s: float
    edge: int  # the largest in-core batch
    optimizer_s: float = 1e-4
    disturbed: dict[int, float] = field(default_factory=dict)  # batch -> times its seconds, whenever it runs
    recorded: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)

    @property
    def budget(self) -> Budget:
        return Budget(_in_core_bytes(self.edge), 1 << 40, 1 << 40)

    def planner(self, family: Family) -> BatchPlanner:
        return BatchPlanner(family, MACHINE, self.budget, self.optimizer_s)

    def trace(self, batch: int) -> Trace:
        """Op seconds add up to the step's, as those of a Bench do: the longer of the host's and the device's."""
        found = trace_of(batch)
        seconds = [self.law(at, batch) for at in range(len(found.ops))]
        longer = max(1.0, self.host_s / sum(seconds))
        return replace(found, ops=tuple(replace(op, seconds=s * longer) for op, s in zip(found.ops, seconds)))

    def step_s(self, batch: int) -> float:
        return sum(op.seconds for op in self.trace(batch).ops) + self.optimizer_s

    def warm_up(self, batch: int) -> None: ...

    def record(self, batch: int) -> Measurement:
        self.recorded.append(batch)
        return self._measured(batch)

    def run_planned(self, predicted: PredictedBatch, *, brief: bool) -> Measurement:
        assert predicted.point.in_core  # nothing is learned about ops from a step that swaps
        self.ran.append(predicted.point.micro_batch)
        return self._measured(predicted.point.micro_batch)

    def retime(self, measured: Sequence[Measurement], *, for_s: float = 0.0) -> list[Measurement]:
        return list(measured)

    def retime_interleaved(self, measured: Sequence[Measurement]) -> list[Measurement]:
        return list(measured)

    def _measured(self, batch: int) -> Measurement:
        found = Measurement(batch, self.step_s(batch), _in_core_bytes(batch), self.trace(batch))
        return found.with_seconds(found.step_s * self.disturbed.get(batch, 1.0), self.optimizer_s)


def _in_core_bytes(batch: int) -> int:
    return plan(trace_of(batch), MACHINE, Budget(1 << 50, 0, 0), planner="keep-all").predicted_peak_bytes


def kernels(fixed_s: float, sample_s: float, floor_s: float) -> Law:
    """Cheap and dear ops; none is faster than its kernel's launch on the device."""

    def law(op: int, batch: int) -> float:
        weight = 1.8 if op % 2 else 0.2
        return max(floor_s, weight * (fixed_s + sample_s * batch) / 12)

    return law


def as_measured(table_ms: dict[int, float]) -> Law:
    """Through measured steps, on lines between them; flat below the first, straight on beyond the last."""
    known = sorted(table_ms)

    def law(op: int, batch: int) -> float:
        at = max(1, min(sum(b < batch for b in known), len(known) - 1))
        low, high = known[at - 1], known[at]
        slope = (table_ms[high] - table_ms[low]) / (high - low)
        step_ms = table_ms[known[0]] if batch <= known[0] else table_ms[low] + slope * (batch - low)
        return (1.8 if op % 2 else 0.2) * step_ms / 12e3

    return law


DEVICES: dict[str, tuple[Law, float]] = {
    "launches, then work": (kernels(2e-3, 4.4e-4, 1e-3), 0.027),
    "a host that is never ahead": (kernels(1e-4, 1e-4, 2e-5), 0.05),
    "one core": (kernels(3e-3, 1e-3, 0.0), 0.0),
    "ResNet-50 on an H200": (as_measured(RESNET50_MS), 0.0),
    "ViT-B on an H200": (as_measured(VIT_B_MS), 0.0),
}


NOT_SEEN = ("a host that is never ahead", 179)  # in-core the device always waits: what it takes itself does not show


@pytest.mark.parametrize(
    ("name", "edge"), [(name, edge) for name in DEVICES for edge in (179, 1380) if (name, edge) != NOT_SEEN]
)
def test_seconds_of_every_batch_follow_from_the_few_that_ran(name: str, edge: int) -> None:
    law, host_s = DEVICES[name]
    device = Device(law, host_s, edge)
    found = probe_batches(cast(Bench, device), 2048, lambda what, part: None)
    assert found.family is not None
    for batch in BATCHES:
        predicted_s = found.family.step_s(batch) + device.optimizer_s
        assert abs(predicted_s / device.step_s(batch) - 1) < THROUGHPUT, (batch, device.recorded, device.ran)


@pytest.mark.parametrize("name", DEVICES)
def test_a_batch_that_was_disturbed_is_not_taken_by_its_word(name: str) -> None:
    """Two samples took 32.5 ms on the H200 where 8 took 26.0: the next real steps went there, not to the bend."""
    law, host_s = DEVICES[name]
    device = Device(law, host_s, 1380, disturbed={2: 1.4, 8: 1.1})
    found = probe_batches(cast(Bench, device), 2048, lambda what, part: None)
    assert found.family is not None
    seconds = [recorded.total_s for recorded in found.family.recorded]
    assert seconds == sorted(seconds)
    for batch in BATCHES:
        predicted_s = found.family.step_s(batch) + device.optimizer_s
        assert abs(predicted_s / device.step_s(batch) - 1) < THROUGHPUT, (batch, device.recorded, device.ran)


@pytest.mark.parametrize("name", DEVICES)
def test_each_op_is_known_beyond_the_batches_that_ran(name: str) -> None:
    """What a plan recomputes is paid by the op: the step's seconds alone would not do."""
    law, host_s = DEVICES[name]
    device = Device(law, host_s, 1380)
    found = probe_batches(cast(Bench, device), 2048, lambda what, part: None)
    assert found.family is not None
    for op, real in zip(found.family.at(2048).ops, device.trace(2048).ops):
        assert op.seconds == pytest.approx(real.seconds, rel=2 * THROUGHPUT)


@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize("edge", [2, 3, 5, 10, 40, 179, 1380])
def test_it_takes_few_batches_and_none_that_does_not_fit(name: str, edge: int) -> None:
    law, host_s = DEVICES[name]
    device = Device(law, host_s, edge)
    probe_batches(cast(Bench, device), 2048, lambda what, part: None)
    assert max(device.recorded[2:], default=0) <= max(edge, 8)  # the first two say what one sample takes
    assert max(device.ran, default=0) <= edge
    assert len(device.recorded) <= 3
    assert len(device.ran) <= 5
    assert sum(map(device.step_s, device.ran)) < 1.0


def test_a_long_step_is_not_run_far_up() -> None:
    """A second per sample: twice the last batch tells enough."""
    device = Device(kernels(0.1, 1.0, 0.0), 0.0, 4096)
    probe_batches(cast(Bench, device), 2048, lambda what, part: None)
    assert device.recorded == [2, 4, 8]
    assert max(device.ran, default=0) <= 16
