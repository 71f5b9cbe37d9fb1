"""The tunable numbers of recording and running steps, with unit and origin."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import MIB


@dataclass(frozen=True)
class EagerSettings:
    """Origins are in brackets: "measured" on an H200, "derived" from other facts, or "guessed"."""

    # -- recording ----------------------------------------------------------------------------------------------------
    small_bytes: int = 4096  # saved tensors below this stay on the device: a copy has a fixed cost (guessed)
    few_ops: int = 16  # ops that may be rerun for one value while recording (measured: 1.6 x a forward's products)
    many_ops: int = 40  # the same if host memory would have to be pinned instead (measured: 4 to 6 x)
    many_products: int = 4  # matrix products and convolutions among those (measured, together with `many_ops`)
    remade_part: int = 4  # a value is made again only if it is smaller than this part of the budget (guessed)
    sum_parts: int = 16  # chunks of a checksum, which are summed in parallel (guessed)

    # -- comparing a cheaper rerun with the op itself, bit by bit -----------------------------------------------------
    compared_bytes: int = 64 * MIB  # of two storages that are compared at a time (guessed)
    num_pieces: int = 64  # a norm is compared in pieces of 1 / this of the budget (guessed)
    piece_copies: int = 4  # pieces that exist at a time while a norm is compared (derived)
    drawn_scale: float = 256.0  # of drawn weights; their products are not subnormal in half precision

    # -- fused kernels and launches -----------------------------------------------------------------------------------
    tile: int = 1024  # elements that one program of a fused kernel handles (guessed)
    num_probes: int = 1999  # numbers with which a fused kernel is compared with PyTorch's (guessed)
    most_copied_bytes: int = MIB  # of inputs that a launch changes, which are copied to run it again (guessed)

    # -- estimates on fake tensors ------------------------------------------------------------------------------------
    most_known_elements: int = 1 << 22  # of a tensor whose content is computed (guessed: a batch of tokens)
    asked_steps: tuple[int, int] = (4, 20)  # lengths at which the workspace of a recurrent net is measured (guessed)
    asked_sequences: int = 8  # sequences in such a measurement (guessed)

    # -- the fast path in C++ -----------------------------------------------------------------------------------------
    most_build_s: float = 600.0  # after this time the compiler counts as dead, and another process may try (guessed)
    build_poll_s: float = 0.2  # between checks whether another process has compiled it (guessed)


EAGER = EagerSettings()
