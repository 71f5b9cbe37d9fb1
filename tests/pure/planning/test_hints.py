"""How long what a step makes stays where it was made."""

from __future__ import annotations

from dataclasses import replace

from outcore.planning import lower
from outcore.planning.allocator.hints import storage_ends
from outcore.values import Budget, Machine, Plan
from tests.pure.planning.random_steps import chain

MACHINE = Machine("pretend", 10**9, 10**9, 0, 1e9, 1e9, 1.0, 1.0, 1.0, 0.0)


def test_a_copy_on_its_way_out_holds_its_storage_until_it_is_freed() -> None:
    trace = chain()
    plan = Plan(trace.fingerprint, "mine", Budget(1000, 1000, 0), {1: "swap", 3: "keep", 4: "keep"}, 8)
    schedule = lower(trace, plan, replace(MACHINE, swap_out_bytes_per_s=4.0))  # two seconds each
    freed = next(action.tick for action in schedule.actions if action.kind == "free" and action.value == 1)
    assert storage_ends(trace, schedule)[1] == max(trace.storages[1].dies, trace.ticks[freed].slot)
    assert storage_ends(trace, schedule)[2] > trace.storages[2].dies  # kept until its backward
