"""Training with the state beside the device gives the bits of plain PyTorch, whatever the loop does."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from outcore.units import KIB
from tests.cpu.state.training import WHERE, WIDTH, Loop, MakeOptimizer, Net, Training, When, batch, plain_loop, train

adamw: MakeOptimizer = partial(torch.optim.AdamW, lr=1e-2)
Loops = dict[str, Loop]


class Lion(torch.optim.Optimizer):
    """An optimizer that is not torch's."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.add_(average.lerp(p.grad, 1 - group["betas"][0]).sign(), alpha=-group["lr"])
                    average.lerp_(p.grad, 1 - group["betas"][1])


class Counting(Lion):
    """It keeps a count in its groups."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            group["lr"] = 1e-3 / group["count"]
        super().step()


def groups(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    params = list(params)
    return torch.optim.AdamW([{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.0}], lr=1e-2)


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=1e-2, amsgrad=True),
    "foreach": partial(torch.optim.Adam, lr=1e-2, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "fused sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "rmsprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "nadam": partial(torch.optim.NAdam, lr=1e-3),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "tensor lr": lambda params: torch.optim.Adam(params, lr=torch.tensor(1e-2)),
    "lion": Lion,
    "counting": Counting,
    "groups": groups,
}


@pytest.fixture(params=list(When), ids=["at step", "later", "early"])
def later(request: pytest.FixtureRequest) -> When:
    return When(request.param)


def assert_same(loop: Loop, make_optimizer: MakeOptimizer, folder: Path, **options: Any) -> None:
    net = options.get("net", Net)
    train(loop, make_optimizer, net=net).assert_same(train(loop, make_optimizer, folder=folder, **options))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name: str, later: When, tmp_path: Path) -> None:
    assert_same(plain_loop(), OPTIMIZERS[name], tmp_path, later=later)


def clipped_loop(training: Training) -> None:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(training.optimizer, 16)
    for step in range(16):
        training.backward(2 * step, 0.5)
        training.backward(2 * step + 1, 0.5)
        norm = nn.utils.clip_grad_norm_(training.model.parameters(), 0.1)
        training.outcome.notes.append(norm)
        training.optimizer.step()
        schedule.step()
        training.optimizer.zero_grad()


@pytest.mark.parametrize("name", ["momentum", "fused", "adagrad"])
def test_sixteen_steps_with_clipping_accumulation_and_a_scheduler(name: str, later: When, tmp_path: Path) -> None:
    assert_same(clipped_loop, OPTIMIZERS[name], tmp_path, later=later)


@pytest.mark.parametrize("window_bytes", [200 * KIB, 3000 * KIB])
@pytest.mark.parametrize("delay_s", [0.0, 0.001])
def test_slow_copies_and_small_windows_change_nothing(
    window_bytes: int, delay_s: float, later: When, tmp_path: Path
) -> None:
    assert_same(plain_loop(), adamw, tmp_path, later=later, window_bytes=window_bytes, delay_s=delay_s)


def each_step(touch: Callable[[Training, int], None], num_steps: int = 4, *, zero: bool = True) -> Loop:
    """A loop that does something after each `optimizer.step()`."""

    def loop(training: Training) -> None:
        for step in range(num_steps):
            training.backward(step)
            training.optimizer.step()
            touch(training, step)
            if zero:
                training.optimizer.zero_grad()

    return loop


def between(touch: Callable[[Training, int], None], num_steps: int = 4) -> Loop:
    """A loop that does something between backward and `optimizer.step()`."""

    def loop(training: Training) -> None:
        for step in range(num_steps):
            training.backward(step)
            touch(training, step)
            training.optimizer.step()
            training.optimizer.zero_grad()

    return loop


def note(training: Training, *values: Any) -> None:
    training.outcome.notes += [value.clone() if isinstance(value, Tensor) else value for value in values]


def saved(training: Training, step: int) -> None:
    file = io.BytesIO()
    torch.save({"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, file)
    file.seek(0)
    note(training, *torch.load(file)["model"].values())


def copied(training: Training, step: int) -> None:
    twin = copy.deepcopy(training.model)
    with torch.no_grad():
        note(training, twin(batch(step)[0]))
    assert all(type(p) is nn.Parameter for p in twin.parameters())


def pickled(training: Training, step: int) -> None:
    file = io.BytesIO()
    torch.save(training.model, file)
    file.seek(0)
    with torch.no_grad():
        note(training, torch.load(file, weights_only=False)(batch(step)[0]))


def evaluated(training: Training, step: int) -> None:
    training.model.eval()
    with torch.no_grad() if step % 2 else torch.inference_mode():
        note(training, training.model(batch(step)[0]).clone())
    training.model.train()


def loaded(training: Training, step: int) -> None:
    """Back to where the step before began."""
    if step == 1:
        training.outcome.__dict__["state"] = copy.deepcopy(
            (training.model.state_dict(), training.optimizer.state_dict())
        )
    elif step == 2:
        model, optimizer = training.outcome.__dict__["state"]
        training.model.load_state_dict(model)
        training.optimizer.load_state_dict(optimizer)


LOOKS: dict[str, Callable[[Training, int], None]] = {
    "data": lambda training, step: note(training, *(p.data for p in training.model.parameters())),
    "op": lambda training, step: note(training, *(p.sum() for p in training.model.parameters())),
    "norm": lambda training, step: note(training, *torch._foreach_norm(list(training.model.parameters()))),
    "gradient": lambda training, step: note(training, *(p.grad for p in training.model.parameters())),
    "one": lambda training, step: note(training, training.model.get_parameter("first.weight")[0, :3]),
    "state": lambda training, step: note(
        training, *(kept["exp_avg"] for kept in training.optimizer.state.values() if kept)
    ),
    "state_dict": lambda training, step: note(training, *training.model.state_dict().values()),
    "numpy": lambda training, step: note(
        training, float(training.model.get_parameter("second.weight").detach().cpu().numpy().sum())
    ),
    "save": saved,
    "copy": copied,
    "pickle": pickled,
    "eval": evaluated,
    "load": loaded,
}


@pytest.mark.parametrize("name", LOOKS)
def test_looking_at_the_state_shows_the_truth(name: str, later: When, tmp_path: Path) -> None:
    assert_same(each_step(LOOKS[name]), adamw, tmp_path, later=later)


def write_weights(training: Training, step: int) -> None:
    with torch.no_grad():
        for p in training.model.parameters():
            p.clamp_(-0.05, 0.05)


def write_data(training: Training, step: int) -> None:
    for p in training.model.parameters():
        p.data.mul_(0.9)


def zero_in_place(training: Training, step: int) -> None:
    training.optimizer.zero_grad(set_to_none=False)


def scale_gradients(training: Training, step: int) -> None:
    for p in training.model.parameters():
        assert p.grad is not None
        p.grad.mul_(0.5)


def other_gradients(training: Training, step: int) -> None:
    for p in training.model.parameters():
        assert p.grad is not None
        p.grad = p.grad * 2


def clip_values(training: Training, step: int) -> None:
    nn.utils.clip_grad_value_(training.model.parameters(), 0.01)


def clip_norms(training: Training, step: int) -> None:
    for foreach in (None, False):
        note(training, nn.utils.clip_grad_norm_(training.model.parameters(), 0.05, foreach=foreach))
    note(training, nn.utils.clip_grad_norm_(training.model.parameters(), 0.01, norm_type=float("inf")))
    note(training, *(p.grad for p in training.model.parameters()))


def clip_twice(training: Training, step: int) -> None:
    for _ in range(2):
        note(training, nn.utils.clip_grad_norm_(training.model.parameters(), 0.05))


def some_without(training: Training, step: int) -> None:
    for p in list(training.model.parameters())[step % 2 :: 2]:
        p.grad = None


@pytest.mark.parametrize("touch", [write_weights, write_data, zero_in_place, scale_gradients])
def test_writing_after_a_step(touch: Callable[[Training, int], None], later: When, tmp_path: Path) -> None:
    assert_same(each_step(touch), adamw, tmp_path, later=later)


@pytest.mark.parametrize("touch", [scale_gradients, other_gradients, clip_values, clip_norms, clip_twice, some_without])
def test_writing_before_a_step(touch: Callable[[Training, int], None], later: When, tmp_path: Path) -> None:
    assert_same(between(touch), adamw, tmp_path, later=later)


def test_gradients_that_nobody_zeroes(later: When, tmp_path: Path) -> None:
    assert_same(each_step(lambda training, step: None, zero=False), adamw, tmp_path, later=later)


def test_two_steps_in_a_row(later: When, tmp_path: Path) -> None:
    assert_same(each_step(lambda training, step: training.optimizer.step() and None), adamw, tmp_path, later=later)


def test_views_held_over_a_step_follow_it(later: When, tmp_path: Path) -> None:
    """A state dictionary and the tensors of an optimizer's state share memory with what is trained."""

    def loop(training: Training) -> None:
        plain_loop(2)(training)
        held = [*training.model.state_dict().values()]
        held += [kept["exp_avg_sq"] for kept in training.optimizer.state.values() if kept]
        inner = training.optimizer.state[training.model.get_parameter("first.weight")]
        for step in range(2, 5):
            training.backward(step)
            training.optimizer.step()
            note(training, *held, inner["exp_avg"])
            training.optimizer.zero_grad()

    assert_same(loop, adamw, tmp_path, later=later)


