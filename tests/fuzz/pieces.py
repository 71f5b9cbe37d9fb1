"""What generated programs call by name: custom functions, a custom op, a tensor subclass.

Each stands alone below its imports: a program printed as a script carries the source of those that it names.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Square(torch.autograd.Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return 2 * x * grads[0]


class Tanh(torch.autograd.Function):
    """Saves its output, through setup_context."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grads[0] * (1 - y * y)


class SavesBetween(torch.autograd.Function):
    """Saves what is neither input nor output, and does not differentiate its second output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(x)
        mask = x > 0
        ctx.save_for_backward(s, mask)
        ctx.mark_non_differentiable(mask)
        ctx.set_materialize_grads(False)
        return x * s, mask

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        s, mask = ctx.saved_tensors
        return grads[0] * s + grads[0] * mask * 0.1


class Dirty(torch.autograd.Function):
    """Changes its input in place and saves it afterwards."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.tanh_()
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return grads[0] * (1 - y.square())


class ReturnsSaved(torch.autograd.Function):
    """The gradient of `p` is the tensor that was saved, itself: as losses do that differentiate in their forward."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return (p * g).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


class PassesSaved(torch.autograd.Function):
    """The gradient of an activation is the tensor that was saved, itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, g: Tensor) -> Tensor:
        ctx.save_for_backward(g)
        return x * g

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (g,) = ctx.saved_tensors
        return g, grads[0] * 0.5


class OnContext(torch.autograd.Function):
    """Keeps a tensor as an attribute, where saved-tensor hooks do not see it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Any:
        ctx.y = torch.sin(x)
        return x + ctx.y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0] * (1 + ctx.y)


class InNumpy(torch.autograd.Function):
    """Computes without any op of PyTorch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.from_numpy(x.detach().numpy() * 0.75)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return torch.from_numpy(grads[0].numpy() * 0.75) + 0 * x


class Reruns(torch.autograd.Function):
    """Checkpointing by hand: the backward runs the forward again with gradients enabled."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return torch.tanh(x @ w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
        with torch.enable_grad():
            y = torch.tanh(x @ w)
        return torch.autograd.grad(y, (x, w), grads[0])


class WritesSaved(torch.autograd.Function):
    """The backward changes what it gets in place: the gradient it saved for itself, and a copy of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        own = torch.cos(x)
        ctx.save_for_backward(own)
        return torch.sin(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (own,) = ctx.saved_tensors
        return own.mul_(grads[0])


class Labeled(torch.Tensor):
    """A tensor subclass without behaviour of its own."""


class Attention(nn.Module):
    """Self-attention over groups of eight rows."""

    def __init__(self, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(width, 3 * width), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x.reshape(-1, 1, 8, x.shape[1])).chunk(3, -1)
        y: Tensor = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return y.reshape(-1, x.shape[1])


def _define() -> None:
    """A custom op, and one that changes its argument, registered once per process."""

    @torch.library.custom_op("outcore_fuzz::bent", mutates_args=())
    def bent(x: Tensor) -> Tensor:
        return torch.tanh(x) * 1.5

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    def back(ctx: Any, grad: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 1.5 * (1 - torch.tanh(x) ** 2)

    bent.register_autograd(back, setup_context=keep)

    @torch.library.custom_op("outcore_fuzz::count_", mutates_args=("into",))
    def count_(into: Tensor, x: Tensor) -> None:
        into.add_(x.mean(0), alpha=0.01)


if not hasattr(torch.ops.outcore_fuzz, "bent"):
    _define()
