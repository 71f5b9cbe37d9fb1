"""An op's shapes + OpRates -> its seconds: what it computes or what it moves, whichever takes longer.

PyTorch knows how many operations products, convolutions and attention take (`torch.utils.flop_counter`). Everything
else is taken to be bound by memory: each tensor that is read or made goes over the bus once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import flop_counter

from outcore.eager.signatures import tensors_in
from outcore.estimating.settings import SETTINGS
from outcore.values import Machine, OpRates

_CONVOLUTIONS = (torch.ops.aten.convolution, torch.ops.aten._convolution, torch.ops.aten.convolution_backward)
_HALF = (torch.bfloat16, torch.float16)


def seconds_of_ops(machine: Machine, rates: OpRates) -> Callable[[Any, Sequence[Any], dict[str, Any], Any], float]:
    """The function that tells the seconds of an op from its arguments and its result. Rates that were given are a
    vendor's peaks, of which real ops reach a share."""
    is_given = "op_rates" in machine.given
    flops_share = SETTINGS.reached_flops_share if is_given else 1.0
    memory_share = SETTINGS.reached_memory_share if is_given else 1.0

    def seconds(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
        made = tensors_in(result if isinstance(result, tuple) else (result,))
        tensors = {id(tensor): tensor for tensor in tensors_in((*args, *kwargs.values(), *made))}
        num_bytes = sum(map(_moved_bytes, tensors.values()))
        flops_per_s = _rate(rates, func, made)
        return rates.op_s(num_flops(func, args, kwargs, result) / flops_share, flops_per_s, num_bytes / memory_share)

    return seconds


def num_flops(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> float:
    """Floating point operations; 0 for what is bound by memory."""
    packet = func.overloadpacket
    if packet in flop_counter.flop_registry:
        return float(flop_counter.flop_registry[packet](*args, **kwargs, out_val=result))
    if packet in _OWN:
        return float(_OWN[packet](args))
    return 0.0


def _attention(args: Sequence[Any]) -> int:
    return int(flop_counter.sdpa_flop_count(*(tensor.shape for tensor in args[:3])))


def _attention_backward(args: Sequence[Any]) -> int:
    return int(flop_counter.sdpa_backward_flop_count(*(tensor.shape for tensor in args[:4])))


def _recurrent(args: Sequence[Any]) -> int:
    """A step of every sequence multiplies with both weights."""
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
