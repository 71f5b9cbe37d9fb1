"""TraceIndex + Machine + Budget -> decisions, near the least step time: the default planner.

Pricing proposes decisions and the simulator scores them. For several shares of the copy lanes and several reserves of
memory (for copies in flight), the cheapest decisions that fit are lowered and simulated. Local search then improves
them by flips: one to three values are kept, swapped or recomputed instead, large values more often, and a change is
accepted if the simulated step fits and is faster. All offers get some flips, and the best of them are improved until no
flip helps; the search then restarts near the best result. Finally, values are kept where memory is left.

PoocH (arXiv 1907.05013) searches by simulating too, from all-swap and layer by layer. Here prices do the coarse work,
so that what the simulator must decide is small; values are storages of ops, and both lanes' capacity is a price.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from outcore.planning.planners.blocks import block_offers
from outcore.planning.planners.pricing import Pricing
from outcore.planning.planners.scoring import (
    Decisions,
    Progress,
    Scored,
    better,
    bound_step_s,
    keep_all,
    lean_bytes,
    leanest,
    score,
    score_if_it_can_fit,
)
from outcore.planning.planners.swap import swap
from outcore.planning.program.simulate import KIND, SUBJECT, TICK
from outcore.planning.settings import HYBRID, INF
from outcore.planning.trace_index import TraceIndex
from outcore.values import MADE_AGAIN, Budget, Decision, Machine


def hybrid(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Pricing, simulation and flips. Keeps everything when everything fits."""
    return several(trace_index, machine, budget, progress, most=1)[0]


def several(
    trace_index: TraceIndex,
    machine: Machine,
    budget: Budget,
    progress: Progress,
    *,
    most: int,
    starts: Sequence[Mapping[int, Decision]] = (),
    brief: bool = False,
) -> list[Decisions]:
    """What `hybrid` decides, and other ends of its walks that are nearly as fast, `most` in all: what the simulator
    does not know of, a device's allocator say, may favour one of them. `starts`: what was decided for about as much
    memory; with those that fit less work will do. `brief`: a plan that is nearly as good as any could be is not
    improved further, and one that is far from it not for longer."""
    if (whole := _kept_if_it_fits(trace_index, machine, budget, progress)) is not None:
        return [whole]
    bound_s = bound_step_s(trace_index, machine, budget)
    enough_s = bound_s * (1 + (HYBRID.briefly_enough_share if brief else HYBRID.good_enough_share))
    offers = _with_blocks(trace_index, machine, budget, _offers(trace_index, machine, budget, enough_s, progress))
    known = [score(trace_index, machine, budget, start) for start in starts if _is_of(trace_index, start)]
    known = sorted((scored for scored in known if scored.fits), key=_merit)[:1]
    ranked = sorted((*offers, *known), key=_merit)
    if not ranked[0].fits:
        return [dict(ranked[0].decisions)]
    if ranked[0].step_s > enough_s:
        far = HYBRID.far_times if ranked[0].step_s > (1 + HYBRID.far_share) * bound_s and not known else 1.0
        times = min(HYBRID.brief_times if brief else far, _worth(trace_index))
        walk = Walk(trace_index, machine, budget, enough_s, progress, times)
        ranked = walk.improved(offers, known)
    return _ends(trace_index, machine, budget, ranked, most)


def _worth(trace_index: TraceIndex) -> float:
    """How many times the work a search may take. Where the host computes, steps wait for it: it is not worth more than
    so many of them."""
    return HYBRID.worth_steps * trace_index.total_s / HYBRID.search_s if trace_index.trace.is_in_line else INF


def _is_of(trace_index: TraceIndex, start: Mapping[int, Decision]) -> bool:
    """Does it decide this step's values, each so that it can be done?"""
    made_again = (value for value, decision in start.items() if decision in MADE_AGAIN)
    return start.keys() == set(trace_index.evictable) and all(trace_index.recomputable[value] for value in made_again)


def _ends(
    trace_index: TraceIndex, machine: Machine, budget: Budget, ranked: list[Scored], most: int
) -> list[Decisions]:
    """The best, different ones, with what there is room for kept; which may make another one the best."""
    kept: list[Scored] = []
    for scored in ranked:
        if (
            len(kept) == max(most, HYBRID.num_ends)
            or not scored.fits
            or scored.step_s > (1 + HYBRID.near_share) * ranked[0].step_s
        ):
            break
        fuller = _keep_what_fits(trace_index, machine, budget, scored)
        if all(fuller.decisions != other.decisions for other in kept):
            kept.append(fuller)
    return [dict(scored.decisions) for scored in sorted(kept, key=_merit)[:most]]


