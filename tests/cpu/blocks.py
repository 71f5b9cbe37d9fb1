"""Blocks whose ops are rerun in one pass, and blocks in which something stands in the way."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(6, 6, 3, padding=1) for _ in range(2))
        self.norm, self.last_norm = nn.BatchNorm2d(6), nn.BatchNorm2d(6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.relu_(self.norm(self.first(x)))
        y = self.last_norm(self.second(y))
        y += x
        return torch.relu_(y)


class NotInPlace(Block):
    """As most people write it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        y = self.last_norm(self.second(y)) + x
        return torch.relu(y)


class OtherWayRound(Block):
    """The norm is what is added."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        return torch.relu(x + self.last_norm(self.second(y)))


class IntoTheOther(Block):
    """The norm is added into something else."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm(self.first(x)))
        z: Tensor = torch.tanh(self.first(x)) * 1.5
        z += self.last_norm(self.second(y))
        return torch.relu_(z)


class TwoNorms(Block):
    """Both of what is added are norms."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last_norm(self.second(x))
        y += self.norm(self.first(x))
        return torch.relu_(y)


class Sums(Block):
    """No norm before them."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.first(x).add_(x))
        return torch.relu(self.second(y) + y)


class RootMeanSquare(nn.Module):
    """As in language models: a product that is cast for each of its readers."""

    num_casts = 3

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=torch.bfloat16) for _ in range(self.num_casts))

    def forward(self, x: Tensor) -> Tensor:
        normed = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        scaled = self.weight * normed
        out = x
        for layer in self.layers:
            out = out + layer(scaled.to(torch.bfloat16)).float()
        return out


class ReadWhole(RootMeanSquare):
    """Somebody reads the product as it is."""

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.weight * torch.tanh(x)
        out: Tensor = self.layers[0](scaled.to(torch.bfloat16)).float() + scaled
        return out


class CastElsewhere(RootMeanSquare):
    """Casts a part, asks for a layout, multiplies with a number, and with what does not lie in rows."""

    def forward(self, x: Tensor) -> Tensor:
        half = (self.weight * torch.tanh(x))[..., :4].to(torch.bfloat16).tanh()
        turned = (self.weight * torch.tanh(x)).to(torch.bfloat16, memory_format=torch.contiguous_format).tanh()
        twice = (torch.tanh(x) * 2.0).to(torch.bfloat16).tanh()
        other = (torch.tanh(x) * torch.tanh(x).transpose(1, 2).contiguous().transpose(1, 2)).to(torch.bfloat16).tanh()
        return x + (turned + twice + other).float() + half.float().mean()


class PartOfANorm(Block):
    """Rectifies some channels."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        torch.relu_(y[:, :2])
        out: Tensor = self.last_norm(self.second(y))
        return out


class PartOfASum(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        y += x
        torch.relu_(y[:, 3:])
        out: Tensor = self.last_norm(self.second(y))
        return out


class ReadTwice(Block):
    """Somebody else reads what is rectified afterwards."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        level = y.mean()
        out: Tensor = self.second(torch.relu_(y)) * level
        return out


class Scaled(Block):
    """The sum is no plain one."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(x).add_(self.first(x), alpha=0.5)
        out: Tensor = self.norm(torch.relu_(y))
        return out


class PlusOne(Block):
    """A number is added, and no tensor."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(torch.relu(self.second(x) + 1.0))
        return out


class Wide(Block):
    """One number is added to a whole channel."""

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(x).add_(self.first(x).mean((2, 3), keepdim=True))
        out: Tensor = self.norm(torch.relu_(y))
        return out


class Fickle(Block):
    """Does not always rectify."""

    rectifies = True

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.first(x))
        y = torch.relu_(y) if self.rectifies else torch.tanh_(y)
        out: Tensor = self.last_norm(self.second(y))
        return out + x
