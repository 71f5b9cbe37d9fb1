"""Runs several ops of a rerun as one pass over memory with Triton on CUDA: a norm, a sum, or both, with a rectifier; or
a product with a cast.

Such ops are bound by memory, and each reads the previous one's result. Triton comes with PyTorch's wheels for CUDA; if
it is missing or finds no compiler, nothing is fused. The bits are the same: batch normalisation with a rectifier is
compared on all elements of the recorded step and with drawn weights, like a norm replay. A sum or a product is rounded
once in any implementation, and is compared once per dtype on a sample of special values.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from outcore.eager.cells import View
from outcore.eager.settings import EAGER
from outcore.memory.device_kind import kind_of

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = EAGER.tile
_MOST_TILES, _MOST_ROWS = (1 << 16) - 1, (1 << 31) - _TILE  # the limits of CUDA's grid and of 32-bit integers


def normalise(
    source: torch.Tensor, numbers: Sequence[Any], *, folded: bool, plus: Any = None, rectified: bool
) -> torch.Tensor | None:
    """Computes batch normalisation from weight, bias, mean and deviation. `folded`: weight and deviation are multiplied
    first. Returns None if the tensors are not supported."""
    if not source.numel() or not is_ready(source.device, source.dtype):
        return None
    if plus is not None and not lie_alike(source, plus):
        return None
    if not all(
        isinstance(number, torch.Tensor) and number.dtype is torch.float32 and number.is_contiguous()
        for number in numbers
    ):
        return None
    matrix = _as_matrix(source)
    if matrix is None:
        return None
    num_rows, num_columns, last = matrix
    out = torch.empty_like(source)
    right = source if plus is None else plus  # not read if nothing is added
    given = (source, right, out, *numbers, num_rows, num_columns, source.shape[1])
    how = {"LAST": last, "FOLDED": folded, "ADDED": plus is not None, "RECTIFIED": rectified}
    signed = _keeps_minus_zero(source.device, source.dtype)
    return out if _launch_tiles("normalise", num_rows, num_columns, given, **how, SIGNED=signed) else None


def is_folded(func: Any, source: torch.Tensor) -> bool:
    """Whether cuDNN multiplies weight and deviation first, as it does with channels last; results may then differ."""
    return func is torch.ops.aten.cudnn_batch_norm.default and not source.is_contiguous()


def multiply(left: Any, right: Any, between: torch.dtype, like: View) -> torch.Tensor | None:
    """Returns the product, rounded to `between` and then to the dtype of `like`, with its layout; None if
    unsupported."""
    factors = as_factors(left, right)
    if factors is None or torch.promote_types(left.dtype, right.dtype) is not between:
        return None
    left, right = factors
    if left.shape != like.size or left.stride() != like.stride:
        return None
    if not multiplies_alike(left.device, left.dtype, right.dtype, like.dtype):
        return None
    out = torch.empty_like(left, dtype=like.dtype)
    return out if multiply_into(left, right, out, between) else None


def as_factors(left: Any, right: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Returns a contiguous tensor, and one of the same shape, a row, or a column; None if they are something else."""
    for first, second in ((left, right), (right, left)):
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and _kind_of(first, second):
            return first, second
    return None


def _kind_of(left: torch.Tensor, right: torch.Tensor) -> str:
    if not (left.is_contiguous() and right.is_contiguous() and left.numel() and left.dim() and right.dim()):
        return ""
    if right.device != left.device:
        return ""
    if right.shape == left.shape:
        return "whole"
    if right.numel() == right.shape[-1] == left.shape[-1] and right.dim() <= left.dim():
        return "row"
    return "column" if right.shape == (*left.shape[:-1], 1) else ""


def multiply_into(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, between: torch.dtype) -> bool:
    num_columns = left.shape[-1]
    num_rows = left.numel() // num_columns
    how = {"OTHER": _kind_of(left, right), "BETWEEN": str(between).removeprefix("torch.")}
    return _launch_tiles("multiply", num_rows, num_columns, (left, right, out, num_rows, num_columns), **how)


