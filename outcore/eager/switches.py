"""Process-wide settings that change what a kernel computes: the library, the precision, the order of sums.

A rerun under other settings would give other bits: `with torch.backends.cudnn.flags(...)` around a part of a forward
has ended when its backward begins. So an op that ran under other switches than its step began with is never recomputed,
and a rerun under other switches than the op's raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_GETTERS = {  # functions of torch._C, and the settings that they return
    "_get_mkldnn_enabled": "torch.backends.mkldnn.enabled",
    "_get_mkldnn_deterministic": "torch.backends.mkldnn.deterministic",
    "_get_nnpack_enabled": "torch.backends.nnpack.enabled",
    "_get_cpu_allow_fp16_reduced_precision_reduction": "the reduced precision of fp16 products on the CPU",
    "_get_linalg_preferred_backend": "the preferred library of linear algebra",
    "_get_deterministic_algorithms": "torch.use_deterministic_algorithms",
    "_get_cudnn_enabled": "torch.backends.cudnn.enabled",
    "_get_cudnn_benchmark": "torch.backends.cudnn.benchmark",
    "_get_cudnn_deterministic": "torch.backends.cudnn.deterministic",
    "_get_cublas_allow_fp16_reduced_precision_reduction": "the reduced precision of fp16 products",
    "_get_cublas_allow_bf16_reduced_precision_reduction": "the reduced precision of bf16 products",
    "_get_cublas_allow_fp16_accumulation": "the accumulation of fp16 products",
    "_get_blas_preferred_backend": "the preferred BLAS library",
}
_KINDS = tuple((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("matmul", "conv", "rnn"))

_get_dtype, _uses_mkldnn = torch.get_default_dtype, torch._C._get_mkldnn_enabled


def _num_threads() -> int:
    """Returns the number of parts of a sum on the CPU. With CUDA, autograd's threads have counts of their own."""
    return 0 if torch.cuda.is_initialized() else torch.get_num_threads()


_ASKED: dict[str, Callable[[], Any]] = {
    "the default dtype": _get_dtype,
    _GETTERS["_get_mkldnn_enabled"]: _uses_mkldnn,
    "torch.get_num_threads()": _num_threads,
}
_ASKED |= {name: getattr(torch._C, getter) for getter, name in _GETTERS.items() if hasattr(torch._C, getter)}
if hasattr(torch._C, "_get_fp32_precision_getter"):
    _ASKED |= {
        f"the fp32 precision of {kind} ({backend})": partial(torch._C._get_fp32_precision_getter, backend, kind)
        for backend, kind in _KINDS
    }
ASKED = tuple(_ASKED.values())  # functions, in the order of the values of `switches`

Switches = tuple[Any, ...]


def switches(*, few: bool = False) -> Switches:
    """Returns the present settings. `few`: only the first three, which are all that elementwise and rowwise ops depend
    on."""
    return (_get_dtype(), _uses_mkldnn(), _num_threads()) if few else tuple([ask() for ask in ASKED])


def changed(before: Switches, now: Switches) -> str:
    """Returns the first difference in words; "" if all values of `now` are as before."""

    if before[: len(now)] == now:
        return ""
    found = ((name, was, is_now) for name, was, is_now in zip(_ASKED, before, now) if was != is_now)
    return next((f"{name} was {was} and is {is_now}" for name, was, is_now in found), "")
