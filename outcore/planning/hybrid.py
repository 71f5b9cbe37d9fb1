"""Terrain + Machine + Budget -> decisions, near the least step time: the default planner.

Two prices decide. Memory has a price per byte: a value is evicted when that is cheaper than keeping it. The copy lanes
have a capacity: they are given to the values where a hidden copy saves most, that is the least of what remaking or
keeping the value would cost, per second of lane. For a reserve of memory (room for copies in flight) and a share of
the lanes, the lowest price at which the step fits is found by bisection; the simulator judges every combination.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outcore.planning.costs import remake_density, segments_of
from outcore.planning.lower import lean_steps, tiers_of
from outcore.planning.scoring import Decisions, Progress, Scored, lean_bytes, score
from outcore.planning.simple import keep_all, leanest
from outcore.planning.simulate import memory_of
from outcore.planning.terrain import Int64s, Terrain
from outcore.planning.unroll import Unrolled, unroll
from outcore.values import Budget, Machine

SHARES = (0.0, 0.85, 1.0)
RESERVES = (0.0, 0.05)
MAX_ANCHOR_ROUNDS = 12
INF = float("inf")


def hybrid(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    kept = keep_all(terrain, machine, budget, progress)
    if int(lean_bytes(terrain, budget, kept).max(initial=0)) <= budget.device_bytes:
        return kept
    best = score(terrain, machine, budget, leanest(terrain, machine, budget, progress))
    market = Market(terrain, machine, budget)
    for share in SHARES:
        for reserve in RESERVES:
            found = market.cheapest_fit(share, int(budget.device_bytes * (1 - reserve)))
            if found is None:
                continue
            scored = score(terrain, machine, budget, found)
            if scored.peak_bytes <= budget.device_bytes and (
                scored.step_s < best.step_s or best.peak_bytes > budget.device_bytes
            ):
                best = scored
    return dict(best.decisions)


@dataclass
class Job:
    """One value's copies on the lanes."""

    value: int
    packed_s: float
    out_s: float
    needed_s: float
    in_s: float


class Market:
    """Evictions at a price."""

    def __init__(self, terrain: Terrain, machine: Machine, budget: Budget) -> None:
        self.terrain, self.machine, self.budget = terrain, machine, budget
        self.segments = segments_of(terrain)
        self.density = remake_density(terrain, self.segments)
        self.prices = sorted({price for price in self.density.values() if price > 0})
        self.lanes = LaneRoom(terrain, machine)

    def decide(self, price: float, share: float, anchors: frozenset[int] = frozenset()) -> Decisions:
        """Evict at this price of memory; `share` of the lanes may be used; anchors are never remade."""
        density = {v: self.density[v] for v in self.density if v not in anchors}
        worth = {v: min(density.get(v, price), price) for v in self.terrain.evictable}
        swapped = self.lanes.admit(worth, share)
        return {
            value: "swap" if value in swapped else "recompute" if density.get(value, INF) <= price else "keep"
            for value in self.terrain.evictable
        }

    def cheapest_fit(self, share: float, device_bytes: int) -> Decisions | None:
        """The lowest price at which the lean program fits, with as many anchors as its segments need."""
        anchors: frozenset[int] = frozenset()
        for _ in range(MAX_ANCHOR_ROUNDS):
            found = self._lowest_price(share, device_bytes, anchors)
            if found is None:
                return None
            decisions, unrolled, slot_bytes = found
            over = slot_bytes - device_bytes
            if int(over.max(initial=0)) <= 0:
                return decisions
            new = _anchors_for(self.terrain, decisions, unrolled, over)
            if not new:
                return None
            anchors |= new
        return None

    def _lowest_price(
        self, share: float, device_bytes: int, anchors: frozenset[int]
    ) -> tuple[Decisions, Unrolled, Int64s] | None:
        """Fits but for what segments hold before it is asked for."""
        low, high = 0, len(self.prices) - 1
        found = None
        while low <= high:
            middle = (low + high) // 2
            decisions = self.decide(self.prices[middle], share, anchors)
            unrolled = unroll(self.terrain, decisions)
            tiers = tiers_of(self.terrain, decisions, self.budget)
            slot_bytes = memory_of(self.terrain, lean_steps(self.terrain, decisions, unrolled, tiers), decisions)
            early_bytes = early_bytes_of(self.terrain, decisions, unrolled)
            if int((slot_bytes - early_bytes).max(initial=0)) <= device_bytes:
                found, high = (decisions, unrolled, slot_bytes), middle - 1
            else:
                low = middle + 1
        return found


