"""`Adaptive` around real loops on digits: off it changes no bit, on it follows the noise and the rule."""

from __future__ import annotations

import logging
import math
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from outcore.elastic.digits import accuracy
from outcore.errors import TuningError
from outcore.limit import limit
from outcore.tuning import Adaptive, RateRule
from outcore.tuning.gradients.goodput import gain
from tests.cpu.tuning.digits import digits, small_net

Make = Callable[[Any], torch.optim.Optimizer]
SGD: Make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
ADAM: Make = lambda p: torch.optim.Adam(p, lr=2e-3)  # noqa: E731


def loader(batch: int, num_samples: int = 1408, seed: int = 0) -> DataLoader[Any]:
    data = digits()
    rows = TensorDataset(data.train_images[:num_samples], data.train_labels[:num_samples])
    return DataLoader(rows, batch, shuffle=True, generator=torch.Generator().manual_seed(seed))


def weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def train_plain(make: Make, num_parts: int, num_epochs: int = 2) -> torch.Tensor:
    net = small_net()
    optimizer = make(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    found = loader(64 // num_parts)
    for _ in range(num_epochs):
        for number, (x, y) in enumerate(found):
            (F.cross_entropy(net(x), y) / num_parts).backward()
            if (number + 1) % num_parts == 0:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
    return weights(net)


def train_adaptive(make: Make, micro_batch: int, loader_batch: int, num_epochs: int = 2, **options: Any) -> Any:
    net = small_net()
    optimizer = make(net.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    adaptive = Adaptive(net, optimizer, batch=64, micro_batch=micro_batch, scheduler=scheduler, **options)
    losses: list[float] = []
    found = loader(loader_batch)
    for _ in range(num_epochs):
        for x, y in adaptive.batches(found):
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            adaptive.step()
            losses.append(loss.item())
    adaptive.close()
    return net, adaptive, losses


@pytest.mark.parametrize("make", [SGD, ADAM])
@pytest.mark.parametrize("num_parts", [1, 4])
def test_off_it_changes_no_bit(make: Make, num_parts: int) -> None:
    net, adaptive, _ = train_adaptive(make, 64 // num_parts, 64 // num_parts)
    assert torch.equal(weights(net), train_plain(make, num_parts))
    assert (adaptive.noise is None) == (num_parts == 1)  # noise shows where there are two micro-batches anyway
    assert adaptive.lr_factor == 1.0
    assert not adaptive.changes


@pytest.mark.parametrize("loader_batch", [1, 24, 100])
def test_the_loaders_own_batch_size_does_not_matter(loader_batch: int) -> None:
    """1,408 samples of one epoch in another grouping are the same samples in the same order."""
    net, _, _ = train_adaptive(SGD, 16, loader_batch, num_epochs=1)
    assert torch.equal(weights(net), train_plain(SGD, 4, num_epochs=1))


def cheap_batches(batch: int) -> float:
    return 1e-3 + 1e-6 * batch


@pytest.mark.parametrize("rule", ["adascale", "sqrt", "linear"])
def test_noise_grows_batch_grows_loss_falls_and_the_rate_follows(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "outcore")
    torch.manual_seed(0)
    net = small_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    adaptive = Adaptive(
        net, optimizer, batch=32, micro_batch=64, largest_batch=512, rule=rule, step_s=cheap_batches, interval_steps=40
    )
    rates: list[tuple[int, float, float]] = []
    optimizer.register_step_pre_hook(
        lambda opt, *_: rates.append(
            (adaptive.batch, opt.param_groups[0]["lr"], adaptive.noise.scale if adaptive.noise else 0.0)
        )
    )
    losses, noises = [], []
    for _ in range(25):
        for x, y in adaptive.batches(loader(32)):
            assert len(x) <= 64
            loss = F.cross_entropy(net(x), y)
            loss.backward()
            losses.append(loss.item())
            if adaptive.step() and adaptive.noise is not None:
                noises.append(adaptive.noise.scale)
    assert max(batch for batch, _, _ in rates) >= 128
    assert [change.batch for change in adaptive.changes][:2] == [64, 128]
    assert sum(losses[-50:]) / 50 < 0.2 * sum(losses[:5]) / 5
    if rule != "linear":  # at 16 times the rate this net swings between the walls of a valley: |G| grows, not the noise
        assert sorted(noises[-50:])[25] > 2 * sorted(noises[10:60])[25]
    expected: dict[str, Callable[[int, float], float]] = {
        "adascale": lambda batch, noise: gain(batch, 32, noise),
        "sqrt": lambda batch, noise: math.sqrt(batch / 32),
        "linear": lambda batch, noise: batch / 32,
    }
    assert all(rate == pytest.approx(0.05 * expected[rule](batch, noise)) for batch, rate, noise in rates)
    assert optimizer.param_groups[0]["lr"] == 0.05  # a scheduler would find the first batch's rate
    assert "batch 32 -> 64: the noise scale is" in caplog.text
    assert "batch 32 -> 64" in str(adaptive)
    assert adaptive.num_samples == sum(batch for batch, _, _ in rates)
    assert accuracy(net, digits().test_images, digits().test_labels) > 0.93


def test_under_limit_it_is_the_same_training() -> None:
    ends = []
    for limited in (False, True):
        net = small_net()
        optimizer = SGD(net.parameters())
        ooc = limit(net, "100%", planner="swap-all") if limited else None
        adaptive = Adaptive(
            net, optimizer, batch=32, micro_batch=32, largest_batch=128, step_s=cheap_batches, interval_steps=20
        )
        for _ in range(3):
            for x, y in adaptive.batches(loader(32)):
                if ooc is None:
                    F.cross_entropy(net(x), y).backward()
                else:
                    with ooc.step():
                        F.cross_entropy(net(x), y).backward()
                adaptive.step()
        if ooc is not None:
            assert ooc.predicted is not None
            assert ooc.predicted.swapped_bytes > 0
            ooc.close()
        assert adaptive.batch == 128
        ends.append((weights(net), adaptive.noise))
    assert torch.equal(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]


@pytest.mark.parametrize("per_sample", [False, True])
def test_by_the_clock_it_grows_only_where_a_larger_batch_is_cheap(
    per_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of constant length makes large batches free, one that grows with its samples makes them worth less than
    they cost. The larger batch is tried in both cases and kept in one. The clock is a counter: on a machine that is
    shared, steps that sleep for two milliseconds take up to ten."""
    now_s = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    net = small_net()
    adaptive = Adaptive(
        net, SGD(net.parameters()), batch=16, micro_batch=512, largest_batch=64, interval_steps=10, rule="sqrt"
    )
    tried = set()
    for _ in range(1 if per_sample else 4):
        for x, y in adaptive.batches(loader(16)):
            F.cross_entropy(net(x), y).backward()
            now_s += 1e-3 * len(x) if per_sample else 2e-3
            adaptive.step()
            tried.add(adaptive.batch)
    assert {16, 32} <= tried
    final = [change.batch for change in adaptive.changes][-1]
    assert final == (16 if per_sample else 64)


def test_deciding_more_often_than_steps_can_be_timed_waits_for_a_timed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise that comes and goes sends the batch up and down, also to one whose seconds are known."""
    now_s, net = 0.0, small_net()
    monkeypatch.setattr(time, "perf_counter", lambda: now_s)
    monkeypatch.setattr(Adaptive, "noise_scale", lambda self: 1e9 if self.num_steps // 4 % 2 else 0.0)
    adaptive = Adaptive(net, SGD(net.parameters()), batch=16, micro_batch=64, largest_batch=64, interval_steps=1)
    for _ in range(3):
        for x, y in adaptive.batches(loader(16)):
            F.cross_entropy(net(x), y).backward()
            now_s += 8e-3 + 5e-4 * len(x)
            adaptive.step()
    assert len(adaptive.changes) > 3
    assert all(two.num_steps - one.num_steps > 5 for one, two in zip(adaptive.changes, adaptive.changes[1:]))


def test_a_schedule_in_steps_of_the_first_batch_advances_by_what_steps_are_worth() -> None:
    _, adaptive, _ = train_adaptive(SGD, 64, 64, 6, largest_batch=256, step_s=cheap_batches, interval_steps=10)
    assert adaptive.batch > 64
    assert adaptive.num_steps < adaptive.progress < adaptive.num_samples / 64
    assert adaptive.scheduler.last_epoch == math.floor(adaptive.progress)


def test_adam_takes_the_root_of_the_gain_and_may_keep_its_half_life() -> None:
    net = small_net()
    optimizer = ADAM(net.parameters())
    adaptive = Adaptive(
        net,
        optimizer,
        batch=32,
        micro_batch=32,
        largest_batch=64,
        step_s=cheap_batches,
        interval_steps=10,
        rule=RateRule(scale_beta2=True),
    )
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda opt, *_: seen.append((adaptive.batch, *opt.param_groups[0]["betas"])))
    for x, y in adaptive.batches(loader(32)):
        F.cross_entropy(net(x), y).backward()
        adaptive.step()
    assert {batch for batch, _, _ in seen} == {32, 64}
    assert all(beta2 == pytest.approx(0.999 ** (batch / 32)) and beta1 == 0.9 for batch, beta1, beta2 in seen)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
    assert adaptive.noise is not None
    assert adaptive.lr_factor == pytest.approx(math.sqrt(gain(64, 32, adaptive.noise.scale)))


def test_warm_up_follows_a_change() -> None:
    net = small_net()
    optimizer = SGD(net.parameters())
    adaptive = Adaptive(
        net, optimizer, batch=32, micro_batch=32, largest_batch=64, step_s=cheap_batches,
        interval_steps=10, rule=RateRule("linear", warm_up_steps=4),
    )  # fmt: skip
    factors = []
    for x, y in adaptive.batches(loader(32)):
        F.cross_entropy(net(x), y).backward()
        factor = adaptive.lr_factor
        if adaptive.step():
            factors.append(factor)
    change = adaptive.changes[0].num_steps
    assert factors[change - 1 : change + 5] == pytest.approx([1, 1.25, 1.5, 1.75, 2, 2])


def test_clipping_by_the_optimizers_own_hook_sees_the_mean_gradient() -> None:
    net = small_net()
    optimizer = SGD(net.parameters())
    lengths: list[float] = []
    optimizer.register_step_pre_hook(lambda *_: lengths.append(float(clip_grad_norm_(net.parameters(), 1e9))))
    adaptive = Adaptive(net, optimizer, batch=64, micro_batch=16)
    x, y = next(iter(loader(64)))
    whole = [float(p.square().sum()) for p in torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))]
    for part_x, part_y in adaptive.batches([(x, y)]):
        F.cross_entropy(net(part_x), part_y).backward()
        adaptive.step()
    assert lengths == pytest.approx([math.sqrt(sum(whole))], rel=1e-5)


def test_training_goes_on_from_a_saved_state() -> None:
    _, adaptive, _ = train_adaptive(SGD, 64, 64, 3, largest_batch=256, step_s=cheap_batches, interval_steps=10)
    net = small_net()
    other = Adaptive(net, SGD(net.parameters()), batch=64, micro_batch=64, largest_batch=256)
    other.load_state_dict(adaptive.state_dict())
    assert (other.batch, other.noise, other.progress) == (adaptive.batch, adaptive.noise, adaptive.progress)
    assert other.lr_factor == adaptive.lr_factor
    with pytest.raises(TuningError, match="keep batch="):
        other.load_state_dict(adaptive.state_dict() | {"batch": 100})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch": 64, "micro_batch": 16, "rule": "cubic"}, "choose one of adascale"),
        ({"batch": 64, "micro_batch": 0}, "do not fit together"),
        ({"batch": 64, "micro_batch": 16, "largest_batch": 32}, "do not fit together"),
        ({"batch": 127, "micro_batch": 16}, "take a multiple of 16"),
        ({"batch": 1, "micro_batch": 16, "largest_batch": 4}, "equal micro-batches"),
    ],
)
def test_bad_input_is_told_in_a_sentence(options: dict[str, Any], sentence: str) -> None:
    net = small_net()
    with pytest.raises(TuningError, match=sentence):
        Adaptive(net, SGD(net.parameters()), **options)


def test_a_loop_that_forgets_one_of_the_two_lines_is_told_so() -> None:
    net = small_net()
    adaptive = Adaptive(net, SGD(net.parameters()), batch=64, micro_batch=64)
    with pytest.raises(TuningError, match=r"goes with adaptive\.batches"):
        adaptive.step()
    found = adaptive.batches(loader(64))
    next(found)
    with pytest.raises(TuningError, match=r"without adaptive\.step"):
        next(found)


def test_a_loop_left_in_mid_batch_leaves_no_half_gradient() -> None:
    ends = []
    for left in (False, True):
        net = small_net()
        adaptive = Adaptive(net, SGD(net.parameters()), batch=64, micro_batch=16)
        if left:
            for number, (x, y) in enumerate(adaptive.batches(loader(16, seed=1))):
                F.cross_entropy(net(x), y).backward()
                if number == 2:
                    break  # two micro-batches were counted, this one was not
                adaptive.step()
        for x, y in adaptive.batches(loader(16)):
            F.cross_entropy(net(x), y).backward()
            adaptive.step()
        ends.append(weights(net))
    assert torch.equal(*ends)


def test_the_example_runs_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "examples" / "adaptive_batch.py"
    adaptive = runpy.run_path(str(path), run_name="adaptive_batch")["main"]()
    assert adaptive.noise is not None
    assert adaptive.num_samples >= 4 * 4096 - 256
    assert "learning rate x" in capsys.readouterr().out
