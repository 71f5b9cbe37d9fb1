"""Loop -> LoopView: what users read between steps, the read-only part of `outcore.limit`."""

from __future__ import annotations

from outcore.fitting.kinds import Kinds
from outcore.fitting.loop import Loop
from outcore.fitting.phases import Settled
from outcore.fitting.ready import Ready
from outcore.reporting.text import as_html, report, summary
from outcore.units import format_bytes
from outcore.values import Machine, Plan, PreparedStep, Schedule, Timeline, Trace


class LoopView:
    """What was recorded, planned and measured. Properties refer to the last step unless they say otherwise."""

    _loop: Loop

    @property
    def machine(self) -> Machine:
        """What was measured of this machine. Copy rates are corrected if steps show that copies are slower."""
        return self._loop.preparer.machine

    @machine.setter
    def machine(self, machine: Machine) -> None:
        self._loop.preparer.machine = machine

    @property
    def measure(self) -> bool:
        """Whether every step is measured, not only the first steps of each plan."""
        return self._loop.measure

    @measure.setter
    def measure(self, every_step: bool) -> None:
        self._loop.measure = every_step

    @property
    def kinds(self) -> Kinds:
        """The kinds of steps so far, the least recently used first."""
        return self._loop.kinds

    @property
    def trace(self) -> Trace | None:
        """The recording of the last step."""
        return self._loop.last.trace if self._loop.last is not None else None

    @property
    def prepared(self) -> PreparedStep | None:
        """The last step's plan, with its schedule and prediction."""
        ready: Ready | None = self._loop.last.phase.ready if self._loop.last is not None else None
        return ready.prepared if ready is not None else None

    @property
    def plan(self) -> Plan | None:
        """The last step's plan. It is made when a recorded step occurs again. With the planner `hybrid` the first
        plan is a brief one (`priced`)."""
        return self.prepared.plan if self.prepared is not None else None

    @property
    def schedule(self) -> Schedule | None:
        return self.prepared.schedule if self.prepared is not None else None

    @property
    def predicted(self) -> Timeline | None:
        """What the plan predicts."""
        return self.prepared.predicted if self.prepared is not None else None

    @property
    def timeline(self) -> Timeline | None:
        """The timeline of the last measured step."""
        self._loop.read_measured()
        return self._loop.last.measured if self._loop.last is not None else None

    @property
    def settled(self) -> bool:
        """Whether the last step followed a plan that will not change any more. On a GPU several plans are tried
        first."""
        self._loop.read_measured()
        return self._loop.last is not None and isinstance(self._loop.last.phase, Settled)

    def stats(self) -> dict[str, float]:
        """What the steps did and cost so far, as a flat dict of numbers:

        - `recorded`, `planned`, `left`, `unplanned`: how many went which way; `in_core`: how many of the planned ones
          kept everything on the device;
        - `recorded_s`, `planned_s`, `left_s`, `unplanned_s`: seconds of the host inside them, planning included;
        - `swapped_bytes` (one way), `recomputed_bytes`: by the planned ones;
        - `measured`: how many of them were measured closely; `waited_s`: how long these waited for copies;
        - `peak_bytes`: the highest peak of device memory in a measured step; 0 if none was measured;
        - with `optimizer=`: `state_..._bytes` that stay, that do not, that are there at a time, that the last step
          moved, that are on the disk, and that the last step wrote there;
        - with `update="cpu"`: `state_by_cpu`, the updates that the CPU has run, and `state_by_cpu_s`, their seconds.
        """
        return self._loop.stats()

    @property
    def closed(self) -> bool:
        """Whether `close()` was called, or another limit of the same model took its place."""
        return self._loop.is_closed

    # -- as text ------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        loop, where = self._loop, str(self._loop.memory.device)
        because = loop.tally.unplanned_because
        told = report(
            loop.preparer.budget,
            self.trace,
            self.plan,
            self.predicted,
            self.timeline,
            where=where,
            because=because,
            is_first=self._is_first,
        )
        parts = (told, self._highest_peak, str(loop.beside) if loop.beside is not None else "")
        return "\n".join(filter(None, parts))

    def __repr__(self) -> str:
        loop = self._loop
        memory = f"{format_bytes(loop.preparer.budget.device_bytes)} on {loop.memory.device}"
        name = f"{type(self).__name__}({type(loop.model).__name__}, {memory}"
        if loop.is_closed:
            return f"{name}, closed)"
        state = summary(self.trace, self.prepared, settled=self.settled, is_first=self._is_first)
        return f"{', '.join(filter(None, (f'{name}, {loop.preparer.planner}: {state}', self._highest_peak)))})"

    @property
    def _is_first(self) -> bool:
        """Whether the last step's plan is a brief one that another will replace."""
        plan, preparer = self.plan, self._loop.preparer
        if plan is None or self.settled or preparer.brief_planner == preparer.planner or preparer.uses_given:
            return False
        return plan.planner == preparer.brief_planner

    @property
    def _highest_peak(self) -> str:
        """The highest peak of all measured steps, in words."""
        tally, budget_bytes = self._loop.tally, self._loop.preparer.budget.device_bytes
        if not tally.num_peaks:
            return ""
        steps = f"{tally.num_peaks} measured step{'s' if tally.num_peaks > 1 else ''}"
        return f"highest peak {format_bytes(tally.peak_bytes)} of {format_bytes(budget_bytes)} in {steps}"

    def _repr_html_(self) -> str:
        return as_html(str(self))
