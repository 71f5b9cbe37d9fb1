"""Steps of a model under `outcore.limit`: recorded traces, measured seconds, and whether plans were followed.

The tuner needs more of `limit` than a training loop does: it records a step twice, measures one planned step and times
the others without metering memory, and times the ops of a batch that was never recorded. This is the only file of
`tuning` that knows how `limit` stores the steps it has seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from outcore.errors import BudgetTooSmall, TuningError
from outcore.fitting.kinds import Kind
from outcore.fitting.settings import FITTING
from outcore.limit import Limited
from outcore.tuning.settings import SETTINGS
from outcore.values import Budget, Machine, Plan, Timeline, Trace

UNTIMED_S = 1e3  # s; marks ops that are not timed yet, longer than any op takes
EACH_BY_ITSELF = replace(FITTING, num_sizes=sys.maxsize)  # every batch size gets a plan of its own

RunStep = Callable[[], None]


class LimitedSteps:
    """Steps of one model under one budget. `run_step` arguments enter `step()` once and run forward and backward."""

    def __init__(
        self,
        model: torch.nn.Module,
        memory: int | str,
        *,
        host: int | str = "auto",
        disk: str | Path | None = None,
        plan: Plan | None = None,
    ) -> None:
        self._limited = Limited(model, memory, host=host, disk=disk, plan=plan, settings=EACH_BY_ITSELF)

    @property
    def machine(self) -> Machine:
        return self._limited.machine

    @property
    def device(self) -> torch.device:
        return self._limited.device

    @property
    def budget(self) -> Budget:
        return self._limited.budget

    @property
    def planning_budget(self) -> Budget:
        """The budget of plans: on CUDA less than the whole budget, because the allocator leaves holes."""
        if self.device.type != "cuda":
            return self.budget
        return replace(self.budget, device_bytes=int(self.budget.device_bytes * FITTING.first_share))

    def step(self) -> AbstractContextManager[Any]:
        return self._limited.step()

    def expect(self, trace: Trace) -> None:
        """Makes `limit` plan the next step of a new batch size from `trace` instead of recording it."""
        self._limited.expect(trace)

    @property
    def is_settled(self) -> bool:
        """Whether `limit` has settled on a plan."""
        return self._limited.settled

    @property
    def num_kinds(self) -> int:
        return len(self._limited.kinds)

    def forget(self) -> None:
        """Forgets every recorded step."""
        self._limited.kinds.clear()

    def close(self) -> None:
        """Removes all hooks from the model."""
        self._limited.close()

    # -- recording ----------------------------------------------------------------------------------------------------

    @property
    def trace(self) -> Trace | None:
        """The trace of the last step."""
        return self._limited.trace

    def record_again(self) -> None:
        """Makes `limit` record the next step of the newest batch size once more."""
        self._newest.record_again()

    def replace_trace(self, trace: Trace) -> None:
        """Makes `limit` plan steps of the newest batch size from this trace."""
        self._newest.replace_trace(trace)

    # -- following plans ----------------------------------------------------------------------------------------------

    def measure(self, run_step: RunStep) -> tuple[Timeline, float, Trace]:
        """Runs steps until one was measured under its plan; returns its timeline, the predicted seconds and the trace.

        Later steps of the same batch are not metered: one measurement gives the peak, and metering takes time.
        """
        measured: Timeline | None = None
        for _ in range(SETTINGS.timing.max_steps_to_measure):
            run_step()
            kind = self._newest
            if self._limited.timeline is kind.measured and kind.measured is not None:
                measured = kind.measured
                break
        kind.stop_measuring()
        predicted, trace = self._limited.predicted, self._limited.trace
        if measured is None or predicted is None or trace is None:
            raise TuningError(
                "steps of the same batch keep doing different work, so none can be planned ahead; see the warning above"
            )
        return measured, predicted.step_s, trace

    @property
    def followed(self) -> bool:
        """Whether every step of the newest batch size followed its plan."""
        newest = self._newest
        alike = [kind for kind in self._limited.kinds.values() if kind.signature == newest.signature]
        return not any(kind.num_left for kind in alike)

    @property
    def all_followed(self) -> bool:
        """Whether every step of every batch size followed its plan."""
        return not any(kind.num_left or kind.is_given_up for kind in self._limited.kinds.values())

    def time_ops(self, run_step: RunStep) -> Trace:
        """Times the ops of the newest batch in a step that keeps everything, and returns the trace with these seconds.

        On a GPU the op seconds of small batches are not usable, because launching a kernel takes longer than running
        it.
        """
        kind = self._newest
        assert kind.trace is not None
        expected = kind.trace
        kind.time_again(replace(expected, ops=tuple(replace(op, seconds=UNTIMED_S) for op in expected.ops)))
        with suppress(BudgetTooSmall):  # timing ops needs memory of its own
            run_step()
        timed = kind.trace
        if timed is None or any(op.seconds == UNTIMED_S for op in timed.ops):
            timed = expected  # the step ran other ops than expected
        kind.plan_for(timed)  # its plan was for a step whose ops are timed
        return timed

    @property
    def _newest(self) -> Kind:
        return self._limited.kinds.values()[-1]
