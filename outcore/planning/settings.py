"""The numbers by which plans are searched for, each with its unit and where it comes from.

"Work" is a number of draws times the ops and ticks of a step, so that a search takes about as long for any network.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class HybridSettings:
    """Of the default planner. "Measured" is on the recorded H200 steps of `benchmarks/planners.py`."""

    pricing_work: int = 700_000  # offers x (ops + ticks), after which no other is asked for (guessed: a second or two)
    flip_work: int = 1_500_000  # flips drawn x (ops + ticks): what improving may cost (guessed: a few seconds)
    max_flips: int = 3000  # drawn (guessed)
    far_share: float = 0.05  # of the bound: where the best offer takes so much longer, there is more work (measured)
    far_times: float = 2.5  # so many times the work, there (measured)
    brief_times: float = 0.2  # so many times the work, for a brief search (guessed)
    slow_times: float = 1.5  # the in-core step: where a price alone leads to more, blocks are offered (guessed)
    num_starts: int = 8  # offers that are improved a little (measured)
    num_finalists: int = 2  # offers that are improved as far as it goes (measured)
    least_each: int = 60  # flips for each start, or fewer start (guessed)
    round_parts: int = 6  # each round of halving the starts takes this part of all flips (guessed)
    num_values: tuple[float, ...] = (0.35, 0.45, 0.2)  # how often one, two, three values are decided anew (measured)
    by_bytes_share: float = 0.5  # of the values drawn: a large one more often; the others each as often (measured)
    exchange_share: float = 0.4  # of the flips of several, where two can: they take each other's decision (measured)
    max_draws: int = 20  # for a flip that memory may have room for (guessed)
    num_ends: int = 4  # of walks: to keep more may make one of them the best (guessed)
    near_share: float = 0.02  # of the best: so little slower may an end be (guessed)
    num_kicks: int = 3  # flips taken whatever they cost, then a walk (guessed)
    max_idle_walks: int = 40  # walks in a row that led nowhere (guessed)
    good_enough_share: float = 1e-4  # of the bound: a plan this near to it is not improved further (guessed)
    briefly_enough_share: float = 0.03  # the same for a brief search (guessed)
    keep_reserves: tuple[float, ...] = (0.0, 0.05, 0.15, 0.35)  # shares of the budget, tried in turn (guessed)
    num_halvings: int = 8  # when looking for the least budget that would do (derived: to 0.4 %)
    nearly_free_share: float = 1e-3  # where the bound says that copies alone may hide, the swap planner is asked too
    first_patience: int = 150  # flips in a row that change nothing before the first walk stops (guessed)
    later_patience: int = 30  # the same for later walks (guessed)


@dataclass(frozen=True)
class FragmentationSettings:
    """Of the search for a plan nearly as fast whose blocks find holes."""

    restart_s: float = 0.02  # what the allocator's starting over costs (measured: about, on an H200)
    hopeless_share: float = 0.4  # of a cap, beyond what is safe: no neighbour changes that (guessed)
    doubt: float = 0.5  # restarts beyond those of the model, for a step that wants more than is safe (guessed)
    prices: tuple[float, ...] = (0.3, 0.8, 1.6)  # in step times, for as many pages as the whole cap has beyond safe
    patience: int = 80  # neighbours drawn that lead nowhere: a new walk (guessed)
    draw_work: int = 1_500_000  # neighbours drawn x (ops + ticks) (guessed: a few seconds)
    most_draws: int = 1500  # neighbours drawn (guessed)
    stuck_share: float = 0.25  # of the draws, where by then no neighbour wanted less (guessed)
    most_s: float = 4.0  # on a slow or busy host fewer are drawn (guessed)
    near_share: float = 2e-3  # of the plan's time: so little slower is good enough (guessed)
    far_share: float = 0.03  # of the plan's time: what is so much slower is not looked at (guessed)


@dataclass(frozen=True)
class SharedSettings:
    """Of plans that steps of many sizes share."""

    shares: tuple[float, ...] = (0.94, 0.90, 0.86, 0.82, 0.78, 0.74, 0.70)  # of a CUDA budget, to plan for (guessed)


@dataclass(frozen=True)
class AllocatorSettings:
    """What PyTorch's caching allocator does, where its source says so, and how much its model leaves to doubt."""

    page_bytes: int = 20 * MIB  # large blocks are mapped in pieces of this size (from its source)
    small_bytes: int = MIB  # blocks up to this size have a pool of their own (from its source)
    round_bytes: int = 512  # sizes of blocks are multiples of this (from its source)
    step_bytes: int = 2 * MIB  # what is asked of a cap is rounded up to this (from its source)
    num_steps: int = 4  # after which the blocks of a step lie where they will lie (measured)
    used_share: float = 0.995  # of a cap: the rest is for small blocks (measured)
    safe_share: float = 0.99  # of a cap: and for requests that no trace knows (measured)
    full_share: float = 0.998  # of a cap, with what may lie there twice (measured)
    num_neighbours: int = 6  # ops before and after: one of them has no workspace (guessed)
    pool_share: float = 0.02  # of the budget, for the gradient pool: its pages lie idle while no gradient needs them
    pool_bytes: int = 512 * MIB  # the largest gradient pool (guessed)
    giant_shares: tuple[float, ...] = (0.16, 0.08, 0.04, 0.02)  # of the budget: least bytes of a giant; the best counts


HYBRID, FRAGMENTATION = HybridSettings(), FragmentationSettings()
ALLOCATOR, SHARED = AllocatorSettings(), SharedSettings()
