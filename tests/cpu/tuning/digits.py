"""What the tuning tests train: scikit-learn's digits, a small net."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from outcore.elastic.digits import Digits, load_digits


def digits() -> Digits:
    return load_digits(None)


def small_net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))


def draws(data: Digits, batch: int, num_batches: int, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches drawn with replacement: the data set itself is then the distribution, and its moments are exact."""
    chance = torch.Generator().manual_seed(seed)
    for _ in range(num_batches):
        rows = torch.randint(len(data.train_labels), (batch,), generator=chance)
        yield data.train_images[rows], data.train_labels[rows]


def exact_moments(net: nn.Module, data: Digits) -> tuple[float, float]:
    """|G|^2 and tr(Sigma) from the gradient of every single sample."""
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, weights, (x[None],)), y[None])

    rows = vmap(grad(loss), (None, 0, 0))(weights, data.train_images, data.train_labels)
    flat = torch.cat([part.flatten(1) for part in rows.values()], 1).double()
    mean = flat.mean(0)
    return float(mean.square().sum()), float((flat - mean).square().sum(1).mean())


def train(net: nn.Module, data: Digits, num_steps: int, batch: int = 64, lr: float = 0.1) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for x, y in draws(data, batch, num_steps, seed=7):
        optimizer.zero_grad()
        F.cross_entropy(net(x), y).backward()
        optimizer.step()
