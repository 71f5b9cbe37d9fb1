"""One gradient at home, its norms and what it is still to be multiplied with: Gradient.

Clipping asks for the norm of every gradient and then multiplies all of them with one number. At home both would read
and write every byte over the bus. So a norm that the last step asked for is taken while the gradient is still on the
device, and a multiplication is noted and done when the gradient is on the device next. The functions are the caller's,
each called with one gradient: their results do not depend on which gradients they are called with together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outcore.memory.tensors import below_everything, is_plain, unseen
from outcore.state.watched import is_held, is_watched, num_users, unwatch, watch
from outcore.state.window import Item, Window

Norm = tuple[Any, tuple[Any, ...], tuple[tuple[str, Any], ...]]  # function, and its arguments but the gradients
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
MOST_NORMS = 2  # that are taken ahead: of the functions that asked last
_GRADIENT = "_outcore_gradient"


class Gradient(Item):
    """The gradient of a parameter. At home, `shown` is what others see of it."""

    __slots__ = ("made", "norms", "scalings", "shown", "wanted", "was_touched")

    def __init__(self, window: Window, home: torch.Tensor, wanted: dict[Norm, None]) -> None:
        super().__init__(window, home)
        self.shown = home.detach()
        self.shown.__dict__[_GRADIENT] = self
        self.made: torch.Tensor | None = None  # what the backward made, as others see it while it is on its way home
        self.wanted = wanted  # the norms that steps ask for, of all gradients
        self.norms: dict[Norm, torch.Tensor] = {}  # of what is at home
        self.scalings: list[Scaling] = []  # that what is at home is still to be given
        self.was_touched = False  # since it was made: somebody may have changed it

    def is_held(self, num_own: int) -> bool:
        """Whether somebody, besides `num_own` whom we know, holds the gradient at home or a view of it."""
        return is_held(self.shown, num_own) or num_users(self.shown) > 2  # the item's and the one shown

    def renew(self, new: torch.Tensor) -> None:
        """`new`, on the device, is sent home. If somebody touches it on its way, and may change it, it is theirs and
        stays on the device."""
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
        """Others see it from here on."""
        watch(self.shown, self._on_touch, on_call)

    def _on_touch(self) -> None:
        """Somebody looks at it, or writes into it: it is made what it is shown as, and an ordinary tensor."""
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
        """Gives a copy of it, or of a span of it, the scalings that it is still to be given."""
        with below_everything():
            for func, args, kwargs in self.scalings:
                func([tensor] if func in OF_MANY else tensor, *args, **kwargs)

    def norm(self, norm: Norm) -> torch.Tensor:
        if norm not in self.norms:
            was_here = self.here is not None
            data = self.arrive()
            with below_everything():
                self.scale(data)  # nobody reads this copy before it goes
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
    """Whose content a watched tensor shows."""
    found = tensor.__dict__.get(_GRADIENT) if is_watched(tensor) else None
    return found if isinstance(found, Gradient) else None


def on_call(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a call with gradients at home, if it is one of those that need not bring them."""
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
    """A number, or a tensor of one number."""
    if isinstance(arg, torch.Tensor):
        return not is_watched(arg) and arg.numel() == 1 and arg.dim() == 0
    return arg is None or isinstance(arg, int | float | torch.dtype)


def _as_now(arg: Any) -> Any:
    return arg.detach().clone() if isinstance(arg, torch.Tensor) else arg


def _is_like(tensor: Any, first: torch.Tensor) -> bool:
    """Functions for many tensors take another way for all of them where one is no plain tensor of the same type."""
    return isinstance(tensor, torch.Tensor) and is_plain(tensor) and tensor.dtype == first.dtype
