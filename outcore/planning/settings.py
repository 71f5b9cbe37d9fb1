"""The numbers by which plans are searched for, each with its unit and where it comes from.

Where a number comes from stands in brackets: "measured" on the recorded H200 steps of `benchmarks/planners.py`,
"derived" from other facts, "guessed", or from the "source" of PyTorch. "Work" counts draws (or offers) times the ops
and ticks of a step, so that a search takes about as long for any network.
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import KIB, MIB

INF = float("inf")


@dataclass(frozen=True)
class IndexSettings:
    """What planners may ask of a trace at all."""

    floor_bytes: int = 64 * KIB  # saved values below this are kept: a copy has a fixed cost (guessed)
    floor_parts: int = 4096  # in a small step, values below this part of all saved bytes are kept instead (guessed)


@dataclass(frozen=True)
class HybridSettings:
    """The default planner."""

    # -- offers: sets of decisions that `Pricing` proposes ------------------------------------------------------------
    # Each offer is priced for (share of the copy lanes that it may fill, share of memory left for copies in flight).
    # The first list is tried first; the second only where nothing of the first fits. (measured)
    offers: tuple[tuple[float, float], ...] = (
        *((1.0, 0.0), (1.0, 0.02), (0.95, 0.0), (0.95, 0.02), (1.05, 0.0), (1.05, 0.02), (0.8, 0.0), (0.8, 0.02)),
        *((1.5, 0.15), (1.5, 0.2)),
    )
    forced_offers: tuple[tuple[float, float], ...] = (
        *((0.0, 0.0), (0.0, 0.02), (1.5, 0.0), (1.5, 0.02), (2.0, 0.0), (2.0, 0.02), (3.0, 0.0), (3.0, 0.02)),
        *((INF, 0.0), (INF, 0.02)),
    )
    pricing_work: int = 700_000  # once this much work was done, no further offer is priced (guessed: a second or two)
    max_anchor_rounds: int = 80  # passes that decide which early copies pay, until nothing changes (guessed)
    stride_factor: int = 4  # a search for the lowest price that fits multiplies its stride by this (guessed)
    most_lane_times: float = 1e6  # a lane capacity beyond this multiple is treated as unlimited (derived)
    max_bundle: int = 32  # values that are offered together; a larger group is found through its parts (guessed)
    nearly_free_share: float = 1e-3  # the swap planner is asked if the bound exceeds the in-core step by less

    # -- checkpointing by blocks --------------------------------------------------------------------------------------
    slow_times: float = 1.5  # blocks are offered too where pricing alone exceeds this multiple of the in-core step
    timing_share: float = 0.98  # of the budget, for the plan of a step whose ops are timed (guessed)
    small_value_share: float = 1 / 64  # of the largest value: smaller ones may cross blocks, as masks do (guessed)
    least_block_ops: int = 3  # rerunning a shorter block saves nothing worth its cost (guessed)

    # -- local search: flips decide one to three values anew ----------------------------------------------------------
    flip_work: int = 1_500_000  # work that all flips together may take (guessed: a few seconds)
    max_flips: int = 3000  # flips drawn at most, however small the step is (guessed)
    far_share: float = 0.05  # if the best offer exceeds the bound by this share, the search gets more work (measured)
    far_times: float = 2.5  # by this factor (measured)
    search_s: float = 3.0  # seconds that the work once takes (measured: 2 to 6 on two cores)
    worth_steps: float = 50.0  # on the CPU a search may take as long as so many in-core steps (guessed)
    brief_times: float = 0.2  # a brief search gets this multiple of the work (guessed)
    num_starts: int = 8  # offers from which short walks begin (measured)
    num_finalists: int = 2  # of these, walks that are continued until no flip helps (measured)
    least_each: int = 60  # flips that each start needs; with fewer flips in all there are fewer starts (guessed)
    round_parts: int = 6  # each round that halves the number of starts takes this part of all flips (guessed)
    num_values: tuple[float, ...] = (0.35, 0.45, 0.2)  # odds that a flip changes one, two or three values (measured)
    by_bytes_share: float = 0.5  # of the draws prefer large values; the others draw evenly (measured)
    exchange_share: float = 0.4  # of the flips of several values exchange the decisions of two of them (measured)
    max_draws: int = 20  # flips drawn in a row until one may fit into memory (guessed)
    num_ends: int = 4  # results of walks that are kept, because values kept in spare memory may reorder them (guessed)
    near_share: float = 0.02  # a result that is slower than the best by more than this share is dropped (guessed)
    num_kicks: int = 3  # flips that are taken whatever they cost before a walk restarts near the best (guessed)
    first_patience: int = 150  # flips without an improvement that end one of the first walks (guessed)
    patience_per_value: int = 4  # the same for each value of the step, where that is more (guessed)
    later_patience: int = 30  # flips without an improvement that end a later walk (guessed)
    max_idle_walks: int = 40  # later walks without an improvement that end the search (guessed)
    good_enough_share: float = 1e-4  # the search ends with a plan this near to the bound (guessed)
    briefly_enough_share: float = 0.03  # the same for a brief search (guessed)
    flips_per_report: int = 64  # progress is reported once in so many flips (guessed)

    # -- at the end ---------------------------------------------------------------------------------------------------
    keep_reserves: tuple[float, ...] = (0.0, 0.05, 0.15, 0.35)  # shares of the budget left free for copies in flight
    # while further values are kept; the first one that makes the step no slower counts (guessed)
    num_halvings: int = 8  # bisections for the least budget that is enough (derived: to 0.4 %)


@dataclass(frozen=True)
class BoundSettings:
    """The lower bound on step time."""

    num_slots: int = 24  # slots with the most excess bytes; the bound is the largest of theirs (guessed)
    num_sharing_rounds: int = 6  # iterations that share the cost of an op among the values it remakes (guessed)
    num_halvings: int = 50  # bisections for a delay (derived: beyond the digits of a float)


@dataclass(frozen=True)
class PeerSettings:
    """The planners after published methods, which serve as comparisons."""

    most_remade: int = 500_000  # values x ops: the leanest plan tries remaking each value up to this size (guessed)
    swap_rounds: int = 40  # rounds of the swap planner (guessed)
    swap_part: int = 8  # its first round keeps one in so many values (guessed)
    num_critical: int = 6  # values whose keeping the pooch planner searches exhaustively (guessed: 64 simulations)
    max_recomputes: int = 300  # values that the pooch planner recomputes, one after another (guessed)


@dataclass(frozen=True)
class ExactSettings:
    """The mixed-integer planner."""

    max_enumerated: int = 4**6  # up to so many combinations of decisions, all of them are simulated (guessed)
    time_limit_s: float = 10.0  # for one solution (guessed)
    total_limit_s: float = 60.0  # for all solutions (guessed)
    gap: float = 2e-3  # relative gap at which the solver stops (guessed)
    reserves: tuple[float, ...] = (0.0, 0.03)  # shares of the budget that the model leaves free, in turn (guessed)
    max_cut_rounds: int = 12  # solutions that may be cut off because the simulator refuses them (guessed)
    eviction_cost_ms: float = 1e-7  # of solutions with equal seconds, the one with fewer evictions (derived)


@dataclass(frozen=True)
class LoweringSettings:
    """When copies of the schedule start, and which common ops are merged."""

    slack_share: float = 0.1  # a swap-in starts this share of its own duration before it has to (guessed)
    slack_s: float = 300e-6  # and this much earlier on top (guessed)
    least_duplex_share: float = 1e-3  # no lane gets a smaller share of the link while both run (derived: not zero)
    near_slots: int = 128  # repeated ops are merged if their results are asked for within so many slots (guessed)
    near_share: float = 0.02  # or within this share of all slots, where that is more (guessed)


@dataclass(frozen=True)
class FragmentationSettings:
    """The search for a plan that is nearly as fast and fits the caching allocator's pages."""

    restart_s: float = 0.02  # seconds that an allocator restart costs (measured, roughly)
    give_up_share: float = 0.4  # of a cap: no search if a plan maps so much more than is safe (guessed)
    doubt: float = 0.5  # restarts added to those of the model where a step maps more than is safe (guessed)
    prices: tuple[float, ...] = (0.3, 0.8, 1.6)  # of pages beyond the safe size, as large as the cap: in step times
    patience: int = 80  # neighbours without an improvement that end a walk (guessed)
    draw_work: int = 1_500_000  # work that all neighbours together may take (guessed: a few seconds)
    most_draws: int = 1500  # neighbours drawn at most, however small the step is (guessed)
    stuck_share: float = 0.25  # of the draws: the search ends there if no neighbour mapped fewer pages (guessed)
    most_s: float = 4.0  # seconds of the whole search, for slow or busy hosts (guessed)
    near_share: float = 2e-3  # a plan that is slower by no more than this share ends the search (guessed)
    far_share: float = 0.03  # a neighbour that is slower by more than this share is not examined (guessed)


