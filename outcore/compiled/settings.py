"""The numbers by which compiled graphs are read, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class CompiledSettings:
    """In brackets: from Inductor's "source", or "guessed"."""

    most_wrappers: int = 1000  # functions that are searched for the code of a graph (guessed)
    alignment_bytes: int = 16  # alignment that Inductor's kernels assume of their inputs (source)
    small_bytes: int = MIB  # largest value that is kept so that reruns can start from it (guessed: norms' statistics)
    small_part: int = 8  # such a value is at most this part of what is computed from it (guessed)
    most_text: int = 160  # characters of an unknown statement in a message (guessed)


COMPILED = CompiledSettings()
