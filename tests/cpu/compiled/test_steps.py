"""A compiled step in a byte budget: bits of the same step compiled in-core, and the peak that was promised."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from outcore.limit import limit
from outcore.memory.device import CpuMemory
from outcore.planning.trace_index import index_of
from outcore.values import Budget, Plan, Trace
from tests.cpu.compiled.stubs import stub_kernels
from tests.cpu.compiled.training import Training, convolutions, peak_bytes, residuals, same

NETWORKS = {"residuals": residuals, "convolutions": convolutions}


@pytest.fixture(scope="module", params=list(NETWORKS))
def training(request: pytest.FixtureRequest) -> Iterator[Training]:
    with stub_kernels():
        found = NETWORKS[request.param]()
        found.run = torch.compile(found.model)
        found.step()
        yield found


def recorded(training: Training) -> tuple[Trace, int]:
    """The trace of a step, and the peak of the same step in-core."""
    ooc = limit(training.model, "1GiB", measure=True)
    for _ in range(6):  # recorded; its ops are timed again, some times; measured
        training.step(ooc)
    assert ooc.trace is not None
    assert ooc.timeline is not None
    found = ooc.trace, ooc.timeline.peak_bytes
    ooc.close()
    return found


def test_launches_are_ops_of_the_step(training: Training) -> None:
    trace, _ = recorded(training)
    names = [op.name for op in trace.ops]
    assert any(name.startswith("cpp_fused") for name in names)
    assert {op.phase for op in trace.ops if op.name.startswith("cpp_fused")} == {"forward", "backward"}
    index = index_of(trace)
    assert index.evictable
    assert all(index.recomputable[value] for value in index.evictable)
    assert not trace.has_unseen


@pytest.mark.parametrize("share", [1.0, 0.8, 0.7])
def test_bits_and_peak_in_a_budget(training: Training, share: float) -> None:
    expected = training.step()
    _, in_core_bytes = recorded(training)
    budget_bytes = int(share * in_core_bytes)
    ooc = limit(training.model, budget_bytes, measure=True)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert ooc.timeline is not None
    assert ooc.predicted is not None
    assert ooc.timeline.peak_bytes == ooc.predicted.peak_bytes <= budget_bytes
    assert ooc.timeline.actions == ooc.predicted.actions
    assert ooc.store.num_parcels == 0
    ooc.close()


@pytest.mark.parametrize("decisions", ["recompute", "remake", "swap", "swap remake", "keep recompute remake"])
def test_any_decision_gives_the_same_bits(training: Training, decisions: str) -> None:
    expected = training.step()
    trace, _ = recorded(training)
    kinds = decisions.split()
    chosen = {value: kinds[at % len(kinds)] for at, value in enumerate(index_of(trace).evictable)}
    plan = Plan(trace.fingerprint, "given", Budget(1 << 40, 0, 1 << 40), chosen, trace.before_bytes)  # type: ignore[arg-type]
    ooc = limit(training.model, "1GiB", plan=plan, measure=True)
    for _ in range(3):
        assert same(training.step(ooc), expected)
    assert ooc.timeline is not None
    assert ooc.predicted is not None
    assert ooc.timeline.peak_bytes <= ooc.predicted.peak_bytes
    ooc.close()


def test_the_first_step_is_lean(training: Training) -> None:
    """By the allocator's own count: it is recorded before anything was planned."""
    in_core_bytes = peak_bytes(training.step)
    ooc = limit(training.model, "1GiB")
    first_bytes = peak_bytes(lambda: training.step(ooc))
    assert ooc.trace is not None
    leanest = limit(training.model, "1GiB", planner="swap-all")
    training.step(leanest)
    leanest_bytes = peak_bytes(lambda: training.step(leanest))
    assert first_bytes < 0.8 * in_core_bytes
    assert first_bytes < 1.1 * leanest_bytes
    ooc.close()
    leanest.close()


def test_a_step_that_is_recorded_by_dropping(training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where what a handful of launches make again is dropped in the first step."""
    expected = training.step()

    monkeypatch.setattr(CpuMemory, "is_slow_to_pin", True)
    ooc = limit(training.model, "1GiB", measure=True)
    for _ in range(2):
        assert same(training.step(ooc), expected)
    assert ooc.timeline is not None
    assert ooc.predicted is not None
    assert ooc.timeline.peak_bytes == ooc.predicted.peak_bytes
    ooc.close()
