"""The host as a lane of the simulated step."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from outcore.planning import lower, plan, simulate
from outcore.planning.planners.scoring import keep_all
from outcore.planning.program.simulate import clock_of
from outcore.planning.trace_index import index_of
from outcore.units import GIB
from outcore.values import Budget, HostCosts, Machine, Op, Schedule, Storage, Tick, Trace, Value

ROOT = Path(__file__).parents[3]
VGG = Trace.load(ROOT / "tests" / "golden" / "vgg_256.trace.json")
H200 = Machine.load(ROOT / "tests" / "golden" / "h200.machine.json")
NOTHING = HostCosts(0.0, 0.0, 0.0, 0.0, 0.0)
EMPTY = Schedule("", (), {})


def chain(seconds: list[float], host_s: list[float], device: str) -> Trace:
    """Ops one after the other, each of which makes what autograd saves."""
    ops = tuple(
        Op(2 * at, "aten.sin.default", "forward", op_s, (at,), (at + 1,), replay="pure", host_s=own_s)
        for at, (op_s, own_s) in enumerate(zip(seconds, host_s, strict=True))
    )
    num = len(ops)
    storages = (Storage(8, 0, 3 * num, external=True), *(Storage(8, 2 * at, 2 * at + 2) for at in range(num)))
    packs = [Tick(2 * at + 1, "pack", at + 1, at, -1) for at in range(num)]
    unpacks = [Tick(2 * num + back, "unpack", num - back, num - back - 1, 2 * num + back) for back in range(num)]
    values = tuple(Value(at, 0, at - 1) for at in range(num + 1))
    return Trace(ops, values, storages, (*packs, *unpacks), 8, device=device)


def step_s(trace: Trace, host: HostCosts | None = None, machine: Machine = H200) -> float:
    return simulate(trace, EMPTY, replace(machine, host=host)).step_s


def test_in_line_the_seconds_of_both_add_up() -> None:
    assert step_s(chain([1.0, 2.0], [0.5, 0.25], "cpu")) == pytest.approx(3.75)


def test_a_device_waits_for_a_host_that_is_slower() -> None:
    assert step_s(chain([1.0, 1.0, 1.0], [3.0, 3.0, 3.0], "a gpu")) == pytest.approx(10.0)
    assert step_s(chain([1.0, 1.0, 1.0], [0.0, 0.0, 0.0], "a gpu")) == pytest.approx(3.0)


def test_a_host_that_is_ahead_is_not_waited_for() -> None:
    """The first op takes long enough for the host to queue the others meanwhile."""
    assert step_s(chain([9.0, 1.0, 1.0], [1.0, 3.0, 3.0], "a gpu")) == pytest.approx(12.0)
    assert step_s(chain([1.0, 1.0, 9.0], [1.0, 3.0, 3.0], "a gpu")) == pytest.approx(16.0)


def test_saved_tensors_captured_ops_reruns_and_copies_cost_the_host() -> None:
    trace = chain([1.0] * 4, [0.0] * 4, "cpu")
    costs = HostCosts(tick_s=0.1, seen_op_s=0.01, captured_op_s=0.5, rerun_s=3.0, copy_s=20.0)
    assert step_s(trace, costs) == pytest.approx(4.8)
    clock = clock_of(index_of(trace), [(5, "rerun", 1, "", (2,), False)], replace(H200, host=costs))
    assert clock.step_s == pytest.approx(4.8 + 1.0 + 2 * 0.01 + 0.5 + 3.0)  # two ops are looked at until it is captured
    copied = [(1, "swap_out", 2, "host", (), False), (2, "wait_out", 2, "", (), False)]
    clock = clock_of(index_of(trace), copied, replace(H200, host=costs, copy_latency_s=0.0))
    assert clock.step_s == pytest.approx(4.8 + 20.0)


def test_what_the_host_does_is_hidden_behind_a_wait_of_the_device() -> None:
    trace = chain([1.0] * 4, [0.0] * 4, "a gpu")
    machine = replace(H200, copy_latency_s=50.0, host=replace(NOTHING, copy_s=20.0))
    copied = [(1, "swap_out", 2, "host", (), False), (2, "wait_out", 2, "", (), False)]
    clock = clock_of(index_of(trace), copied, machine)
    assert clock.step_s == pytest.approx(2.0 + 50.0 + 1.0)


def test_spans_fill_the_step() -> None:
    for device in ("cpu", "a gpu"):
        trace = chain([1.0] * 3, [2.0] * 3, device)
        timeline = simulate(trace, EMPTY, replace(H200, host=replace(NOTHING, tick_s=0.125)), detail=True)
        spans = [span for span in timeline.spans if span.stream == "compute"]
        assert sum(span.end_s - span.start_s for span in spans) == pytest.approx(timeline.step_s)
        assert max(span.end_s for span in spans) == pytest.approx(timeline.step_s)
        assert any(span.is_wait for span in spans)


def test_a_planner_sees_that_captured_ops_cost_the_host() -> None:
    """Fewer of them then make as much room."""
    trace, budget = replace(VGG, device="cpu"), Budget(14 * GIB, 100 * GIB)
    machine = replace(H200, swap_out_bytes_per_s=5e9, swap_in_bytes_per_s=5e9)

    def num_reruns(captured_op_s: float) -> int:
        here = replace(machine, host=replace(NOTHING, captured_op_s=captured_op_s))
        actions = lower(trace, plan(trace, here, budget), here).actions
        return len({action.op for action in actions if action.kind == "rerun"})

    assert num_reruns(0.0) > num_reruns(1e-3) > num_reruns(1.0)


def test_without_seconds_of_the_host_nothing_changes() -> None:
    made = plan(VGG, H200, Budget(12 * GIB, 100 * GIB), "priced")
    schedule = lower(VGG, made, H200)
    bare, zero = H200, replace(H200, host=NOTHING)
    assert simulate(VGG, schedule, bare, detail=True) == simulate(VGG, schedule, zero, detail=True)
    assert lower(VGG, made, zero) == schedule


def test_the_lane_costs_the_simulation_little() -> None:
    made = plan(VGG, H200, Budget(12 * GIB, 100 * GIB), "priced")
    schedule, host = lower(VGG, made, H200), replace(H200, host=replace(NOTHING, tick_s=1e-6))

    def took_s(machine: Machine) -> float:
        began_s = time.process_time()
        for _ in range(10):
            simulate(VGG, schedule, machine)
        return time.process_time() - began_s

    simulate(VGG, schedule, host)
    assert min(took_s(host) for _ in range(5)) < 2 * min(took_s(H200) for _ in range(5))


def test_costs_are_kept_in_a_machine_s_file() -> None:
    machine = replace(H200, host=HostCosts(1e-6, 2e-6, 3e-6, 4e-6, 5e-6))
    assert Machine.from_json(machine.to_json()) == machine
    assert Machine.from_json(H200.to_json()).host is None
    trace = chain([1.0], [0.5], "cpu")
    assert Trace.from_json(trace.to_json()) == trace


def test_a_plan_that_keeps_everything_is_bounded_by_what_the_host_needs() -> None:
    trace = chain([1.0] * 3, [2.0] * 3, "a gpu")
    made = plan(trace, replace(H200, host=NOTHING), Budget(GIB))
    assert made.bound_step_s == pytest.approx(made.predicted_step_s)
    assert set(keep_all(index_of(trace), H200, Budget(GIB), lambda what, part: None).values()) <= {"keep"}
