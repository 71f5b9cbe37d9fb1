"""What the state holds on the device, when updates run, and what is left when it is over."""

from __future__ import annotations

import gc
import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tests.cpu.state.test_same_training as same
from outcore.errors import OutcoreError, StoreError
from outcore.memory.home import Homes, is_at_home
from outcore.state.optimizers import splitting_of
from outcore.state.state import State
from outcore.state.watched import is_watched
from outcore.units import GIB, KIB, MIB
from tests.cpu.state.training import Net, batch, make

adamw = partial(torch.optim.AdamW, lr=1e-2)


def make_state(folder: Path, **options: Any) -> State:
    model = make()
    optimizer = options.pop("optimizer", adamw)(model.parameters())
    sizes: dict[str, Any] = {"window_bytes": 600 * KIB, "home_bytes": GIB}
    return State(model, optimizer, folder=folder, **sizes | options)


def backward(state: State, step: int = 0) -> None:
    x, y = batch(step)
    with state.step():
        nn.functional.cross_entropy(state.model(x).flatten(0, 1), y.flatten()).backward()


def train(state: State, num_steps: int = 3) -> None:
    for step in range(num_steps):
        backward(state, step)
        state.optimizer.step()
        state.optimizer.zero_grad()


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("window_bytes", [450 * KIB, 900 * KIB])
def test_the_window_is_not_exceeded_and_empty_between_steps(window_bytes: int, later: bool, tmp_path: Path) -> None:
    state = make_state(tmp_path, window_bytes=window_bytes, later=later)
    for step in range(4):
        backward(state, step)
        assert state.window.used_bytes == 0
        state.optimizer.step()
        assert state.window.used_bytes == 0
        state.optimizer.zero_grad()
    assert 0 < state.window.peak_bytes <= window_bytes
    state.close()


