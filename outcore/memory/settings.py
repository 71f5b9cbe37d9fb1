"""The numbers by which memory is moved and measured, each with its unit and where it comes from.

In brackets: "measured" on an H200, "derived" from other facts, or "guessed".
"""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import GIB, MIB


@dataclass(frozen=True)
class MemorySettings:
    # -- tiers --------------------------------------------------------------------------------------------------------
    page_bytes: int = 4096  # ranges on the host, on the disk and in a mapped file start at multiples of this (derived)
    huge_page_bytes: int = 2 * MIB  # pinned host memory is mapped in pages of this size (derived)
    slab_bytes: int = 2 * GIB  # host memory that is pinned at once when a copy finds none left (guessed)
    chunk_bytes: int = 8 * MIB  # bytes that a disk lane reads or writes at a time (guessed)
    host_share: float = 0.6  # of the available host memory; data loaders and the page cache need the rest (guessed)
    file_growth_bytes: int = 256 * MIB  # by which the swap file grows, unless one value needs more (guessed)
    file_growth_parts: int = 16  # of the file's limit: it grows by no more than one such part (guessed)
    lane_end_s: float = 30.0  # that closing a store waits for a disk lane to finish (guessed)
    most_sources: int = 4096  # addresses with a source that are remembered before dead ones are removed (guessed)

    most_uses_ahead: int = 2  # uses of the training state that the host may be ahead of the device (guessed: some ms)

    # -- the caching allocator ----------------------------------------------------------------------------------------
    num_restarts_looked_at: int = 4  # the host's pace depends on how many of so many last steps restarted (guessed)
    num_restarts_to_wait: int = 2  # with so many restarts among them, the host waits for the device (guessed)
    most_emptied: int = 4  # consecutive steps before which the cache is emptied; more would not help (guessed)

    # -- seconds of ops -----------------------------------------------------------------------------------------------
    spin_cycles: int = 14_000_000  # clock cycles that a device spins for: about 8 ms (measured)
    cycles_per_s: float = 1.5e9  # of a device's clock, for delays that tests ask for (guessed: at least so many)
    ahead_s: float = 5e-3  # seconds of the host during which one spin keeps the device busy (derived)
    num_ops_per_spin: int = 48  # ops that are timed behind one spin while a step is recorded (measured)
    num_empty_pairs: int = 16  # pairs of events that are timed with nothing in between (guessed)
    least_op_share: float = (
        0.2  # of an op on the CPU that is left after the way to the recorder is subtracted (guessed)
    )

    # -- this machine -------------------------------------------------------------------------------------------------
    auto_share: float = 0.9  # of free device memory, for memory="auto"; other processes and kernels need some (guessed)
    disk_share: float = 0.9  # of the free disk that a swap file may take (guessed)
    link_bytes: int = 256 * MIB  # copied to measure a link (guessed: some milliseconds)
    num_link_copies: int = 4  # copies of which a link's rate is the mean (guessed)
    latency_bytes: int = 4096  # copied to measure the fixed cost of a copy (derived: a page)
    num_latency_copies: int = 32  # copies of which the fixed cost is the mean (guessed)
    most_latency_s: float = 50e-6  # a larger fixed cost is a disturbance (guessed)
    disk_bytes: int = 64 * MIB  # written and read to measure a disk (guessed)
    disk_duplex_share: float = 0.7  # of its rate that a disk keeps while it reads and writes (guessed)
    disk_latency_s: float = 100e-6  # the fixed cost of a copy to or from a disk (guessed)

    # -- how fast the device computes ---------------------------------------------------------------------------------
    cuda_side: int = 4096  # of the square matrices that a GPU multiplies (guessed: some milliseconds)
    cpu_side: int = 768  # the same on the CPU (guessed)
    cuda_copy_bytes: int = 512 * MIB  # moved within a GPU's memory (guessed)
    cpu_copy_bytes: int = 64 * MIB  # moved within the host's memory (guessed)
    num_launches: int = 200  # of a tiny op, to measure what starting one costs (guessed)
    num_updated: int = 4 * MIB  # numbers that are updated to measure how fast the CPU does that (guessed: some ms)
    num_tries: int = 5  # of each measurement; the fastest one counts (guessed)


MEMORY = MemorySettings()
