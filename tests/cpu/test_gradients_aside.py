"""Small gradients moved to a place of their own: the same bits, and hands off what is not a fresh block."""

from __future__ import annotations

import torch
from torch import nn

from outcore.running.gradients import move_gradients_aside

CPU = torch.device("cpu")
GIB = 1 << 30


def trained(aside: bool, num_backwards: int = 1, budget_bytes: int = GIB) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 700), nn.ReLU(), nn.Linear(700, 8))
    if aside:
        move_gradients_aside(model.parameters(), budget_bytes, CPU, lambda: True)
    for _ in range(num_backwards):
        model(torch.randn(16, 600)).square().sum().backward()
    return model


def moved(model: nn.Module) -> list[bool]:
    return [hasattr(parameter.grad, "_outcore_aside") for parameter in model.parameters()]


def test_same_bits_whether_moved_or_not() -> None:
    for num_backwards in (1, 3):
        plain, aside = trained(False, num_backwards), trained(True, num_backwards)
        assert moved(aside) == [True, False, True, False, False, False]
        for one, other in zip(plain.parameters(), aside.parameters()):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
            assert one.grad.stride() == other.grad.stride()


def test_only_a_fiftieth_of_the_budget_is_moved() -> None:
    assert moved(trained(True, budget_bytes=100 * (1 << 20))) == [True] + [False] * 5


def test_a_gradient_somebody_placed_is_left_alone() -> None:
    model = nn.Linear(600, 600, bias=False)
    move_gradients_aside(model.parameters(), GIB, CPU, lambda: True)
    bucket = torch.zeros(2 * 600 * 600)
    model.weight.grad = bucket[: 600 * 600].view(600, 600)
    model(torch.randn(4, 600)).sum().backward()
    assert model.weight.grad.untyped_storage().data_ptr() == bucket.untyped_storage().data_ptr()
    assert bool(bucket[: 600 * 600].any())


def test_gradients_of_gradients_are_left_alone() -> None:
    model = nn.Linear(600, 600, bias=False)
    move_gradients_aside(model.parameters(), GIB, CPU, lambda: True)
    model(torch.randn(4, 600)).square().sum().backward(create_graph=True)
    assert model.weight.grad is not None
    assert model.weight.grad.grad_fn is not None


def test_nothing_happens_outside_a_step() -> None:
    model = nn.Linear(600, 600, bias=False)
    move_gradients_aside(model.parameters(), GIB, CPU, lambda: False)
    model(torch.randn(4, 600)).sum().backward()
    assert moved(model) == [False]
