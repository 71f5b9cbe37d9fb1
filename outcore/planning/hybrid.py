"""Terrain + Machine + Budget -> decisions, near the least step time: the default planner.

The market proposes, the simulator judges: for several shares of the copy lanes and several reserves of memory (room
for copies in flight), the cheapest decisions that fit are lowered and simulated. The best of them is then improved by
flips: a value is kept, swapped or recomputed instead, alone or in exchange with another, and the change stays if the
simulated step fits and got faster. At last, what memory still has room for is kept.

PoocH (arXiv 1907.05013) searches by simulating too, from all-swap and layer by layer. Here prices do the coarse work,
so that what the simulator must decide is small; values are storages of ops, and both lanes' capacity is a price.
"""

from __future__ import annotations

import random
from dataclasses import replace

from outcore.planning.bound import bound_step_s
from outcore.planning.market import INF, Market
from outcore.planning.scoring import Decisions, Progress, Scored, better, lean_bytes, score, score_if_it_can_fit
from outcore.planning.simple import keep_all, leanest
from outcore.planning.swap import swap
from outcore.planning.terrain import Terrain
from outcore.values import Budget, Decision, Machine

SHARES = (1.0, 0.95, 1.05, 0.8)  # of the lanes' capacity; some copies may be late, some early
FORCED_SHARES = (0.0, 1.5, 2.0, 3.0, INF)  # where nothing else fits: copies that stall, or none at all
RESERVES = (0.0, 0.02)  # of the budget, for copies in flight
MARKET_WORK = 1_500_000  # offers x (ops + ticks), after which no other share is tried: a few seconds
FLIP_WORK = 1_000_000  # flips drawn x (ops + ticks): what improving may cost, a few seconds
MAX_FLIPS = 2000
GOOD_ENOUGH = 1e-4  # a plan this near to the bound is not improved further
KEEP_RESERVES = (0.0, 0.05, 0.15, 0.35)  # of the budget, tried in turn
NUM_HALVINGS = 8  # when looking for the least budget that would do
NEARLY_FREE = 1e-3  # where the bound says that copies alone may hide, the swap planner is asked too
MIN_PATIENCE = 150  # flips in a row that change nothing before improving stops


