"""Planning in a real process of its own: the same plans, real errors, nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import time

import psutil
import pytest

from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.fitting.planning_process import PlanningProcess
from outcore.planning import plan
from outcore.values import Budget, Machine
from tests.pure.test_reporting import small_trace

TRACE = small_trace()
MACHINE = Machine("elsewhere", 10**9, 10**9, 0, 1e6, 1e6, 1.0, 1.0)


def workers() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "outcore.planning.worker" in " ".join(child.cmdline())]


def test_plans_are_the_same_as_in_this_process() -> None:
    process = PlanningProcess()
    budgets = [Budget(5000 * 1024, 10**9), Budget(10**9)]
    futures = [process.submit(plan, TRACE, MACHINE, budget) for budget in budgets]
    assert [future.result(timeout=60) for future in futures] == [plan(TRACE, MACHINE, budget) for budget in budgets]
    process.close()
    assert not workers()


def test_what_planning_raises_is_raised_here() -> None:
    process = PlanningProcess()
    with pytest.raises(BudgetTooSmall) as caught:
        process.submit(plan, TRACE, MACHINE, Budget(1)).result(timeout=60)
    with pytest.raises(BudgetTooSmall) as here:
        plan(TRACE, MACHINE, Budget(1))
    assert caught.value.needed_bytes == here.value.needed_bytes
    process.close()


def test_a_process_that_is_killed_fails_its_requests_and_is_started_again() -> None:
    process = PlanningProcess()
    process.submit(plan, TRACE, MACHINE, Budget(10**9)).result(timeout=60)
    os.kill(workers()[0].pid, signal.SIGSTOP)
    waiting = process.submit(plan, TRACE, MACHINE, Budget(10**9))
    os.kill(workers()[0].pid, signal.SIGKILL)
    with pytest.raises(OutcoreError, match="ended before it answered"):
        waiting.result(timeout=60)
    assert process.submit(plan, TRACE, MACHINE, Budget(10**9)).result(timeout=60).decisions
    process.close()


def test_a_request_that_the_pipe_cannot_hold_does_not_wait_for_the_ones_before_it() -> None:
    process = PlanningProcess()
    process.submit(len, b"").result(timeout=60)
    os.kill(workers()[0].pid, signal.SIGSTOP)  # it reads nothing until it goes on
    futures = [process.submit(len, bytes(10**6)) for _ in range(3)]
    assert not any(future.done() for future in futures)
    os.kill(workers()[0].pid, signal.SIGCONT)
    assert [future.result(timeout=60) for future in futures] == [10**6] * 3
    process.close()


def test_an_owner_that_is_dropped_leaves_no_process() -> None:
    process = PlanningProcess()
    process.submit(plan, TRACE, MACHINE, Budget(10**9)).result(timeout=60)
    assert workers()
    del process
    gc.collect()
    until_s = time.monotonic() + 10
    while workers() and time.monotonic() < until_s:
        time.sleep(0.01)
    assert not workers()
