"""The range test: near what training bears, steady under noise, nothing left behind, sentences where it fails."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from outcore.errors import TuningError
from outcore.tuning.gradients.range_test import RangeTest, _fit_lines, range_test
from tests.cpu.tuning.digits import digits, draws, small_net

Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
}


def final_loss(make: Make, lr: float, num_steps: int = 60) -> float:
    data, net = digits(), small_net()
    optimizer = make(net.parameters())
    optimizer.param_groups[0]["lr"] = lr
    losses = []
    for x, y in draws(data, 128, num_steps, seed=5):
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return sum(losses[-5:]) / 5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_suggestion_trains_well_and_neither_a_tenth_nor_ten_times_it_does_better(name: str) -> None:
    make, net = OPTIMIZERS[name], small_net()
    found = range_test(net, F.cross_entropy, list(draws(digits(), 128, 60)), make(net.parameters()), num_seeds=2)
    suggested = final_loss(make, found.suggested_lr)
    assert suggested < 0.4
    assert suggested < final_loss(make, found.suggested_lr / 10)
    assert not suggested > final_loss(make, found.suggested_lr * 10)  # which may be no number at all
    assert found.steepest_lr <= found.lowest_loss_lr
    assert RangeTest.from_json(found.to_json()) == found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_noise_does_not_move_it_far(name: str) -> None:
    """Six tests on other nets and samples, four times the noise: all within a factor of three of their middle."""
    suggestions = []
    for seed in range(6):
        net = small_net(seed)
        batches = list(draws(digits(), 32, 120, seed))
        found = range_test(net, F.cross_entropy, batches, OPTIMIZERS[name](net.parameters()))
        suggestions.append(found.suggested_lr)
    middle = float(np.median(suggestions))
    assert all(middle / 3 < lr < middle * 3 for lr in suggestions)


def test_everything_is_as_before_the_order_of_the_data_too() -> None:
    data = digits()
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(), nn.Linear(32, 10))
    groups: list[dict[str, Any]] = [{"params": net[1].parameters(), "lr": 0.2}, {"params": net[5].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    order = torch.Generator().manual_seed(4)
    loader = DataLoader(TensorDataset(data.train_images, data.train_labels), 64, shuffle=True, generator=order)
    before = [tensor.clone() for tensor in net.state_dict().values()]
    states = order.get_state(), torch.get_rng_state()
    rates: list[float] = []
    hook = optimizer.register_step_pre_hook(
        lambda opt, *_: rates.append(opt.param_groups[0]["lr"] / opt.param_groups[1]["lr"])
    )
    parts: list[float] = []
    range_test(net, F.cross_entropy, loader, optimizer, num_steps=60, num_seeds=2, progress=parts.append)
    hook.remove()
    assert rates == pytest.approx([2.0] * len(rates))
    assert parts == sorted(parts)
    assert 0.5 < parts[-1] <= 1
    assert all(torch.equal(one, two) for one, two in zip(before, net.state_dict().values()))
    assert torch.equal(states[0], order.get_state())
    assert torch.equal(states[1], torch.get_rng_state())
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert not optimizer.state
    assert all(parameter.grad is None for parameter in net.parameters())


def test_lines_find_level_and_slope() -> None:
    at = np.linspace(-4, 1, 101)
    level, slopes, errors = _fit_lines(at, 3 - 2 * at)
    assert np.allclose(level, 3 - 2 * at)
    assert np.allclose(slopes, -2)
    assert np.allclose(errors, 0, atol=1e-6)
    noise = np.random.default_rng(0).normal(0, 0.5, 101)
    _, slopes, errors = _fit_lines(at, noise)
    assert np.mean(np.abs(slopes) < 3 * errors) > 0.95


def test_bad_input_is_told_in_a_sentence() -> None:
    net = small_net()
    optimizer = OPTIMIZERS["sgd"](net.parameters())
    batches = list(draws(digits(), 32, 10))
    with pytest.raises(TuningError, match="take 0 < lowest < highest"):
        range_test(net, F.cross_entropy, batches, optimizer, lowest=1.0, highest=0.1)
    with pytest.raises(TuningError, match="does not fall visibly"):
        range_test(net, F.cross_entropy, batches, optimizer, lowest=1e-9, highest=1e-7)
    with pytest.raises(TuningError, match="another range"):
        range_test(net, F.cross_entropy, batches, optimizer, lowest=50.0, highest=1e4)
    with pytest.raises(TuningError, match="start lower"):
        range_test(net, lambda out, y: F.cross_entropy(out, y) * math.nan, batches, optimizer)
    with pytest.raises(TuningError, match="ran out"):
        range_test(net, F.cross_entropy, iter(batches), optimizer)


def test_losses_below_zero_are_no_reason_to_stop() -> None:
    """A loss less a constant has the same gradients, and so wants nearly the same rate."""
    found = []
    for less in (0.0, 5.0):
        net = small_net()
        batches = list(draws(digits(), 128, 60))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        lower = partial(lambda out, y, less: F.cross_entropy(out, y) - less, less=less)
        found.append(range_test(net, lower, batches, optimizer).suggested_lr)
    assert found[1] == pytest.approx(found[0], rel=1.0)
