"""Small gradients moved to a place of their own: the same bits, and hands off what this backward did not make."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn

from outcore.memory.gradient_pool import GradientPool, _own_stream

CPU = torch.device("cpu")
GIB = 1 << 30


class Watched(GradientPool):
    """Notes whose gradient was moved."""

    def __init__(self, model: nn.Module, budget_bytes: int = GIB) -> None:
        super().__init__(model.parameters(), budget_bytes, CPU)
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.moved: list[str] = []

    def _move(self, parameter: torch.Tensor) -> None:
        before = parameter.grad
        super()._move(parameter)
        if parameter.grad is not before:
            self.moved.append(self.names[id(parameter)])


def deep() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 8))


def gradients(model: nn.Module, pool: GradientPool | None, num_backwards: int) -> list[torch.Tensor]:
    if pool is not None:
        pool.begin()
    for _ in range(num_backwards):
        model(torch.randn(16, 600)).square().sum().backward()
    if pool is not None:
        pool.end()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def test_same_bits_whether_moved_or_not() -> None:
    for num_backwards in (1, 3):
        plain = gradients(deep(), None, num_backwards)
        model = deep()
        pool = Watched(model)
        found = gradients(model, pool, num_backwards)
        assert sorted(pool.moved) == ["0.weight", "2.weight"]  # once each, and nothing below a MiB
        for one, other in zip(plain, found, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()


def test_only_a_fiftieth_of_the_budget_is_moved() -> None:
    model = deep()
    pool = Watched(model, 100 * (1 << 20))
    gradients(model, pool, 1)
    assert pool.moved == ["0.weight"]


def test_a_gradient_that_was_there_before_stays_where_it_is() -> None:
    """The user may hold it: `zero_grad(set_to_none=False)` and a list of gradients of one's own."""
    model = deep()
    held = [torch.zeros_like(parameter) for parameter in model.parameters()]
    for parameter, grad in zip(model.parameters(), held):
        parameter.grad = grad
    pool = Watched(model)
    gradients(model, pool, 2)
    assert not pool.moved
    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), held))


def test_a_gradient_inside_a_bucket_is_left_alone() -> None:
    model = nn.Linear(600, 600, bias=False)
    pool = Watched(model)
    bucket = torch.zeros(2 * 600 * 600)

    def place(parameter: torch.Tensor) -> None:
        parameter.grad = bucket[: 600 * 600].view(600, 600)

    model.weight.register_hook(lambda grad: place(model.weight))
    pool.begin()
    model(torch.randn(4, 600)).sum().backward()
    assert not pool.moved
    assert bool(bucket.any())


def test_a_gradient_that_a_hook_of_somebody_else_took_is_left_alone() -> None:
    """A sum over ranks that the hook started ends after the backward, in the tensor the hook was given."""
    model = nn.Linear(600, 600, bias=False)
    taken: list[torch.Tensor] = []

    def take(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        taken.append(parameter.grad)

    model.weight.register_post_accumulate_grad_hook(take)
    pool = Watched(model)
    pool.begin()
    model(torch.randn(4, 600)).sum().backward()
    assert model.weight.grad is taken[0]


def test_gradients_of_gradients_are_left_alone() -> None:
    model = nn.Linear(600, 600, bias=False)
    pool = Watched(model)
    pool.begin()
    (grad,) = torch.autograd.grad(model(torch.randn(4, 600)).square().sum(), model.weight, create_graph=True)
    grad.square().sum().backward(create_graph=True)
    assert not pool.moved
    model.weight.grad = None


def test_nothing_happens_outside_a_step() -> None:
    model = deep()
    pool = Watched(model)
    pool.begin()
    pool.end()
    gradients(model, None, 1)
    assert not pool.moved


def test_a_backward_calls_no_python_before_a_step_that_pools_gradients() -> None:
    """And of two on one model the one that has nothing to do is not in the other's way: tuning has two."""
    model = deep()
    idle, pool = Watched(model), Watched(model)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
    gradients(model, pool, 1)
    assert sorted(pool.moved) == ["0.weight", "2.weight"]
    assert not idle.moved
    pool.remove()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_parameter_that_is_frozen_later_is_left_alone() -> None:
    model = deep()
    pool = Watched(model)
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is not model[2].weight)  # type: ignore[index]
    for _ in range(2):
        gradients(model, pool, 1)
        model.zero_grad()
    assert pool.moved == ["0.weight", "0.weight"]
    pool.remove()
    pool.begin()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_hooks_keep_nothing_alive() -> None:
    model = deep()
    pool = GradientPool(model.parameters(), GIB, CPU)
    gradients(model, pool, 1)
    gone = weakref.ref(model)
    del model, pool
    gc.collect()
    assert gone() is None


def test_without_room_for_it_a_gradient_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError

    model = deep()
    pool = Watched(model)
    monkeypatch.setattr(torch, "UntypedStorage", no_room)
    gradients(model, pool, 1)
    assert not pool.moved
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_nothing_is_pooled_where_memory_is_ordered_by_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cudaMallocAsync`: a block of one stream, used on another that did not wait, may still be somebody else's."""
    monkeypatch.setattr(torch.cuda, "get_allocator_backend", lambda: "cudaMallocAsync")
    assert _own_stream.__wrapped__(torch.device("cuda", 0), 0) is None
