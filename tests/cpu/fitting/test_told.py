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
from outcore.units import GIB, MIB, format_bytes


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
        assert 0 < stats["peak_bytes"] <= 4 * MIB
    said = [record.getMessage() for record in caplog.records]
    assert any("ops was recorded; the next one like it is planned" in sentence for sentence in said)
    assert any("follow this plan from here on" in sentence and "recomputed" in sentence for sentence in said)


def test_the_highest_peak_of_the_run_is_told_not_that_of_the_last_step() -> None:
    model = network()
    with outcore.limit(model, "8MiB", measure=True, cache=False) as ooc:
        assert ooc.stats()["peak_bytes"] == 0
        assert "highest peak" not in str(ooc) + repr(ooc)
        train(model, ooc, 3)
        assert ooc.timeline is not None
        highest_bytes = ooc.timeline.peak_bytes
        for _ in range(3):
            with ooc.step():
                model(torch.ones(64, 128)).sum().backward()
            model.zero_grad()
        assert ooc.timeline.peak_bytes < highest_bytes == ooc.stats()["peak_bytes"]
        told = f"highest peak {format_bytes(int(highest_bytes))} of 8.00 MiB in 4 measured steps"
        assert told in str(ooc)
        assert told in repr(ooc)


def test_a_first_plan_is_said_to_be_one() -> None:
    model, first = network(), "a first plan; a better one follows"
    with outcore.limit(model, "4MiB", cache=False) as ooc:
        train(model, ooc, 2)
        assert ooc.plan is not None
        assert ooc.plan.planner == "priced"
        assert first in str(ooc)
        assert first in repr(ooc)
        train(model, ooc, 1)
        assert first not in str(ooc) + repr(ooc)
    with outcore.limit(model, "4MiB", planner="priced", cache=False) as ooc:
        train(model, ooc, 2)
        assert first not in str(ooc) + repr(ooc)


def test_kinds_are_shown_in_words() -> None:
    model = network()
    with outcore.limit(model, "8MiB", cache=False) as ooc:
        assert repr(ooc.kinds) == "Kinds(none yet)"
        train(model, ooc, 3)
        with ooc.step("other"):
            model(torch.ones(64, 128)).sum().backward()
        assert repr(ooc.kinds) == "Kinds(1 settled, 1 recorded)"


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