def _early_copies(terrain: Terrain, decisions: Decisions, unrolled: Unrolled) -> list[tuple[int, int, int]]:
    """(value, tick it was made at, tick it is first asked for) of what segments hold ahead of their own need."""
    found = []
    for tick, steps in unrolled.steps.items():
        for step in steps:
            if step[1] == "rerun":
                for value in step[4]:
                    if decisions.get(value) == "recompute":
                        asked = next((at for at in terrain.unpacks[value] if at >= tick), tick)
                        if asked > tick:
                            found.append((value, tick, asked))
    return found


def early_bytes_of(terrain: Terrain, decisions: Decisions, unrolled: Unrolled) -> Int64s:
    change = np.zeros(terrain.trace.num_slots + 1, dtype=np.int64)
    for value, made, asked in _early_copies(terrain, decisions, unrolled):
        change[terrain.tick_slots[made]] += terrain.value_bytes[value]
        change[terrain.tick_slots[asked]] -= terrain.value_bytes[value]
    found: Int64s = np.cumsum(change)[:-1]
    return found


def _anchors_for(terrain: Terrain, decisions: Decisions, unrolled: Unrolled, over: Int64s) -> frozenset[int]:
    """One value to keep or swap for the worst slot: what was made before it in that segment then comes later."""
    slot = int(over.argmax())
    copies = [
        (value, terrain.value_bytes[value])
        for value, made, asked in _early_copies(terrain, decisions, unrolled)
        if terrain.tick_slots[made] <= slot < terrain.tick_slots[asked]
    ]
    saved_bytes, choices = 0, []
    for value, num_bytes in copies:
        if saved_bytes > 0:
            choices.append((value, num_bytes, saved_bytes))
        saved_bytes += num_bytes
    if not choices:
        return frozenset(value for value, _ in copies[:1])
    enough = [choice for choice in choices if choice[2] >= int(over[slot])]
    best = min(enough, key=lambda choice: choice[1]) if enough else max(choices, key=lambda choice: choice[2])
    return frozenset([best[0]])


class LaneRoom:
    """Which sets of values both lanes can copy in time.

    Going out, everything packed after some moment must be copied between then and the turn, when the step first asks
    for something back; coming in, everything needed before some moment must be copied between the turn and then.
    """

    def __init__(self, terrain: Terrain, machine: Machine) -> None:
        self.terrain = terrain
        unpack_ticks = sorted(tick for ticks in terrain.unpacks.values() for tick in ticks)
        self.jobs: dict[int, Job] = {}
        self.turn_s: dict[int, float] = {}
        for value in terrain.evictable:
            pack, needs = terrain.packs[value][0], terrain.unpacks[value]
            at = int(np.searchsorted(unpack_ticks, pack))
            turn = unpack_ticks[at] if at < len(unpack_ticks) else len(terrain.clock_s) - 1
            num_bytes = terrain.value_bytes[value]
            self.turn_s[value] = terrain.clock_s[turn] / machine.speed
            needed_s = terrain.clock_s[needs[0]] / machine.speed if needs else float("inf")
            self.jobs[value] = Job(
                value,
                terrain.clock_s[pack] / machine.speed,
                machine.out_s(num_bytes, "host"),
                needed_s,
                machine.in_s(num_bytes, "host"),
            )
        self.by_pack = sorted(self.jobs.values(), key=lambda job: job.packed_s)
        self.by_need = sorted(self.jobs.values(), key=lambda job: job.needed_s)

    def admit(self, worth: Mapping[int, float], share: float) -> set[int]:
        """Values by falling worth per byte, while both lanes keep up; equal worth: the earliest packed first."""
        out_room = np.array([self.turn_s[job.value] - job.packed_s for job in self.by_pack]) * share
        in_room = np.array([job.needed_s - self.turn_s[job.value] for job in self.by_need]) * share
        out_at = {job.value: at for at, job in enumerate(self.by_pack)}
        in_at = {job.value: at for at, job in enumerate(self.by_need)}
        chosen: set[int] = set()
        for value in sorted(worth, key=lambda value: (-worth[value], out_at[value])):
            job, first, last = self.jobs[value], in_at[value], out_at[value]
            if _min(out_room[: last + 1]) >= job.out_s and _min(in_room[first:]) >= job.in_s:
                out_room[: last + 1] -= job.out_s
                in_room[first:] -= job.in_s
                chosen.add(value)
        return chosen


def _min(room: NDArray[np.float64]) -> float:
    return float(room.min(initial=float("inf")))


__all__ = ["LaneRoom", "Market", "Scored", "hybrid"]
