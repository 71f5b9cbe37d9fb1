"""The learning-rate schedule of a training with a given length.

The rate rises during the warm-up, stays constant, and falls to zero over the last third. The target may be missed even
so, because other initial weights learn more slowly. Then the training continues in rounds with the same shape that
start at half the rate: what was learnt is kept, and the next end comes soon.
"""

from __future__ import annotations

from outcore.tuning.gradients.goodput import warm_up
from outcore.tuning.settings import SETTINGS

TRAINING = SETTINGS.training


def rate_factor(step: int, num_steps: int, num_warm_up_steps: int = 0) -> float:
    """Returns the factor of the rate at `step` (from 0), in a training of `num_steps` steps (0: without an end) and in
    the rounds after it."""
    up = warm_up(step, num_warm_up_steps)
    if not num_steps:
        return up
    if step < num_steps:
        return up * _decay(step, num_steps)
    num_round = _round_steps(num_steps)
    return TRAINING.round_rate_share * _decay((step - num_steps) % num_round, num_round)


def is_end(num_done: int, num_steps: int) -> bool:
    """Whether the training or a round ends after so many steps; only then the metric shows what was learnt."""
    if not num_steps or num_done < num_steps:
        return False
    return (num_done - num_steps) % _round_steps(num_steps) == 0


def _round_steps(num_steps: int) -> int:
    return max(1, round(TRAINING.round_share * num_steps))


def _decay(step: int, num_steps: int) -> float:
    return min(1.0, (num_steps - step) / (TRAINING.decay_share * num_steps))
