"""The numbers by which memory is moved and measured, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class MemorySettings:
    """ "Measured" is on an H200."""

    # -- tiers --------------------------------------------------------------------------------------------------------
    page_bytes: int = 4096  # places on the host, on the disk and in a mapped file begin at multiples of this (derived)
    chunk_bytes: int = 8 * MIB  # copied to or from the disk at a time (guessed)
    host_share: float = 0.6  # of the available host memory: data loader and page cache live there, too (guessed)

    # -- the caching allocator ----------------------------------------------------------------------------------------
    num_restarts_looked_at: int = 4  # the last steps, of which it is asked whether the allocator started over (guessed)
    num_restarts_to_wait: int = 2  # so many of them with a restart: the host waits for the device then (guessed)
    most_emptied: int = 4  # caches that are emptied in a row; after that something else is wrong (guessed)

    # -- seconds of ops -----------------------------------------------------------------------------------------------
    spin_cycles: int = 14_000_000  # of the device: about 8 ms (measured)
    ahead_s: float = 5e-3  # of the host's time, for which one spin is trusted to keep the device busy (derived)
    num_ops_per_spin: int = 48  # where they are counted (measured)
    num_empty_pairs: int = 16  # of events, timed with nothing in between (guessed)


MEMORY = MemorySettings()
