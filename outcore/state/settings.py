"""The numbers by which training state is moved and updated, each with its unit and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import KIB, MIB


@dataclass(frozen=True)
class StateSettings:
    """In brackets: "derived" from other facts, or "guessed"."""

    small_bytes: int = 64 * KIB  # tensors below this stay on the device: a copy has a fixed cost (guessed)
    look_units: int = 64  # parameters after the expected one among which the parameter that is read is sought (guessed)
    align_numbers: int = 4096  # parts of an update start at multiples of so many numbers, so kernels see them aligned
    resident_bytes: int = 64 * MIB  # of resident parameters that are updated at a time (guessed: a millisecond)
    pieces_ahead: int = 4  # parts of an update that are fetched before they are needed, if there is memory (guessed)
    window_parts: int = 3  # of the window that an update uses at a time: one comes, one is updated, one goes (derived)

    # -- trying out whether an optimizer may be run in parts ----------------------------------------------------------
    tried_sides: tuple[int, ...] = (6, 5, 4, 3, 2)  # sides of the small parameters that are updated (guessed)
    num_tried_steps: int = 3  # updates after which results are compared (guessed)
    num_examples: int = 3  # parameters of the user's whose dtype and dimensions are tried (guessed)
    tried_scales: tuple[float, ...] = (0.5, -2.0)  # of the numbers in them: both signs, both sides of one (guessed)
    gradient_scale: float = 0.1  # of the gradients, relative to the parameters (guessed)
    number_step: float = 0.7  # radians between the sines that serve as numbers: none repeats (guessed)


STATE = StateSettings()
