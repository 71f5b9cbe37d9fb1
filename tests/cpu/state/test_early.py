"""Updates that run in the backward, before `step()` asks for them: taken where it does, undone where it does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tests.cpu.state.test_same_training as same
from outcore.memory.home import is_at_home
from outcore.state.early import Foresight
from outcore.state.state import State
from outcore.units import GIB, KIB
from tests.cpu.state.training import (
    WIDTH,
    Loop,
    MakeOptimizer,
    Net,
    Result,
    Training,
    When,
    assert_equal,
    batch,
    make,
    plain_loop,
    train,
)

ODD_STEP = 3  # by then updates run early; the next steps are ordinary ones again
NUM_LARGE = 4  # parameters of the network that have a home
Touch = Callable[[Training, int], None]


def early(loop: Loop, make_optimizer: MakeOptimizer, folder: Path, **options: Any) -> Result:
    ours = train(loop, make_optimizer, folder=folder, later=When.EARLY, **options)
    train(loop, make_optimizer).assert_same(ours)
    return ours


def at_odd_step(touch: Touch, *, after: bool = False) -> Loop:
    """Six steps. In one of them something happens between the backward and `step()`, or after it."""

    def loop(training: Training) -> None:
        for step in range(6):
            training.backward(step)
            if step == ODD_STEP and not after:
                touch(training, step)
            training.optimizer.step()
            if step == ODD_STEP and after:
                touch(training, step)
            training.optimizer.zero_grad()

    return loop


def set_lr(training: Training, step: int) -> None:
    for group in training.optimizer.param_groups:
        group["lr"] *= 0.5


def more_gradients(training: Training, step: int) -> None:
    training.backward(step + 100)


def no_gradients(training: Training, step: int) -> None:
    training.optimizer.zero_grad()


def move_state(training: Training, step: int) -> None:
    for kept in training.optimizer.state.values():
        if "exp_avg" in kept:
            kept["exp_avg"].mul_(0.5)


def reload_state(training: Training, step: int) -> None:
    training.optimizer.load_state_dict(training.optimizer.state_dict())


def clip(training: Training, step: int) -> None:
    same.note(training, nn.utils.clip_grad_norm_(training.model.parameters(), 0.05))


def freeze(training: Training, step: int) -> None:
    training.model.get_parameter("second.weight").requires_grad_(False)


UNDONE: dict[str, Touch] = {
    "clipped": clip,
    "clipped by value": same.clip_values,
    "scaled": same.scale_gradients,
    "other gradients": same.other_gradients,
    "some without": same.some_without,
    "no gradients": no_gradients,
    "more gradients": more_gradients,
    "another rate": set_lr,
    "weights written": same.write_weights,
    "weights written past autograd": same.write_data,
    "state written": move_state,
    "state loaded": reload_state,
    "in inference": lambda training, step: same.evaluated(training, 1),
    "gradients looked at": same.LOOKS["gradient"],
    "weights looked at": same.LOOKS["data"],
    "state looked at": same.LOOKS["state"],
    "saved": same.saved,
    "copied": same.copied,
}


@pytest.mark.parametrize("delay_s", [0.0, 0.001])
@pytest.mark.parametrize("name", UNDONE)
def test_a_step_that_turns_out_otherwise_undoes_them(name: str, delay_s: float, tmp_path: Path) -> None:
    found = early(at_odd_step(UNDONE[name]), same.adamw, tmp_path, delay_s=delay_s)
    before = NUM_LARGE * (ODD_STEP - 1)  # the first step teaches
    assert before <= found.counts["early"] < before + 3 * NUM_LARGE  # two more at most


@pytest.mark.parametrize("name", same.LOOKS)
def test_looking_after_a_step_shows_the_truth(name: str, tmp_path: Path) -> None:
    found = early(at_odd_step(same.LOOKS[name], after=True), same.adamw, tmp_path, delay_s=0.001)
    assert found.counts["early"] >= NUM_LARGE * (ODD_STEP - 1)


@pytest.mark.parametrize("name", ["momentum", "fused", "foreach", "adagrad", "tensor lr", "sgd", "lion", "groups"])
def test_updates_run_in_the_backward(name: str, tmp_path: Path) -> None:
    found = early(plain_loop(4), same.OPTIMIZERS[name], tmp_path, delay_s=0.001)
    assert found.counts["early"] == 3 * NUM_LARGE


def test_with_accumulation_the_last_backward_updates(tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 16)
        for step in range(16):
            training.backward(2 * step, 0.5)
            training.backward(2 * step + 1, 0.5)
            training.optimizer.step()
            schedule.step()
            training.optimizer.zero_grad()

    found = early(loop, same.OPTIMIZERS["fused"], tmp_path, delay_s=0.001)
    assert found.counts["early"] == 15 * NUM_LARGE


def test_what_changes_each_step_is_learned(tmp_path: Path) -> None:
    """Clipping is seen at once. A rate that is set just before each step is not foreseen: it is tried ever less."""
    assert early(same.clipped_loop, same.adamw, tmp_path).counts["early"] == 0

    foresight = Foresight()
    tried = []
    for step in range(40):
        tried += [step] if foresight.is_sure else []
        foresight.learn(is_calm=True, was_surprised=foresight.is_sure)
    assert tried == [1, 4, 9, 18, 35]
    found = early(same.between(set_lr, 8), same.adamw, tmp_path)
    assert found.counts["early"] == 0


def test_views_held_over_a_step_follow_it(tmp_path: Path) -> None:
    """Whoever holds a view of a weight, or what the optimizer keeps, sees what a step makes of it."""

    def loop(training: Training) -> None:
        weight = training.model.get_parameter("second.weight")
        for step in range(6):
            view = weight.detach()[0, :3] if step > 2 else torch.zeros(1)
            kept = training.optimizer.state[weight].get("exp_avg") if step > 2 else None
            training.backward(step)
            training.optimizer.step()
            same.note(training, view, kept)
            training.optimizer.zero_grad()

    early(loop, same.adamw, tmp_path)


class Failing(torch.optim.SGD):
    """It cannot step in a backward."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if torch._C._current_autograd_node() is not None:
            raise ZeroDivisionError
        return super().step(closure)


