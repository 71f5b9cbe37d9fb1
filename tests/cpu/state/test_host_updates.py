"""`limit(..., update="cpu")`: PyTorch's fused CPU kernels update what is at home, bit for bit as they do alone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import outcore
import tests.cpu.state.test_same_training as same
from outcore.errors import OutcoreError, StoreError
from outcore.fitting import preparing
from outcore.memory.home import is_at_home
from outcore.state.host_updates import HostUpdates
from tests.cpu.state.test_limit import ROOMY, TIGHT, scaled_loop
from tests.cpu.state.training import (
    WIDTH,
    Loop,
    MakeOptimizer,
    Net,
    Result,
    Training,
    assert_equal,
    make,
    plain_loop,
    train,
)


class Large(nn.Module):
    """Every parameter has a home."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.head = nn.Linear(WIDTH, 100, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        out: Tensor = self.head(x)
        return out


KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "amsgrad": partial(torch.optim.Adam, lr=1e-2, amsgrad=True, maximize=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, weight_decay=0.01),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "tensor lr": lambda params, **options: torch.optim.Adam(params, lr=torch.tensor(1e-2), **options),
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_an_ordinary_optimizer_gets_the_bits_of_the_fused_one(name: str, later: bool, tmp_path: Path) -> None:
    ours = train(plain_loop(5), KINDS[name], net=Large, folder=tmp_path, later=later, by_cpu=True)
    plain = train(plain_loop(5), partial(KINDS[name], fused=True), net=Large)
    assert_equal(plain.losses, ours.losses)
    assert_equal(plain.weights, ours.weights)
    assert_equal(plain.state["state"], ours.state["state"])
    assert ours.counts["state_by_cpu"] == 5 * 5


def test_the_bits_are_not_those_of_the_ordinary_optimizer(tmp_path: Path) -> None:
    """Else the tests here could not tell one from the other."""
    ours = train(plain_loop(5), KINDS["adamw"], net=Large, folder=tmp_path, by_cpu=True)
    plain = train(plain_loop(5), KINDS["adamw"], net=Large)
    assert any(not torch.equal(ours.weights[name], plain.weights[name]) for name in plain.weights)


fused: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2, fused=True)
CASES: dict[str, tuple[int, Loop, MakeOptimizer, Callable[[], nn.Module]]] = {
    "clipped, accumulated": (TIGHT, same.clipped_loop, fused, Net),
    "clipped, some resident": (ROOMY, same.clipped_loop, fused, Net),
    "momentum": (TIGHT, plain_loop(5), same.OPTIMIZERS["fused sgd"], Net),
    "saved": (TIGHT, same.each_step(same.saved, 5), fused, Net),
    "loaded": (ROOMY, same.each_step(same.loaded, 5), fused, Net),
    "evaluated": (TIGHT, same.each_step(same.evaluated, 5), fused, Net),
    "frozen": (TIGHT, plain_loop(5), fused, same.Frozen),
    "scaled": (TIGHT, scaled_loop, fused, Net),
    "autocast": (TIGHT, plain_loop(4), fused, same.Autocast),
    "checkpointed": (TIGHT, plain_loop(4), fused, same.Checkpointed),
    "half": (TIGHT, plain_loop(4), fused, same.Half),
    "channels last": (TIGHT, plain_loop(4), fused, same.ChannelsLast),
}


@pytest.mark.parametrize("name", CASES)
def test_a_fused_optimizer_keeps_its_bits(name: str, tmp_path: Path) -> None:
    memory_bytes, loop, make_optimizer, net = CASES[name]
    ours = train(loop, make_optimizer, net=net, folder=tmp_path, memory_bytes=memory_bytes, by_cpu=True)
    train(loop, make_optimizer, net=net).assert_same(ours)
    assert ours.counts["state_by_cpu"] > 0


