"""Trace + StateUnits + Machine + Budget -> Residency: which parameters stay on the device, and how large the window is.

Activations and training state share one budget and the same links. Memory that the state uses (for resident parameters,
or to fetch others early) is not available to activations, which then need more copies or reruns. The cost of either
depends on the other, so a few residencies are tried. For each of them, activations are planned in the memory that is
left, and both are simulated together in the same lanes. The fastest one is used.

Resident parameters are spread evenly over the step, so that there is time to fetch each streamed one early.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from outcore.errors import BudgetTooSmall
from outcore.planning.planners.scoring import lean_bytes, leanest
from outcore.planning.preparing import prepare
from outcore.planning.settings import RESIDENCY, ResidencySettings
from outcore.planning.trace_index import index_of
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
    search = _Search(trace, machine, budget, plan)
    everything = replace(least, resident=frozenset(range(len(least.units))), window_bytes=0)
    whole = search.tries(everything)
    if whole is not None and not whole.moves:
        return everything
    for share in (0.0, *settings.early_shares) if early else (0.0,):
        beside = partial(_with_early, early=early, share=share, budget=budget)
        wider = [min(factor * least.window_bytes, least.streamed_bytes) for factor in settings.windows]
        found = [search.tries(beside(replace(least, window_bytes=window))) for window in dict.fromkeys(wider)]
        best = min((one for one in found if one is not None), key=lambda one: one.step_s, default=None)
        best_bytes = best.residency.window_bytes if best is not None else least.window_bytes
        for window, resident_share in product({best_bytes, least.window_bytes}, settings.resident_shares):
            resident = spread(least.units, int(resident_share * search.free_bytes(window)))
            if resident:
                search.tries(beside(replace(least, resident=resident, window_bytes=window)))
    return search.best(least)


class _Search:
    """Residencies that were tried, and the fastest of them."""

    def __init__(self, trace: Trace, machine: Machine, budget: Budget, plan: MakePlan) -> None:
        self._trace, self._machine, self._budget, self._plan = trace, machine, budget, plan
        trace_index = index_of(trace)
        lean = leanest(trace_index, machine, budget, lambda what, part: None)
        self._lean_bytes = int(lean_bytes(trace_index, budget, lean).max(initial=trace.before_bytes))
        self._tried: list[_Tried] = []

    def free_bytes(self, window_bytes: int) -> int:
        """Of the device, that the window and the step with everything put away leave."""
        return self._budget.device_bytes - self._lean_bytes - window_bytes

    def tries(self, residency: Residency) -> _Tried | None:
        """None: it does not fit. Most of those that do not are found without planning."""
        if self.free_bytes(residency.device_bytes) < 0:
            return None
        try:
            residency = spilled(residency, self._budget)
            self._tried.append(_Tried.of(self._trace, residency, self._machine, self._budget, self._plan))
        except BudgetTooSmall:
            return None
        return self._tried[-1]

    def best(self, least: Residency) -> Residency:
        """Where none fits, `least` raises with what it needs."""
        if not self._tried:
            least = spilled(least, self._budget)
            self._tried.append(_Tried.of(self._trace, least, self._machine, self._budget, self._plan))
        fastest = min(self._tried, key=lambda one: one.step_s)
        shared = self.tries(replace(fastest.residency, link_share=_free_share(fastest, self._machine)))
        return shared.residency if shared is not None and shared.step_s < fastest.step_s else fastest.residency


def _free_share(tried: _Tried, machine: Machine) -> float:
    """Of the links' seconds, what the state leaves to activations."""
    predicted, tier = tried.predicted, tried.residency.tier
    in_bytes, out_bytes = predicted.state_in_bytes, predicted.state_out_bytes
    busy_s = max(machine.in_s(in_bytes, tier), machine.out_s(out_bytes, tier)) if in_bytes else 0.0
    return max(RESIDENCY.least_link_share, 1 - busy_s / max(predicted.step_s, 1e-9))


def _with_early(residency: Residency, early: Collection[int], share: float, budget: Budget) -> Residency:
    """A share of those that may be updated in the backward is, evenly spread: as many as the window and homes have room
    for."""
    units = residency.units
    residency = spilled(residency, budget)
    may = [
        n
        for n in sorted(set(early) - residency.resident - residency.on_disk)
        if 2 * units[n].all_bytes <= residency.window_bytes
    ]
    all_bytes = sum(units[n].all_bytes for n in may)
    second_bytes = sum(units[n].weight_bytes + units[n].kept_bytes for n in may)
    room_bytes = max(0, residency.home_room(budget) - residency.home_bytes_on(residency.tier))
    chosen = spread([units[n] for n in may], int(all_bytes * min(share, room_bytes / max(1, second_bytes))))
    return replace(residency, early=frozenset(may[at] for at in chosen))


