"""Trace + decisions -> the lean program, in which everything happens at the latest possible moment.

Each unpack of a recomputed value becomes the reruns that make it, inputs first; each need of a swapped value becomes a
swap-in at that very tick, and its swap-out is waited for and freed where it was packed. No schedule for the same
decisions needs less memory; `lower` then moves frees later and swap-ins earlier, where memory allows, to hide copies.

An op is rerun once per need of its segment: saved outputs that are recomputed too and still to be asked for are held
until their own last unpack. Those that are remade are not: before they are first asked for they are made for others
only, and let go. What no later rerun of the tick reads is freed at once. A swapped value that a rerun reads and
autograd asks for later is brought in for each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from outcore.planning.program.simulate import KIND, SUBJECT, Step
from outcore.planning.trace_index import RECOMPUTED, SWAPPED, THERE, UNSAVED, TraceIndex
from outcore.values import MADE_AGAIN

STATES = {"keep": THERE, "swap": SWAPPED, "recompute": RECOMPUTED, "remake": RECOMPUTED}


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
