"""Contents of integer and boolean tensors in a step on fake tensors, as far as they are known.

A step may read a small tensor: whether a mask hides anything, or whether positions restart within a row. Its content
follows from known values (a range, a constant, the user's own batch), so the same ops run on these values beside the
fake ones. Floating point and random numbers stay unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from outcore.eager.settings import EAGER
from outcore.eager.signatures import outputs_of

_CONTENT, _WRITTEN = "_outcore_content", "_outcore_written"


def content_of(leaf: Any) -> torch.Tensor | None:
    """Returns the content of a fake tensor; None if it is unknown, as after a write into it."""
    if not isinstance(leaf, FakeTensor) or _WRITTEN in leaf.untyped_storage().__dict__:
        return None
    found: torch.Tensor | None = leaf.__dict__.get(_CONTENT)
    return found


def know_content(fake: torch.Tensor, real: torch.Tensor) -> None:
    """Sets the content of `fake` to that of `real`, a tensor of the user."""
    if _is_followed(real) and not real.is_meta and not isinstance(real, FakeTensor):
        with _disable_current_modes():
            fake.__dict__[_CONTENT] = real.detach().to("cpu", copy=True)


def follow_contents(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
    """Called after an op on fake tensors: runs it on their contents, too, if all of them are known."""
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    for written in outputs_of(func, args, kwargs, result)[1]:
        written.untyped_storage().__dict__[_WRITTEN] = True
    if not made or torch.Tag.nondeterministic_seeded in func.tags or not all(map(_is_followed, made)):
        return
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if any(content_of(leaf) is None for leaf in leaves) or any(leaf is one for leaf in leaves for one in made):
        return
    on_cpu = kwargs | ({"device": torch.device("cpu")} if kwargs.get("device") is not None else {})
    with _disable_current_modes(), torch.no_grad():
        known_args, known_kwargs = tree_map(_content_or_itself, (args, on_cpu))
        found = func(*known_args, **known_kwargs)
    for fake, real in zip(made, (leaf for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)), strict=True):
        fake.__dict__[_CONTENT] = real


def _content_or_itself(leaf: Any) -> Any:
    return leaf if (content := content_of(leaf)) is None else content


def _is_followed(tensor: torch.Tensor) -> bool:
    is_counted = not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)
    return is_counted and tensor.layout is torch.strided and tensor.numel() <= EAGER.most_known_elements
