"""What memory becomes after an op read it, or autograd saved it: the same numbers as plain PyTorch's, by every door."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from outcore.limit import limit
from tests.cpu.eager.training import assert_same_steps, data

pytestmark = pytest.mark.usefixtures("both_ways")

FIRST = 3  # the step in which the change begins: the recorded one and two planned ones do not know of it
LATER = 6  # the same, where steps are not measured any more: then fewer ops are seen


def through_data(t: Tensor) -> None:
    t.data.mul_(0.5)


def without_gradients(t: Tensor) -> None:
    with torch.no_grad():
        t.mul_(0.5)


def in_inference_mode(t: Tensor) -> None:
    with torch.inference_mode():
        t.mul_(0.5)


def as_out(t: Tensor) -> None:
    torch.mul(t.data, 0.5, out=t.data)


def through_set(t: Tensor) -> None:
    torch.empty(0).set_(t.detach()).mul_(0.5)  # type: ignore[call-overload]


def by_numpy(t: Tensor) -> None:
    t.detach().numpy()[:] *= 0.5


def by_dlpack(t: Tensor) -> None:
    torch.utils.dlpack.from_dlpack(t.detach()).mul_(0.5)


def replaced(t: Tensor) -> None:
    t.data = t.data * 0.5


def resized(t: Tensor) -> None:
    """Its version counter moves before anybody writes into it."""
    with torch.no_grad():
        shape = t.shape
        t.resize_(shape[0] // 2, *shape[1:]).resize_(shape).fill_(0.5)


UNVERSIONED = [through_data, as_out, through_set, by_numpy, by_dlpack, replaced]


class Reads(nn.Module):
    """A buffer is read, and changed before the backward."""

    def __init__(self, change: Callable[[Tensor], None]) -> None:
        super().__init__()
        self.one, self.other, self.change, self.step = nn.Linear(32, 32), nn.Linear(32, 32), change, 0
        self.scale: Tensor
        self.register_buffer("scale", torch.randn(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(torch.tanh(self.one(x)) * self.scale.clone())
        out = torch.tanh(self.other(h))
        if self.step >= FIRST:
            self.change(self.scale)
        return out


class Saves(Reads):
    """An activation is saved, and changed before the backward."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.one(x))
        y = self.other(h)
        if self.step >= FIRST:
            self.change(h)
        return torch.tanh(y)


def loss_of(model: Any, step: int) -> Tensor:
    model.step = step
    loss: Tensor = model(data(step, 64, 32)).square().sum()
    return loss


@pytest.mark.parametrize(
    "change", [*UNVERSIONED, without_gradients, in_inference_mode, resized], ids=lambda door: door.__name__
)
def test_a_buffer_that_reruns_read_changes(change: Callable[[Tensor], None]) -> None:
    assert_same_steps(lambda: Reads(change), loss_of, num_steps=5)


class ReadsShared(Reads):
    def __init__(self) -> None:
        super().__init__(self.halve)
        self.shared = self.scale.numpy()  # made before the step, where nobody watches

    def halve(self, t: Tensor) -> None:
        self.shared *= 0.5


def test_a_numpy_array_from_before_the_step_changes_a_buffer() -> None:
    assert_same_steps(ReadsShared, loss_of, num_steps=5)