def spilled(residency: Residency, budget: Budget) -> Residency:
    """Returns the residency with units on the disk, if it may use it, until the others fit the host. Frozen units go
    first, since they are never written back; of each kind, those that are chosen are spread over the step."""
    excess_bytes = residency.home_bytes - residency.home_room(budget) if residency.spills else 0
    chosen: set[int] = set()
    streamed = [number for number in range(len(residency.units)) if number not in residency.resident]
    for trains in (False, True):
        kind = [number for number in streamed if (residency.units[number].gradient_bytes > 0) == trains]
        units = [residency.units[number] for number in kind]
        largest_bytes = max((unit.all_bytes for unit in units), default=0)
        first = [kind[at] for at in sorted(spread(units, excess_bytes + largest_bytes))] if excess_bytes > 0 else []
        for number in (*first, *kind):
            if excess_bytes > 0 and number not in chosen:
                chosen.add(number)
                excess_bytes -= residency.units[number].all_bytes
    return replace(residency, on_disk=frozenset(chosen), early=residency.early - chosen)


def budget_beside(budget: Budget, residency: Residency, machine: Machine) -> Budget:
    """What the homes of the training state leave of a budget to activations, which do not use the host of a machine
    whose device it is."""
    host_bytes, disk_bytes = (
        max(0, room_bytes - residency.home_bytes_on(tier))
        for tier, room_bytes in (("host", budget.host_bytes), ("disk", budget.disk_bytes))
    )
    return replace(budget, host_bytes=host_bytes if machine.host_bytes else 0, disk_bytes=disk_bytes)


def spread(units: Sequence[StateUnit], num_bytes: int) -> frozenset[int]:
    """Returns units of at most `num_bytes` in all, spread evenly over the step."""
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


def with_gradients(trace: Trace, residency: Residency) -> Trace:
    """Returns the trace of a step in which some units are resident, from one in which all were streamed. The gradients
    of resident units stay on the device from where they are made or, if that was not observed, throughout the step."""
    made = [seen for seen in trace.state if seen.kind == "gradient"]
    stay = [seen for seen in made if seen.unit in residency.resident]
    if not stay:
        return trace
    last, numbers = max(trace.num_slots - 1, 0), {seen.storage for seen in stay}
    storages = tuple(
        replace(storage, dies=last) if number in numbers else storage for number, storage in enumerate(trace.storages)
    )
    unseen = {seen.unit for seen in stay if seen.storage < 0}
    unseen_bytes = sum(residency.units[unit].gradient_bytes for unit in unseen)
    return replace(trace, storages=storages, before_bytes=trace.before_bytes + unseen_bytes)


def beside_state(machine: Machine, residency: Residency) -> Machine:
    """Returns the machine with the share of the links that the training state leaves to activations."""
    if residency.link_share >= 1:
        return machine
    share = residency.link_share
    return replace(
        machine.with_copies_at(share),
        disk_write_bytes_per_s=share * machine.disk_write_bytes_per_s,
        disk_read_bytes_per_s=share * machine.disk_read_bytes_per_s,
    )


@dataclass(frozen=True)
class _Tried:
    """A residency, and the plan for activations in the memory that it leaves."""

    residency: Residency
    plan: Plan
    predicted: Timeline

    @classmethod
    def of(cls, trace: Trace, residency: Residency, machine: Machine, budget: Budget, plan: MakePlan) -> _Tried:
        if not residency.fits_home(budget):
            room_bytes, where = residency.home_room(budget), f"the {residency.tier}"
            if residency.spills:
                room_bytes, where = room_bytes + budget.disk_bytes, f"{where} and the disk"
            raise BudgetTooSmall(residency.home_bytes, room_bytes, "the training state", where=where)
        budget = budget_beside(budget, residency, machine)
        before_bytes = trace.before_bytes + residency.device_bytes - residency.resident_gradient_bytes
        step = with_gradients(replace(trace, before_bytes=before_bytes), residency)
        made = plan(step, beside_state(machine, residency), budget)
        return cls(residency, made, prepare(step, made, machine, residency=residency).predicted)

    @property
    def step_s(self) -> float:
        return self.predicted.step_s

    @property
    def moves(self) -> bool:
        """Whether the plan evicts any activation."""
        return self.plan.count("keep") < len(self.plan.decisions)
