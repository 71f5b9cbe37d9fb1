"""Estimates the seconds of an op from its shapes: those of its computation or of its memory traffic, if they are
longer.

PyTorch knows the number of operations of products, convolutions and attention (`torch.utils.flop_counter`). All other
ops are assumed to be bound by memory: each tensor that is read or written is transferred once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from outcore.eager.fake_recorder import Seconds
from outcore.eager.signatures import tensors_in
from outcore.estimating.settings import ON_CPU, ON_CUDA, SETTINGS, KindCosts
from outcore.values import Machine, OpRates

_ATEN: Any = torch.ops.aten
_CONVOLUTIONS = (_ATEN.convolution, _ATEN._convolution, _ATEN.convolution_backward)
_UNFILLED = (_ATEN.empty, _ATEN.empty_like, _ATEN.empty_strided, _ATEN.new_empty, _ATEN.new_empty_strided)
_HALF = (torch.bfloat16, torch.float16)


def seconds_of_ops(machine: Machine, rates: OpRates) -> Seconds:
    """Returns a function of an op's arguments and result that gives two times in seconds: of the op, and of making its
    result again if a norm's statistics are available. Rates that were given are a vendor's peaks, of which ops reach a
    share.
    """
    is_given, kinds = "op_rates" in machine.given, ON_CUDA if machine.device.startswith("cuda") else ON_CPU
    flops_share = SETTINGS.reached_flops_share if is_given else 1.0
    memory_share = SETTINGS.reached_memory_share if is_given else 1.0

    def seconds(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> tuple[float, float]:
        if func.overloadpacket in _UNFILLED:
            return 0.0, 0.0
        made = tensors_in(result if isinstance(result, tuple) else (result,))
        tensors = {id(tensor): tensor for tensor in tensors_in((*args, *kwargs.values(), *made))}
        num_bytes = sum(map(_moved_bytes, tensors.values())) / memory_share
        kind_share, passes = _of_kind(kinds, func, args)
        num_operations = num_flops(func, args, kwargs, result) / (flops_share * kind_share)
        flops_per_s = _rate(rates, func, made)
        once, again = (rates.op_s(num_operations, flops_per_s, num_bytes * n) for n in (passes, 1.0))
        return once, again

    return seconds


def _of_kind(kinds: KindCosts, func: Any, args: Sequence[Any]) -> tuple[float, float]:
    """Returns the share of the rate of matrix products that the op reaches, and how many times it moves its bytes."""
    packet, name = func.overloadpacket, func.overloadpacket.__name__
    if packet in _CONVOLUTIONS:
        is_last = any(_has_channels_last(tensor) for tensor in args[:2])
        return kinds.channels_last_share if is_last else kinds.convolution_share, 1.0
    if "attention" in name:
        return kinds.attention_share, 1.0
    if torch.Tag.nondeterministic_seeded in func.tags:
        return 1.0, kinds.random_passes
    is_backward = "backward" in name
    if name.startswith(_NORMS):
        return 1.0, kinds.norm_backward_passes if is_backward else kinds.norm_passes
    if "pool" in name:
        return 1.0, kinds.pool_backward_passes if is_backward else kinds.pool_passes
    return 1.0, kinds.softmax_passes if "softmax" in name else 1.0


def _has_channels_last(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the layout of cuDNN's tensor core kernels; other layouts are converted there and back."""
    return tensor.dim() > 3 and not tensor.is_contiguous() and tensor.movedim(1, -1).is_contiguous()


_NORMS = ("native_batch_norm", "native_layer_norm", "native_group_norm", "_native_batch_norm", "cudnn_batch_norm")


def num_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Returns the number of floating point operations, or 0 for an op that is bound by memory."""
    packet = func.overloadpacket
    if packet in flop_counter.flop_registry:
        found = float(flop_counter.flop_registry[packet](*args, **kwargs, out_val=result))
    elif packet in _OWN:
        found = float(_OWN[packet](args))
    else:
        return 0.0
    return found / 2 if "attention" in packet.__name__ and _is_causal(func, args, kwargs) else found


def _is_causal(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the attention is causal: half of its scores are then not computed."""
    for at, argument in enumerate(func._schema.arguments):
        if argument.name == "is_causal":
            return bool(args[at] if at < len(args) else kwargs.get("is_causal", False))
    return False


def _attention(args: Sequence[Any]) -> int:
    return int(flop_counter.sdpa_flop_count(*(tensor.shape for tensor in args[:3])))


def _attention_backward(args: Sequence[Any]) -> int:
    return int(flop_counter.sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))


def _recurrent(args: Sequence[Any]) -> int:
    """Counts two products, with the input's and the hidden state's weight, for each element of each sequence."""
    inputs, weights = args[0], args[1:3]
    return int(2 * sum(weight.numel() for weight in weights) * (inputs.numel() // max(1, inputs.shape[-1])))


_OWN: dict[Any, Callable[[Sequence[Any]], int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda args: 2 * _recurrent(args),
}


def _moved_bytes(tensor: torch.Tensor) -> int:
    num_bytes = tensor.numel() * tensor.element_size()
    return min(num_bytes, tensor.untyped_storage().nbytes()) if tensor.layout is torch.strided else num_bytes


def _rate(rates: OpRates, func: Any, made: Sequence[torch.Tensor]) -> float:
    dtype = made[0].dtype if made else torch.float32
    if dtype in _HALF:
        return rates.half_flops_per_s
    if dtype is torch.float64:
        return rates.float64_flops_per_s
    is_convolution = func.overloadpacket in _CONVOLUTIONS
    uses_tf32 = torch.backends.cudnn.allow_tf32 if is_convolution else torch.get_float32_matmul_precision() != "highest"
    return rates.tf32_flops_per_s if uses_tf32 else rates.float32_flops_per_s