class SavesShared(nn.Module):
    """A constant that is no buffer lies in NumPy's memory, and is saved in a step that does more than was recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.step = nn.Linear(32, 32), nn.Linear(32, 32), 0
        self.array = np.full((64, 32), 0.3, np.float32)
        self.scale = torch.from_numpy(self.array)

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x) * self.scale
        if self.step >= FIRST:
            h = torch.sin(h) * self.scale
            self.array *= 0.5
        return torch.tanh(self.other(h))


def test_a_numpy_array_that_was_saved_changes_in_a_step_that_leaves_its_plan() -> None:
    assert_same_steps(SavesShared, loss_of, num_steps=5)


@pytest.mark.parametrize("change", UNVERSIONED, ids=lambda door: door.__name__)
def test_a_saved_activation_changes_unversioned(change: Callable[[Tensor], None]) -> None:
    assert_same_steps(lambda: Saves(change), loss_of, num_steps=5)


class Threads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_num_threads()
        torch.set_num_threads(before + 1)
        y = torch.tanh(self.linear(x)) * x.sum(0, keepdim=True)
        torch.set_num_threads(before)
        return y


def test_what_ran_with_another_number_of_threads_is_not_run_again() -> None:
    assert_same_steps(Threads, lambda model, step: model(data(step, 2048, 32)).sum(), num_steps=4)


def test_two_threads_in_one_graph() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(32, 32), nn.Tanh())))
    ooc = limit(model, "100%", planner="swap-all")
    for step in range(4):
        found: list[Any] = [None, None]
        with ooc.step():
            loss = model(data(step, 64, 32)).square().mean()

            def work(at: int, loss: Tensor = loss, found: list[Any] = found) -> None:
                found[at] = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)

            threads = [threading.Thread(target=work, args=(at,)) for at in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        expected = torch.autograd.grad(model(data(step, 64, 32)).square().mean(), list(model.parameters()))
        assert all(torch.equal(a, b) for one in found for a, b in zip(expected, one, strict=True))
    del loss, work, threads, thread
    ooc.close()


class ReturnsSaved(torch.autograd.Function):
    """Its gradient is what it saved, as in losses that compute their gradient in the forward."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return (p * gradient).sum()

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        return ctx.saved_tensors[0], None


class TakesOver(nn.Module):
    """A gradient that autograd takes over from what was saved, and that a hook scales."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(32, 32), 0
        self.p = nn.Parameter(torch.randn(64, 32))
        self.p.register_post_accumulate_grad_hook(lambda p: self.scale(p, first))

    def scale(self, p: Tensor, first: int) -> None:
        assert p.grad is not None
        if self.step >= first:
            p.grad.mul_(10.0)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.linear(x))
        g = torch.tanh(h * 2)
        k = torch.sin(g)
        loss: Tensor = ReturnsSaved.apply(self.p, g) + (k * h).sum()  # type: ignore[no-untyped-call]
        return loss


@pytest.mark.parametrize("first", [0, FIRST])
def test_a_gradient_taken_over_from_what_was_saved_is_scaled(first: int) -> None:
    assert_same_steps(lambda: TakesOver(first), loss_of, num_steps=6)


def twice(model: Any, step: int) -> Tensor:
    loss = loss_of(model, step)
    loss.backward(retain_graph=True)
    model.p.grad.mul_(0.5)
    return loss * 0.5


def test_a_gradient_taken_over_is_scaled_between_two_backwards() -> None:
    assert_same_steps(lambda: TakesOver(0), twice, num_steps=6)


class ChangesInCheckpoint(nn.Module):
    """What a checkpoint gets back in the backward is changed after the second forward saved it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        def inside(h: Tensor) -> Tensor:
            y = h * h.sigmoid()
            h.data.mul_(0.9)
            return y

        y: Tensor = checkpoint(inside, self.linear(x), use_reentrant=True)
        return y


def test_the_input_of_a_checkpoint_changes_unversioned() -> None:
    assert_same_steps(ChangesInCheckpoint, loss_of, num_steps=4)


