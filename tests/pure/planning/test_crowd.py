"""Who lies around when the step's largest piece of memory is asked for."""

from __future__ import annotations

from dataclasses import replace

from outcore.planning import lower
from outcore.planning.crowd import bystanders, storage_ends
from outcore.units import MIB
from outcore.values import Budget, Decision, Machine, Op, Plan, Storage, Tick, Trace, Value
from tests.pure.planning.random_steps import chain

MACHINE = Machine("pretend", 10**9, 10**9, 0, 1e9, 1e9, 1.0, 1.0, 1.0, 0.0)


def loss_step(kept_bytes: int = 2 * MIB) -> Trace:
    """A weight is cast (and the cast held until the loss is there), an activation saved, and the loss is large."""
    return Trace(
        ops=(
            Op(0, "aten._to_copy.default", "forward", 1.0, (0,), (1,), replay="pure"),
            Op(1, "aten.mm.default", "forward", 1.0, (1,), (2,), replay="pure"),
            Op(3, "aten.mm.default", "forward", 1.0, (2,), (3,), replay="pure"),
            Op(4, "aten.log_softmax.default", "forward", 1.0, (3,), (4,)),
            Op(6, "aten.mm_backward.default", "backward", 1.0, (4,), (5,)),
        ),
        values=(Value(0, 0, -1), *(Value(at + 1, 0, at) for at in range(5))),
        storages=(
            Storage(4 * MIB, 0, 6, external=True),
            Storage(2 * MIB, 0, 4),  # the cast
            Storage(kept_bytes, 1, 3),
            Storage(MIB, 3, 4),
            Storage(40 * MIB, 4, 6),  # the giant
            Storage(MIB, 6, 6),
        ),
        ticks=(Tick(2, "pack", 2, 0, -1), Tick(5, "unpack", 2, 0, 6)),
        before_bytes=4 * MIB,
    )


def crowd_of(trace: Trace, decision: Decision) -> dict[int, frozenset[int]]:
    plan = Plan(trace.fingerprint, "mine", Budget(100 * MIB, 100 * MIB, 0), {2: decision}, trace.before_bytes)
    return bystanders(trace, lower(trace, plan, MACHINE), 100 * MIB)


def test_what_stays_is_a_bystander_and_what_goes_is_not() -> None:
    assert crowd_of(loss_step(), "keep") == {0: frozenset({1}), 1: frozenset({2}), 2: frozenset({3})}
    assert crowd_of(loss_step(), "recompute") == {0: frozenset({1}), 2: frozenset({3})}


def test_large_ones_and_tiny_ones_are_none() -> None:
    assert crowd_of(loss_step(kept_bytes=6 * MIB), "keep") == {0: frozenset({1}), 2: frozenset({3})}
    assert crowd_of(loss_step(kept_bytes=MIB - 1), "keep") == {0: frozenset({1}), 2: frozenset({3})}


def test_what_another_librarys_op_made_stays_where_it_is() -> None:
    """A functional collective returns at once and writes later; who waits for it asks for the storage it returned."""
    trace = loss_step()
    gathered = replace(trace.ops[0], name="_c10d_functional.all_gather_into_tensor.default", replay="no")
    crowd = crowd_of(replace(trace, ops=(gathered, *trace.ops[1:])), "keep")
    assert crowd == {1: frozenset({2}), 2: frozenset({3})}


def test_without_a_giant_there_is_no_crowd() -> None:
    trace = loss_step()
    smaller = replace(trace.storages[4], bytes=14 * MIB)
    assert crowd_of(replace(trace, storages=(*trace.storages[:4], smaller, trace.storages[5])), "keep") == {}


def test_a_copy_on_its_way_out_holds_its_storage_until_it_is_freed() -> None:
    trace = chain()
    plan = Plan(trace.fingerprint, "mine", Budget(1000, 1000, 0), {1: "swap", 3: "keep", 4: "keep"}, 8)
    schedule = lower(trace, plan, replace(MACHINE, swap_out_bytes_per_s=4.0))  # two seconds each
    freed = next(action.tick for action in schedule.actions if action.kind == "free" and action.value == 1)
    assert storage_ends(trace, schedule)[1] == max(trace.storages[1].dies, trace.ticks[freed].slot)
    assert storage_ends(trace, schedule)[2] > trace.storages[2].dies  # kept until its backward
