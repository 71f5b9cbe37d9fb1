"""The tunable numbers of reading compiled graphs, with unit and origin."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class CompiledSettings:
    """Origins are in brackets: Inductor's "source", or "guessed"."""

    most_wrappers: int = 1000  # functions searched for the code of a graph, at most (guessed)
    alignment_bytes: int = 16  # the alignment of inputs that Inductor's kernels assume (source)
    small_bytes: int = MIB  # largest value that is kept as an input of reruns (guessed: statistics of norms)
    small_part: int = 8  # such a value is at most 1 / this of the value computed from it (guessed)
    most_text: int = 160  # characters of an unknown statement in a message (guessed)


COMPILED = CompiledSettings()
