"""The numbers by which steps are recorded and run, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class EagerSettings:
    small_bytes: int = 4096  # smaller saved tensors are kept: not worth a copy of their own (guessed)
    few_ops: int = 16  # that may run again for one value (measured: 1.6 times the products of a forward in all)
    many_ops: int = 40  # the same where the alternative is to pin fresh host memory (measured: 4 to 6 times)
    many_products: int = 4  # among those (measured: with the figure above)
    compared_bytes: int = 64 * MIB  # of two storages, compared at a time (guessed)
    num_pieces: int = 64  # of the budget, in which a norm replay is compared (guessed)
    most_copied_bytes: int = MIB  # of inputs that a launch changes, to run it again (guessed: statistics are smaller)
    most_known_elements: int = 1 << 22  # of a tensor whose content an estimate works out (guessed: a batch of tokens)


EAGER = EagerSettings()