def _launch_tiles(name: str, num_rows: int, num_columns: int, given: Sequence[Any], **constants: Any) -> bool:
    columns = min(_TILE, 1 << (num_columns - 1).bit_length())
    grid = (-(-num_rows * columns // _TILE), -(-num_columns // columns))
    if grid[1] > _MOST_TILES or num_rows > _MOST_ROWS:
        return False
    return _launch(name, grid, given, **constants, ROWS=_TILE // columns, COLUMNS=columns)


def add_relu(left: torch.Tensor, right: Any, *, in_place: bool) -> torch.Tensor | None:
    """Returns the rectified sum, in a new tensor or in the first one; None, without any effect, if unsupported."""
    if not can_add(left, right):
        return None
    out = left if in_place else torch.empty_like(left)
    return out if _add(left, right, out) else None


def can_add(left: torch.Tensor, right: Any) -> bool:
    return lie_alike(left, right) and is_ready(left.device, left.dtype)


def lie_alike(left: torch.Tensor, right: Any) -> bool:
    """Whether two tensors have the same dense layout, so that they can be added in the order of memory."""
    return (
        isinstance(right, torch.Tensor)
        and right.dtype is left.dtype
        and right.device == left.device
        and right.shape == left.shape
        and right.stride() == left.stride()
        and left.numel() > 0
        and _is_dense(left)
    )


def _add(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> bool:
    grid, signed = (-(-left.numel() // _TILE),), _keeps_minus_zero(left.device, left.dtype)
    return _launch("add_and_rectify", grid, (left, right, out, left.numel()), TILE=_TILE, SIGNED=signed)


def _as_matrix(source: torch.Tensor) -> tuple[int, int, bool] | None:
    """Returns rows, columns, and whether columns are the channels; otherwise the rows are, repeatedly."""
    num_channels = source.shape[1]
    if source.is_contiguous() and source.dim() > 2:
        num_rows = source.shape[0] * num_channels
        return num_rows, source.numel() // num_rows, False
    if _is_dense(source):
        return source.numel() // num_channels, num_channels, True
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    wanted = formats.get(tensor.dim())
    return tensor.is_contiguous() or (wanted is not None and tensor.is_contiguous(memory_format=wanted))


@cache
def is_ready(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for this device that add such numbers like PyTorch's own. Tested once."""
    return kind_of(device).has_kernels and dtype in TYPES and _adds_alike(device, dtype)


def _adds_alike(device: torch.device, dtype: torch.dtype) -> bool:
    left, right = (numbers.to(device, dtype) for numbers in _sample())
    wanted, out = left.clone().add_(right).relu_(), torch.empty_like(left)
    return _add(left, right, out) and _is_same(out, wanted)


def multiplies_alike(device: torch.device, left: torch.dtype, right: torch.dtype, out: torch.dtype) -> bool:
    """Whether kernels multiply two dtypes, and cast the product to a third, like PyTorch's own."""
    return _multiplies_alike(device, (*sorted((left, right), key=str), out))


@cache
def _multiplies_alike(device: torch.device, types: tuple[torch.dtype, ...]) -> bool:
    if not all(is_ready(device, dtype) for dtype in types):
        return False
    left, right = (numbers.to(device, dtype) for numbers, dtype in zip(_sample(), types))
    product, out = left * right, torch.empty_like(left, dtype=types[2])
    return multiply_into(left, right, out, product.dtype) and _is_same(out, product.to(types[2]))


@cache
def adds_to_norms_alike(device: torch.device, dtype: torch.dtype, folded: bool) -> bool:
    """Whether the fused kernel of norm, sum and rectifier gives the same result as one after the other. Tested once."""
    if not is_ready(device, dtype):
        return False
    orders = (torch.channels_last,) if folded else (torch.contiguous_format, torch.channels_last)
    for order in orders:
        numbers = torch.linspace(-3, 3, 4 * 6 * 10 * 10, device=device).reshape(4, 6, 10, 10)
        source, plus = (left.to(dtype).contiguous(memory_format=order) for left in (numbers, numbers.cos()))
        row = torch.arange(1, 7, device=device, dtype=torch.float32)
        given = row.sin(), row.cos(), row.sin().square(), row.cos().abs() + 0.5
        alone = normalise(source, given, folded=folded, rectified=False)
        out = normalise(source, given, folded=folded, plus=plus, rectified=True)
        if alone is None or out is None or not _is_same(out, alone.add_(plus).relu_()):
            return False
    return True


def _sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Returns pairs of ordinary numbers, zeros of both signs, subnormal and huge numbers, infinities and NaN."""
    tiny, huge = [1e-45, -1e-45, 1e-39, 1e-38, 1e-20, 6e-8, -3e-4], [3e38, -3e38, 1e20, 6e4, torch.inf, -torch.inf]
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.nan, *tiny, *huge])
    steps = torch.linspace(-3, 3, EAGER.num_probes)
    left, right = torch.cartesian_prod(odd, odd).T
    return torch.cat((left, steps)), torch.cat((right, steps.cos()))


def _is_same(out: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether results are equal; any NaN equals any other."""
    numbers = ~wanted.isnan()
    return torch.equal(out.isnan(), ~numbers) and not bool(differ(out[numbers], wanted[numbers]))


@cache
def _keeps_minus_zero(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch's rectifier keeps negative zeros; the CPU's does."""
    return bool(torch.full((1,), -0.0, device=device, dtype=dtype).relu_().signbit())


def differ(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Returns whether any bit differs, as a tensor that is not synchronized."""
    whole = torch.int32 if left.element_size() == 4 else torch.int16
    return (left.view(whole) != right.view(whole)).any()


def _launch(name: str, grid: tuple[int, ...], given: Sequence[Any], **constants: Any) -> bool:
    """Launches a kernel; returns False, without any effect, if it cannot be run."""
    try:
        from outcore.eager import kernels

        with torch.cuda.device_of(given[0]):
            getattr(kernels, name)[grid](*given, **constants)
    except Exception:  # Triton is missing, has no compiler, or knows no device like this one
        return False
    return True
