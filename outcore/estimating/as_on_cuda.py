"""Makes a step that is estimated on a machine without a GPU behave as on CUDA.

PyTorch chooses kernels, and the effect of autocast, by the device of the tensors. Fake tensors cannot be on a device
that this build of PyTorch does not support, so without a GPU they are on the CPU, whatever device a script names. Four
things that determine what a step saves are then done as on CUDA: `torch.autocast("cuda")` is on; it runs norms,
softmax, losses and similar ops in float32; dropout saves a boolean mask; attention with dropout is one fused op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

# Ops that autocast runs in float32 on CUDA ("CUDA Ops that can autocast to float32" in PyTorch's documentation).
_NAMES = (
    "acos asin binary_cross_entropy_with_logits cdist cosh cosine_embedding_loss cosine_similarity cumprod cumsum dist "
    "erfinv exp expm1 group_norm hinge_embedding_loss kl_div l1_loss layer_norm log log10 log1p log2 log_softmax "
    "logsumexp margin_ranking_loss mse_loss native_layer_norm nll_loss norm pdist poisson_nll_loss pow prod reciprocal "
    "renorm rms_norm rsqrt sinh smooth_l1_loss soft_margin_loss softmax softplus sum tan triplet_margin_loss"
)
_FLOAT32 = frozenset(_NAMES.split())
_HALF = (torch.bfloat16, torch.float16)


@contextmanager
def as_on_cuda() -> Iterator[None]:
    """A context in which a step on fake CPU tensors does these four things as on CUDA."""
    with ExitStack() as undo:
        undo.enter_context(patch.object(F, "scaled_dot_product_attention", _attention(F.scaled_dot_product_attention)))
        undo.enter_context(patch.object(F, "dropout", _dropout(F.dropout)))
        library = torch.library.Library("aten", "IMPL")
        undo.callback(library._destroy)
        for name in _cast_on_cuda_alone():
            library.impl(name.removeprefix("aten::"), _in_float32(_op(name)), "AutocastCPU")
        yield


@contextmanager
def cuda_is_cpu() -> Iterator[None]:
    """A context in which, on a machine without a GPU, CUDA devices of a script become the CPU, and
    `torch.autocast("cuda")`, which PyTorch disables there, becomes the CPU's autocast."""
    if torch.cuda.is_available():
        yield
        return
    own: Callable[..., None] = torch.autocast.__init__

    def init(self: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        own(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    with patch.object(torch.autocast, "__init__", init), _NoGpu():
        yield


class _NoGpu(TorchFunctionMode):
    """Replaces every CUDA device that a call names by the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map(_cpu_for_cuda, (args, kwargs or {}))
        return func(*args, **kwargs)


def _cpu_for_cuda(leaf: Any) -> Any:
    is_cuda = isinstance(leaf, torch.device) and leaf.type == "cuda"
    return "cpu" if is_cuda or (isinstance(leaf, str) and leaf.partition(":")[0] == "cuda") else leaf


def _cast_on_cuda_alone() -> set[str]:
    """Returns the names of the overloads that autocast runs in float32 on CUDA but not on the CPU."""
    on_cuda, on_cpu = (
        set(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in ("AutocastCUDA", "AutocastCPU")
    )
    return {name for name in on_cuda - on_cpu if name.removeprefix("aten::").partition(".")[0] in _FLOAT32}


def _op(name: str) -> Any:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _in_float32(op: Any) -> Callable[..., Any]:
    """Returns a kernel for autocast's dispatch key. Real tensors, of other threads, are not cast."""
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            args, kwargs = tree_map(_as_float32, (args, kwargs))
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*args, **kwargs)

    return kernel


def _as_float32(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF else leaf


def _attention(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Removes dropout: CUDA's kernels apply it inside, while the CPU would materialize and save the scores."""

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        return own(query, key, value, attn_mask, 0.0, *args, **kwargs)

    return attention


def _dropout(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def dropout(input: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
        if training and not inplace and 0.0 < p < 1.0:
            return torch.native_dropout(input, p, True)[0]
        return own(input, p, training, inplace)

    return dropout
