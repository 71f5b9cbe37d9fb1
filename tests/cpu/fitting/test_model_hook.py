"""The one hook that a model under a limit carries: copies, repeated limits, dropped limits, forgotten steps."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import outcore
from outcore.errors import OutcoreError
from outcore.fitting.hooks import ForwardHook
from outcore.limit import Limited, limit

X = torch.ones(256, 16)  # large enough to be swapped


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def step(ooc: Limited) -> None:
    with ooc.step():
        ooc.model(X).sum().backward()
    ooc.model.zero_grad()


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


def averaged(model: nn.Module) -> nn.Module:
    found: nn.Module = AveragedModel(model).module
    return found


COPIES: list[Callable[[nn.Module], nn.Module]] = [
    copy.deepcopy,
    averaged,
    saved,
    lambda model: pickle.loads(pickle.dumps(model)),
    lambda model: copy.deepcopy(copy.deepcopy(model)),
]


@pytest.mark.parametrize("copied", COPIES, ids=["deepcopy", "AveragedModel", "torch.save", "pickle", "of a copy"])
def test_a_copy_is_an_ordinary_model(copied: Callable[[nn.Module], nn.Module]) -> None:
    model = net()
    with limit(model, "100%", planner="swap-all") as ooc:
        for num_steps in (0, 1, 2):
            other = copied(model)
            assert not any(isinstance(hook, ForwardHook) for hook in other._forward_pre_hooks.values())
            assert torch.equal(other(X), model(X))
            other(X).sum().backward()
            with ooc.step():  # the copy's forward is nothing of this step's model
                other(X).sum().backward()
                model(X).sum().backward()
            model.zero_grad()
            assert len(ooc.kinds) <= 1 + (num_steps > 0)
        other.zero_grad()
        with limit(other, "100%", planner="swap-all") as its_own:
            step(its_own)
            step(its_own)
            assert its_own.plan is not None


def test_a_saved_model_is_read_without_outcore(tmp_path: Path) -> None:
    model = net()
    with limit(model, "100%"):
        torch.save(model, tmp_path / "model.pt")
    read = "torch.load(sys.argv[1], weights_only=False)(torch.ones(1, 16))"
    program = f"import sys, torch; sys.modules['outcore'] = None; {read}"
    subprocess.run([sys.executable, "-c", program, str(tmp_path / "model.pt")], check=True)


def test_eight_limits_of_one_model_leave_one_hook() -> None:
    """As a cell of a notebook that is run again and again."""
    model, held = net(), list[Limited]()
    num_fds, num_threads = psutil.Process().num_fds(), threading.active_count()
    ooc = limit(model, "100%", planner="swap-all")
    for _ in range(8):
        step(ooc)
        step(ooc)
        held.append(ooc)
        with pytest.warns(UserWarning, match="had a limit of .* already; it is closed") as caught:
            ooc = limit(model, "1GiB", planner="swap-all")
        assert caught[0].filename == __file__
        assert len(model._forward_pre_hooks) == 1
    with pytest.raises(OutcoreError, match="closed"):
        step(held[0])
    assert all("closed" in repr(old) for old in held)
    assert psutil.Process().num_fds() == num_fds
    step(ooc)
    ooc.close()
    assert not model._forward_pre_hooks
    assert psutil.Process().num_fds() == num_fds
    assert threading.active_count() == num_threads


def test_an_earlier_limit_whose_values_are_still_used_gives_them() -> None:
    model = net()
    earlier = limit(model, "100%", planner="swap-all")
    with earlier.step():
        loss = model(X.repeat(64, 1)).square().sum()
    assert earlier.store.num_parcels
    with pytest.warns(UserWarning, match="it is closed"):
        ooc = limit(model, "100%", planner="swap-all")
    loss.backward()
    got = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    model(X.repeat(64, 1)).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    assert all(a is not None and b is not None and torch.equal(a, b) for a, b in zip(got, wanted))
    ooc.close()


def test_no_limit_is_made_inside_a_step_of_the_same_model() -> None:
    model = net()
    with limit(model, "100%") as ooc:
        with ooc.step(), pytest.raises(OutcoreError, match="inside a step"):
            limit(model, "100%")
        step(ooc)


def test_a_dropped_limit_leaves_nothing() -> None:
    model = net()
    num_fds, num_threads = psutil.Process().num_fds(), threading.active_count()
    gc.collect()
    gc.disable()  # nothing keeps it alive, not even a cycle
    try:
        for _ in range(3):
            ooc = limit(model, "100%", planner="swap-all")
            step(ooc)
            step(ooc)
            assert psutil.Process().num_fds() > num_fds
            gone = weakref.ref(ooc)
            del ooc
            assert gone() is None
            assert not model._forward_pre_hooks
            assert psutil.Process().num_fds() == num_fds
            assert threading.active_count() == num_threads
    finally:
        gc.enable()


def test_a_dropped_model_goes_too() -> None:
    model = net()
    ooc = limit(model, "100%", planner="swap-all")
    step(ooc)
    step(ooc)
    gone = weakref.ref(model)
    del model, ooc
    gc.collect()
    assert gone() is None


def test_hooks_on_the_optimizer_go_with_a_dropped_limit() -> None:
    from torch.optim.optimizer import _global_optimizer_post_hooks

    num_hooks = len(_global_optimizer_post_hooks)
    ooc = limit(net(), "100%")
    assert len(_global_optimizer_post_hooks) == num_hooks + 1
    del ooc
    gc.collect()
    assert len(_global_optimizer_post_hooks) == num_hooks


# -- forgotten steps --------------------------------------------------------------------------------------------------


def told(train: Callable[[nn.Module, Limited], None]) -> list[str]:
    model = net()
    with warnings.catch_warnings(record=True) as caught, limit(model, "100%") as ooc:
        warnings.simplefilter("always")
        train(model, ooc)
    return [str(warning.message) for warning in caught if "outside `with ooc.step():`" in str(warning.message)]


def test_trainings_without_a_step_are_told_of_once() -> None:
    def train(model: nn.Module, ooc: Limited) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(10):
            model(X).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert len(told(train)) == 1


def test_so_are_those_that_only_accumulate() -> None:
    def train(model: nn.Module, ooc: Limited) -> None:
        for _ in range(10):
            model(X).sum().backward()

    assert len(told(train)) == 1


def test_evaluations_and_forwards_between_steps_are_no_trainings() -> None:
    def train(model: nn.Module, ooc: Limited) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(6):
            with ooc.step():
                model(X).sum().backward()
            model(X)  # in training mode, for a metric
            model(X).sum().backward()  # of another loss, say
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        for _ in range(6):
            model(X)
        model.train()
        with torch.no_grad():
            for _ in range(6):
                model(X)

    assert told(train) == []


def test_a_closed_limit_says_nothing_of_trainings() -> None:
    def train(model: nn.Module, ooc: Limited) -> None:
        ooc.close()
        for _ in range(10):
            model(X).sum().backward()

    assert told(train) == []


def test_closing_at_the_end_of_a_with() -> None:
    model = net()
    with outcore.limit(model, "100%") as ooc:
        assert repr(ooc).startswith("Limited(Sequential, ")
        assert "nothing recorded yet" in repr(ooc)
        step(ooc)
        assert "ops recorded" in repr(ooc)
        step(ooc)
        assert "settled, predicted " in repr(ooc)
        assert "\n" not in repr(ooc)
        assert "peak memory" in str(ooc)
        assert ooc._repr_html_().startswith("<pre")
        assert "peak memory" in ooc._repr_html_()
    assert not model._forward_pre_hooks
    assert "closed" in repr(ooc)


def test_closing_at_the_end_of_a_with_that_fails_says_why_it_failed() -> None:
    model = net()

    def fail() -> None:
        with outcore.limit(model, "100%", planner="swap-all") as ooc, ooc.step():
            loss = model(X).square().sum()
            assert ooc.store.num_parcels
            raise ZeroDivisionError(f"the user's own, {loss.item()}")

    with pytest.raises(ZeroDivisionError):
        fail()
    assert not model._forward_pre_hooks
