"""The rate on the way through a training of known length, and where its target was missed."""

from __future__ import annotations

import pytest
import torch

from outcore.tuning.advice import Setting
from outcore.tuning.trainings.schedule import is_end, rate_factor


def test_up_level_and_down_to_zero() -> None:
    factors = [rate_factor(step, 12, 3) for step in range(12)]
    assert factors == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 3 / 4, 1 / 2, 1 / 4])
    assert [rate_factor(step, 0, 2) for step in range(3)] == [0.5, 1, 1]  # no length: nothing falls


def test_after_a_missed_target_shorter_rounds_follow_at_half_the_rate() -> None:
    rounds = [rate_factor(step, 12, 3) for step in range(12, 24)]
    assert rounds == pytest.approx(2 * [1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 2, 1 / 4])
    assert [step for step in range(1, 25) if is_end(step, 12)] == [12, 18, 24]
    assert [step for step in range(1, 5) if is_end(step, 1)] == [1, 2, 3, 4]
    assert not is_end(12, 0)


def test_a_scheduler_sets_the_rate_of_every_step() -> None:
    soonest = Setting(8, 1, 0.4, num_steps=12, num_warm_up_steps=2)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))], "lr": 0.04})
    scheduler, rates = soonest.scheduler(optimizer), []
    for _ in range(18):
        assert optimizer.param_groups[1]["lr"] == pytest.approx(optimizer.param_groups[0]["lr"] / 10)
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates == pytest.approx([0.2, *8 * [0.4], 0.3, 0.2, 0.1, *5 * [0.2], 0.1])
