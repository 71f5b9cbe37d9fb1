"""What a user is told: by `print(ooc)`, `ooc.stats()`, the log, and by `limit()` where a budget makes no sense."""

from __future__ import annotations

import logging
import pickle

import psutil
import pytest
import torch
from torch import nn

import outcore
from outcore.errors import BudgetTooSmall, OutcoreError
from outcore.units import GIB, MIB


def network() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(6) for layer in (nn.Linear(128, 128), nn.GELU())])


def train(model: nn.Module, ooc: outcore.Limited, num_steps: int) -> None:
    for _ in range(num_steps):
        with ooc.step():
            model(torch.ones(1024, 128)).sum().backward()
        model.zero_grad()


def test_each_change_is_said_in_the_log_and_stats_add_up(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    caplog.set_level(logging.INFO, "outcore")
    with outcore.limit(model, "4MiB") as ooc:
        assert "nothing recorded yet" in str(ooc)
        followed = []
        for _ in range(4):
            train(model, ooc, 1)
            followed += [ooc.predicted] if ooc.predicted is not None else []
        stats = ooc.stats()
        assert (stats["recorded"], stats["planned"], stats["left"], stats["unplanned"]) == (1, 3, 0, 0)
        assert stats["swapped_bytes"] == sum(predicted.swapped_bytes for predicted in followed)
        assert stats["recomputed_bytes"] == sum(predicted.recomputed_bytes for predicted in followed)
        assert stats["swapped_bytes"] + stats["recomputed_bytes"] > 0
        assert stats["in_core"] == 0
        assert stats["measured"] >= 2
        assert 0 <= stats["waited_s"] <= stats["planned_s"]
        assert stats["recorded_s"] > 0 == stats["left_s"] == stats["unplanned_s"]
    said = [record.getMessage() for record in caplog.records]
    assert any("ops was recorded; the next one like it is planned" in sentence for sentence in said)
    assert any("follow this plan from here on" in sentence and "recomputed" in sentence for sentence in said)


def test_a_step_without_a_plan_says_why() -> None:
    model, x = network(), torch.randn(8, 128)
    with outcore.limit(model, "16MiB") as ooc:
        with ooc.step(), torch.no_grad():
            model(x)
        assert "nothing in it was saved for a backward pass; call the model inside" in str(ooc)
        with pytest.raises(ZeroDivisionError), ooc.step():
            _ = 1 / 0
        assert "the last step followed no plan: it ended with ZeroDivisionError: division by zero" in str(ooc)
        for _ in range(2):
            with ooc.step():
                model(x).sum().backward()
            model.zero_grad()
        assert "followed no plan" not in str(ooc)
        with ooc.step():
            (model(x) * torch.rand(())).exp().sum().backward()
        assert "the last step followed no plan: it left its plan" in str(ooc)


def test_a_budget_below_the_model_and_what_is_no_module_are_refused_at_once() -> None:
    model = network()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())
    with pytest.raises(BudgetTooSmall, match=r"parameters and buffers take .* more than the budget of 1\.00 K"):
        outcore.limit(model, "1KiB")
    with outcore.limit(model, parameter_bytes) as ooc:
        train(model, ooc, 1)
        with pytest.raises(BudgetTooSmall, match="in use before the step") as no:
            train(model, ooc, 1)
    again = pickle.loads(pickle.dumps(no.value))
    assert (str(again), again.needed_bytes) == (str(no.value), no.value.needed_bytes)
    assert no.value.needed_bytes > no.value.before_bytes >= parameter_bytes
    with pytest.raises(OutcoreError, match=r"takes a torch\.nn\.Module, not function"):
        outcore.limit(lambda x: x, "1GiB")  # type: ignore[arg-type]
    with pytest.raises(OutcoreError, match="parameters"):
        outcore.limit(nn.ReLU(), "1GiB")


def test_auto_is_what_is_free_less_a_margin(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outcore")
    with outcore.limit(network()) as ooc:  # the default
        assert MIB < ooc.budget.device_bytes < psutil.virtual_memory().total + GIB
    assert "memory='auto'" in caplog.text
    assert "stay free" in caplog.text


def test_a_backward_that_comes_after_its_step_is_told_once() -> None:
    model, x = network(), torch.randn(64, 128)
    with outcore.limit(model, "16MiB") as ooc:
        with pytest.warns(UserWarning, match="a step ended without a backward"), ooc.step():
            loss = model(x).sum()
        loss.backward()
        model.zero_grad()
        train(model, ooc, 1)  # of another size: nothing is said
    with outcore.limit(model, "16MiB", cache=False) as ooc:
        for number in range(2):
            with ooc.step():
                if number:
                    with pytest.warns(UserWarning, match="after the end of ooc.step"):
                        loss = model(x).square().sum()
                else:
                    loss = model(x).square().sum()
                loss.backward(retain_graph=True)
            loss.backward()
            model.zero_grad()
