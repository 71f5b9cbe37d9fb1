"""The numbers by which plans are fitted to a device, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class FittingSettings:
    """ "Measured" is on an H200 with the networks of `benchmarks/slowdown.py`."""

    # -- headroom: the part of a CUDA budget that plans leave free ----------------------------------------------------
    first_share: float = 0.92  # of the budget that the first plan may use (measured)
    largest_share: float = 0.94  # of the budget, for a plan that the model of the allocator has seen (measured)
    least_share: float = 0.70  # of the budget: no smaller plan is tried (guessed)
    look_share: float = 0.02  # of the budget, between the sizes that are looked at (guessed)
    shrink_share: float = 0.04  # of the budget, after running out of memory in a step or in the model (guessed)
    margin_share: float = 0.015  # of the budget: pages that are used in part count whole (measured)
    unsplit_bytes: int = 4 * MIB  # a CUDA block counts whole where its rest is too small to split (measured)
    num_looks: int = 4  # sizes that are planned for and looked at before one is tried (guessed: a few seconds each)
    num_attempts: int = 6  # plans that are tried before the fastest stays (guessed)
    near_share: float = 5e-3  # of a step: a plan this near to the fastest of smaller sizes ends the looking (guessed)
    num_plans: int = 8  # of one size, from which the search for a plan that lies well may begin (measured)

    # -- steps that are measured --------------------------------------------------------------------------------------
    num_measured: int = 3  # steps of a plan that are measured; the first maps memory and does not count (measured)
    stall_share: float = 0.01  # of a step: waiting longer by this than predicted shows slower copies (guessed)
    slowed_share: float = 0.9  # of their rates, for copies that turned out slower beside compute (measured: 5 to 15 %)
    num_slowed: int = 2  # times that copies are planned for slower than measured (guessed)
    most_pace: float = 1.1  # how much slower than its ops one by one a whole step may run (measured: up to 1.04)
    pass_bytes_share: float = 0.9  # of the bytes a pass moves: an op that moves as many bounds its seconds (derived)

    # -- families of sizes --------------------------------------------------------------------------------------------
    num_sizes: int = 3  # different ones of a family, from which on they share plans (derived: two members and another)
    size_step: float = 0.08  # between two sizes that plans are made for, as a share of the smaller one (guessed)
    shared_share: float = 0.88  # of a CUDA budget, for plans whose steps change their sizes, unlooked-at (guessed)
    timed_ratio: float = 1.5  # between the work of two steps of a family whose ops are timed, at least (guessed)

    # -- kinds of steps -----------------------------------------------------------------------------------------------
    grown_bytes: int = MIB  # of a headroom: so much more may be there before a step than planned for (guessed)
    num_recordings: int = 3  # of a kind whose steps keep changing, before it is given up (guessed)
    most_kinds: int = 64  # that are remembered, the least recently used goes first (guessed: some MiB each)
    most_alike: int = 16  # kinds told apart by Python scalars of which none came twice: they tell nothing (guessed)
    most_branches: int = 8  # kinds that nothing tells apart before their first op (guessed: a plan takes some MiB)
    branch_share: float = 1 / 32  # of their steps, that are recorded beyond those (derived: 3 % for twice a step)
    num_transient: int = 2  # largest saved values, beside what a step without a plan keeps (derived: read and write)
    num_remembered: int = 128  # steps in which it is looked for what came after the same steps (guessed)
    longest_pattern: int = (
        8  # steps that are compared with earlier ones for that (guessed: five critics, one generator)
    )
    num_recent: int = 32  # steps over which recordings are counted, to warn of steps that keep changing (guessed)
    recorded_share: float = 0.75  # of them: more recordings are warned of (guessed)
    num_forgotten: int = 3  # trainings outside any step before a warning (guessed)


FITTING = FittingSettings()
