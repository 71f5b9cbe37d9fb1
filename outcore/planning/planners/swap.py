"""TraceIndex + Machine + Budget -> keep or swap, guided by the performance model; nothing is recomputed.

The memory optimizer of Guo et al. (PPoPP 2019, 10.1145/3293883.3295718; long version AccUDNN, arXiv 1901.06773): first
make the step trainable (everything swapped), then take back the swaps that slow it down, as far as memory allows. The
papers work on layers of a network; here the simulator is the performance model and values are storages of ops. Which
swap hurts most is read from its stalls, going out and coming in.
"""

from __future__ import annotations

from outcore.planning.planners.scoring import Decisions, Progress, Scored, better, lean_bytes, score, swap_all
from outcore.planning.settings import PEERS
from outcore.planning.trace_index import TraceIndex
from outcore.values import Budget, Machine


def swap(trace_index: TraceIndex, machine: Machine, budget: Budget, progress: Progress) -> Decisions:
    """Starts with everything swapped, and keeps values whose copies are not hidden, the most expensive first, while
    they fit."""
    best = score(trace_index, machine, budget, swap_all(trace_index, machine, budget, progress))
    num_taken = max(len(trace_index.evictable) // PEERS.swap_part, 1)
    for at in range(PEERS.swap_rounds):
        progress("taking swaps back", at / PEERS.swap_rounds)
        decisions = _keep_dearest(trace_index, budget, best, num_taken)
        tried = score(trace_index, machine, budget, decisions)
        if better(best, tried) is tried:
            best = tried
        elif num_taken == 1:
            break
        else:
            num_taken = max(num_taken // 2, 1)
    return dict(best.decisions)


def _keep_dearest(trace_index: TraceIndex, budget: Budget, scored: Scored, num_taken: int) -> Decisions:
    """Keeps up to `num_taken` more values, those with the longest stalls first, each only if everything still fits."""
    stalls_s = {
        value: scored.clocked.out_stall_s.get(value, 0.0) + scored.clocked.in_stall_s.get(value, 0.0)
        for value, decision in scored.decisions.items()
        if decision == "swap"
    }
    decisions: Decisions = dict(scored.decisions)
    taken = 0
    for value in sorted(stalls_s, key=lambda value: stalls_s[value], reverse=True):
        if taken == num_taken:
            break
        decisions[value] = "keep"
        if int(lean_bytes(trace_index, budget, decisions).max(initial=0)) <= budget.device_bytes:
            taken += 1
        else:
            decisions[value] = "swap"
    return decisions
