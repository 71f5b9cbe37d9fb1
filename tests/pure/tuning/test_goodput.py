"""The equations: known values, the identities between them, and the optimum where a formula for it is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.errors import TuningError
from outcore.tuning.gradients import goodput as g

batches = st.integers(1, 1 << 16)
noises = st.floats(0, 1e9)


@given(sqr=st.floats(1e-3, 1e3), var=st.floats(1e-3, 1e6), small=st.integers(1, 100), times=st.integers(2, 50))
def test_moments_invert_the_expected_norms(sqr: float, var: float, small: int, times: int) -> None:
    large = small * times
    found = g.moments(sqr + var / small, small, sqr + var / large, large)
    assert found == pytest.approx((sqr, var), rel=1e-6, abs=1e-6 * (sqr + var))


@given(batch=batches, first=batches, noise=noises)
def test_gain_is_bounded_and_goodput_is_gain_per_second(batch: int, first: int, noise: float) -> None:
    gain = g.gain(batch, first, noise)
    low, high = sorted((1.0, batch / first))
    assert low * (1 - 1e-9) <= gain <= high * (1 + 1e-9)
    step_s = 0.25
    assert g.goodput(batch / step_s, batch, first, noise) == pytest.approx(first * gain / step_s)


def test_gain_at_its_ends() -> None:
    assert g.gain(1024, 256, 0.0) == 1
    assert g.gain(1024, 256, math.inf) == 4
    assert g.gain(256, 256, 123.4) == 1
    assert g.gain(1024, 256, 256) == pytest.approx(2 / 1.25)


def test_noise_scale_where_nothing_can_be_divided() -> None:
    assert g.noise_scale(2.0, 10.0) == 5.0
    assert g.noise_scale(-0.1, 10.0) == math.inf
    assert g.noise_scale(1.0, -1e-9) == 0.0


@pytest.mark.parametrize("noise", [50.0, 400.0, 5000.0])
def test_best_batch_is_at_the_known_optimum(noise: float) -> None:
    fixed_s, per_sample_s = 4e-3, 1e-5
    best, _ = g.best_batch(range(1, 10_000), lambda batch: fixed_s + per_sample_s * batch, 1, noise)
    assert best == pytest.approx(math.sqrt(noise * fixed_s / per_sample_s), abs=1)
    best, _ = g.best_batch(range(1, 10_000), lambda batch: max(fixed_s, per_sample_s * batch), 1, noise)
    assert best == pytest.approx(fixed_s / per_sample_s, abs=1)  # the knee, whatever the noise


def test_rules() -> None:
    assert g.lr_factor("linear", 1024, 256) == 4
    assert g.lr_factor("sqrt", 1024, 256) == g.lr_factor("legw", 1024, 256) == 2
    assert g.lr_factor("fixed", 1024, 256) == 1
    assert g.lr_factor("adascale", 1024, 256, math.inf) == 4
    assert g.lr_factor("adascale", 1024, 256, math.inf, normalised=True) == 2
    assert all(g.lr_factor(rule, 64, 64, 10.0) == 1.0 for rule in g.RULES)
    with pytest.raises(TuningError, match="choose one of adascale"):
        g.lr_factor("cubic", 2, 1)
    with pytest.raises(TuningError, match="measure one"):
        g.lr_factor("adascale", 2, 1)
    with pytest.raises(TuningError, match="at least one sample"):
        g.lr_factor("linear", 0, 1)
    with pytest.raises(TuningError, match="two batch sizes"):
        g.moments(1.0, 4, 1.0, 4)
    with pytest.raises(TuningError, match="no batch size"):
        g.best_batch([], lambda batch: 1.0, 1, 1.0)


def test_warm_up_and_half_lives() -> None:
    assert [g.warm_up(step, 4) for step in range(6)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert g.warm_up(0, 0) == g.warm_up(0, 1) == 1
    assert g.warm_up(0, 2, start=0.5) == 0.75
    assert g.num_warm_up_steps("linear", 100, 1024, 256) == 25
    assert g.num_warm_up_steps("legw", 100, 1024, 256) == 100
    assert g.beta2_for(0.999, 1024, 256) == pytest.approx(0.999**4)
    assert math.log(0.5) / math.log(g.beta2_for(0.99, 32, 512)) * 32 == pytest.approx(
        math.log(0.5) / math.log(0.99) * 512
    )
