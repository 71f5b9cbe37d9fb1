"""The update equations: weights, centre and step determine new weights and a new centre.

Notation: W_i a worker's weights, C the centre, G_i the gradient at W_i, P workers, eta the learning rate, rho the
elastic strength, alpha = eta * rho the moving rate, mu the momentum, s_i the local step (for plain SGD s_i = -eta G_i).
Every rule takes the step instead of the gradient, so that any local optimizer fits; every right-hand side holds the OLD
pair (W_i, C), so that the exchange may run while the gradient is computed.

Follows You, Buluc, Demmel (SC17, arXiv 1708.02983), equations 1, 2, 5 and 6; Zhang, Choromanska, LeCun (NIPS 2015,
arXiv 1412.6651), equations 3 to 6 and EAMSGD; Douillard et al. (DiLoCo, arXiv 2311.08105) for the outer step, and
(Streaming DiLoCo, arXiv 2501.18512) for mixing a late one. Unlike the papers, which write sums of weights, the rules
use differences (W_i - C): mathematically the same, with less cancellation, and safe to round to bfloat16 in messages.
With `out` a rule writes in place; without it a rule is a pure function.
"""

from __future__ import annotations

import torch
from torch import Tensor


def difference(weights: Tensor, center: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Returns d_i = W_i - C, the only quantity that an elastic exchange needs."""
    return torch.sub(weights, center, out=out)


def worker_elastic(moved: Tensor, difference: Tensor, alpha: float, *, out: Tensor | None = None) -> Tensor:
    """1708.02983 eq. 1: W_i <- (W_i + s_i) - alpha (W_i - C); `moved` is W_i + s_i, `difference` uses the old pair."""
    return torch.add(moved, difference, alpha=-alpha, out=out)


def center_elastic(center: Tensor, difference: Tensor, alpha: float, *, out: Tensor | None = None) -> Tensor:
    """C <- C + alpha d. With d = W_i - C this is the asynchronous and round-robin centre (Alg. 1, one worker at a
    time); with d = sum_i (W_i - C) it is eq. 2 of 1708.02983, which is eq. 4 of 1412.6651 with beta = P alpha.
    """
    return torch.add(center, difference, alpha=alpha, out=out)


def center_step(center: Tensor, step: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Async SGD and Hogwild SGD: C <- C - eta G_i, given s_i = -eta G_i."""
    return torch.add(center, step, out=out)


def momentum(velocity: Tensor, step: Tensor, mu: float, *, out: Tensor | None = None) -> Tensor:
    """V <- mu V - eta G, given s = -eta G.

    At the centre it is Async MSGD (then C <- C + V); at the worker, with the gradient taken at W_i, 1708.02983 eq. 5
    (then eq. 6: W_i <- W_i + V_i - alpha (W_i - C)); with the gradient taken at `look_ahead`, EAMSGD of 1412.6651.
    """
    return torch.add(step, velocity, alpha=mu, out=out)


def look_ahead(weights: Tensor, velocity: Tensor, delta: float, *, out: Tensor | None = None) -> Tensor:
    """x + delta v, where EAMSGD takes its gradient (1412.6651, section 3); MEASGD uses another point."""
    return torch.add(weights, velocity, alpha=delta, out=out)


def outer_nesterov(
    center: Tensor, velocity: Tensor, mean_difference: Tensor, rate: float, mu: float
) -> tuple[Tensor, Tensor]:
    """DiLoCo: with g = -mean_i (W_i - C), V <- mu V + g, C <- C - rate (g + mu V).

    mu = 0 and rate = beta give C + beta mean_i (W_i - C): the synchronous centre step is its special case.
    """
    outer_gradient = -mean_difference
    velocity = mu * velocity + outer_gradient
    return center - rate * (outer_gradient + mu * velocity), velocity


def mixed(weights: Tensor, center: Tensor, mix: float, *, out: Tensor | None = None) -> Tensor:
    """Streaming DiLoCo (2501.18512): W_i <- mix W_i + (1 - mix) C, where C is the centre after its outer step and W_i
    was trained further while the differences were sent."""
    return torch.lerp(center, weights, mix, out=out)