def test_gradients_held_over_a_step_stay_what_they_were(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        held: list[Tensor] = []
        for step in range(4):
            training.backward(step)
            held += [p.grad for p in training.model.parameters() if p.grad is not None]
            held += [p.grad[:1] for p in training.model.parameters() if p.grad is not None]
            training.optimizer.step()
            training.optimizer.zero_grad()
        note(training, *held)

    assert_same(loop, adamw, tmp_path, later=later)


def test_gradients_held_while_others_are_added_follow(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        for step in range(3):
            training.backward(2 * step)
            held = [p.grad for p in training.model.parameters()]
            training.backward(2 * step + 1)
            note(training, *held)
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert_same(loop, adamw, tmp_path, later=later)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler(fused: bool, later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        scaler = torch.amp.GradScaler(WHERE["device"], init_scale=2.0**10, growth_interval=2)
        for step in range(6):
            x, y = batch(step)
            with training.block():
                loss = nn.functional.cross_entropy(training.model(x).flatten(0, 1), y.flatten())
                scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            if step % 2:
                scaler.unscale_(training.optimizer)
                note(training, nn.utils.clip_grad_norm_(training.model.parameters(), 0.1))
            scaler.step(training.optimizer)
            scaler.update()
            note(training, scaler.get_scale())
            training.optimizer.zero_grad()

    assert_same(loop, partial(torch.optim.AdamW, lr=1e-2, fused=fused), tmp_path, later=later)


def test_moving_average(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        average = AveragedModel(training.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        each_step(lambda training, step: average.update_parameters(training.model))(training)
        note(training, *(p.detach() for p in average.parameters()))

    assert_same(loop, adamw, tmp_path, later=later)


def test_closures(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        for step in range(4):

            def closure(step: int = step) -> float:
                training.optimizer.zero_grad()
                training.backward(step)
                return training.outcome.losses[-1].item()

            note(training, training.optimizer.step(lambda: closure()))

    assert_same(loop, adamw, tmp_path, later=later)


def test_hooks_see_what_they_see_without_us(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        weight = training.model.get_parameter("first.weight")
        weight.register_hook(lambda grad: grad * 0.5)
        weight.register_post_accumulate_grad_hook(lambda p: note(training, p.grad))
        steps: list[str] = []
        training.optimizer.register_step_pre_hook(lambda *_: steps.append("before"))
        training.optimizer.register_step_post_hook(lambda *_: steps.append("after"))
        plain_loop()(training)
        note(training, steps)

    assert_same(loop, adamw, tmp_path, later=later)


def test_a_hook_that_changes_the_accumulated_gradient(later: When, tmp_path: Path) -> None:
    def halve(p: Tensor) -> None:
        assert p.grad is not None
        p.grad.mul_(0.5)

    def loop(training: Training) -> None:
        for p in training.model.parameters():
            p.register_post_accumulate_grad_hook(halve)
        plain_loop()(training)

    assert_same(loop, adamw, tmp_path, later=later)


class Frozen(Net):
    """All but two weights are frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first.requires_grad_(True)
        self.norm.requires_grad_(True)


def test_frozen_parameters(later: When, tmp_path: Path) -> None:
    assert_same(plain_loop(), adamw, tmp_path, later=later, net=Frozen)


def test_freezing_and_unfreezing_on_the_way(later: When, tmp_path: Path) -> None:
    def freeze(training: Training, step: int) -> None:
        training.model.get_parameter("second.weight").requires_grad_(step % 2 == 0)
        training.model.get_parameter("embed.weight").requires_grad_(step < 2)

    assert_same(each_step(freeze, 5), adamw, tmp_path, later=later)
    assert_same(each_step(freeze, 5), adamw, tmp_path, later=later, net=Frozen)


class Checkpointed(Net):
    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + checkpoint(lambda x: self.second(torch.relu(self.first(self.norm(x)))), x, use_reentrant=False)
        x = x + checkpoint(self.borrowed, x, use_reentrant=True)
        logits: Tensor = self.head(x)
        return logits


class Attention(nn.Module):
    """`nn.MultiheadAttention` reads the weight of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        logits: Tensor = self.head(x)
        return logits


class Normalising(Net):
    """Its weights change in the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm())
        self.second.weight.data = nn.functional.normalize(self.second.weight.data)
        return super().forward(x)


class ByItself(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(nn.functional.normalize(self.weight))
        return super().forward(x)


class ByData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


class InData(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.05, 0.05)
        return super().forward(x)


class InForward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.borrowed = ByItself(WIDTH, WIDTH), ByData(WIDTH, WIDTH)
        self.second = InData(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.borrowed(torch.relu(self.first(self.embed(x)))))
        logits: Tensor = self.head(x)
        return logits


class Half(Net):
    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class Autocast(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(WHERE["device"], dtype=torch.bfloat16):
            return super().forward(x).float()


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 64)
        self.conv = nn.Conv2d(64, 48, 3, padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.back = nn.Conv2d(48, 100, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 1).unsqueeze(2)
        logits: Tensor = self.back(torch.relu(self.conv(x)))
        return logits.squeeze(2).permute(0, 2, 1)


class Encoder(nn.Module):
    """A frozen encoder that evaluates takes the short way of ordinary parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 256, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 100)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        self.encoder.train(x.requires_grad)
        with torch.set_grad_enabled(x.requires_grad and self.encoder.training):
            x = x + self.encoder(x)
        self.encoder.eval()
        with torch.no_grad():
            y = self.encoder(x)
        logits: Tensor = self.head(x + y)
        return logits


NETS = [Encoder, Checkpointed, Attention, Normalising, InForward, Half, Autocast, ChannelsLast]


@pytest.mark.parametrize("net", NETS)
def test_every_network(net: Callable[[], nn.Module], later: When, tmp_path: Path) -> None:
    assert_same(plain_loop(), adamw, tmp_path, later=later, net=net)


def test_several_backwards_in_a_block(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        for step in range(4):
            with training.block():
                losses = []
                for at in range(2):
                    x, y = batch(2 * step + at)
                    losses.append(nn.functional.cross_entropy(training.model(x).flatten(0, 1), y.flatten()))
                losses[0].backward(retain_graph=True)
                losses[0].backward()
                losses[1].backward()
            note(training, *losses)
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert_same(loop, adamw, tmp_path, later=later, delay_s=0.0005)


@pytest.mark.parametrize("touch", [scale_gradients, other_gradients, clip_values, clip_norms, some_without])
def test_writing_gradients_inside_the_block(
    touch: Callable[[Training, int], None], later: When, tmp_path: Path
) -> None:
    """Some of them are still on their way home."""

    def loop(training: Training) -> None:
        for step in range(4):
            x, y = batch(step)
            with training.block():
                nn.functional.cross_entropy(training.model(x).flatten(0, 1), y.flatten()).backward()
                touch(training, step)
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert_same(loop, adamw, tmp_path, later=later, delay_s=0.002)


class BetweenModules(Net):
    """Weights that were updated a moment ago are written into before they have arrived at home."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed(x))
        self.first.weight.data.mul_(0.5)
        with torch.no_grad():
            self.embed.weight.mul_(0.5)
        x = self.second(x)
        self.first.weight.data.mul_(2.0)
        logits: Tensor = nn.functional.linear(x, self.embed.weight.detach())
        return logits


def test_writing_weights_between_modules(later: When, tmp_path: Path) -> None:
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    assert_same(plain_loop(), sgd, tmp_path, later=later, delay_s=0.002, net=BetweenModules, window_bytes=4000 * KIB)


def test_gradients_of_gradients(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        for step in range(3):
            x, y = batch(step)
            with training.block():
                loss = nn.functional.cross_entropy(training.model(x).flatten(0, 1), y.flatten())
                grads = torch.autograd.grad(loss, list(training.model.parameters()), create_graph=True)
                (loss + sum(grad.pow(2).sum() for grad in grads)).backward()
            training.optimizer.step()
            training.optimizer.zero_grad()

    assert_same(loop, adamw, tmp_path, later=later)


def test_training_without_blocks(later: When, tmp_path: Path) -> None:
    """The step's block is for memory: without it the numbers are right, too."""

    def loop(training: Training) -> None:
        training.block = lambda: torch.enable_grad()  # type: ignore[method-assign]
        plain_loop()(training)

    assert_same(loop, adamw, tmp_path, later=later)


def test_the_optimizer_steps_inside_the_block(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        for step in range(4):
            x, y = batch(step)
            with training.block():
                loss = nn.functional.cross_entropy(training.model(x).flatten(0, 1), y.flatten())
                loss.backward()
                training.optimizer.step()
                training.optimizer.zero_grad()
                if step == 2:
                    training.model(x).sum()
            note(training, loss.detach())

    assert_same(loop, adamw, tmp_path, later=later)


def test_a_parameter_group_added_on_the_way(later: When, tmp_path: Path) -> None:
    def loop(training: Training) -> None:
        plain_loop(2)(training)
        weight = training.model.get_parameter("second.weight")
        training.optimizer.add_param_group({"params": [weight], "lr": 1e-3})
        plain_loop(4)(training)

    def without(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return adamw([p for at, p in enumerate(params) if at != 5])

    names = [name for name, _ in Net().named_parameters()]
    assert names[5] == "second.weight"
    assert_same(loop, without, tmp_path, later=later)
