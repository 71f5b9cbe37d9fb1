"""The length of a training -> the rate on the way.

Up over the warm-up, level, and down to zero over the last third. A target may be missed all the same, since another
start learns more slowly; then the training goes on in rounds of the same shape. They begin at half the rate: what was
learnt is not thrown away, and the next end comes soon.
"""

from __future__ import annotations

from outcore.tuning.goodput import warm_up

ANNEALED = 1 / 3  # of a training whose end is known: over this part its rate falls to zero
ROUND = 1 / 2  # of the length: so long is a round after it
ROUND_RATE = 1 / 2  # of the rate, in it


def rate_factor(step: int, num_steps: int, num_warm_up_steps: int = 0) -> float:
    """Of the rate at `step` (from 0) in a training of `num_steps` (0: without an end) and in the rounds after it."""
    up = warm_up(step, num_warm_up_steps)
    if not num_steps:
        return up
    if step < num_steps:
        return up * _down(step, num_steps)
    num_round = max(1, round(ROUND * num_steps))
    return ROUND_RATE * _down((step - num_steps) % num_round, num_round)


def is_end(num_done: int, num_steps: int) -> bool:
    """Whether a length or a round is over after so many steps: now the metric tells what was learnt."""
    if not num_steps or num_done < num_steps:
        return False
    return (num_done - num_steps) % max(1, round(ROUND * num_steps)) == 0


def _down(step: int, num_steps: int) -> float:
    return min(1.0, (num_steps - step) / (ANNEALED * num_steps))
