"""Seconds of ops that are timed again, and of passes with them."""

from __future__ import annotations

import pytest

from outcore.running.kinds import Kind
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
    kind = Kind(trace=trace)
    assert kind.take_times([op.name for op in trace.ops], seconds)
    assert kind.trace is not None
    return [op.rerun_s for op in kind.trace.ops]


def test_a_product_and_its_cast_take_as_long_as_the_cast() -> None:
    """Which reads one large tensor and writes half of one, as the pass does; the product writes a large one."""
    mul, cast = op(0, "mul", 4.0, (0, 1), 2), op(1, "cast", 3.0, (2,), 3, fused=(0,), fused_s=3.0)
    trace = trace_of(mul, cast, sizes=(LARGE, SMALL, LARGE, HALF))
    assert timed_again(trace, 4.0, 3.0) == [4.0, 3.0]
    assert timed_again(trace, 4.0, 1.5) == [4.0, 1.5]
    assert timed_again(trace, 1.0, 3.0) == [1.0, 1.0]  # it moves no less
    assert timed_again(trace, 9.0, 9.0) == [4.0, 3.0]


def test_a_norm_a_sum_and_a_rectifier_take_as_long_as_the_sum() -> None:
    """The rectifier moves less than the pass, and how long the norm itself takes is another matter: it has a twin."""
    norm = op(0, "norm", 5.0, (0,), 1, twin=True, twin_s=2.0)
    add, relu = op(1, "add", 4.0, (1, 2), 3), op(2, "relu", 2.0, (3,), 4, fused=(0, 1), fused_s=4.0)
    trace = trace_of(norm, add, relu, sizes=(LARGE,) * 5)
    assert timed_again(trace, 0.1, 3.0, 0.1) == [2.0, 3.0, 3.0]


def test_a_pass_keeps_its_own_seconds_where_they_are_the_least() -> None:
    norm = op(0, "norm", 5.0, (0,), 1, twin=True, twin_s=2.0)
    relu = op(1, "relu", 2.0, (1,), 2, fused=(0,), fused_s=1.5)
    trace = trace_of(norm, relu, sizes=(LARGE,) * 3)
    assert timed_again(trace, 0.1, 1.8) == [2.0, 1.5]
    assert timed_again(trace, 0.1, 1.2) == [2.0, 1.2]


def test_another_pace_is_the_pace_of_passes_and_twins_too() -> None:
    norm = op(0, "norm", 5.0, (0,), 1, twin=True, twin_s=2.0)
    relu = op(1, "relu", 2.0, (1,), 2, fused=(0,), fused_s=1.5)
    kind = Kind(trace=trace_of(norm, relu, sizes=(LARGE,) * 3))
    kind.go_at(2.0)
    assert kind.trace is not None
    assert [op.seconds for op in kind.trace.ops] == pytest.approx([10.0, 4.0])
    assert [op.rerun_s for op in kind.trace.ops] == pytest.approx([4.0, 3.0])
