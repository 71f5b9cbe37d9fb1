"""The tunable numbers of moving and updating training state, with unit and origin."""

from __future__ import annotations

from dataclasses import dataclass

from outcore.units import KIB, MIB


@dataclass(frozen=True)
class StateSettings:
    """Origins are in brackets: "derived" from other facts, or "guessed"."""

    small_bytes: int = 64 * KIB  # tensors below this stay on the device: a copy has a fixed cost (guessed)
    look_units: int = 64  # parameters after the expected one that are searched for the one that is read (guessed)
    align_numbers: int = 4096  # parts of an update start at multiples of this many elements: alignment
    resident_bytes: int = 64 * MIB  # of resident parameters updated at a time (guessed: takes about a millisecond)
    pieces_ahead: int = 4  # parts of an update that are fetched before they are needed, if memory allows (guessed)
    window_parts: int = 3  # parts of the window: one arrives, one is updated, one departs (derived)

    # -- testing whether an optimizer may run in parts ----------------------------------------------------------
    tried_sides: tuple[int, ...] = (6, 5, 4, 3, 2)  # sides of the small parameters that are updated (guessed)
    num_tried_steps: int = 3  # updates whose results are compared (guessed)
    num_examples: int = 3  # user's parameters whose dtype and dimensions are tried (guessed)
    tried_scales: tuple[float, ...] = (0.5, -2.0)  # of their elements: both signs, both sides of one (guessed)
    gradient_scale: float = 0.1  # of the gradients, relative to the parameters (guessed)
    number_step: float = 0.7  # radians between the sines that serve as elements; no value repeats (guessed)


STATE = StateSettings()
