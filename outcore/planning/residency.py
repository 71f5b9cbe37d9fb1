"""Trace + StateUnits + Machine + Budget -> Residency: which parameters stay on the device, and how large the window is.

Activations and state share one budget and the same links. A byte that the state takes (a resident parameter, or room to
fetch ahead) is one that activations must do without, which costs copies or reruns of theirs. Neither side's price is
known without the other's, so a few residencies are tried: for each, activations are planned in what it leaves, and both
are simulated together in the same lanes. The fastest is taken.

Resident parameters are spread evenly over the step: between two streamed ones there is then time to fetch ahead.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

from outcore.errors import BudgetTooSmall
from outcore.planning.preparing import prepare
from outcore.planning.settings import RESIDENCY, ResidencySettings
from outcore.values import Budget, Machine, Plan, Residency, StateUnit, Timeline, Trace

MakePlan = Callable[[Trace, Machine, Budget], Plan]


def choose_residency(
    trace: Trace,
    least: Residency,
    machine: Machine,
    budget: Budget,
    plan: MakePlan,
    settings: ResidencySettings = RESIDENCY,
    early: Collection[int] = (),
) -> Residency:
    """The residency with which the step takes the least time. `trace` was recorded with every unit streamed; its
    `before_bytes` count neither units nor a window. `least` streams all units through the least window. `early`: units
    that may be updated in the backward. What the budget has on the units' tier is for homes and for activations. Raises
    BudgetTooSmall where even that does not fit."""
    everything = replace(least, resident=frozenset(range(len(least.units))), window_bytes=0)
    whole = _tried(trace, everything, machine, budget, plan)
    if whole is not None and not whole.moves:
        return whole.residency
    tried = [_Tried.of(trace, least, machine, budget, plan)] if least.fits_home(budget) else []  # raises
    tried += _some(whole)
    for factor in settings.windows[1:]:
        wider = replace(least, window_bytes=min(factor * least.window_bytes, least.streamed_bytes))
        tried += _some(_tried(trace, wider, machine, budget, plan))
    first = min(tried[: len(settings.windows)], key=lambda one: one.step_s, default=None)
    window_bytes = first.residency.window_bytes if first is not None else 0
    free_bytes = budget.device_bytes - trace.before_bytes - max(window_bytes, least.window_bytes)
    for share in settings.resident_shares:
        resident = spread(least.units, int(share * free_bytes))
        if resident:
            chosen = replace(least, resident=resident, window_bytes=window_bytes or least.window_bytes)
            tried += _some(_tried(trace, chosen, machine, budget, plan))
    if not tried:
        raise BudgetTooSmall(least.home_bytes, least.home_room(budget), "the training state", where=f"the {least.tier}")
    for share in settings.early_shares:
        best = min(tried, key=lambda one: one.step_s).residency
        for window_bytes in sorted({best.window_bytes, min(2 * best.window_bytes, best.streamed_bytes)}):
            wanted = spread_early(best, early, share, window_bytes)
            if wanted:
                chosen = replace(best, early=wanted, window_bytes=window_bytes)
                tried += _some(_tried(trace, chosen, machine, budget, plan))
    return min(tried, key=lambda one: one.step_s).residency


def budget_beside(budget: Budget, residency: Residency) -> Budget:
    """What the homes of the training state leave of a budget to activations."""
    left = {"host": budget.host_bytes, "disk": budget.disk_bytes}
    left[residency.tier] = max(0, left[residency.tier] - residency.home_bytes)
    return replace(budget, host_bytes=left["host"], disk_bytes=left["disk"])


def spread_early(residency: Residency, early: Collection[int], share: float, window_bytes: int) -> frozenset[int]:
    """A share of those that may be updated in the backward, evenly spread: the ones that the window has room for."""
    units = residency.units
    may = [n for n in sorted(set(early) - residency.resident) if 2 * units[n].all_bytes <= window_bytes]
    chosen = spread([units[n] for n in may], int(share * sum(units[n].all_bytes for n in may)))
    return frozenset(may[at] for at in chosen)


def spread(units: Sequence[StateUnit], num_bytes: int) -> frozenset[int]:
    """Units of `num_bytes` in all, at most, evenly spread over all of them."""
    all_bytes = sum(unit.all_bytes for unit in units)
    share = min(1.0, max(0.0, num_bytes / max(1, all_bytes)))
    chosen: set[int] = set()
    due_bytes, left_bytes = 0.0, num_bytes
    for number, unit in enumerate(units):
        due_bytes += share * unit.all_bytes
        if unit.all_bytes <= left_bytes and due_bytes >= unit.all_bytes / 2:
            chosen.add(number)
            due_bytes -= unit.all_bytes
            left_bytes -= unit.all_bytes
    return frozenset(chosen)


def with_gradients(trace: Trace, residency: Residency | None) -> Trace:
    """A step that was recorded with every unit streamed, as it is where some are resident: their gradients stay, from
    where they were made or, where that was not seen, all along."""
    made = [seen for seen in trace.state if seen.kind == "gradient"]
    stay = [seen for seen in made if residency is not None and seen.unit in residency.resident]
    if residency is None or not stay:
        return trace
    last, numbers = max(trace.num_slots - 1, 0), {seen.storage for seen in stay}
    storages = tuple(
        replace(storage, dies=last) if number in numbers else storage for number, storage in enumerate(trace.storages)
    )
    unseen = {seen.unit for seen in stay if seen.storage < 0}
    unseen_bytes = sum(residency.units[unit].gradient_bytes for unit in unseen)
    return replace(trace, storages=storages, before_bytes=trace.before_bytes + unseen_bytes)


def beside_state(machine: Machine, residency: Residency | None) -> Machine:
    """The machine as activations find it: the state takes its share of the links."""
    if residency is None or residency.link_share >= 1:
        return machine
    share = residency.link_share
    return replace(
        machine.with_copies_at(share),
        disk_write_bytes_per_s=share * machine.disk_write_bytes_per_s,
        disk_read_bytes_per_s=share * machine.disk_read_bytes_per_s,
    )


@dataclass(frozen=True)
class _Tried:
    """A residency, with the activations planned in what it leaves."""

    residency: Residency
    plan: Plan
    predicted: Timeline

    @classmethod
    def of(cls, trace: Trace, residency: Residency, machine: Machine, budget: Budget, plan: MakePlan) -> _Tried:
        if not residency.fits_home(budget):
            room_bytes = residency.home_room(budget)
            raise BudgetTooSmall(residency.home_bytes, room_bytes, "the training state", where=f"the {residency.tier}")
        budget = budget_beside(budget, residency)
        before_bytes = trace.before_bytes + residency.device_bytes - residency.resident_gradient_bytes
        step = with_gradients(replace(trace, before_bytes=before_bytes), residency)
        made = plan(step, machine, budget)
        predicted = prepare(step, made, machine, residency=residency).predicted
        busy_s = max(
            machine.in_s(predicted.state_in_bytes, residency.tier),
            machine.out_s(predicted.state_out_bytes, residency.tier),
        )
        free = max(RESIDENCY.least_link_share, 1 - busy_s / max(predicted.step_s, 1e-9))
        return cls(replace(residency, link_share=free if predicted.state_in_bytes else 1.0), made, predicted)

    @property
    def step_s(self) -> float:
        return self.predicted.step_s

    @property
    def moves(self) -> bool:
        """Whether activations have to make room."""
        return self.plan.count("keep") < len(self.plan.decisions)


def _tried(trace: Trace, residency: Residency, machine: Machine, budget: Budget, plan: MakePlan) -> _Tried | None:
    try:
        return _Tried.of(trace, residency, machine, budget, plan)
    except BudgetTooSmall:
        return None


def _some(tried: _Tried | None) -> list[_Tried]:
    return [] if tried is None else [tried]
