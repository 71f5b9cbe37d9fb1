"""The numbers by which plans are fitted to a device, each with its unit and where it comes from.

In brackets: "measured" on an H200 with the networks of `benchmarks/slowdown.py`, "derived" from other facts, or
"guessed".
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class FittingSettings:
    # -- headroom: the part of a CUDA budget that plans leave free ----------------------------------------------------
    first_share: float = 0.92  # of the budget that the first plan may use (measured)
    largest_share: float = 0.94  # of the budget that a plan may use after the allocator's model examined it (measured)
    least_share: float = 0.70  # of the budget that the smallest plan may use (guessed)
    look_share: float = 0.02  # of the budget, between two sizes for which plans are examined (guessed)
    shrink_share: float = 0.04  # of the budget by which plans shrink after a step ran out of memory (guessed)
    least_shrink: float = 0.9  # of that share: a size must be smaller by so much to count as smaller (guessed)
    grow_share: float = 0.04  # of the budget that a plan must leave unmapped for a larger one to be tried (guessed)
    margin_share: float = 0.015  # of the budget that plans leave for pages which are only used in part (measured)
    unsplit_bytes: int = 4 * MIB  # by which a CUDA block may be larger than needed without being split (measured)
    num_looks: int = 4  # sizes for which plans are examined before one of them is tried (guessed: some seconds each)
    num_attempts: int = 6  # plans that are tried before the fastest one stays (guessed)
    near_share: float = 5e-3  # of a step: no smaller sizes are examined once a plan is this near to its own (guessed)
    num_plans: int = 8  # of one size, from which the search for a plan without fragmentation starts (measured)

    # -- measured steps -----------------------------------------------------------------------------------------------
    num_measured: int = 3  # steps of a plan that are measured; the first one maps memory and is not counted (measured)
    num_paced: int = 3  # unwatched steps on the CPU by whose median predictions are corrected (guessed)
    least_host_pace: float = 0.3  # factor by which ops on the CPU may be faster than predicted (guessed)
    most_host_pace: float = 3.0  # factor by which they may be slower (guessed: a busy machine)
    stall_share: float = 0.01  # of a step: if compute waits longer than predicted by this, copies are slower (guessed)
    slowed_share: float = 0.9  # of their rates that copies then keep in predictions (measured: 5 to 15 % slower)
    num_slowed: int = 2  # times that rates are reduced in this way (guessed)
    most_pace: float = 1.1  # factor by which a whole step may run slower than its ops one by one (measured: 1.04)
    pass_bytes_share: float = 0.9  # of the bytes of a fused pass: an op that moves as many takes as long (derived)

    # -- the host's seconds, measured with a chain of small ops -------------------------------------------------------
    host_pairs: int = 48  # of ops in the chain (guessed: a step of it takes a millisecond or two)
    host_elements: int = 2048  # of its tensors (derived: smaller saved tensors are never put away)
    host_repeats: int = 7  # of each way to run it (guessed)

    # -- families of sizes --------------------------------------------------------------------------------------------
    num_sizes: int = 3  # different sizes of a family before its steps share plans (derived: two members and a third)
    size_step: float = 0.08  # relative distance of two sizes for which shared plans are made (guessed)
    shared_share: float = 0.88  # of a CUDA budget for shared plans that were not examined by the model (guessed)
    timed_ratio: float = 1.5  # least ratio between the sizes of two steps of a family whose ops are timed (guessed)

    # -- kinds of steps -----------------------------------------------------------------------------------------------
    grown_bytes: int = MIB  # more memory in use before a step than planned for, at which the plan is kept (guessed)
    num_recordings: int = 3  # left plans of one kind, after which its steps run without a plan (guessed)
    most_kinds: int = 64  # kinds that are kept; the least recently used is dropped (guessed: some MiB each)
    most_alike: int = 16  # kinds that differ only in scalars and never occurred twice, after which scalars are ignored
    most_gradient_sets: int = 8  # sets of parameters with gradients that tell kinds apart (guessed: micro-batches)
    most_branches: int = 8  # kinds with the same key (guessed: a plan takes some MiB)
    branch_share: float = 1 / 32  # of the steps that may be recorded beyond these (derived: 3 %, each twice as long)
    num_transient: int = 2  # of the largest saved values that a step without a plan holds at a time (derived)
    num_remembered: int = 128  # last steps in which a repeating pattern is looked for (guessed)
    longest_pattern: int = 8  # steps of a pattern (guessed: five of a critic, one of a generator)
    num_recent: int = 32  # last steps among which recordings are counted (guessed)
    recorded_share: float = 0.75  # of these: with more recordings, a warning says that steps keep changing (guessed)
    num_forgotten: int = 3  # consecutive training steps outside `ooc.step()` before a warning (guessed)


@dataclass(frozen=True)
class CacheSettings:
    """The cache on disk."""

    num_entries: int = 256  # kinds of steps in all (guessed: some trainings with dozens of sizes each)
    total_bytes: int = 256 * MIB  # of all entries (guessed: a trace of 3,000 ops takes 100 KB compressed)
    compression: int = 6  # level of gzip (guessed)


FITTING, CACHE = FittingSettings(), CacheSettings()