@dataclass(frozen=True)
class FamilySettings:
    """Traces of a few sizes, from which those of other sizes are computed; and the plans that sizes share."""

    shares: tuple[float, ...] = (0.94, 0.90, 0.86, 0.82, 0.78, 0.74, 0.70)  # of a CUDA budget, tried in turn (guessed)
    largest_power: int = 2  # of one variable in the size of a tensor: attention scores have the length twice (derived)
    largest_degree: int = 3  # of all variables together (derived: batch, and the length twice)
    strides: tuple[int, ...] = (2, 4, 8, 16, 32)  # by which convolutional networks divide their inputs (derived)
    num_forms_kept: int = 8  # numbers of variables whose list of candidate forms is cached (guessed)
    least_share: float = 0.25  # of an op's recorded seconds: scaling never predicts fewer, as noise might (guessed)
    bend_share: float = 0.07  # by which a chord may exceed the lines beside it before it counts as a bend (guessed)


@dataclass(frozen=True)
class ResidencySettings:
    """How much of the training state stays on the device; each combination is planned."""

    windows: tuple[int, ...] = (1, 2, 4)  # sizes of the window, as multiples of the least one (guessed)
    early_shares: tuple[float, ...] = (1.0,)  # of what may be updated in the backward (simulated: half is slower)
    resident_shares: tuple[float, ...] = (0.5, 0.95)  # of what window and largest op leave (guessed)
    least_link_share: float = 0.25  # of the link that activations are planned with, at least (guessed)


