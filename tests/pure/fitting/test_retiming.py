"""Seconds of ops that are timed again, and of passes with them."""

from __future__ import annotations

import pytest

from outcore.fitting.retiming import TimedOps
from outcore.fitting.retiming import timed_again as retimed
from outcore.fitting.settings import FITTING
from outcore.values import Op, Storage, Trace, Value

LARGE, HALF, SMALL = 1000, 500, 1  # bytes


def trace_of(*ops: Op, sizes: tuple[int, ...]) -> Trace:
    """Value n lies on storage n; what no op writes was there before."""
    maker = {value: index for index, op in enumerate(ops) for value in op.writes}
    values = tuple(Value(number, 0, maker.get(number, -1)) for number in range(len(sizes)))
    storages = tuple(Storage(size, 0, len(ops), external=number not in maker) for number, size in enumerate(sizes))
    return Trace(ops, values, storages, (), 0)


def op(slot: int, name: str, seconds: float, reads: tuple[int, ...], write: int, **more: object) -> Op:
    return Op(slot, name, "forward", seconds, reads, (write,), **more)  # type: ignore[arg-type]


def timed_again(trace: Trace, *seconds: float) -> list[float]:
    """What reruns take afterwards."""
    found = retimed(trace, TimedOps([op.name for op in trace.ops], seconds), FITTING.pass_bytes_share)
    return [op.rerun_s for op in found.ops]


def test_a_product_and_its_cast_take_as_long_as_the_cast() -> None:
    """Which reads one large tensor and writes half of one, as the pass does; the product writes a large one."""
    mul, cast = op(0, "mul", 4.0, (0, 1), 2), op(1, "cast", 3.0, (2,), 3, fused=(0,), fused_s=3.0)
    trace = trace_of(mul, cast, sizes=(LARGE, SMALL, LARGE, HALF))
    assert timed_again(trace, 4.0, 3.0) == [4.0, 3.0]
    assert timed_again(trace, 4.0, 1.5) == [4.0, 1.5]
    assert timed_again(trace, 1.0, 3.0) == [1.0, 1.0]  # it moves no less
    assert timed_again(trace, 9.0, 9.0) == [4.0, 3.0]


def test_a_norm_a_sum_and_a_rectifier_take_as_long_as_the_sum() -> None:
    """The rectifier moves less than the pass, and the norm itself does not count: it has a norm replay."""
    norm = op(0, "norm", 5.0, (0,), 1, norm_replay=True, norm_replay_s=2.0)
    add, relu = op(1, "add", 4.0, (1, 2), 3), op(2, "relu", 2.0, (3,), 4, fused=(0, 1), fused_s=4.0)
    trace = trace_of(norm, add, relu, sizes=(LARGE,) * 5)
    assert timed_again(trace, 0.1, 3.0, 0.1) == [2.0, 3.0, 3.0]


def test_a_pass_keeps_its_own_seconds_where_they_are_the_least() -> None:
    norm = op(0, "norm", 5.0, (0,), 1, norm_replay=True, norm_replay_s=2.0)
    relu = op(1, "relu", 2.0, (1,), 2, fused=(0,), fused_s=1.5)
    trace = trace_of(norm, relu, sizes=(LARGE,) * 3)
    assert timed_again(trace, 0.1, 1.8) == [2.0, 1.5]
    assert timed_again(trace, 0.1, 1.2) == [2.0, 1.2]


def test_another_pace_is_the_pace_of_passes_and_norm_replays_too() -> None:
    norm = op(0, "norm", 5.0, (0,), 1, norm_replay=True, norm_replay_s=2.0)
    relu = op(1, "relu", 2.0, (1,), 2, fused=(0,), fused_s=1.5)
    trace = trace_of(norm, relu, sizes=(LARGE,) * 3)
    slower = trace.at(2.0)
    assert [op.seconds for op in slower.ops] == pytest.approx([10.0, 4.0])
    assert [op.rerun_s for op in slower.ops] == pytest.approx([4.0, 3.0])
    assert slower.fingerprint == trace.fingerprint


def test_seconds_of_other_ops_are_not_taken() -> None:
    trace = trace_of(op(0, "mul", 4.0, (0,), 1), sizes=(LARGE, LARGE))
    assert retimed(trace, TimedOps(["add"], [1.0]), FITTING.pass_bytes_share) is trace
    assert retimed(trace, TimedOps(["mul", "mul"], [1.0, 1.0]), FITTING.pass_bytes_share) is trace


def test_the_hosts_seconds_are_the_least_that_were_seen() -> None:
    trace = trace_of(
        op(0, "mul", 4.0, (0,), 1, host_s=2.0), op(1, "cast", 3.0, (1,), 2, host_s=2.0), sizes=(LARGE,) * 3
    )
    again = retimed(trace, TimedOps(["mul", "cast"], [4.0, 3.0], [1.0, 5.0]), FITTING.pass_bytes_share)
    assert [one.host_s for one in again.ops] == [1.0, 2.0]
    untold = retimed(trace, TimedOps(["mul", "cast"], [4.0, 3.0]), FITTING.pass_bytes_share)
    assert [one.host_s for one in untold.ops] == [2.0, 2.0]
