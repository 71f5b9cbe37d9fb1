"""The table of methods and the bounds of its moving rate, without torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from outcore.elastic.compare import RATE, rate_for
from outcore.elastic.methods import METHODS, ahead_alpha_bound, alpha_bound, default_alpha, find_method
from outcore.elastic.methods import round_robin_alpha_bound as round_robin_bound
from outcore.elastic.methods import sync_alpha_bound as sync_bound
from outcore.errors import ElasticError

Array = npt.NDArray[np.float64]


def round_of(alpha: float, eta: float, extras: list[int], period: int = 1) -> Array:
    """The map (W_1..W_P, C) -> one synchronous round on f(w) = w^2 / 2, after which worker i took extras[i] more."""
    num, before = len(extras), (1 - eta) ** (period - 1)
    step = np.zeros((num + 1, num + 1))
    step[:num, :num] = np.diag([before * ((1 - eta) ** (1 + extra) - alpha) for extra in extras])
    step[:num, num] = alpha
    step[num, :num] = alpha * before
    step[num, num] = 1 - num * alpha
    return step


def spectral_radius(step: Array) -> float:
    return float(np.abs(np.linalg.eigvals(step)).max())


def spectral_radius_sync(num: int, eta: float, alpha: float) -> float:
    return spectral_radius(round_of(alpha, eta, [0] * num))


@pytest.mark.parametrize("num", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("eta", [0.01, 0.5, 1.5])
def test_the_sync_bound_is_where_the_eigenvalues_leave_the_circle(num: int, eta: float) -> None:
    bound = sync_bound(num, eta)
    assert spectral_radius_sync(num, eta, 0.999 * bound) < 1
    assert spectral_radius_sync(num, eta, 1.001 * bound) > 1


@pytest.mark.parametrize("num", [1, 2, 4, 16])
@pytest.mark.parametrize(("eta", "extra"), [(0.2, 8), (0.1, 2), (0.9, 1)])
def test_the_bound_of_workers_ahead_is_where_the_eigenvalues_leave_the_circle(num: int, eta: float, extra: int) -> None:
    bound = ahead_alpha_bound(num, (1 - eta) ** (1 + extra))
    assert alpha_bound(METHODS["sync-easgd"], num, extra) < bound < alpha_bound(METHODS["sync-easgd"], num)
    assert spectral_radius(round_of(0.999 * bound, eta, [extra] * num)) < 1
    assert spectral_radius(round_of(1.001 * bound, eta, [extra] * num)) > 1


def test_an_alpha_fit_for_workers_in_step_breaks_workers_ahead() -> None:
    assert alpha_bound(METHODS["sync-easgd"], 2, 8) == 0.5 < 0.6 < alpha_bound(METHODS["sync-easgd"], 2)
    assert spectral_radius(round_of(0.6, 0.2, [0, 0])) < 1 < spectral_radius(round_of(0.6, 0.2, [8, 8]))


@pytest.mark.parametrize("num", [2, 3, 8])
@pytest.mark.parametrize("period", [1, 2, 4])
def test_below_the_bound_of_workers_ahead_no_sequence_of_rounds_grows(num: int, period: int) -> None:
    chance, bound = np.random.default_rng(0), alpha_bound(METHODS["sync-easgd"], num, 16)
    assert default_alpha(METHODS["sync-easgd"], num) < bound
    for eta in (0.01, 0.2, 0.7, 1.0):
        for _ in range(20):
            step = round_of(0.999 * bound, eta, chance.integers(0, 17, num).tolist(), period)
            assert np.linalg.norm(step, 2) <= 1 + 1e-9


def test_one_worker_has_the_published_bound() -> None:
    assert sync_bound(1, 0.3) == pytest.approx(round_robin_bound(0.3))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("num", [1, 2, 8, 4352])
def test_the_default_is_stable_for_any_number_of_workers(name: str, num: int) -> None:
    assert default_alpha(METHODS[name], num) < alpha_bound(METHODS[name], num)


def test_an_alpha_fit_for_async_breaks_sync() -> None:
    assert alpha_bound(METHODS["async-easgd"], 4) > 0.5 > alpha_bound(METHODS["sync-easgd"], 4)
    assert spectral_radius_sync(4, 0.1, 0.5) > 1


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ElasticError, match="choose one of original-easgd"):
        find_method("easgd")


def test_the_compared_rates_move_every_centre_alike() -> None:
    assert rate_for("sync-sgd", 4) == rate_for("ddp", 4) == RATE
    assert rate_for("sync-easgd", 4) == pytest.approx(RATE * 5 / 4)
    assert rate_for("eamsgd", 4) == pytest.approx(RATE * 5 / 4 / 10)
    assert rate_for("async-sgd", 4) == pytest.approx(RATE / 4)
    assert rate_for("sync-easgd", 1) == pytest.approx(RATE * 1.5)
