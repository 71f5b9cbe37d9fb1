"""TraceIndex + Machine + Budget -> keep, swap or recompute, by PoocH's own two stages.

PoocH (Ito et al., arXiv 1907.05013) starts from everything swapped and lets a timeline simulator judge. Stage one
chooses what to keep: among the maps whose swap-in is not hidden by trying all combinations of the few worst, and, for
those whose swap-out is not hidden, one after the other from the output side. Stage two turns swaps into recomputes, one
at a time, by the best ratio of overhead removed to recompute time, simulating after each change.

Where this differs: PoocH classifies feature maps of layers, this classifies storages of ops; and the full text was not
available, so the size of the critical set and the order of ties are ours.
"""

from __future__ import annotations

from itertools import combinations

from outcore.planning.planners.scoring import Decisions, Progress, Scored, better, score, score_if_it_can_fit, swap_all
from outcore.planning.settings import PEERS
from outcore.planning.trace_index import TraceIndex, segments_of
from outcore.values import Budget, Machine


def pooch(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Decides between keep and swap, then between swap and recompute."""
    best = score(trace_index, machine, budget, swap_all(trace_index, machine, budget, progress))
    best = _keep_critical(trace_index, machine, budget, best, progress)
    best = _keep_from_output(trace_index, machine, budget, best, progress)
    return dict(_recompute_by_ratio(trace_index, machine, budget, best, progress).decisions)


def _keep_critical(
    trace_index: TraceIndex, machine: Machine, budget: Budget, best: Scored, progress: Progress
) -> Scored:
    """Tries every combination of the values whose swap-ins stall longest."""
    stalls_s = best.clocked.in_stall_s
    critical = sorted(stalls_s, key=lambda value: stalls_s[value], reverse=True)[: PEERS.num_critical]
    start: Decisions = dict(best.decisions)
    for size in range(1, len(critical) + 1):
        progress("keeping: swap-ins", size / (len(critical) + 1))
        for chosen in combinations(critical, size):
            decisions: Decisions = {**start, **dict.fromkeys(chosen, "keep")}
            if (tried := score_if_it_can_fit(trace_index, machine, budget, decisions)) is not None:
                best = better(best, tried)
    return best


def _keep_from_output(
    trace_index: TraceIndex, machine: Machine, budget: Budget, best: Scored, progress: Progress
) -> Scored:
    """Keeps swapped values, the newest first, while any swap-out stalls and memory lasts."""
    for value in reversed(trace_index.evictable):
        if not best.clocked.out_stall_s:
            break
        if best.decisions[value] != "swap":
            continue
        tried = score_if_it_can_fit(trace_index, machine, budget, {**best.decisions, value: "keep"})
        if tried is None:
            break
        best = better(best, tried)
        progress("keeping: swap-outs", 0.5)
    return best


def _recompute_by_ratio(
    trace_index: TraceIndex, machine: Machine, budget: Budget, best: Scored, progress: Progress
) -> Scored:
    segments = segments_of(trace_index)
    cost_s = {v: sum(trace_index.trace.ops[op].rerun_s for op in ops) / machine.speed for v, ops in segments.items()}
    tried: set[int] = set()
    for at in range(PEERS.max_recomputes):
        progress("recomputing", at / PEERS.max_recomputes)
        clocked = best.clocked
        overhead_s = {
            value: clocked.out_stall_s.get(value, 0.0) + clocked.in_stall_s.get(value, 0.0)
            for value in segments
            if best.decisions[value] == "swap" and value not in tried
        }
        overhead_s = {value: seconds for value, seconds in overhead_s.items() if seconds > 0}
        if not overhead_s:
            break
        value = max(overhead_s, key=lambda value: overhead_s[value] / max(cost_s[value], 1e-12))
        tried.add(value)
        decisions: Decisions = {**best.decisions, value: "recompute"}
        best = better(best, score(trace_index, machine, budget, decisions))
    return best