class Both(Reads):
    """An activation that autograd saved and that a rerun reads is changed, in a step that is already off its plan."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        v = torch.sin(h * 1.5)
        scaled = v * self.scale.mean(0)
        added = torch.addcmul(h, v, h.sigmoid(), value=0.3)
        out = scaled * torch.tanh(scaled.detach().roll(1, 0) * self.other.bias)
        if self.step >= FIRST:
            self.change(v)
        del added
        return out


@pytest.mark.parametrize("change", UNVERSIONED, ids=lambda door: door.__name__)
def test_what_autograd_saved_and_a_rerun_reads_changes(change: Callable[[Tensor], None]) -> None:
    assert_same_steps(lambda: Both(change), loss_of, num_steps=5)


class OnSameMemory(Reads):
    """A tensor gets another storage after autograd saved it, or another tensor that lies on the same memory."""

    def __init__(self, *, has_graph: bool, save: Callable[[Tensor], Tensor]) -> None:
        super().__init__(replaced)
        self.has_graph, self.save = has_graph, save
        self.weight = nn.Parameter(torch.randn(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.sin(self.one(x))
        with torch.set_grad_enabled(self.has_graph):
            t = torch.cos(h) * 2
        y = torch.tanh(self.save(t) * self.weight + h)
        if self.step >= FIRST:
            self.change(t)
        return y


SAVED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda t: t,
    "a view": lambda t: t.view_as(t),
    "detached": lambda t: t.detach(),
    "data": lambda t: t.data,
    "itself and a view": lambda t: t * t.view_as(t),
}


@pytest.mark.parametrize("has_graph", [True, False], ids=["with a graph", "without one"])
@pytest.mark.parametrize("save", SAVED.values(), ids=SAVED)
def test_only_what_was_saved_itself_follows_its_new_storage(save: Callable[[Tensor], Tensor], has_graph: bool) -> None:
    assert_same_steps(lambda: OnSameMemory(has_graph=has_graph, save=save), loss_of, num_steps=5)


def normed() -> nn.Module:
    """Its norm writes into repeated statistics that autograd saved, and no version counter moves."""
    return nn.Sequential(nn.Linear(32, 64), nn.Unflatten(1, (64, 1)), nn.InstanceNorm1d(64, track_running_stats=True))


def test_statistics_that_a_norm_overwrites_stay() -> None:
    def loss(model: nn.Module, step: int) -> Tensor:
        squares: Tensor = model[1](model[0](data(step, 64, 32))).expand(-1, -1, 8)  # type: ignore[index]
        normal: Tensor = model[2](squares * torch.arange(8.0))  # type: ignore[index]
        return normal.square().mean()

    assert_same_steps(normed, loss, num_steps=4)


class Noisy(Reads):
    """From some step on there is an op that saves its noise before it draws it."""

    def __init__(self, first: int) -> None:
        super().__init__(through_data)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h = nn.functional.rrelu(h, training=True) if self.step >= self.first else h
        return torch.tanh(self.other(h))


@pytest.mark.parametrize("first", [FIRST, LATER])
def test_noise_is_drawn_after_it_was_saved(first: int) -> None:
    assert_same_steps(lambda: Noisy(first), loss_of, num_steps=first + 3)


@pytest.mark.parametrize("change", UNVERSIONED, ids=lambda door: door.__name__)
def test_a_step_that_keeps_everything_looks_at_no_write(change: Callable[[Tensor], None]) -> None:
    def later(t: Tensor, model: Both) -> None:
        if model.step >= LATER:
            change(t)

    def made() -> nn.Module:
        model = Both(lambda t: later(t, model))
        return model

    assert_same_steps(made, loss_of, planners=("keep-all",), shares=(1.0,), num_steps=LATER + 3)


class Powers(Reads):
    """PyTorch computes `2 ** x` with an operator that writes, and gives it a number in the place of a tensor."""

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.other(2.0 ** torch.tanh(self.one(x)))
        return h + 0.1 ** h.abs().mean()


def powers(model: Any, step: int) -> Tensor:
    loss: Tensor = model(data(step, 64, 32)).square().sum()
    return loss


def test_a_number_to_the_power_of_a_tensor_in_steps_that_look_at_writes_only() -> None:
    assert_same_steps(lambda: Powers(through_data), powers, num_steps=LATER + 1)


class Random(Reads):
    """What it draws is saved, and is drawn again by reruns; the ops after it draw from the same generator."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.one(x))
        h = h * torch.rand_like(h) + torch.randn(h.shape) * h
        h = nn.functional.dropout(self.other(h), 0.3)
        return torch.tanh(h * torch.bernoulli(torch.full_like(h, 0.7)))


def test_what_is_drawn_again_is_the_same_and_later_ops_draw_what_they_would() -> None:
    assert_same_steps(lambda: Random(through_data), loss_of, num_steps=4)


@pytest.mark.parametrize("planner", ["recompute-all", "hybrid"])
def test_a_buffer_changes_between_a_step_and_its_late_backward(planner: str) -> None:
    """Nobody watches a storage between two steps: nothing that the first one saved is made again in the second."""

    def gradients(planner: str | None) -> list[Tensor]:
        torch.manual_seed(0)
        model, kept, found = Reads(through_data), list[Tensor](), list[Tensor]()
        ooc = limit(model, "100%", planner=planner) if planner else None
        for _ in range(8):
            if not kept:
                model.zero_grad()
            with ooc.step() if ooc is not None else nullcontext():
                loss = loss_of(model, 0)
                if kept:
                    (loss + kept.pop()).backward()
                    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
                else:
                    kept.append(loss)
            model.scale.untyped_storage().copy_((model.scale * 0.9).untyped_storage())
        if ooc is not None:
            ooc.close()
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert all(map(torch.equal, gradients(None), gradients(planner)))
