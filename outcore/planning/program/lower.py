"""Trace + Plan + Machine -> Schedule.

`unroll` makes the lean program, in which everything happens at the latest possible moment. One pass over the ticks,
with a simulated clock, then gives copies time to overlap with compute:

- A swapped-out storage is freed at the first tick at which its copy has ended, or earlier, with a stall, if memory up
  to the next tick would not be enough otherwise.
- A swap-in starts as late as the lane allows (computed backwards from the last need, with some slack), in order of
  need. It starts later if a slot before its need has no space for it.

The schedule never needs more memory than the budget, unless the lean program does; then it needs no more than that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from outcore.errors import PlanMismatch
from outcore.planning.program.lanes import IN, OUT, Lanes, host_lane
from outcore.planning.program.simulate import KIND, SUBJECT, Step, memory_with_ins
from outcore.planning.settings import LOWERING
from outcore.planning.trace_index import RECOMPUTED, SWAPPED, THERE, UNSAVED, Int64s, TraceIndex, index_of
from outcore.values import MADE_AGAIN, Action, Budget, Decision, Machine, Plan, Schedule, Trace

STATES = {"keep": THERE, "swap": SWAPPED, "recompute": RECOMPUTED, "remake": RECOMPUTED}


def lower(trace: Trace, plan: Plan, machine: Machine) -> Schedule:
    """Returns the program for this machine. `trace` is the step as planned, see `outcore.planning.preparing`."""
    if plan.fingerprint != trace.fingerprint:
        raise PlanMismatch(
            f"this plan was made for step {plan.fingerprint}, this step is {trace.fingerprint}; plan this step"
        )
    trace_index = index_of(trace)
    decisions = trace_index.binding(plan.decisions)
    return as_schedule(trace, decisions, lower_steps(trace_index, decisions, machine, plan.budget))


def as_schedule(trace: Trace, decisions: Mapping[int, Decision], steps: list[Step]) -> Schedule:
    actions = tuple(
        Action(tick, "rerun", op=subject, values=held, in_place=in_place)
        if kind == "rerun"
        else Action(tick, kind, value=subject, tier=tier)  # type: ignore[arg-type]
        for tick, kind, subject, tier, held, in_place in steps
    )
    return Schedule(trace.fingerprint, actions, dict(decisions), trace.has_merged_ops)


def lower_steps(
    trace_index: TraceIndex,
    decisions: Mapping[int, Decision],
    machine: Machine,
    budget: Budget,
    lean: Lean | None = None,
) -> list[Step]:
    lean = lean or lean_of(trace_index, decisions, budget)
    return _Sweep(trace_index, decisions, machine, budget, lean).run() if lean.tiers else lean.steps


# -- the lean program --------------------------------------------------------------------------------------------------


@dataclass
class Unrolled:
    """Per unpack tick its steps in order; swap-ins are not among them: a `wait_in` says where one must have ended.

    `stays` has, per swapped value, the (first, last) ticks of each of its stays on the device.
    """

    steps: dict[int, list[Step]] = field(default_factory=dict)
    stays: dict[int, list[tuple[int, int]]] = field(default_factory=dict)

    def rerun_s(self, trace_index: TraceIndex) -> float:
        ops = trace_index.trace.ops
        return sum(
            ops[step[SUBJECT]].rerun_s for steps in self.steps.values() for step in steps if step[KIND] == "rerun"
        )


def unroll(trace_index: TraceIndex, decisions: Mapping[int, str]) -> Unrolled:
    """Returns the program in which everything happens at the latest possible moment. No other for the same decisions
    needs less memory.

    Each unpack of a recomputed value becomes the reruns that make it, inputs first; each need of a swapped value
    becomes a swap-in at that very tick. An op is rerun once per need of its segment: saved outputs that are recomputed
    too and still to be asked for are held until their own last unpack. Those that are remade are not: before they are
    first asked for they are made for others only, and let go. What no later rerun of the tick reads is freed at once. A
    swapped value that a rerun reads and autograd asks for later is brought in for each.
    """
    return _Unroller(trace_index, decisions).run()


class _Unroller:
    def __init__(self, trace_index: TraceIndex, decisions: Mapping[int, str]) -> None:
        self.trace_index = trace_index
        self.ops = trace_index.trace.ops
        self.decisions = decisions
        self.state = trace_index.state.copy()
        for value, decision in decisions.items():
            self.state[value] = STATES[decision]
        self.present: set[int] = set()  # recomputed values whose copy we hold
        self.swap_reads: dict[int, list[tuple[int, int]]] = {}  # swapped value -> (tick, position of the reading step)
        self.found = Unrolled()

    def run(self) -> Unrolled:
        decisions, unpacks = self.decisions, self.trace_index.unpacks
        for index, tick in enumerate(self.trace_index.trace.ticks):
            decision = decisions.get(tick.value) if tick.kind == "unpack" else None
            if decision in MADE_AGAIN:
                steps: list[Step] = []
                if tick.value not in self.present:
                    steps = self._remake(tick.value, index)
                if unpacks[tick.value][-1] == index:
                    self.present.discard(tick.value)
                    steps.append((index, "free", tick.value, "", (), False))
                self.found.steps[index] = steps
            elif decision == "swap":
                self.found.steps[index] = []
                self.swap_reads.setdefault(tick.value, []).append((index, len(self.ops)))
        self._place_swap_needs()
        return self.found

    def _remake(self, value: int, tick: int) -> list[Step]:
        order = self._order_of_reruns(self.trace_index.producer[value])
        last_reader: dict[int, int] = {}
        for position, op in enumerate(order):
            for read in self.trace_index.reads[op]:
                last_reader[read] = position
        steps: list[Step] = []
        transients: set[int] = set()  # transients of this tick
        for position, op in enumerate(order):
            self._note_swap_reads(op, tick, len(steps))
            steps += self._rerun(op, tick, position, last_reader, transients)
        return steps

    def _order_of_reruns(self, goal: int) -> list[int]:
        """Depth first, inputs in order; without recursion, because a segment may be thousands of ops long."""
        order: list[int] = []
        entered: set[int] = {goal}
        stack = [(goal, iter(self.trace_index.reads[goal]))]
        while stack:
            op, reads = stack[-1]
            for read in reads:
                state = self.state[read]
                if state == UNSAVED or (state == RECOMPUTED and read not in self.present):
                    maker = self.trace_index.producer[read]
                    if maker not in entered:
                        entered.add(maker)
                        stack.append((maker, iter(self.trace_index.reads[maker])))
                        break
            else:
                order.append(op)
                stack.pop()
        return order

    def _note_swap_reads(self, op: int, tick: int, position: int) -> None:
        for read in self.trace_index.reads[op]:
            if self.state[read] == SWAPPED:
                self.swap_reads.setdefault(read, []).append((tick, position))

    def _rerun(
        self, op: int, tick: int, position: int, last_reader: dict[int, int], transients: set[int]
    ) -> list[Step]:
        """Run `op` again; hold what is read again or asked for later; free what nobody reads any more."""
        reads, overwritten = self.trace_index.reads[op], self.trace_index.overwrites[op]
        held = []
        for value in self.ops[op].writes:
            if value in self.present or self.state[value] in (THERE, SWAPPED):
                continue  # readers find it elsewhere
            if self._asked_for_later(value, tick):
                self.present.add(value)
                held.append(value)
            elif last_reader.get(value, -1) > position:
                transients.add(value)
                held.append(value)
        in_place = bool(overwritten) and all(
            read in transients and last_reader[read] == position and self.state[read] == UNSAVED for read in overwritten
        )
        steps: list[Step] = [(tick, "rerun", op, "", tuple(held), in_place)]
        for read in reads:
            if read in transients and last_reader[read] == position:
                transients.remove(read)
                if not (in_place and read in overwritten):
                    steps.append((tick, "free", read, "", (), False))
        return steps

    def _asked_for_later(self, value: int, tick: int) -> bool:
        """And held until then?"""
        decision = self.decisions.get(value)
        if decision not in MADE_AGAIN:
            return False
        unpacks = self.trace_index.unpacks[value]
        return unpacks[-1:] >= [tick] and (decision == "recompute" or unpacks[0] <= tick)

    def _place_swap_needs(self) -> None:
        """Each tick that reads a swapped value waits for it before the first read and frees it after the last."""
        inserts: dict[int, list[tuple[int, int, Step]]] = {}
        for value, reads in self.swap_reads.items():
            stays: list[tuple[int, int]] = []
            for at, (tick, position) in enumerate(reads):
                if not stays or not self._still_there(value, stays[-1][1], tick):
                    wait: Step = (tick, "wait_in", value, "", (), False)
                    inserts.setdefault(tick, []).append((position, 0, wait))
                    stays.append((tick, tick))
                stays[-1] = (stays[-1][0], tick)
                if at + 1 == len(reads) or not self._still_there(value, tick, reads[at + 1][0]):
                    free: Step = (tick, "free", value, "", (), False)
                    inserts.setdefault(tick, []).append((position + 1, 1, free))
            self.found.stays[value] = stays
        for tick, inserted in inserts.items():
            self.found.steps[tick] = _merge(self.found.steps[tick], inserted)

    def _still_there(self, value: int, tick: int, later: int) -> bool:
        """The same tick, or autograd holds what `tick` gave it until then anyway."""
        given = self.trace_index.trace.ticks[tick]
        return tick == later or (given.value == value and given.dies >= self.trace_index.tick_slots[later])


def _merge(steps: Sequence[Step], inserts: list[tuple[int, int, Step]]) -> list[Step]:
    """Insert each step before the position it names; positions count the steps as they were."""
    inserts.sort(key=lambda insert: insert[:2])
    merged: list[Step] = []
    at = 0
    for position, step in enumerate(steps):
        while at < len(inserts) and inserts[at][0] <= position:
            merged.append(inserts[at][2])
            at += 1
        merged.append(step)
    return merged + [insert[2] for insert in inserts[at:]]


@dataclass(frozen=True)
class Lean:
    """The program that needs the least memory: every copy is waited for at once, swap-outs where the value is packed
    and swap-ins where it is needed."""

    unrolled: Unrolled
    tiers: Mapping[int, str]
    steps: list[Step]
    slot_bytes: Int64s
    before_in: Mapping[tuple[int, int], int]  # (value, tick of need) -> bytes in that tick until it is brought in

    @property
    def peak_bytes(self) -> int:
        return int(self.slot_bytes.max(initial=0))


def lean_of(
    trace_index: TraceIndex, decisions: Mapping[int, Decision], budget: Budget, unrolled: Unrolled | None = None
) -> Lean:
    decisions = trace_index.binding(decisions)
    unrolled, tiers = unrolled or unroll(trace_index, decisions), tiers_of(trace_index, decisions, budget)
    steps = _lean_steps(trace_index, decisions, unrolled, tiers)
    return Lean(unrolled, tiers, steps, *memory_with_ins(trace_index, steps, decisions))


def tiers_of(trace_index: TraceIndex, decisions: Mapping[int, str], budget: Budget) -> dict[int, str]:
    """Returns the tier of each swapped value: the host while its budget lasts, then the disk, also beyond its
    budget."""
    tiers, host_bytes = {}, budget.host_bytes
    for value in trace_index.evictable:
        if decisions.get(value) == "swap":
            fits = trace_index.value_bytes[value] <= host_bytes
            tiers[value] = "host" if fits else "disk"
            host_bytes -= trace_index.value_bytes[value] if fits else 0
    return tiers


def _lean_steps(
    trace_index: TraceIndex, decisions: Mapping[int, str], unrolled: Unrolled, tiers: Mapping[int, str]
) -> list[Step]:
    steps: list[Step] = []
    packs = {trace_index.packs[value][0]: value for value in decisions if decisions[value] != "keep"}
    for tick in range(len(trace_index.tick_slots)):
        if tick in packs:
            steps += _pack_steps(tick, packs[tick], tiers.get(packs[tick]), wait=True)
        for step in unrolled.steps.get(tick, ()):
            if step[KIND] == "wait_in":
                steps.append((tick, "swap_in", step[SUBJECT], tiers[step[SUBJECT]], (), False))
            steps.append(step)
    return steps


def _pack_steps(tick: int, value: int, tier: str | None, *, wait: bool) -> list[Step]:
    if tier is None:
        return [(tick, "drop", value, "", (), False)]
    out: Step = (tick, "swap_out", value, tier, (), False)
    return [out, *_release(tick, value)] if wait else [out]


def _release(tick: int, value: int) -> list[Step]:
    return [(tick, "wait_out", value, "", (), False), (tick, "free", value, "", (), False)]


# -- copies overlap with compute ---------------------------------------------------------------------------------------


@dataclass
class _Flight:
    """A swap-out that has started, whose device storage is still held."""

    value: int
    num_bytes: int
    dies: int  # the last slot in which something else holds the storage


class _Flights:
    """The swap-outs that have started, the oldest first."""

    def __init__(self) -> None:
        self.queue: deque[_Flight] = deque()
        self.values: set[int] = set()
        self.num_bytes = 0
        self.shared: list[_Flight] = []  # those whose storage something else still held at the previous tick
        self.alone_bytes = 0  # bytes of those that nothing else holds

    def add(self, flight: _Flight) -> None:
        self.queue.append(flight)
        self.values.add(flight.value)
        self.shared.append(flight)
        self.num_bytes += flight.num_bytes

    def pop(self) -> _Flight:
        flight = self.queue.popleft()
        self.values.remove(flight.value)
        self.num_bytes -= flight.num_bytes
        if flight in self.shared:
            self.shared.remove(flight)
        else:
            self.alone_bytes -= flight.num_bytes
        return flight

    def note_deaths(self, slot: int) -> None:
        """Notes which storages nothing else holds from this slot on."""
        for flight in [flight for flight in self.shared if flight.dies < slot]:
            self.shared.remove(flight)
            self.alone_bytes += flight.num_bytes


class _Space:
    """Device bytes per slot and tick: those of the lean program, and those of swap-ins that start before their need."""

    def __init__(self, trace_index: TraceIndex, lean: Lean) -> None:
        self._trace_index = trace_index
        self._slot_bytes, self._before_in = lean.slot_bytes.copy(), lean.before_in
        starts = np.array(trace_index.tick_slots, dtype=np.int64)
        self._range_bytes: Int64s = np.maximum.reduceat(self._slot_bytes, starts)  # from a tick up to the next one
        self._ahead_bytes: Int64s = np.zeros(len(starts), dtype=np.int64)  # swap-ins that started before their need
        self._early_bytes: dict[int, int] = {}  # tick -> bytes of swap-ins that are needed in it and started earlier

    def until_next(self, tick: int, flights: _Flights, budget_bytes: int) -> int:
        """The highest memory from this tick up to the next, with what is in flight. It is not looked at closely where
        even the bound is over the budget."""
        slots = self._trace_index.tick_slots
        first, end = slots[tick], slots[tick + 1] if tick + 1 < len(slots) else self._trace_index.trace.num_slots
        known_bytes = int(self._ahead_bytes[tick]) + flights.alone_bytes
        most_bytes = int(self._range_bytes[tick]) + known_bytes
        dying = [flight for flight in flights.shared if flight.dies + 1 < end]
        if not dying or most_bytes > budget_bytes:
            return most_bytes
        level = self._slot_bytes[first:end] + known_bytes
        for flight in dying:
            level[max(flight.dies + 1 - first, 0) :] += flight.num_bytes
        return int(level.max())

    def with_copy(self, tick: int, need: int, value: int) -> int:
        """Returns the highest memory if a copy exists from one tick on and not only when it is needed."""
        taken = self._range_bytes[tick:need] + self._ahead_bytes[tick:need]
        most_bytes = int(taken.max(initial=0))
        if tick < need:
            before_bytes = self._before_in[value, need] + self._early_bytes.get(need, 0) + int(self._ahead_bytes[need])
            most_bytes = max(most_bytes, before_bytes)
        return most_bytes + self._trace_index.value_bytes[value]

    def take(self, tick: int, need: int, value: int) -> None:
        """Adds a copy of `value` that exists from one tick on, for its need in a later one."""
        num_bytes = self._trace_index.value_bytes[value]
        self._ahead_bytes[tick:need] += num_bytes
        if tick < need:
            self._early_bytes[need] = self._early_bytes.get(need, 0) + num_bytes
            level = self._before_in[value, need] + self._early_bytes[need]
            slot = self._trace_index.tick_slots[need]
            self._slot_bytes[slot] = max(int(self._slot_bytes[slot]), level)
            self._range_bytes[need] = max(int(self._range_bytes[need]), level)


class _Sweep:
    """Visits the ticks once, and decides where copies are waited for and where swap-ins start."""

    def __init__(
        self,
        trace_index: TraceIndex,
        decisions: Mapping[int, str],
        machine: Machine,
        budget: Budget,
        lean: Lean,
    ) -> None:
        self.trace_index, self.machine, self.lean = trace_index, machine, lean
        self.budget_bytes = budget.device_bytes
        self.packs = {trace_index.packs[value][0]: value for value in decisions if decisions[value] != "keep"}
        self.space = _Space(trace_index, lean)
        self.flights = _Flights()
        self.lanes = Lanes(machine.duplex_share)
        again = (step[SUBJECT] for steps in lean.unrolled.steps.values() for step in steps if step[KIND] == "rerun")
        self.host = host_lane(trace_index, machine, again)
        self.delay_s = 0.0
        self.steps: list[Step] = []
        self.begun: set[tuple[int, int]] = set()  # (value, tick of need)
        self.kept_on: set[tuple[str, int, int]] = set()  # (kind, value, tick): steps that a stay in between saves
        self.stays = self._join_stays()
        self.queue = self._plan_swap_ins()

    def run(self) -> list[Step]:
        flights = self.flights
        for tick in range(len(self.trace_index.tick_slots)):
            if self.host is not None:
                self.delay_s = self.host.reach(tick, self.delay_s)
            if flights.queue:
                self._release_done(tick)
            if tick in self.packs:
                self._pack(tick, self.packs[tick])
            if flights.queue:
                self._release_for_room(tick)
            for step in self.lean.unrolled.steps.get(tick, ()):
                self._perform(step)
            if self.queue and self.queue[0][0] <= tick:
                self._begin_swap_ins(tick)
        while flights.queue:  # values that are not needed again
            self._release(len(self.trace_index.tick_slots) - 1)
        return self.steps

    def _act(self, kind: str) -> None:
        if self.host is not None:
            self.delay_s = self.host.act(kind, self.delay_s)

    # --- swap-outs

    def _now_s(self, tick: int) -> float:
        return self.trace_index.clock_s[tick] / self.machine.speed + self.delay_s

    def _pack(self, tick: int, value: int) -> None:
        self.steps += _pack_steps(tick, value, self.lean.tiers.get(value), wait=False)
        if value in self.lean.tiers:
            num_bytes = self.trace_index.value_bytes[value]
            work_s = self.machine.out_s(num_bytes, self.lean.tiers[value])
            self._act("swap_out")
            self.lanes.issue(OUT, value, self._now_s(tick), work_s)
            dies = self.trace_index.dies[self.trace_index.storage[value]]
            self.flights.add(_Flight(value, num_bytes, dies))

    def _release_done(self, tick: int) -> None:
        self.lanes.advance(self._now_s(tick))
        while self.flights.queue and self.flights.queue[0].value in self.lanes.end_s[OUT]:
            self._release(tick)

    def _release(self, tick: int) -> None:
        """Waits for the oldest swap-out and frees its storage."""
        flight = self.flights.pop()
        self.delay_s += max(0.0, self.lanes.finish(OUT, flight.value) - self._now_s(tick))
        self.steps += _release(tick, flight.value)

    def _release_for_room(self, tick: int) -> None:
        flights = self.flights
        flights.note_deaths(self.trace_index.tick_slots[tick])
        while flights.queue and self.space.until_next(tick, flights, self.budget_bytes) > self.budget_bytes:
            self._release(tick)

    # --- swap-ins

    def _join_stays(self) -> list[tuple[int, int]]:
        """Returns (tick of need, value) of every swap-in. A value stays from one need to the next if there is space."""
        gaps, first_needs = [], []
        for value, stays in self.lean.unrolled.stays.items():
            first_needs.append((stays[0][0], value))
            gaps += [(after[0] - before[1], before[1], after[0], value) for before, after in pairwise(stays)]
        for _, last, need, value in sorted(gaps):  # the shortest gaps first, which cost the least memory
            if self._has_room(last, need, value):
                self.space.take(last, need, value)
                self.kept_on |= {("free", value, last), ("wait_in", value, need)}
            else:
                first_needs.append((need, value))
        return sorted(first_needs)

    def _has_room(self, tick: int, need: int, value: int) -> bool:
        return self.space.with_copy(tick, need, value) + self.flights.num_bytes <= self.budget_bytes

    def _plan_swap_ins(self) -> deque[tuple[int, int, int]]:
        """Returns (tick to start at, tick of need, value) in order of need, as late as the lane allows."""
        ends_s = self._tick_ends()
        queue: deque[tuple[int, int, int]] = deque()
        free_s = float("inf")
        for need, value in reversed(self.stays):
            copy_s = self.machine.in_s(self.trace_index.value_bytes[value], self.lean.tiers[value])
            need_s = ends_s[need - 1] if need else 0.0
            free_s = min(free_s, need_s) - copy_s * (1 + LOWERING.slack_share)
            tick = bisect_right(ends_s, free_s - LOWERING.slack_s) - 1
            queue.appendleft((max(tick, self._gone_at(value, need)), need, value))
        return queue

    def _gone_at(self, value: int, need: int) -> int:
        """Returns the tick from which on a value is not on the device before this need: its pack, or an earlier
        need."""
        stays = self.lean.unrolled.stays[value]
        at = next(place for place, stay in enumerate(stays) if stay[0] == need)
        return stays[at - 1][1] if at else self.trace_index.packs[value][0]

    def _tick_ends(self) -> list[float]:
        """Returns the clock after each tick's reruns, without stalls."""
        ops, speed, delay_s, ends_s = self.trace_index.trace.ops, self.machine.speed, 0.0, []
        behind_s = self.host.delays() if self.host is not None else None
        for tick, clock_s in enumerate(self.trace_index.clock_s):
            for step in self.lean.unrolled.steps.get(tick, ()):
                if step[KIND] == "rerun":
                    delay_s += ops[step[SUBJECT]].rerun_s / speed
            ends_s.append(clock_s / speed + delay_s + (behind_s[tick] if behind_s is not None else 0.0))
        return ends_s

    def _begin_swap_ins(self, tick: int) -> None:
        """Starts the swap-ins that are due, in order. Those without space wait for the next tick."""
        while self.queue and self.queue[0][0] <= tick:
            _, need, value = self.queue[0]
            if (value, need) not in self.begun:
                if not self._has_room(tick, need, value) or value in self.flights.values:
                    return
                self.space.take(tick, need, value)
                self._swap_in(tick, need, value)
            self.queue.popleft()

    def _swap_in(self, tick: int, need: int, value: int) -> None:
        self.begun.add((value, need))
        self.steps.append((tick, "swap_in", value, self.lean.tiers[value], (), False))
        work_s = self.machine.in_s(self.trace_index.value_bytes[value], self.lean.tiers[value])
        self._act("swap_in")
        self.lanes.issue(IN, value, self._now_s(tick), work_s)

    def _perform(self, step: Step) -> None:
        """Performs one step of the lean program and advances the clock."""
        tick, kind, subject = step[:3]
        if (kind, subject, tick) in self.kept_on:
            return
        if kind == "wait_in":
            while subject in self.flights.values:
                self._release(tick)
            if (subject, tick) not in self.begun:
                self._swap_in(tick, tick, subject)
            self.delay_s += max(0.0, self.lanes.finish(IN, subject) - self._now_s(tick))
        elif kind == "rerun":
            self._act(kind)
            self.delay_s += self.trace_index.trace.ops[subject].rerun_s / self.machine.speed
        self.steps.append(step)
