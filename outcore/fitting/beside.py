"""Loop + training state -> StateBeside: which of the state stays on the device, decided with the first recorded step.

While a step is recorded, all state is streamed through the smallest window. When its plan is due, activations and state
are planned together (`outcore.planning.residency`), and once more after its ops were timed without the recorder. From
then on the device memory of the state counts as in use before the step, so plans for activations do not use it. If a
later kind of step does not fit into the rest, all state leaves the device again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from outcore.errors import BudgetTooSmall, OutcoreError, StoreError, warn
from outcore.fitting.kinds import Kind
from outcore.fitting.phases import Phase, Recorded, Timed
from outcore.fitting.preparing import Preparer
from outcore.memory.machine import device_of, room_for_homes
from outcore.planning.residency import budget_beside, spilled
from outcore.reporting.text import render, rows_table
from outcore.state.state import State
from outcore.state.window import Watcher
from outcore.units import TB, format_bytes
from outcore.values import Budget, Machine, Residency, Trace


class StateBeside:
    """The training state of one loop."""

    def __init__(self, state: State, preparer: Preparer) -> None:
        self.state, self._preparer = state, preparer
        self._budget = _with_homes(preparer.budget, state)  # activations and homes share it
        self._is_settled = False  # no other residency will be tried
        self._least_bytes = 0  # of a window, as far as the steps so far have needed
        self._copied_bytes = dict(state.window.homes.copied_bytes)
        self._written_bytes = state.window.homes.written_bytes
        self.written_bytes = 0  # to files, by the last step and its update
        self.moved_bytes = {"in": 0, "out": 0}  # by the last step and its update
        self._num_updated = self._count_updated()
        self._be_lean()

    @property
    def reserved_bytes(self) -> int:
        """Device memory that the state may use beyond what is in use before a step."""
        return self.state.reserved_bytes

    def _be_lean(self) -> None:
        window = self.state.window
        window.is_lean = True
        window.peak_bytes = 0

    # -- a step -------------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        copied = self.state.window.homes.copied_bytes
        self.moved_bytes = {way: copied[way] - self._copied_bytes[way] for way in copied}
        self._copied_bytes = dict(copied)
        written_bytes = self.state.window.homes.written_bytes
        self.written_bytes, self._written_bytes = written_bytes - self._written_bytes, written_bytes
        self.state.begin()
        if self._count_updated() != self._num_updated:
            self._num_updated = self._count_updated()
            self._tell_of_later_parameters()

    def _count_updated(self) -> int:
        return sum(len(group["params"]) for group in self.state.optimizer.param_groups)

    def _tell_of_later_parameters(self) -> None:
        known = {size.name for size in self.state.sizes} | self.state.kept_for.keys()
        later = [parameter for name, parameter in self.state.model.named_parameters() if name not in known]
        if later:
            added = _params(len(later), sum(parameter.nbytes for parameter in later))
            warn(
                f"{added} were added after limit() and stay on the device with their gradients and optimizer state; "
                "close the limit and make another one to plan for them"
            )

    def watch(self, watcher: Watcher) -> None:
        """Called when a step is recorded: `watcher` sees what the window moves."""
        self.state.window.watcher = watcher

    def leave(self) -> None:
        self.state.window.watcher = None
        self.state.end()

    def begin(self, kind: Kind, before: Callable[[], int]) -> Phase:
        """Called when a step of this kind begins: moves the state if that is due, and plans the step. `before` returns
        the bytes that are in use."""
        phase = kind.phase
        if not self._is_settled and isinstance(phase, Recorded | Timed) and phase.trace.state:
            self._place(phase.trace, before())
            self._is_settled = isinstance(phase, Timed)
            kind.phase = replace(phase, ready=None)  # the current plan was made for another placement of the state
        try:
            return kind.begin(before() + self.reserved_bytes)
        except BudgetTooSmall:
            least = self._least()
            if not self.state.resident and self.state.window.limit_bytes <= least.window_bytes:
                raise
            self._move(least)
            if kind.trace is not None:
                kind.phase = Timed(kind.trace)
            return kind.begin(before() + self.reserved_bytes)

    # -- what a user looks at -----------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Bytes, numbers of updates, and seconds."""
        residency, host = self.state.residency, self.state.host_updates
        by_cpu = {} if host is None else {"state_by_cpu": host.num_done, "state_by_cpu_s": host.busy_s}
        return by_cpu | {
            "state_early": self.state.num_early,
            "state_resident_bytes": residency.resident_bytes,
            "state_streamed_bytes": residency.streamed_bytes,
            "state_window_bytes": residency.window_bytes,
            "state_host_bytes": residency.home_bytes_on("host"),
            "state_disk_bytes": residency.home_bytes_on("disk"),
            "state_written_bytes": self.written_bytes,
            "state_in_bytes": self.moved_bytes["in"],
            "state_out_bytes": self.moved_bytes["out"],
        }

    def __str__(self) -> str:
        residency, cannot = self.state.residency, Counter(self.state.kept_for.values())
        num_streamed = len(residency.units) - len(residency.resident)
        rows = [
            ("stay on the device", _params(len(residency.resident), residency.resident_bytes)),
            ("come when they are used", _params(num_streamed, residency.streamed_bytes)),
            *([("of them updated in the backward", f"{len(residency.early)} parameters")] if residency.early else []),
            *([("of them updated by the CPU", f"{residency.num_by_cpu} parameters")] if residency.by_cpu else []),
            ("at a time at most", format_bytes(residency.window_bytes)),
            ("a step brings, sends home", " and ".join(format_bytes(self.moved_bytes[way]) for way in ("in", "out"))),
            *self._home_rows(residency),
            *((f"cannot leave it: {why}", f"{count} parameters") for why, count in cannot.items()),
        ]
        return render(rows_table("weights, gradients and optimizer state", rows))

    def _home_rows(self, residency: Residency) -> list[tuple[str, str]]:
        """Where the streamed state is kept, and how much a step wears the disk."""
        kept = {tier: residency.home_bytes_on(tier) for tier in ("host", "disk")}
        rows = [(f"memory for it on the {tier}", format_bytes(num)) for tier, num in kept.items() if num]
        terabytes = 1000 * self.written_bytes / TB
        written = f"{format_bytes(self.written_bytes)} ({terabytes:.3g} TB in 1,000 steps)"
        return [*rows, ("a step writes to the disk", written)] if kept["disk"] else rows

    # -- where it lies ------------------------------------------------------------------------------------------------

    def _least(self) -> Residency:
        self._least_bytes = max(self._least_bytes, self.state.least_window_bytes)
        return replace(self.state.residency, resident=frozenset(), window_bytes=self._least_bytes, link_share=1.0)

    def _place(self, trace: Trace, before_bytes: int) -> None:
        """`trace` was recorded with everything streamed; what is there now may be more."""
        least, preparer = self._least(), self._preparer
        residency = self.state.residency
        there = residency.resident_bytes - residency.resident_gradient_bytes - self.state.coming_bytes
        budget = self._budget
        if preparer.memory.has_caching_allocator:
            budget = replace(budget, device_bytes=int(preparer.settings.first_share * budget.device_bytes))
        try:
            step = replace(trace, before_bytes=before_bytes - there)
            residency = preparer.choose_residency(step, least, budget, self.state.may_be_early)
        except BudgetTooSmall:
            if not least.fits_home(budget):
                raise
            residency = least  # the planner that is asked for in the end may find more, and says what it needs
        self._move(residency)

    def _move(self, residency: Residency) -> None:
        residency = spilled(residency, self._budget)
        self.state.place(residency)
        window = self.state.window
        window.is_lean, window.peak_bytes = False, window.used_bytes
        preparer, share = self._preparer, residency.link_share
        preparer.residency = replace(self.state.residency, link_share=share)
        preparer.budget = budget_beside(self._budget, preparer.residency, preparer.machine)
        preparer.store.disk_bytes = preparer.budget.disk_bytes
        preparer.store.shrink(preparer.budget.host_bytes if preparer.store.host_bytes else 0)


