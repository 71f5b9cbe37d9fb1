"""Two ops of a rerun as one pass over memory: normalise and rectify, add and rectify. On CUDA, where Triton is.

Such ops only wait for memory, and the second reads what the first wrote. PyTorch's wheels for CUDA bring Triton along;
where it is missing or finds no compiler, nothing is fused. The same bits: batch normalisation fused with what
rectifies it is compared on every element of the recorded step and on weights drawn for it, like its twin; a sum is
rounded once whoever makes it, and a sample with every odd number in it is compared once for each type of number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 1024  # elements of one program
_MOST_TILES, _MOST_ROWS = 65535, 2**31 - _TILE  # a grid's second side; what a whole number of 32 bits counts


def normalise(source: torch.Tensor, numbers: Sequence[Any], *, folded: bool, rectified: bool) -> torch.Tensor | None:
    """Batch normalisation from weight, bias, mean and deviation. Folded: weight and deviation are multiplied first.
    None: not for these tensors."""
    if not source.numel() or not is_ready(source.device, source.dtype):
        return None
    if not all(isinstance(one, torch.Tensor) and one.dtype is torch.float32 and one.is_contiguous() for one in numbers):
        return None
    matrix = _as_matrix(source)
    if matrix is None:
        return None
    num_rows, num_columns, last = matrix
    columns = min(_TILE, 1 << (num_columns - 1).bit_length())
    grid = (-(-num_rows * columns // _TILE), -(-num_columns // columns))
    if grid[1] > _MOST_TILES or num_rows > _MOST_ROWS:
        return None
    made = torch.empty_like(source)
    given = (source, made, *numbers, num_rows, num_columns, source.shape[1])
    how = {"LAST": last, "ROWS": _TILE // columns, "COLUMNS": columns, "FOLDED": folded, "RECTIFIED": rectified}
    return made if _launch("normalise", grid, given, **how) else None


def add_relu(one: torch.Tensor, other: Any, *, in_place: bool) -> torch.Tensor | None:
    """The sum, rectified, in a tensor of its own or in the first one. None: not for these, and nothing was done."""
    if not can_add(one, other):
        return None
    made = one if in_place else torch.empty_like(one)
    return made if _add(one, other, made) else None


def can_add(one: torch.Tensor, other: Any) -> bool:
    return lie_alike(one, other) and is_ready(one.device, one.dtype)


def lie_alike(one: torch.Tensor, other: Any) -> bool:
    """Two tensors that can be added element by element, in the order in which they lie?"""
    return (
        isinstance(other, torch.Tensor)
        and other.dtype is one.dtype
        and other.device == one.device
        and other.shape == one.shape
        and other.stride() == one.stride()
        and one.numel() > 0
        and _is_dense(one)
    )


def _add(one: torch.Tensor, other: torch.Tensor, made: torch.Tensor) -> bool:
    grid = (-(-one.numel() // _TILE),)
    return _launch("add_and_rectify", grid, (one, other, made, one.numel()), TILE=_TILE)


def _as_matrix(source: torch.Tensor) -> tuple[int, int, bool] | None:
    """Rows, columns, and whether columns are the channels; else rows are, over and over."""
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
    """Are there kernels for this device, and do they add such numbers like PyTorch's own? Asked once."""
    return device.type == "cuda" and torch.version.hip is None and dtype in TYPES and _adds_alike(device, dtype)


def _adds_alike(device: torch.device, dtype: torch.dtype) -> bool:
    """On ordinary numbers, zeros of both signs, tiny and huge ones, and what is no number."""
    odd = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, 1.0, -1.0])
    steps = torch.linspace(-3, 3, 1999)
    ends = torch.cartesian_prod(odd, odd).T
    one, other = (torch.cat(both).to(device, dtype) for both in zip(ends, (steps, steps.cos())))
    wanted, made = one.clone().add_(other).relu_(), torch.empty_like(one)
    did, numbers = _add(one, other, made), ~wanted.isnan()
    return did and torch.equal(made.isnan(), ~numbers) and not bool(differ(made[numbers], wanted[numbers]))


@cache
def _keeps_minus_zero(device: torch.device, dtype: torch.dtype) -> bool:
    """Does PyTorch's own rectifying? A CPU's does."""
    return bool(torch.full((1,), -0.0, device=device, dtype=dtype).relu_().signbit())


def differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Does any bit of them? Not waited for."""
    whole = torch.int32 if one.element_size() == 4 else torch.int16
    return (one.view(whole) != other.view(whole)).any()


def _launch(name: str, grid: tuple[int, ...], given: Sequence[Any], **constants: Any) -> bool:
    """False: it could not be run, and nothing was done."""
    try:
        from outcore.running import kernels

        first: torch.Tensor = given[0]
        with torch.cuda.device_of(first):
            signed = _keeps_minus_zero(first.device, first.dtype)
            getattr(kernels, name)[grid](*given, **constants, SIGNED=signed)
    except Exception:  # Triton is missing, has no compiler, or knows no device like this one
        return False
    return True