def priced(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Returns the first offer of `Pricing` that fits, without local search.

    The step is a few percent slower than with the hybrid planner, and planning is several times faster. It serves the
    step in which ops are timed. In very little memory the offer may recompute the same values many times; checkpointing
    by blocks is used if it is faster then.
    """
    if (kept := _kept_if_it_fits(trace_index, machine, budget, progress)) is not None:
        return kept
    pricing = Pricing(trace_index, machine, budget)
    for remakes in (False, True):
        found = pricing.cheapest_fit(1.0, int(budget.device_bytes * HYBRID.timing_share), remakes=remakes)
        if found is None:
            continue
        scored = score(trace_index, machine, budget, found)
        if scored.fits and scored.step_s <= HYBRID.slow_times * trace_index.total_s / machine.speed:
            return found
        if scored.fits:
            return dict(_with_blocks(trace_index, machine, budget, [scored])[0].decisions)
    offers = _offers(trace_index, machine, budget, INF, progress)
    return dict(_with_blocks(trace_index, machine, budget, offers)[0].decisions)


def _kept_if_it_fits(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions | None:
    kept = keep_all(trace_index, machine, budget, progress)
    return kept if int(lean_bytes(trace_index, budget, kept).max(initial=0)) <= budget.device_bytes else None


def smallest_fit(
    trace_index: TraceIndex, machine: Machine, budget: Budget, high_bytes: int
) -> tuple[int, Decisions] | None:
    """Returns a device budget below `high_bytes` that is enough, and decisions for it. Called if host and disk cannot
    hold everything."""
    low_bytes = int(lean_bytes(trace_index, budget, dict.fromkeys(trace_index.evictable, "swap")).max(initial=0))
    best = None
    for _ in range(HYBRID.num_halvings):
        device_bytes = (low_bytes + high_bytes) // 2
        tried = replace(budget, device_bytes=device_bytes)
        pricing = Pricing(trace_index, machine, tried)
        ways = itertools.product((1.0, 0.0), (False, True))
        offers = [pricing.cheapest_fit(share, device_bytes, remakes=remakes) for share, remakes in ways]
        fitting = [
            decisions
            for decisions in offers
            if decisions is not None and score(trace_index, machine, tried, decisions).fits
        ]
        if fitting:
            best, high_bytes = (device_bytes, fitting[0]), device_bytes
        else:
            low_bytes = device_bytes
    return best


def _offers(
    trace_index: TraceIndex, machine: Machine, budget: Budget, enough_s: float, progress: Progress
) -> list[Scored]:
    """Returns different offers, those that fit first and the faster before the slower. The leanest decisions are among
    them, but are not examined for `enough_s`, since an offer may be better."""
    found = [score(trace_index, machine, budget, leanest(trace_index, machine, budget, progress))]
    pricing = Pricing(trace_index, machine, budget)

    def is_enough(scored: Scored) -> bool:
        return scored.fits and scored.step_s <= enough_s

    any_fit = False
    for offers in (HYBRID.offers, HYBRID.forced_offers):
        any_anchored, most_work = False, pricing.work + HYBRID.pricing_work
        for at, (share, reserve) in enumerate(offers):
            progress("pricing", at / len(offers))
            room_bytes = int(budget.device_bytes * (1 - reserve))
            for remakes in (False, True):
                made = pricing.cheapest_fit(share, room_bytes, remakes=remakes)
                if made is None:
                    continue
                known = next((scored for scored in found if scored.decisions == made), None)
                if known is None:
                    found.append(known := score(trace_index, machine, budget, made))
                if known.fits:
                    any_fit, any_anchored = True, any_anchored or not remakes
                    break
            if any(map(is_enough, found[1:])) or (any_fit and pricing.work > most_work):
                break
        if any_anchored:
            break
    if enough_s <= trace_index.total_s / machine.speed * (1 + HYBRID.nearly_free_share) and not any(
        map(is_enough, found)
    ):
        found.append(score(trace_index, machine, budget, swap(trace_index, machine, budget, progress)))
    return sorted(found, key=_merit)


def _with_blocks(trace_index: TraceIndex, machine: Machine, budget: Budget, offers: list[Scored]) -> list[Scored]:
    """Returns the offers, and checkpointing by blocks if it fits and is faster than the best of them."""
    checkpointed = [score(trace_index, machine, budget, decisions) for decisions in block_offers(trace_index)]
    faster = [scored for scored in checkpointed if scored.fits and _merit(scored) < _merit(offers[0])]
    return sorted((*offers, *faster), key=_merit)


def _merit(scored: Scored) -> tuple[bool, float]:
    """Returns a key that is smaller for better decisions."""
    return not scored.fits, scored.step_s


def _keep_what_fits(trace_index: TraceIndex, machine: Machine, budget: Budget, best: Scored) -> Scored:
    """Keeps more values where memory is left, if the step does not become slower: a copy that is hidden in the
    simulator may not be hidden on the machine. Values with the shortest spans come first. Some memory is left for
    copies."""
    lean = lean_bytes(trace_index, budget, best.decisions)
    away = [value for value in trace_index.evictable if best.decisions[value] != "keep"]
    away.sort(key=lambda value: trace_index.spans[value][1] - trace_index.spans[value][0])
    for reserve in HYBRID.keep_reserves:
        level, kept = lean + int(reserve * budget.device_bytes), dict(best.decisions)
        for value in away:
            first, end = trace_index.spans[value]
            if int(level[first:end].max(initial=0)) + trace_index.value_bytes[value] <= budget.device_bytes:
                level[first:end] += trace_index.value_bytes[value]
                kept[value] = "keep"
        tried = score(trace_index, machine, budget, kept)
        if tried.fits and tried.step_s <= best.step_s:
            return tried
    return best


class Walk:
    """Local search: accepts random flips, drawn with a fixed seed, that make the simulated step faster."""

    def __init__(
        self,
        trace_index: TraceIndex,
        machine: Machine,
        budget: Budget,
        enough_s: float,
        progress: Progress,
        times: float,
    ) -> None:
        self.trace_index, self.machine, self.budget = trace_index, machine, budget
        self.enough_s, self.progress = enough_s, progress
        num_flips = min(min(1.0, times) * HYBRID.max_flips, times * HYBRID.flip_work / trace_index.trace.num_slots)
        self.num_flips = self.num_left = int(num_flips)
        self.flips = Flips(trace_index, budget)

    def improved(self, offers: list[Scored], known: list[Scored]) -> list[Scored]:
        """Returns the results of walks, the best first. Walks start from promising offers and from known plans, and
        then from near the best result so far."""
        num_values, fitting = len(self.trace_index.evictable), [scored for scored in offers if scored.fits]
        patience, ends = (
            max(HYBRID.first_patience, HYBRID.patience_per_value * num_values),
            [min((*fitting, *known), key=_merit)],
        )
        ends += [self._descend(start, patience) for start in (*self._raced(fitting, patience), *known)]
        best = min(ends, key=_merit)
        num_idle, max_idle = 0, min(HYBRID.max_idle_walks, num_values)
        while not self._is_over(best) and num_idle < max_idle:
            ends.append(self._descend(self._kicked(best), max(HYBRID.later_patience, num_values)))
            num_idle = 0 if ends[-1].step_s < best.step_s else num_idle + 1
            best = better(best, ends[-1])
        return sorted(ends, key=_merit)

    def _raced(self, here: list[Scored], patience: int) -> list[Scored]:
        """Tries some flips on each and continues with the better half. The best offer often does not lead to the best
        plan: for ResNet-50 in 11 GiB the fastest offer (+54 %) ends at +20 %, and four offers at +70 % end at +12 to
        +13 %."""
        here = here[: max(HYBRID.num_finalists, min(HYBRID.num_starts, self.num_flips // HYBRID.least_each))]
        while len(here) > HYBRID.num_finalists:
            most = self.num_flips // HYBRID.round_parts // len(here)
            here = sorted((self._descend(one, patience, most) for one in here), key=lambda one: one.step_s)
            here = here[: max(HYBRID.num_finalists, len(here) // 2)]
        return here

    def _is_over(self, here: Scored) -> bool:
        return self.num_left <= 0 or here.step_s <= self.enough_s

    def _descend(self, here: Scored, patience: int, most: int = HYBRID.max_flips) -> Scored:
        num_idle, until = 0, self.num_left - most
        while not self._is_over(here) and num_idle < patience and self.num_left > until:
            tried = self._flipped(here, here.step_s)
            num_idle += 1
            if tried is not None and better(here, tried) is tried:
                here, num_idle = tried, 0
        return here

    def _kicked(self, here: Scored) -> Scored:
        """Takes some flips that fit, whatever they cost."""
        num_taken, until = 0, max(0, self.num_left - HYBRID.later_patience)
        while num_taken < HYBRID.num_kicks and self.num_left > until:
            tried = self._flipped(here)
            if tried is not None and tried.fits:
                here, num_taken = tried, num_taken + 1
        return here

    def _flipped(self, here: Scored, below_s: float = INF) -> Scored | None:
        self.num_left -= 1
        if self.num_left % HYBRID.flips_per_report == 0:
            self.progress("improving", 1 - self.num_left / self.num_flips)
        changed = self.flips.draw(here)
        if changed is None:
            return None
        return score_if_it_can_fit(self.trace_index, self.machine, self.budget, {**here.decisions, **changed}, below_s)


class Flips:
    """Draws changes worth simulating, with a fixed seed."""

    def __init__(self, trace_index: TraceIndex, budget: Budget) -> None:
        self.trace_index, self.budget = trace_index, budget
        self.random = random.Random(0)
        self._known: Scored | None = None
        self._early: set[int] = set()  # of `_known`
        self.weights = list(itertools.accumulate(trace_index.value_bytes[value] for value in trace_index.evictable))

    def draw(self, scored: Scored) -> Decisions | None:
        """Returns a flip that may fit into memory, or None."""
        if scored is not self._known:
            self._known, self._early = scored, self._read_early(scored)
        drawn = (self._draw(scored.decisions) for _ in range(HYBRID.max_draws))
        return next((changed for changed in drawn if self._has_room(scored, changed)), None)

    def _read_early(self, scored: Scored) -> set[int]:
        """Or made, by reruns for others, before they are asked for: it matters whether these are held or remade."""
        ops, reads, unpacks = self.trace_index.trace.ops, self.trace_index.reads, self.trace_index.unpacks
        reruns = ((step[TICK], step[SUBJECT]) for step in scored.steps if step[KIND] == "rerun")
        passed = ((tick, value) for tick, op in reruns for value in (*reads[op], *ops[op].writes))
        return {value for tick, value in passed if value in scored.decisions and unpacks[value][:1] > [tick]}

    def _draw(self, decisions: Mapping[int, Decision]) -> Decisions:
        """Returns new decisions for one to three values, or the exchanged decisions of two."""
        num = self.random.choices((1, 2, 3), HYBRID.num_values)[0]
        values = list(dict.fromkeys(self._pick() for _ in range(num)))
        changed = {value: self.random.choice(self._others(value, decisions[value])) for value in values}
        if len(values) > 1 and self.random.random() < HYBRID.exchange_share:
            one, other = values[:2]
            if decisions[other] in self._others(one, decisions[one]) and decisions[one] in self._others(
                other, decisions[other]
            ):
                changed |= {one: decisions[other], other: decisions[one]}
        return changed

    def _pick(self) -> int:
        weights = self.weights if self.random.random() < HYBRID.by_bytes_share else None
        return self.random.choices(self.trace_index.evictable, cum_weights=weights)[0]

    def _others(self, value: int, decision: Decision) -> list[Decision]:
        choices: list[Decision] = ["keep", "swap"]
        if self.trace_index.recomputable[value]:
            choices += ["recompute", "remake"] if decision == "remake" or value in self._early else ["recompute"]
        choices.remove(decision)
        return choices

    def _has_room(self, scored: Scored, changed: Decisions) -> bool:
        """A quick look: what becomes kept fits beside what stays, less what leaves."""
        for value, decision in changed.items():
            if decision == "keep" and scored.decisions[value] != "keep":
                first, end = self.trace_index.spans[value]
                if first < end:
                    at = first + int(scored.slot_bytes[first:end].argmax())
                    level = int(scored.slot_bytes[at]) + self.trace_index.value_bytes[value]
                    for other, other_decision in changed.items():
                        if other_decision != "keep" and scored.decisions[other] == "keep":
                            inside = self.trace_index.spans[other][0] <= at < self.trace_index.spans[other][1]
                            level -= self.trace_index.value_bytes[other] if inside else 0
                    if level > self.budget.device_bytes:
                        return False
        return True
