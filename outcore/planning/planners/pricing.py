"""A price for memory -> decisions that fit: the relaxation behind the hybrid planner.

Memory has a price per byte, and a value is evicted when that is cheaper than keeping it. The copy lanes have a
capacity, which is given to the values whose hidden copies save most: the lesser of the costs of recomputing and of
keeping the value. Bisection finds the lowest price of memory at which the step fits.

A price alone does not see the memory of the backward pass: recomputing a value also makes, and holds, every value of
its segment. Where these early copies do not fit, one value of the segment becomes an *anchor*, which is kept or swapped
and never recomputed, so that the values before it are recomputed later. Alternatively the early copies are freed, and
recomputed again when they are needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np
from numpy.typing import NDArray

from outcore.planning.planners.scoring import Decisions
from outcore.planning.program.lower import Unrolled, lean_of
from outcore.planning.program.simulate import HELD, KIND
from outcore.planning.settings import HYBRID, INF
from outcore.planning.trace_index import Int64s, TraceIndex, segments_of
from outcore.values import Budget, Machine

NEVER_S = 1e12  # later than any step ends; finite, so that differences of it are numbers


@dataclass(frozen=True)
class Early:
    """A recomputed value that is held before it is unpacked, because recomputing `goal` at tick `made` needed it."""

    value: int
    goal: int
    made: int
    asked: int


@dataclass(frozen=True)
class Cures:
    """Remedies for segments that do not fit: values that are never recomputed, and values that are freed in between."""

    anchors: frozenset[int] = frozenset()
    remade: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Offer:
    """Decisions at a price, with the memory of their lean program."""

    price_at: int
    decisions: Decisions
    unrolled: Unrolled
    slot_bytes: Int64s
    early: list[Early]


class Pricing:
    """Finds decisions for one step, machine and budget at the lowest price of memory that fits."""

    def __init__(self, trace_index: TraceIndex, machine: Machine, budget: Budget) -> None:
        self.trace_index, self.machine, self.budget = trace_index, machine, budget
        self.segments = segments_of(trace_index)
        self.density = remake_density(trace_index, machine, self.segments)
        known = sorted({price for price in self.density.values() if price > 0}) or [1.0]
        # from a price at which only free reruns happen to one at which everything is recomputed
        self.prices = [known[0] / 2, *known, known[-1] * 2]
        self.lanes = LaneRoom(trace_index, machine, budget)
        self._hint = 0  # the position of the last price that was found
        self.work = 0  # slots examined so far

    def cheapest_fit(self, share: float, device_bytes: int, *, remakes: bool = False) -> Decisions | None:
        """Returns the decisions at the lowest price at which the lean program fits, or None.

        Segments that do not fit get anchors. With `remakes`, values that they make early are freed instead, if that is
        enough.
        """
        cures = Cures()
        price_at = 0
        for _ in range(HYBRID.max_anchor_rounds):
            offer = self._lowest_price(share, device_bytes, cures, price_at)
            if offer is None:
                return None
            over_bytes = offer.slot_bytes - device_bytes
            if int(over_bytes.max(initial=0)) <= 0:
                return offer.decisions
            remade = self._remade_for(offer, over_bytes) if remakes else frozenset()
            anchors = frozenset() if remade else self._anchors_for(offer, over_bytes) - cures.anchors
            if not remade and not anchors:
                return None
            cures = Cures(cures.anchors | anchors, cures.remade | remade)
            price_at = offer.price_at
        return None

    def _decide(self, price: float, share: float, cures: Cures) -> Decisions:
        density = {value: cost for value, cost in self.density.items() if value not in cures.anchors}
        worth = {value: min(density.get(value, INF), price) for value in self.trace_index.evictable}
        swapped = self.lanes.admit(worth, share)
        decisions: Decisions = dict.fromkeys(self.trace_index.evictable, "keep")
        for value in decisions:
            if value in swapped:
                decisions[value] = "swap"
            elif density.get(value, INF) <= price:
                decisions[value] = "remake" if value in cures.remade else "recompute"
        return decisions

    def _offer(self, price_at: int, share: float, cures: Cures) -> Offer:
        self.work += self.trace_index.trace.num_slots
        return offer_of(self.trace_index, self.budget, self._decide(self.prices[price_at], share, cures), price_at)

    def _lowest_price(self, share: float, device_bytes: int, cures: Cures, start: int) -> Offer | None:
        """Returns the offer at the lowest price that fits, not counting excess that can be remedied. Prices below
        `start` are too low. The search starts where the last one ended, doubles its stride, and then bisects."""
        low, high, stride = start, max(start, self._hint), 1
        best = self._offer(high, share, cures)
        if self._fits_but_for_segments(best, device_bytes):
            while low < high:
                lower = self._offer(max(low, high - stride), share, cures)
                if not self._fits_but_for_segments(lower, device_bytes):
                    low = lower.price_at + 1
                    break
                best, high, stride = lower, lower.price_at, HYBRID.stride_factor * stride
        else:
            while not self._fits_but_for_segments(best, device_bytes):
                low = high + 1
                if low >= len(self.prices):
                    return None
                high = min(high + stride, len(self.prices) - 1)
                stride *= HYBRID.stride_factor
                best = self._offer(high, share, cures)
        while low < high:
            middle = (low + high) // 2
            offer = self._offer(middle, share, cures)
            if self._fits_but_for_segments(offer, device_bytes):
                best, high = offer, middle
            else:
                low = middle + 1
        self._hint = high
        return best

    def _fits_but_for_segments(self, offer: Offer, device_bytes: int) -> bool:
        curable = np.zeros(len(offer.slot_bytes) + 1, dtype=np.int64)
        slots = self.trace_index.tick_slots
        for copy in offer.early:
            curable[slots[copy.made]] += self.trace_index.value_bytes[copy.value]
            curable[slots[copy.asked]] -= self.trace_index.value_bytes[copy.value]
        level = offer.slot_bytes - np.cumsum(curable)[:-1]
        level[[slots[tick] for tick, steps in offer.unrolled.steps.items() if steps]] = 0  # their own reruns
        return int(level.max(initial=0)) <= device_bytes

    def _remade_for(self, offer: Offer, over_bytes: Int64s) -> frozenset[int]:
        """Returns values to free early for each segment that does not fit, the largest first, until that is enough."""
        slots, remade = self.trace_index.tick_slots, set[int]()
        for tick, (over, slot) in segments_over(self.trace_index, offer, over_bytes).items():
            early = [copy.value for copy in offer.early if copy.made == tick and slots[copy.asked] > slot]
            for value in sorted(early, key=lambda value: -self.trace_index.value_bytes[value]):
                if over > 0:
                    remade.add(value)
                    over -= self.trace_index.value_bytes[value]
        return frozenset(remade)

    def _anchors_for(self, offer: Offer, over_bytes: Int64s) -> frozenset[int]:
        """Returns an anchor for each segment that does not fit: the cheapest value to keep that delays enough of it."""
        worst = segments_over(self.trace_index, offer, over_bytes)
        return frozenset(self._anchor(offer, tick, slot, over) for tick, (over, slot) in worst.items())

    def _anchor(self, offer: Offer, tick: int, slot: int, over_bytes: int) -> int:
        goal = self.trace_index.trace.ticks[tick].value
        slots, price = self.trace_index.tick_slots, self.prices[offer.price_at]
        made_before, choices = 0, []
        for copy in offer.early:
            if copy.made == tick and slots[copy.asked] > slot:
                if made_before > 0:
                    choices.append((copy.value, made_before))
                made_before += self.trace_index.value_bytes[copy.value]
        choices.append((goal, max(made_before, 1)))
        enough = [value for value, saved in choices if saved >= over_bytes]
        if not enough:
            return max(choices, key=lambda choice: choice[1])[0]
        return min(enough, key=lambda v: self.trace_index.value_bytes[v] * (price - self.density.get(v, price)))


def offer_of(trace_index: TraceIndex, budget: Budget, decisions: Decisions, price_at: int = 0) -> Offer:
    lean = lean_of(trace_index, decisions, budget)
    return Offer(
        price_at, decisions, lean.unrolled, lean.slot_bytes, early_copies(trace_index, decisions, lean.unrolled)
    )


def segments_over(trace_index: TraceIndex, offer: Offer, over_bytes: Int64s) -> dict[int, tuple[int, int]]:
    """Returns (excess bytes, slot) for the tick of each segment that does not fit."""
    worst: dict[int, tuple[int, int]] = {}
    slots = np.array(trace_index.tick_slots)
    for slot in _tops(over_bytes):
        segment = _segment_at(trace_index, offer, slot, slots)
        if segment is not None and worst.get(segment, (0, 0))[0] < int(over_bytes[slot]):
            worst[segment] = (int(over_bytes[slot]), slot)
    return worst


def _segment_at(trace_index: TraceIndex, offer: Offer, slot: int, slots: NDArray[np.int64]) -> int | None:
    """Returns the tick whose reruns hold the most memory in this slot."""
    held: dict[int, int] = {}
    for copy in offer.early:
        if slots[copy.made] <= slot < slots[copy.asked]:
            held[copy.made] = held.get(copy.made, 0) + trace_index.value_bytes[copy.value]
    if held:
        return max(held, key=lambda tick: held[tick])
    at = int(np.searchsorted(slots, slot))
    reruns = any(step[KIND] == "rerun" for step in offer.unrolled.steps.get(at, ()))
    return at if at < len(slots) and slots[at] == slot and reruns else None


def _tops(over_bytes: Int64s) -> list[int]:
    """Returns the highest slot of every run of slots that exceed the budget."""
    inside = np.concatenate(([False], over_bytes > 0, [False]))
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    return [int(first + over_bytes[first:end].argmax()) for first, end in zip(edges[::2], edges[1::2])]


def early_copies(trace_index: TraceIndex, decisions: Decisions, unrolled: Unrolled) -> list[Early]:
    """Returns the values that segments hold before their own unpack, in the order in which they are made."""
    copies: list[Early] = []
    ticks = trace_index.trace.ticks
    for tick in sorted(unrolled.steps):
        for step in unrolled.steps[tick]:
            for value in step[HELD]:
                if value in decisions and decisions[value] != "remake":
                    asked = next((at for at in trace_index.unpacks[value] if at >= tick), tick)
                    if asked > tick:
                        copies.append(Early(value, ticks[tick].value, tick, asked))
    return copies


class LaneRoom:
    """Decides which values can be swapped: both lanes must copy them in time, and host and disk must hold them.

    Everything that is packed after a moment must be copied out before the next unpack, which is called the turn.
    Everything that is needed before a moment must be copied in between the turn and that moment.
    """

    def __init__(self, trace_index: TraceIndex, machine: Machine, budget: Budget) -> None:
        self.trace_index, self.budget = trace_index, budget
        tier = "host" if budget.host_bytes else "disk"
        unpack_ticks = [tick for tick, made in enumerate(trace_index.trace.ticks) if made.kind == "unpack"]
        clock_s = np.array(trace_index.clock_s) / machine.speed
        values = list(trace_index.evictable)
        packed_s, turn_s, needed_s = [], [], []
        for value in values:
            pack, needs = trace_index.packs[value][0], trace_index.unpacks[value]
            at = int(np.searchsorted(unpack_ticks, pack))
            packed_s.append(clock_s[pack])
            turn_s.append(clock_s[unpack_ticks[at]] if at < len(unpack_ticks) else clock_s[-1])
            needed_s.append(clock_s[needs[0]] if needs else NEVER_S)
        self.out_s = {value: machine.out_s(trace_index.value_bytes[value], tier) for value in values}
        self.in_s = {value: machine.in_s(trace_index.value_bytes[value], tier) for value in values}
        by_need = sorted(range(len(values)), key=lambda at: needed_s[at])
        self.out_at = {value: at for at, value in enumerate(values)}
        self.in_at = {values[at]: place for place, at in enumerate(by_need)}
        self.out_room = np.array([turn - packed for turn, packed in zip(turn_s, packed_s)])
        self.in_room = np.array([needed_s[at] - turn_s[at] for at in by_need])

    def admit(self, worth: Mapping[int, float], share: float) -> set[int]:
        """Returns the values to swap: by decreasing worth per byte, in order of packs, while both lanes keep up."""
        stored_bytes = self.budget.host_bytes + self.budget.disk_bytes
        scale = min(share, HYBRID.most_lane_times)
        out_room, in_room = self.out_room * scale, self.in_room * scale
        chosen: set[int] = set()
        for value in sorted(worth, key=lambda value: (-worth[value], self.out_at[value])):
            first, last, num_bytes = self.in_at[value], self.out_at[value] + 1, self.trace_index.value_bytes[value]
            out_s, in_s = self.out_s[value], self.in_s[value]
            lanes_keep_up = share == INF or (_least(out_room[:last]) >= out_s and _least(in_room[first:]) >= in_s)
            if lanes_keep_up and num_bytes <= stored_bytes and worth[value] > 0:
                out_room[:last] -= out_s
                in_room[first:] -= in_s
                stored_bytes -= num_bytes
                chosen.add(value)
        return chosen


def _least(room: NDArray[np.float64]) -> float:
    return float(room.min(initial=INF))


def rerun_seconds(trace_index: TraceIndex, machine: Machine) -> list[float]:
    """Returns the seconds by which a rerun of each op makes the step longer. On the CPU the host's part counts, too."""
    ops, host = trace_index.trace.ops, machine.host
    if host is None or not trace_index.trace.is_in_line:
        return [op.rerun_s for op in ops]
    return [op.rerun_s + host.captured_op_s + host.rerun_s for op in ops]


