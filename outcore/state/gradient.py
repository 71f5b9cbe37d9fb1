"""One gradient at home, with its norms and the scalings that are still to be applied.

Gradient clipping computes the norm of every gradient and then multiplies all of them by one number. At home both would
read and write every byte over the bus. Therefore a norm that the last step asked for is computed while the gradient is
still on the device, and a multiplication is recorded and applied when the gradient is on the device next. Both call the
user's function with one gradient at a time, whose result does not depend on the other gradients of the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.memory.tensors import below_everything, is_plain, unseen
from outcore.state.watched import is_held, is_watched, num_users, unwatch, watch
from outcore.state.window import Item, Window

Norm = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]  # function, and its arguments without the gradients
Scaling = tuple[Any, tuple[Any, ...], dict[str, Any]]

_Base: Any = torch.Tensor
OF_MANY: tuple[Any, ...] = (
    torch._foreach_norm,
    torch._foreach_mul_,
    torch._foreach_clamp_min_,
    torch._foreach_clamp_max_,
)
NORMS = frozenset((torch._foreach_norm, torch.linalg.vector_norm))
SCALINGS = frozenset((*OF_MANY[1:], _Base.mul_, _Base.clamp_))
MOST_NORMS = 2  # norms computed in advance, of the most recent requests
_GRADIENT = "_outcore_gradient"


class Gradient(Item):
    """The gradient of a parameter. `shown` is the visible tensor at home."""

    __slots__ = ("made", "norms", "scalings", "shown", "wanted", "was_touched")

    def __init__(self, window: Window, home: torch.Tensor, wanted: dict[Norm, None]) -> None:
        super().__init__(window, home)
        self.shown = home.detach()
        self.shown.__dict__[_GRADIENT] = self
        self.made: torch.Tensor | None = None  # the tensor that the backward made, visible until it is home
        self.wanted = wanted  # the norms that steps ask for, of all gradients
        self.norms: dict[Norm, torch.Tensor] = {}  # norms of the gradient at home
        self.scalings: list[Scaling] = []  # still to be applied to the gradient at home
        self.was_touched = False  # whether it was accessed, and perhaps changed, since it was made

    def is_held(self, num_own: int) -> bool:
        """Whether anybody besides `num_own` known references holds the gradient at home or a view of it."""
        return is_held(self.shown, num_own) or num_users(self.shown) > 2  # those of the item and of `shown`

    def renew(self, new: torch.Tensor) -> None:
        """Starts to send a new gradient on the device home. If it is accessed meanwhile, and perhaps changed, it stays
        on the device."""
        if self.here is None:
            self.window.make_room(self.num_bytes)
            self.hold(new.detach())
        self.scalings.clear()
        self.was_touched = False
        self.norms = {norm: _norm_of(norm, new) for norm in self.wanted}
        self.made = new
        watch(new, self._stay)

    def _stay(self) -> None:
        self.was_touched = True
        self.let_go_of_made()
        self.window.call_back(self)

    def let_go_of_made(self) -> None:
        if self.made is not None:
            unwatch(self.made)
            self.made = None

    def watch(self) -> None:
        """Makes accesses to the visible gradient call `_on_touch`."""
        watch(self.shown, self._on_touch, on_call)

    def _on_touch(self) -> None:
        """Applies pending scalings, because the gradient is read or written, and makes it an ordinary tensor."""
        unwatch(self.shown)
        self.was_touched = True
        self.norms.clear()
        if self.scalings:
            with torch.inference_mode(False), unseen():
                self.scale(self.arrive())
                self.scalings.clear()
                self.send()
                self.finish()
                self.drop()

    def scale(self, tensor: torch.Tensor) -> None:
        """Applies the pending scalings to a copy of the gradient, or of a span of it."""
        with below_everything():
            for func, args, kwargs in self.scalings:
                func([tensor] if func in OF_MANY else tensor, *args, **kwargs)

    def norm(self, norm: Norm) -> torch.Tensor:
        if norm not in self.norms:
            was_here = self.here is not None
            data = self.arrive()
            with below_everything():
                self.scale(data)  # this copy is released without being read
                self.norms[norm] = _norm_of(norm, data)
            if not was_here or self.scalings:
                self.drop()
        self.wanted.pop(norm, None)
        self.wanted[norm] = None
        while len(self.wanted) > MOST_NORMS:
            del self.wanted[next(iter(self.wanted))]
        return self.norms[norm].clone()


def _norm_of(norm: Norm, tensor: torch.Tensor) -> torch.Tensor:
    func, args, kwargs = norm
    with below_everything():
        if func in OF_MANY:
            return func([tensor], *args, **dict(kwargs))[0]  # type: ignore[no-any-return]
        return func(tensor, *args, **dict(kwargs))  # type: ignore[no-any-return]


def gradient_of(tensor: Any) -> Gradient | None:
    """Returns the gradient whose content a watched tensor shows."""
    found = tensor.__dict__.get(_GRADIENT) if is_watched(tensor) else None
    return found if isinstance(found, Gradient) else None


def on_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Returns the result of a call with gradients at home if it need not bring them; otherwise NotImplemented."""
    if func not in NORMS and func not in SCALINGS:
        return NotImplemented
    if not args or not all(_is_setting(arg) for arg in (*args[1:], *kwargs.values())):
        return NotImplemented
    tensors = list(args[0]) if func in OF_MANY else [args[0]]
    gradients = [gradient_of(tensor) for tensor in tensors]
    others = [tensor for tensor, gradient in zip(tensors, gradients) if gradient is None]
    if any(is_watched(other) or not _is_like(other, tensors[0]) for other in others):
        return NotImplemented
    if func in NORMS:
        return _norms(func, args, kwargs, gradients, others)
    if others:
        func(others if func in OF_MANY else others[0], *args[1:], **kwargs)
    settings = [_as_now(arg) for arg in args[1:]], {name: _as_now(arg) for name, arg in kwargs.items()}
    for gradient in gradients:
        if gradient is not None:
            gradient.norms.clear()
            gradient.scalings.append((func, tuple(settings[0]), settings[1]))
    return None if func in OF_MANY else args[0]


def _norms(
    func: Any, args: Sequence[Any], kwargs: dict[str, Any], gradients: list[Gradient | None], others: list[torch.Tensor]
) -> Any:
    norm: Norm = func, tuple(args[1:]), tuple(sorted(kwargs.items()))
    try:
        hash(norm)
    except TypeError:
        return NotImplemented
    rest = iter(func(others, *args[1:], **kwargs) if others and func in OF_MANY else ())
    with torch.inference_mode(False):
        found = [next(rest) if gradient is None else gradient.norm(norm) for gradient in gradients]
    return found if func in OF_MANY else found[0]


def _is_setting(arg: Any) -> bool:
    """Whether an argument is a number, or a tensor of one number."""
    if isinstance(arg, torch.Tensor):
        return not is_watched(arg) and arg.numel() == 1 and arg.dim() == 0
    return arg is None or isinstance(arg, int | float | torch.dtype)


def _as_now(arg: Any) -> Any:
    return arg.detach().clone() if isinstance(arg, torch.Tensor) else arg


def _is_like(tensor: Any, first: torch.Tensor) -> bool:
    """Whether a tensor is plain and of the same dtype; otherwise functions for many tensors use another code path."""

    return isinstance(tensor, torch.Tensor) and is_plain(tensor) and tensor.dtype == first.dtype