@pytest.fixture
def slow_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever does not wait for an update comes before it."""
    run = HostUpdates.run_all

    def slow(self: HostUpdates, *args: Any) -> dict[str, Any]:
        time.sleep(0.002)
        return run(self, *args)

    monkeypatch.setattr(HostUpdates, "run_all", slow)


TOUCHES: dict[str, Loop] = {
    **{f"look: {name}": same.each_step(look) for name, look in same.LOOKS.items()},
    **{
        f"after: {one.__name__}": same.each_step(one)
        for one in (same.write_weights, same.write_data, same.zero_in_place)
    },
    **{
        f"before: {one.__name__}": same.between(one)
        for one in (same.other_gradients, same.clip_values, same.clip_norms, same.clip_twice, same.some_without)
    },
    "gradients that nobody zeroes": same.each_step(lambda training, step: None, zero=False),
    "two steps in a row": same.each_step(lambda training, step: training.optimizer.step() and None),
}


@pytest.mark.usefixtures("slow_updates")
@pytest.mark.parametrize("name", TOUCHES)
def test_nobody_comes_between_a_step_and_its_updates(name: str, tmp_path: Path) -> None:
    ours = train(TOUCHES[name], fused, folder=tmp_path, by_cpu=True)
    train(TOUCHES[name], fused).assert_same(ours)


@pytest.mark.usefixtures("slow_updates")
def test_views_held_over_a_step_follow_it(tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        plain_loop(2)(training)
        held = [*training.model.state_dict().values()]
        held += [kept["exp_avg_sq"] for kept in training.optimizer.state.values() if kept]
        for step in range(2, 5):
            training.backward(step)
            training.optimizer.step()
            same.note(training, *held)
            training.optimizer.zero_grad()

    ours = train(loop, fused, folder=tmp_path, by_cpu=True)
    train(loop, fused).assert_same(ours)


def limited(folder: Path, **options: Any) -> Training:
    model = make(Large)
    optimizer = KINDS["adamw"](model.parameters())
    ooc = outcore.limit(model, 2 * ROOMY, optimizer=optimizer, disk=folder, update="cpu", **options)
    return Training(model, optimizer, Result(), ooc)


def test_a_user_sees_who_updates_and_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparing, "choose_residency", lambda trace, least, *args, **options: least)
    training = limited(tmp_path)
    plain_loop(4)(training)
    ooc = training.ooc
    assert isinstance(ooc, outcore.Limited)
    assert "of them updated by the CPU" in str(ooc)
    ends_s = time.monotonic() + 30
    while ooc.stats()["state_by_cpu"] < 4 * 5 and time.monotonic() < ends_s:
        time.sleep(0.01)  # the last step's updates may still run
    stats = ooc.stats()
    assert stats["state_by_cpu"] == 4 * 5
    assert 0 < stats["state_by_cpu_s"] < stats["planned_s"] + stats["recorded_s"] + 10
    weights_bytes = sum(parameter.nbytes for parameter in training.model.parameters())
    assert stats["state_out_bytes"] == weights_bytes  # gradients only: neither weights nor state come back
    assert stats["state_in_bytes"] <= 3 * weights_bytes
    assert ooc.predicted is not None
    assert ooc.predicted.state_out_bytes == weights_bytes
    ooc.close()
    assert not any(is_at_home(parameter) for parameter in training.model.parameters())


@pytest.mark.parametrize(
    ("make_optimizer", "update", "what"),
    [
        (torch.optim.RMSprop, "cpu", "fused CPU kernels for .SGD, Adam, AdamW, Adagrad., not RMSprop"),
        (same.Lion, "cpu", "not Lion"),
        (partial(torch.optim.Adam, differentiable=True), "cpu", "cannot run this Adam: .*differentiable"),
        (torch.optim.AdamW, "gpu", "update='gpu' is unknown; choose 'device' or 'cpu'"),
        (None, "cpu", "pass optimizer=, too"),
    ],
)
def test_what_the_cpu_cannot_update_is_refused_in_a_sentence(
    make_optimizer: MakeOptimizer | None, update: str, what: str, tmp_path: Path
) -> None:
    model = make(Large)
    optimizer = make_optimizer(model.parameters()) if make_optimizer is not None else None
    with pytest.raises(OutcoreError, match=what):
        outcore.limit(model, 2 * ROOMY, optimizer=optimizer, disk=tmp_path, update=update)
    assert not any(is_at_home(parameter) for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_no_room_for_new_state_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    training = limited(tmp_path)
    assert isinstance(training.ooc, outcore.Limited)
    state = training.ooc.state
    assert state is not None
    training.backward(0)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    limit_bytes, state.window.homes.limit_bytes = state.window.homes.limit_bytes, 0
    training.optimizer.step()
    training.optimizer.zero_grad()
    with pytest.raises(StoreError, match="a tensor of the training state needs"):
        training.model.state_dict()
    state.window.homes.limit_bytes = limit_bytes
    plain = Training(model := make(Large), KINDS["adamw"](model.parameters(), fused=True), Result())
    plain_loop(1)(plain)
    assert_equal(dict(plain.model.state_dict()), dict(training.model.state_dict()))
    assert any(not torch.equal(before[name], tensor) for name, tensor in training.model.state_dict().items())
    training.ooc.close()