def test_everything_large_is_at_home_between_steps(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    train(state)
    backward(state)
    large = [p for p in state.model.parameters() if p.nbytes >= 64 * KIB]
    assert len(large) == len(state.units) == 4
    for p in large:
        assert is_at_home(p)
        assert p.grad is not None
        assert is_at_home(p.grad)
        kept = state.optimizer.state[p]
        assert is_at_home(kept["exp_avg"])
        assert is_at_home(kept["exp_avg_sq"])
        assert not is_at_home(kept["step"])
    state.close()


def test_the_prediction_of_what_homes_need_is_exact(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    train(state)
    used_bytes = state.window.homes.used_bytes
    weights = sum(unit.weight.num_bytes for unit in state.units)
    assert used_bytes == 4 * weights  # weight, gradient, two moments
    state.close()
    with pytest.raises(StoreError, match="the training state needs"):
        make_state(tmp_path, home_bytes=used_bytes - 1)
    make_state(tmp_path, home_bytes=used_bytes).close()


def test_updates_run_when_their_weight_is_read(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    train(state, 2)
    backward(state, 2)
    before = {unit.name: unit.weight.home.clone() for unit in state.units}
    state.optimizer.step()
    state.optimizer.zero_grad()
    waiting = {unit.name: unit for unit in state.units if unit.due is not None}
    assert waiting.keys() == before.keys()
    assert all(torch.equal(before[name], unit.weight.home) for name, unit in waiting.items())
    with torch.no_grad():
        state.model.get_submodule("first")(torch.randn(2, 192))
    assert waiting["first.weight"].due is None
    assert waiting["second.weight"].due is not None
    assert not torch.equal(before["first.weight"], state.model.get_parameter("first.weight"))
    state.model.get_parameter("second.weight").sum()  # a look runs all of them
    assert not any(unit.due for unit in state.units)
    assert not any(is_watched(p) for p in state.model.parameters())
    state.close()


def test_copies_are_fetched_ahead_in_the_order_of_the_step_before(tmp_path: Path) -> None:
    state = make_state(tmp_path, window_bytes=4 * MIB)
    train(state, 2)
    state.flush()
    seen: list[str] = []
    watch = state.model.get_submodule("first").register_forward_hook(
        lambda *_: seen.extend(unit.name for unit in state.units if unit.weight.here is not None)
    )
    backward(state, 2)
    assert set(seen) >= {"second.weight", "borrowed.weight"}
    watch.remove()
    state.close()


def test_the_host_is_paced_at_every_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU it would run ahead otherwise, and find no room to fetch anything ahead."""
    uses = 0

    def pace(homes: Homes) -> None:
        nonlocal uses
        uses += 1

    state = make_state(tmp_path)
    monkeypatch.setattr(Homes, "pace", pace)
    train(state, 1)
    assert uses >= 2 * len(state.units)  # in the forward and in the backward
    before = uses
    state.flush()
    assert uses >= before + len(state.units) - 1  # the updates
    state.close()


@pytest.mark.parametrize("write", ["copy_", "data"])
def test_a_weight_written_into_after_it_was_fetched_ahead_is_fetched_again(write: str, tmp_path: Path) -> None:
    state = make_state(tmp_path, window_bytes=4 * MIB)
    train(state, 2)
    second = state.model.get_submodule("second")
    weight = state.model.get_parameter("second.weight")
    unit = next(unit for unit in state.units if unit.name == "second.weight")
    fetched: list[bool] = []

    def overwrite(*_: Any) -> None:
        fetched.append(unit.weight.here is not None)
        if write == "copy_":
            with torch.no_grad():
                weight.copy_(torch.full_like(weight, 0.5))
        else:
            weight.data.fill_(0.5)

    read: list[float] = []
    hooks = [
        state.model.get_submodule("first").register_forward_hook(overwrite),
        second.register_forward_hook(lambda module, args, out: read.append(float(module.weight.data.max()))),
    ]
    state.flush()
    backward(state, 2)
    for hook in hooks:
        hook.remove()
    assert fetched == [True]
    assert read[0] == 0.5
    state.close()


def test_leaving_gives_an_ordinary_model_back(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    model, optimizer = state.model, state.optimizer
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    train(state, 2)
    backward(state, 2)
    state.close()
    state.close()  # twice does no harm
    tensors: list[Tensor] = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None)]
    tensors += [kept for state in optimizer.state.values() for kept in state.values()]
    assert not any(is_at_home(tensor) for tensor in tensors)
    assert all(type(p) is nn.Parameter for p in model.parameters())
    assert type(optimizer.state).__name__ == "defaultdict"
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    assert not any(p._post_accumulate_grad_hooks or p._backward_hooks for p in model.parameters())
    optimizer.step()
    schedule.step()
    assert state.window.homes.used_bytes == 0 or gc.collect() is not None


def test_homes_are_given_back(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    train(state, 2)
    homes = state.window.homes
    state.close()
    del state
    gc.collect()
    assert homes.used_bytes == 0
    assert list(tmp_path.iterdir()) == []


def test_no_growth_over_many_steps(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    train(state, 3)
    gc.collect()
    before = state.window.homes.used_bytes, len(os.listdir("/proc/self/fd")), len(gc.get_objects())
    train(state, 20)
    gc.collect()
    after = state.window.homes.used_bytes, len(os.listdir("/proc/self/fd")), len(gc.get_objects())
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 200
    state.close()


class Broken(RuntimeError):
    pass


def test_an_exception_in_the_forward_leaves_everything_at_home(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    train(state, 2)

    def fail(*_: Any) -> None:
        raise Broken

    hook = state.model.get_submodule("second").register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        backward(state)
    hook.remove()
    assert state.window.used_bytes == 0
    assert all(unit.depth == 0 and is_at_home(unit.parameter) for unit in state.units)
    train(state, 2)
    state.close()


def test_an_exception_in_the_backward_keeps_the_gradients_that_were_there(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    train(state, 2)
    backward(state)
    before = [p.grad.clone() for p in state.model.parameters() if p.grad is not None]

    def fail(grad: Tensor) -> None:
        raise Broken

    hook = state.model.get_submodule("head").register_full_backward_pre_hook(lambda *_: fail(before[0]))
    with pytest.raises(Broken):
        backward(state, 1)
    hook.remove()
    after = [p.grad for p in state.model.parameters() if p.grad is not None]
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))
    state.close()


def test_a_weight_changed_between_forward_and_backward_is_an_error_as_without_us(tmp_path: Path) -> None:
    state = make_state(tmp_path)
    x, y = batch(0)
    with state.step():
        loss = nn.functional.cross_entropy(state.model(x).flatten(0, 1), y.flatten())
        with torch.no_grad():
            state.model.get_parameter("second.weight").mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    train(state, 2)
    with state.step():
        loss = nn.functional.cross_entropy(state.model(x).flatten(0, 1), y.flatten())
        loss.backward(retain_graph=True)
        state.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    state.close()


@pytest.mark.parametrize("fails_at", [0, 2, 4, 7, 11])
def test_memory_that_runs_out_during_an_update_changes_nothing(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once: what was fetched ahead goes, and the copy is tried again. Always: the update is due as before."""
    state, other = make_state(tmp_path), make_state(tmp_path)
    for one in (state, other):
        train(one, 2)
        backward(one, 2)
        one.optimizer.step()
    fetch, number = state.window.homes.fetch, iter(range(10**6))

    def fail(home: Tensor, always: bool) -> Any:
        if always or next(number) == fails_at:
            raise torch.OutOfMemoryError("no memory")
        return fetch(home)

    monkeypatch.setattr(state.window.homes, "fetch", partial(fail, always=True))
    with pytest.raises(torch.OutOfMemoryError):
        state.model.state_dict()
    assert all(unit.due for unit in state.units)
    monkeypatch.setattr(state.window.homes, "fetch", partial(fail, always=False))
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, state.model.state_dict()[name]), name
    assert not any(unit.due for unit in state.units)
    assert next(number) > fails_at
    state.end()
    assert state.window.used_bytes == 0
    state.close()
    other.close()


def test_what_cannot_be_divided_stays_on_the_device_and_says_so(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="parameters of LBFGS stay on the device"):
        state = make_state(tmp_path, optimizer=partial(torch.optim.LBFGS, max_iter=3))
    assert not state.units
    assert "LBFGS" in str(state)
    plain = make()
    reference = torch.optim.LBFGS(plain.parameters(), max_iter=3)
    x, y = batch(0)

    def closure(model: nn.Module) -> Tensor:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        return loss

    reference.step(partial(closure, plain))
    state.optimizer.step(partial(closure, state.model))  # type: ignore[arg-type]
    assert all(map(torch.equal, plain.parameters(), state.model.parameters()))
    state.close()


def test_a_model_that_was_given_other_data_trains_on(tmp_path: Path) -> None:
    plain, state = make(), make_state(tmp_path, optimizer=partial(torch.optim.SGD, lr=0.1))
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(4):
        if step == 2:
            plain.double()
            state.model.double()
        backward(state, step)
        x, y = batch(step)
        nn.functional.cross_entropy(plain(x).flatten(0, 1), y.flatten()).backward()
        for one in (optimizer, state.optimizer):
            one.step()
            one.zero_grad()
    assert all(map(torch.equal, plain.parameters(), state.model.parameters()))
    state.close()
    assert all(map(torch.equal, plain.parameters(), state.model.parameters()))


def test_bad_input_is_refused_in_a_sentence(tmp_path: Path) -> None:
    model = make()
    with pytest.raises(OutcoreError, match="none of the 8 parameters of this AdamW belongs to the model"):
        State(model, adamw(Net().parameters()), window_bytes=MIB, home_bytes=GIB, folder=tmp_path)
    with pytest.raises(OutcoreError, match="is no torch optimizer"):
        State(model, model, window_bytes=MIB, home_bytes=GIB, folder=tmp_path)  # type: ignore[arg-type]
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreError, match="cannot make a file for the training state"):
        State(model, adamw(model.parameters()), window_bytes=MIB, home_bytes=GIB, folder=file / "below")
    assert all(not is_at_home(p) for p in model.parameters())


def test_a_full_disk_is_an_error_and_the_model_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = make()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(StoreError, match="has no room for"):
        State(model, adamw(model.parameters()), window_bytes=MIB, home_bytes=GIB, folder=tmp_path)
    assert all(map(torch.equal, before, model.parameters()))


def fills_up(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """The disk has room for so many tensors more."""
    reserve, number = os.posix_fallocate, iter(range(10**6))

    def full(handle: int, offset: int, size: int) -> None:
        if next(number) >= after:
            raise OSError(28, "No space left on device")
        reserve(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)


def test_a_disk_that_is_full_half_way_gives_everything_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make()
    before = [p.clone() for p in model.parameters()]
    fills_up(monkeypatch, after=2)
    with pytest.raises(StoreError, match="has no room for"):
        State(model, adamw(model.parameters()), window_bytes=MIB, home_bytes=GIB, folder=tmp_path)
    assert all(map(torch.equal, before, model.parameters()))
    assert not any(is_at_home(p) for p in model.parameters())


@pytest.mark.parametrize("by_cpu", [False, True])
@pytest.mark.parametrize("after", [0, 1, 3, 4])
def test_a_disk_that_fills_up_in_an_update_changes_nothing(
    after: int, by_cpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that find no room for what they create are due as before, and run when there is room."""
    state, other = (make_state(tmp_path, by_cpu=by_cpu) for _ in range(2))
    for one in (state, other):
        backward(one)
        one.optimizer.step()
    other.flush()
    with monkeypatch.context() as patch:
        fills_up(patch, after)
        for _ in range(2):
            with pytest.raises(StoreError, match=r"has no room for .* of the training state"):
                state.model.state_dict()
    for name, tensor in other.model.state_dict().items():
        assert torch.equal(tensor, state.model.state_dict()[name]), name
    for mine, theirs in zip(state.optimizer.state.values(), other.optimizer.state.values()):
        assert all(map(torch.equal, mine.values(), theirs.values()))
    state.close()
    other.close()


def test_gradients_have_the_width_of_their_parameters(tmp_path: Path) -> None:
    """Two bytes in a model of bfloat16: at home, in the plan, and on the way."""
    model = make(same.Half)
    state = State(model, adamw(model.parameters()), window_bytes=600 * KIB, home_bytes=GIB, folder=tmp_path)
    assert all(size.gradient_bytes == size.weight_bytes for size in state.sizes)
    train(state, 2)
    copied_bytes = state.window.homes.copied_bytes["out"]
    backward(state)
    weights_bytes = sum(unit.parameter.numel() * torch.bfloat16.itemsize for unit in state.units)
    for unit in state.units:
        assert unit.gradient is not None
        assert unit.gradient.home.dtype == torch.bfloat16
        assert unit.parameter.grad is not None
        assert unit.parameter.grad.dtype == torch.bfloat16
    late_bytes = 3 * weights_bytes  # weight and two moments, which the last update changed
    assert state.window.homes.copied_bytes["out"] - copied_bytes == late_bytes + weights_bytes
    state.close()


def test_aliased_parameters_stay_on_the_device(tmp_path: Path) -> None:
    model = make()
    view = model.get_parameter("first.weight").detach()
    state = State(model, adamw(model.parameters()), window_bytes=MIB, home_bytes=GIB, folder=tmp_path)
    assert state.kept_for["first.weight"] == "others hold a view of it"
    assert "first.weight" not in {unit.name for unit in state.units}
    assert view.shape == (192, 192)
    state.close()


class Noisy(torch.optim.SGD):
    """It draws random numbers."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        torch.rand(1)
        super().step()


class Together(torch.optim.SGD):
    """Its step depends on all gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1e-3)
        super().step()


def test_splitting_is_found_by_trying() -> None:
    params = list(Net().parameters())
    generator = torch.get_rng_state()
    assert "draws random numbers" in splitting_of(Noisy(params)).because
    assert "stepped together" in splitting_of(Together(params)).because
    assert "differentiable" in splitting_of(torch.optim.SGD(params, differentiable=True)).because
    assert splitting_of(torch.optim.AdamW(params)).by_element
    assert not splitting_of(torch.optim.Adafactor(params)).by_element
    assert splitting_of(torch.optim.Adafactor(params)).by_parameter
    assert splitting_of(torch.optim.AdamW(params, amsgrad=True)).state_bytes(params[0]) == 3 * params[0].nbytes
    assert splitting_of(torch.optim.SGD(params)).state_bytes(params[0]) == 0
    assert torch.equal(generator, torch.get_rng_state())


def test_homes_hold_what_is_written_to_them(tmp_path: Path) -> None:
    homes = Homes(torch.device("cpu"), GIB, tmp_path)
    tensor = torch.randn(64, 48).t()
    home = homes.empty_like(tensor)
    homes.wait(homes.send(tensor, home))
    assert torch.equal(home, tensor)
    assert home.stride() == tensor.stride()
    back, done = homes.fetch(home)
    homes.wait(done)
    assert torch.equal(back, tensor)
    homes.fill(home, torch.ones(48, 64, dtype=torch.float64))
    assert home.sum() == 48 * 64
    assert homes.used_bytes == tensor.nbytes
    with pytest.raises(StoreError, match="may be used"):
        homes.empty(torch.Size([GIB]), (1,), torch.float32)
    view = home[3:]
    del home
    gc.collect()
    assert homes.used_bytes == tensor.nbytes
    assert view.sum() == 45 * 64
    del view
    gc.collect()
    assert homes.used_bytes == 0
    homes.close()


def test_warnings_are_not_raised_by_schedulers(tmp_path: Path) -> None:
    """They look whether `step` was replaced, and whether it was called before theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for first in (True, False):
            model = make()
            optimizer = adamw(model.parameters())
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2) if first else None
            state = State(model, optimizer, window_bytes=MIB, home_bytes=GIB, folder=tmp_path)
            schedule = schedule or torch.optim.lr_scheduler.StepLR(optimizer, 2)
            for step in range(3):
                backward(state, step)
                optimizer.step()
                schedule.step()
            state.close()
            backward_plainly(model)
            optimizer.step()
            schedule.step()


def backward_plainly(model: nn.Module) -> None:
    model(batch(0)[0]).sum().backward()


@pytest.mark.parametrize("cached", [True, False])
def test_copies_that_autocast_keeps_are_told_once(cached: bool, tmp_path: Path) -> None:
    state = make_state(tmp_path)
    x, y = batch(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            with state.step():
                with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=cached):
                    out = state.model(x)
                nn.functional.cross_entropy(out.float().flatten(0, 1), y.flatten()).backward()
    told = [str(warning.message) for warning in caught if "autocast keeps copies" in str(warning.message)]
    assert len(told) == cached
    state.close()
