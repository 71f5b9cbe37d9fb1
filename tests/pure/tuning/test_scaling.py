"""Traces on a line: bytes exactly, seconds by what whole steps take, and a plain word where there is no line."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outcore.errors import TuningError
from outcore.planning.families.scaling import Family, Recorded, difference, fastest
from outcore.units import MIB
from outcore.values import Trace
from tests.pure.test_reporting import small_trace

FIXED_S, SAMPLE_S = 0.002, 0.0005  # seconds of an op, whatever the batch, and per sample
SAMPLE_BYTES = 1000


def trace_of(batch: int, *, device: str = "cpu", noise: float = 0.0) -> Trace:
    """A chain whose every number is (constant + slope x batch)."""
    chain = small_trace()
    ops = tuple(
        replace(
            op,
            seconds=(FIXED_S + SAMPLE_S * batch) * (1 + noise * (-1) ** at),
            workspace_bytes=100 * batch + 7 if at == 0 else 0,
        )
        for at, op in enumerate(chain.ops)
    )
    storages = tuple(s if s.external else replace(s, bytes=SAMPLE_BYTES * batch + 24) for s in chain.storages)
    ticks = tuple(replace(tick, shape=(batch, 250)) for tick in chain.ticks)
    return replace(chain, ops=ops, storages=storages, ticks=ticks, before_bytes=MIB + 40 * batch, device=device)


def family_of(*batches: int, noise: float = 0.0) -> Family:
    return Family(tuple(Recorded(batch, trace_of(batch, noise=noise)) for batch in batches))


@pytest.mark.parametrize("batch", [1, 3, 6, 8, 100, 2048])
def test_a_step_that_grows_along_a_line_is_predicted_exactly(batch: int) -> None:
    found, real = family_of(2, 4, 8).at(batch), trace_of(batch)
    assert found.fingerprint == real.fingerprint
    assert [s.bytes for s in found.storages] == [s.bytes for s in real.storages]
    assert [op.workspace_bytes for op in found.ops] == [op.workspace_bytes for op in real.ops]
    assert [tick.shape for tick in found.ticks] == [tick.shape for tick in real.ticks]
    assert found.before_bytes == real.before_bytes
    assert [op.seconds for op in found.ops] == pytest.approx([op.seconds for op in real.ops])


def test_noise_of_single_ops_does_not_touch_the_step() -> None:
    recorded = [Recorded(batch, trace_of(batch, noise=sign * 0.4)) for batch, sign in ((4, 1), (8, -1))]
    family = Family(tuple(recorded))
    real_s = sum(op.seconds for op in trace_of(64).ops)
    assert sum(op.seconds for op in family.at(64).ops) == pytest.approx(real_s)
    assert family.step_s(64) == pytest.approx(real_s)
    assert all(op.seconds > 0 for op in family.at(64).ops)


def test_between_recorded_batches_the_nearest_two_count() -> None:
    """Small batches take their overhead; a line through the large ones would promise too little. Where between two
    batches the overhead ends is not known: half-way between going on as before, and the chord."""
    overhead_s = {2: 0.05, 8: 0.05, 16: 0.06, 32: 0.12}
    recorded = []
    for batch, total_s in overhead_s.items():
        trace = trace_of(batch)
        ops = tuple(replace(op, seconds=total_s / len(trace.ops)) for op in trace.ops)
        recorded.append(Recorded(batch, replace(trace, ops=ops)))
    family = Family(tuple(recorded))
    assert family.step_s(4) == pytest.approx(0.05)
    assert family.bounds_s(12) == pytest.approx((0.05, 0.055))
    assert family.step_s(12) == pytest.approx(0.0525)
    assert sum(op.seconds for op in family.at(12).ops) == pytest.approx(0.0525)
    assert family.step_s(64) == pytest.approx(0.24)


def test_on_cuda_bytes_come_in_grains_and_a_workspace_does_not_shrink() -> None:
    low, high = trace_of(8, device="cuda"), trace_of(16, device="cuda")
    low = replace(low, ops=(replace(low.ops[0], workspace_bytes=4096), *low.ops[1:]))
    high = replace(high, ops=(replace(high.ops[0], workspace_bytes=1024), *high.ops[1:]))
    found = Family((Recorded(8, low), Recorded(16, high))).at(40)
    assert all(storage.bytes % 512 == 0 for storage in found.storages)
    assert found.storages[1].bytes == 40448  # 40,024 rounded up
    assert found.ops[0].workspace_bytes == 1024


def test_steps_that_do_different_work_are_refused_in_words() -> None:
    one, other = trace_of(4), trace_of(8)
    other = replace(other, ops=(replace(other.ops[0], name="aten.mm.default"), *other.ops[1:]))
    assert difference(one, one) == ""
    with pytest.raises(
        TuningError, match=r"with 4 samples than with 8 \(op 0 is aten.convolution.default, then aten.mm"
    ):
        Family((Recorded(4, one), Recorded(8, other)))
    rewired = replace(one, ops=(replace(one.ops[0], reads=(1,)), *one.ops[1:]))
    assert "wired differently" in difference(one, rewired)
    assert difference(one, replace(one, ops=one.ops[:-1])) == "12 ops, then 11"
    assert difference(one, replace(one, ticks=one.ticks[:-1])) == "autograd saves other tensors"
    with pytest.raises(TuningError, match="ascending"):
        family_of(8, 4)
    with pytest.raises(TuningError, match="one more batch"):
        family_of(8)


def test_of_several_recordings_the_least_seconds_count() -> None:
    quiet, busy = trace_of(8), trace_of(8, noise=0.5)
    found = fastest([busy, quiet])
    pairs = zip(found.ops, quiet.ops, busy.ops)
    assert all(op.seconds == min(one.seconds, other.seconds) for op, one, other in pairs)
    assert found.fingerprint == quiet.fingerprint


@pytest.mark.parametrize(("low", "high"), [(True, True), (True, False), (False, True)])
def test_cheaper_reruns_are_those_of_both_recordings(low: bool, high: bool) -> None:
    def recorded(batch: int, cheaper: bool) -> Recorded:
        trace = trace_of(batch)
        before, half_s = ((0,) if cheaper else ()), 0.5 * cheaper
        ops = tuple(
            replace(
                op, norm_replay=cheaper, norm_replay_s=half_s * op.seconds, fused=before, fused_s=half_s * op.seconds
            )
            for op in trace.ops
        )
        return Recorded(batch, replace(trace, ops=ops))

    found = Family((recorded(4, low), recorded(8, high))).at(16)
    assert {bool(op.fused) for op in found.ops} == {op.norm_replay for op in found.ops} == {low and high}
    assert all(op.rerun_s == pytest.approx(op.seconds * (0.5 if low and high else 1.0)) for op in found.ops)