def test_an_optimizer_that_fails_in_the_backward_steps_when_it_is_asked_to(tmp_path: Path) -> None:
    found = early(plain_loop(6), lambda params: Failing(params, lr=0.1, momentum=0.9), tmp_path)
    assert found.counts["early"] == 0


class Scaling(same.Lion):
    """It writes into the gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        super().step()


def test_an_optimizer_that_writes_into_gradients_waits(tmp_path: Path) -> None:
    """The gradient is on its way home while an early update reads it."""
    ours = train(plain_loop(6), Scaling, folder=tmp_path, later=When.EARLY)
    assert ours.counts["early"] == 0
    assert_equal(ours.weights, train(plain_loop(6), Scaling).weights)


@pytest.mark.parametrize("fails_at", [0, 1, 2, 5, 9])
def test_memory_that_runs_out_in_the_backward_changes_nothing(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs = 0
    step = torch.optim.AdamW.step.__wrapped__  # type: ignore[attr-defined]

    def fail(optimizer: Any, *args: Any) -> Any:
        nonlocal num_runs
        if torch._C._current_autograd_node() is not None:
            num_runs += 1
            if num_runs == fails_at + 1:
                step(optimizer, *args)  # it has changed what it was given
                raise torch.OutOfMemoryError
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW.step, "__wrapped__", fail)
    found = early(plain_loop(6), same.adamw, tmp_path)
    assert num_runs > fails_at
    assert found.counts["early"] == num_runs - 1


class Layers(nn.Sequential):
    """Each weight is read once."""

    def __init__(self) -> None:
        linear = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(6)]
        super().__init__(nn.Embedding(100, WIDTH), *linear, nn.Linear(WIDTH, 100, bias=False))


def make_state(
    folder: Path, home_bytes: int = GIB, window_bytes: int = 1500 * KIB, net: Callable[[], nn.Module] = Net
) -> tuple[Training, State]:
    model = make(net)
    optimizer = same.OPTIMIZERS["fused"](model.parameters())
    state = State(model, optimizer, window_bytes=window_bytes, home_bytes=home_bytes, folder=folder)
    state.update_early(range(len(state.sizes)))
    return Training(model, optimizer, Result(), state), state


def test_copies_are_those_that_the_plan_counts_on(tmp_path: Path) -> None:
    """The weight comes twice, what the optimizer keeps comes once, and all of them and the gradient go once."""
    training, state = make_state(tmp_path, net=Layers, window_bytes=2500 * KIB)
    plain_loop(4)(training)
    before = dict(state.window.homes.copied_bytes)
    plain_loop(1)(training)
    moved = {way: state.window.homes.copied_bytes[way] - before[way] for way in before}
    weights = sum(unit.weight.num_bytes for unit in state.units)
    assert moved["out"] == 4 * weights
    assert 4 * weights <= moved["in"] <= 4.3 * weights  # some is fetched ahead and given up where the host is busy
    assert 4 * len(state.units) - 3 <= state.num_early <= 4 * len(state.units)
    assert all(is_at_home(unit.weight.home) for unit in state.units)
    assert state.window.used_bytes == 0
    state.close()


def test_without_room_for_second_homes_updates_wait(tmp_path: Path) -> None:
    _, state = make_state(tmp_path)
    needed_bytes = sum(size.all_bytes for size in state.sizes)
    state.close()
    training, state = make_state(tmp_path, home_bytes=needed_bytes + 500 * KIB)
    plain_loop(4)(training)
    assert 0 < state.num_early < NUM_LARGE * 3
    state.close()
    plain = Training(make(), nn.Module(), Result())  # type: ignore[arg-type]
    plain.optimizer = same.OPTIMIZERS["fused"](plain.model.parameters())
    plain_loop(4)(plain)
    assert_equal(dict(plain.model.state_dict()), dict(training.model.state_dict()))


def test_between_backward_and_step_everything_is_as_it_was(tmp_path: Path) -> None:
    training, state = make_state(tmp_path)
    plain_loop(3)(training)
    before = {name: tensor.clone() for name, tensor in training.model.state_dict().items()}
    training.backward(3)
    assert any(unit.early is not None and unit.early.is_pending for unit in state.units)
    assert_equal(before, {name: tensor.clone() for name, tensor in training.model.state_dict().items()})
    x, _ = batch(5)
    with torch.no_grad():
        training.model(x)
    training.optimizer.step()
    assert state.num_early == 2 * NUM_LARGE
    state.close()
