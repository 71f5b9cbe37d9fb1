"""Timeline: the time and memory of a step. Predictions and measurements have the same type, to be compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from outcore.values.codec import Saved


@dataclass(frozen=True)
class Span:
    stream: str  # compute, swap_out, swap_in
    start_s: float
    end_s: float
    what: str  # "aten.relu.default", "rerun aten.relu.default", "swap_out 17", "stall", "host"

    @property
    def is_wait(self) -> bool:
        """Whether compute has nothing to do: it waits for a copy, or for the host."""
        return self.what in ("stall", "host")


@dataclass(frozen=True)
class Timeline(Saved):
    """The time and memory of one step, predicted by `simulate` or measured: `ooc.predicted` and `ooc.timeline`.

    ```python
    import outcore

    trace, machine = outcore.Trace.load("step.trace.json"), outcore.Machine.load("here.machine.json")
    schedule = outcore.lower(trace, outcore.Plan.load("step.plan.json"), machine)
    timeline = outcore.simulate(trace, schedule, machine)
    print(timeline.step_s, timeline.peak_bytes, timeline.swapped_bytes)
    ```
    """

    KIND: ClassVar[str] = "timeline"

    measured: bool
    step_s: float
    peak_bytes: int  # of the device, everything included
    peak_at: str  # the op at the peak, in words
    stall_s: float = 0.0  # that compute waited for copies
    recompute_s: float = 0.0
    swapped_bytes: int = 0  # in one direction
    recomputed_bytes: int = 0
    kept_bytes: int = 0
    host_peak_bytes: int = 0
    disk_peak_bytes: int = 0
    state_in_bytes: int = 0  # weights, gradients and optimizer state that are copied to the device
    state_out_bytes: int = 0  # and from it
    state_written_bytes: int = 0  # of the training state that are written to a disk
    reserved_bytes: int = 0  # the peak of what the allocator held; 0 if unknown
    actions: tuple[str, ...] = ()  # in the order they were executed: "tick kind value-or-op"
    spans: tuple[Span, ...] = ()
    memory: tuple[tuple[float, int], ...] = ()  # (seconds since the step began, device bytes)
