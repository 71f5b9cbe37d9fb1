"""What the process is set to that changes what a kernel computes: the library, the precision, the order of sums.

An op that is run again must find these as they were, or its bits are others: `with torch.backends.cudnn.flags(...)`
around a part of a forward is over when its backward begins. So what ran under other switches than its step began with
is never made again, and a rerun under others than the op had is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

_GETTERS = {  # of torch._C: what they tell
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
    """A sum on the CPU is made in as many parts. Where there is a GPU its thread of autograd's counts its own."""
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
ASKED = tuple(_ASKED.values())  # functions, in the order of what `switches` tells

Switches = tuple[Any, ...]


def switches(*, few: bool = False) -> Switches:
    """As they are now; `few`: the first three, which are all that an op that works number by number or row by row may
    depend on."""
    return (_get_dtype(), _uses_mkldnn(), _num_threads()) if few else tuple([ask() for ask in ASKED])


def changed(before: Switches, now: Switches) -> str:
    """The first that differs, and how; nothing, if all that `now` tells is as before."""
    if before[: len(now)] == now:
        return ""
    found = ((name, was, is_now) for name, was, is_now in zip(_ASKED, before, now) if was != is_now)
    return next((f"{name} was {was} and is {is_now}" for name, was, is_now in found), "")