@dataclass(frozen=True)
class WorkerSettings:
    """The process that plans beside training."""

    niceness: int = 10  # added to that of the training process, which goes first (guessed)


@dataclass(frozen=True)
class AllocatorSettings:
    """What PyTorch's caching allocator does, and how far its model is trusted."""

    page_bytes: int = 20 * MIB  # large blocks are mapped in pages of this size (source)
    small_bytes: int = MIB  # blocks up to this size have a pool of their own (source)
    round_bytes: int = 512  # sizes of blocks are multiples of this (source)
    step_bytes: int = 2 * MIB  # a segment's size is rounded up to a multiple of this (source)
    num_steps: int = 4  # simulated steps after which the blocks of a step keep their places (measured)
    used_share: float = 0.995  # of a cap: the rest is for small blocks (measured)
    safe_share: float = 0.99  # of a cap: the rest is also for requests that no trace contains (measured)
    full_share: float = 0.998  # of a cap, including pages whose two halves are in use at different times (measured)
    num_neighbours: int = 6  # ops on each side of an op, one of which needs no workspace (guessed)
    pool_share: float = 0.02  # of the budget, for the gradient pool: its pages are idle until gradients come (guessed)
    pool_bytes: int = 512 * MIB  # the largest gradient pool (guessed)
    last_slots: int = 5  # a storage that dies in one of the last slots of a step outlives the step (derived)
    giant_shares: tuple[float, ...] = (0.16, 0.08, 0.04, 0.02)  # of the budget: sizes from which a block counts as
    # giant and gets a placeholder; the share with the fewest pages is used (guessed)


INDEX, HYBRID, BOUND = IndexSettings(), HybridSettings(), BoundSettings()
PEERS, EXACT = PeerSettings(), ExactSettings()
LOWERING, FRAGMENTATION, FAMILIES = LoweringSettings(), FragmentationSettings(), FamilySettings()
RESIDENCY, WORKER, ALLOCATOR = ResidencySettings(), WorkerSettings(), AllocatorSettings()