def _params(count: int, num_bytes: int) -> str:
    return f"{count} parameters ({format_bytes(num_bytes)})"


def check_update(update: str, optimizer: torch.optim.Optimizer | None) -> None:
    """Raises OutcoreError for what `limit(update=...)` cannot be."""
    if update not in ("device", "cpu"):
        raise OutcoreError(f"update={update!r} is unknown; choose 'device' or 'cpu'")
    if update == "cpu" and optimizer is None:
        raise OutcoreError("update='cpu' is for training state that may leave the device; pass optimizer=, too")


def beside(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    budget: Budget,
    machine: Machine,
    folder: str | None,
    *,
    host: int | str = "auto",
    by_cpu: bool = False,
) -> tuple[State | None, Budget]:
    """Returns the training state with a home outside the device, and what it leaves of the budget to activations."""
    if optimizer is None:
        return None, budget
    home_bytes, spill_bytes = room_for_homes(device_of(model), host, budget, folder)
    rooms: dict[str, Any] = {"home_bytes": home_bytes, "spill_bytes": spill_bytes, "folder": folder}
    may_stay = budget.device_bytes
    try:
        state = State(model, optimizer, window_bytes=0, resident_bytes=may_stay, by_cpu=by_cpu, **rooms)
    except StoreError as error:
        if folder is None or spill_bytes or not machine.host_bytes:
            raise
        raise StoreError(f"{error} (this GPU cannot access files, so disk= holds activations only)") from None
    state.window.limit_bytes = state.least_window_bytes
    residency = state.residency
    if residency.home_bytes > home_bytes + spill_bytes:  # until some of it stays; there is no optimizer state yet
        residency = replace(residency, units=tuple(replace(unit, kept_bytes=0) for unit in residency.units))
    return state, budget_beside(_with_homes(budget, state), residency, machine)


def _with_homes(budget: Budget, state: State) -> Budget:
    """Returns a budget with all the bytes that homes may take."""
    homes = state.window.homes
    budget = replace(budget, disk_bytes=homes.spill_bytes) if homes.spill_bytes else budget
    return replace(budget, **{f"{homes.tier}_bytes": homes.limit_bytes})
