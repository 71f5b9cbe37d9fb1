"""Loops whose first steps do other work than all later ones: what their budgets are judged by."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from outcore.errors import BudgetTooSmall
from outcore.limit import limit


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def test_an_optimizer_that_steps_inside_the_block_is_counted_once() -> None:
    """Its first step makes its state, which all later ones find: they are planned without making it again."""
    model, x = layers(), torch.randn(64, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with limit(model, int(4.9 * weights_bytes), measure=True) as ooc:  # weights, gradients, two moments, and some more
        for _ in range(6):
            with ooc.step():
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        assert (ooc.stats()["recorded"], ooc.stats()["planned"]) == (2, 4)
        assert ooc.timeline is not None
        assert ooc.timeline.peak_bytes <= ooc.budget.device_bytes


def test_the_state_of_a_second_optimizer_is_counted_once() -> None:
    """That of the first one is there when the first step of the second one is recorded."""
    model, x = nn.ModuleList([layers(), layers()]), torch.randn(64, 256)
    optimizers = [torch.optim.AdamW(half.parameters()) for half in model]
    weights_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with limit(model, int(3.8 * weights_bytes), measure=True) as ooc:  # weights, moments, one half's gradients and more
        for number in range(10):
            at = number % 2
            with ooc.step(f"half {at}", batch=x):
                model[at](x).square().mean().backward()
                optimizers[at].step()
                optimizers[at].zero_grad()
        assert (ooc.stats()["recorded"], ooc.stats()["planned"]) == (4, 6)
        assert ooc.stats()["peak_bytes"] <= ooc.budget.device_bytes


def accumulate(budget_bytes: int) -> int:
    """Trains with two micro-batches a step and returns the highest measured peak."""
    model, x = layers(), torch.randn(64, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    peak_bytes = 0
    with limit(model, budget_bytes, measure=True) as ooc:
        for number in range(8):
            with ooc.step():
                model(x).square().mean().backward()
            peak_bytes = max(peak_bytes, ooc.timeline.peak_bytes if ooc.timeline is not None else 0)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    return peak_bytes


def test_the_bytes_that_an_error_names_are_enough_for_all_kinds_of_steps() -> None:
    """The micro-batch that finds gradients needs more than the one that makes them, which is planned first."""
    weights_bytes = sum(parameter.nbytes for parameter in layers().parameters())
    with pytest.raises(BudgetTooSmall) as error:
        accumulate(int(1.5 * weights_bytes))
    needed_bytes = error.value.needed_bytes
    assert accumulate(needed_bytes) <= needed_bytes