def hybrid(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Market, simulator, flips. Keeps everything when everything fits."""
    if (kept := _kept_if_it_fits(terrain, machine, budget, progress)) is not None:
        return kept
    enough_s = bound_step_s(terrain, machine, budget) * (1 + GOOD_ENOUGH)
    best = _best_of_market(terrain, machine, budget, enough_s, progress)
    if enough_s <= terrain.total_s / machine.speed * (1 + NEARLY_FREE) and best.step_s > enough_s:
        best = better(best, score(terrain, machine, budget, swap(terrain, machine, budget, progress)))
    if best.fits and best.step_s > enough_s:
        best = _improve(terrain, machine, budget, best, progress)
    return dict(_keep_what_fits(terrain, machine, budget, best).decisions if best.fits else best.decisions)


def market(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """The first offer that fits, not improved: a few percent slower than the hybrid's, and several times sooner there.
    Good for a step that is only there to be timed."""
    if (kept := _kept_if_it_fits(terrain, machine, budget, progress)) is not None:
        return kept
    found = Market(terrain, machine, budget).cheapest_fit(SHARES[0], int(budget.device_bytes * (1 - RESERVES[-1])))
    if found is not None and score(terrain, machine, budget, found).fits:
        return found
    return hybrid(terrain, machine, budget, progress)


def _kept_if_it_fits(terrain: Terrain, machine: Machine, budget: Budget, progress: Progress) -> Decisions | None:
    kept = keep_all(terrain, machine, budget, progress)
    return kept if int(lean_bytes(terrain, budget, kept).max(initial=0)) <= budget.device_bytes else None


def smallest_fit(terrain: Terrain, machine: Machine, budget: Budget, high_bytes: int) -> tuple[int, Decisions] | None:
    """A device budget below `high_bytes` that the hybrid fits, and how: where host and disk cannot hold everything."""
    low_bytes = int(lean_bytes(terrain, budget, dict.fromkeys(terrain.evictable, "swap")).max(initial=0))
    best = None
    for _ in range(NUM_HALVINGS):
        device_bytes = (low_bytes + high_bytes) // 2
        tried = replace(budget, device_bytes=device_bytes)
        market = Market(terrain, machine, tried)
        offers = [market.cheapest_fit(share, device_bytes) for share in (SHARES[0], *FORCED_SHARES[:1])]
        fitting = [made for made in offers if made is not None and score(terrain, machine, tried, made).fits]
        if fitting:
            best, high_bytes = (device_bytes, fitting[0]), device_bytes
        else:
            low_bytes = device_bytes
    return best


def _best_of_market(terrain: Terrain, machine: Machine, budget: Budget, enough_s: float, progress: Progress) -> Scored:
    best = score(terrain, machine, budget, leanest(terrain, machine, budget, progress))
    market = Market(terrain, machine, budget)
    for shares in (SHARES, FORCED_SHARES):
        tried, any_fit = [(share, reserve) for share in shares for reserve in RESERVES], False
        for at, (share, reserve) in enumerate(tried):
            progress("pricing", at / len(tried))
            found = market.cheapest_fit(share, int(budget.device_bytes * (1 - reserve)))
            if found is not None:
                scored = score(terrain, machine, budget, found)
                any_fit |= scored.fits
                best = better(best, scored)
            if best.fits and (best.step_s <= enough_s or (any_fit and market.work > MARKET_WORK)):
                return best
        if any_fit:
            break
    return best


def _improve(terrain: Terrain, machine: Machine, budget: Budget, best: Scored, progress: Progress) -> Scored:
    """Flips and exchanges, drawn with a fixed seed, while they make the simulated step faster."""
    flips = Flips(terrain, budget)
    num_flips = min(MAX_FLIPS, FLIP_WORK // terrain.trace.num_slots)
    num_idle, patience = 0, max(MIN_PATIENCE, 4 * len(terrain.evictable))
    for at in range(num_flips):
        if at % 64 == 0:
            progress("improving", at / num_flips)
        changed = flips.draw(best)
        if changed is None:
            continue
        num_idle += 1
        tried = score_if_it_can_fit(terrain, machine, budget, {**best.decisions, **changed})
        if tried is not None and better(best, tried) is tried:
            best, num_idle = tried, 0
        if num_idle == patience:
            break
    return best


def _keep_what_fits(terrain: Terrain, machine: Machine, budget: Budget, best: Scored) -> Scored:
    """A copy that is free in the simulator may not be on the machine: what memory has room for stays, if that is no
    slower. The shortest stays first; room for copies in flight is left where they need it."""
    lean = lean_bytes(terrain, budget, best.decisions)
    away = [value for value in terrain.evictable if best.decisions[value] != "keep"]
    away.sort(key=lambda value: terrain.spans[value][1] - terrain.spans[value][0])
    for reserve in KEEP_RESERVES:
        level, kept = lean + int(reserve * budget.device_bytes), dict(best.decisions)
        for value in away:
            first, end = terrain.spans[value]
            if int(level[first:end].max(initial=0)) + terrain.value_bytes[value] <= budget.device_bytes:
                level[first:end] += terrain.value_bytes[value]
                kept[value] = "keep"
        tried = score(terrain, machine, budget, kept)
        if tried.fits and tried.step_s <= best.step_s:
            return tried
    return best


class Flips:
    """Draws changes worth simulating."""

    def __init__(self, terrain: Terrain, budget: Budget) -> None:
        self.terrain, self.budget = terrain, budget
        self.random = random.Random(0)

    def draw(self, scored: Scored) -> Decisions | None:
        """One value decided anew; where that needs room, another one evicted for it."""
        value = self.random.choice(self.terrain.evictable)
        before = scored.decisions[value]
        choices: list[Decision] = ["keep", "swap"]
        if self.terrain.recomputable[value]:
            choices.append("recompute")
        choices.remove(before)
        changed: Decisions = {value: self.random.choice(choices)}
        if changed[value] == "keep" or self.random.random() < 0.5:
            other = self.random.choice(self.terrain.evictable)
            if other != value:
                after: list[Decision] = ["swap", "recompute"] if self.terrain.recomputable[other] else ["swap"]
                changed[other] = before if changed[value] != "keep" and before in after else self.random.choice(after)
        return changed if self._has_room(scored, changed) else None

    def _has_room(self, scored: Scored, changed: Decisions) -> bool:
        """A quick look: what becomes kept fits beside what stays, less what leaves."""
        for value, decision in changed.items():
            if decision == "keep" and scored.decisions[value] != "keep":
                first, end = self.terrain.spans[value]
                if first < end:
                    at = first + int(scored.slot_bytes[first:end].argmax())
                    level = int(scored.slot_bytes[at]) + self.terrain.value_bytes[value]
                    for other, other_decision in changed.items():
                        if other_decision != "keep" and scored.decisions[other] == "keep":
                            inside = self.terrain.spans[other][0] <= at < self.terrain.spans[other][1]
                            level -= self.terrain.value_bytes[other] if inside else 0
                    if level > self.budget.device_bytes:
                        return False
        return True