def remake_density(trace_index: TraceIndex, machine: Machine, segments: dict[int, tuple[int, ...]]) -> dict[int, float]:
    """Returns the seconds per byte of recomputing each value. Starting with the cheapest value, each one is charged
    only for ops that no value before it was charged for.

    Values that share ops are also considered as a group; otherwise the first of them would be charged for all ops.
    """
    seconds, value_bytes = rerun_seconds(trace_index, machine), trace_index.value_bytes
    paid: set[int] = set()
    found: dict[int, float] = {}

    def density(values: tuple[int, ...]) -> float:
        left = [value for value in values if value not in found]
        needed = {op for value in left for op in segments[value]} - paid
        return sum(seconds[op] for op in needed) / max(sum(value_bytes[value] for value in left), 1)

    heap = [(density(bundle), bundle) for bundle in _bundles(segments)]
    heapify(heap)
    while heap:
        before, bundle = heappop(heap)
        left = tuple(value for value in bundle if value not in found)
        if not left:
            continue
        now = density(left)
        if now != before and heap and now > heap[0][0]:
            heappush(heap, (now, left))
            continue
        found.update(dict.fromkeys(left, now))
        for value in left:
            paid.update(segments[value])
    return found


def _bundles(segments: dict[int, tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Returns each value alone, and each group of values that share an op."""
    sharing: dict[int, list[int]] = {}
    for value, segment in segments.items():
        for op in segment:
            sharing.setdefault(op, []).append(value)
    bundles: set[tuple[int, ...]] = {(value,) for value in segments}
    bundles |= {tuple(values) for values in sharing.values() if 1 < len(values) <= HYBRID.max_bundle}
    return sorted(bundles)
