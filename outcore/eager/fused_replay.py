"""Several ops of a rerun as one pass over memory, on CUDA, where Triton is: a norm, a sum, or both, rectified; a
product, cast.

Such ops only wait for memory, and each reads what the one before it wrote. Triton comes with PyTorch's wheels for CUDA;
where it is missing or finds no compiler, nothing is fused. The same bits: batch normalisation fused with what rectifies
it is compared on all elements of the recorded step and on drawn weights, like a norm replay; a sum or a product is
rounded once whoever makes it, and a sample with every odd number in it is compared once for each type of number.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from outcore.eager.cells import View

TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TILE = 1024  # elements of one program
_MOST_TILES, _MOST_ROWS = 65535, 2**31 - _TILE  # a grid's second side; what a whole number of 32 bits counts


def normalise(
    source: torch.Tensor, numbers: Sequence[Any], *, folded: bool, plus: Any = None, rectified: bool
) -> torch.Tensor | None:
    """Batch normalisation from weight, bias, mean and deviation. Folded: weight and deviation are multiplied first.
    None: not for these tensors."""
    if not source.numel() or not is_ready(source.device, source.dtype):
        return None
    if plus is not None and not lie_alike(source, plus):
        return None
    if not all(isinstance(one, torch.Tensor) and one.dtype is torch.float32 and one.is_contiguous() for one in numbers):
        return None
    matrix = _as_matrix(source)
    if matrix is None:
        return None
    num_rows, num_columns, last = matrix
    made = torch.empty_like(source)
    other = source if plus is None else plus  # where nothing is added it is not read
    given = (source, other, made, *numbers, num_rows, num_columns, source.shape[1])
    how = {"LAST": last, "FOLDED": folded, "ADDED": plus is not None, "RECTIFIED": rectified}
    signed = _keeps_minus_zero(source.device, source.dtype)
    return made if _launch_tiles("normalise", num_rows, num_columns, given, **how, SIGNED=signed) else None


def is_folded(func: Any, source: torch.Tensor) -> bool:
    """cuDNN multiplies weight and deviation first where channels lie last: another number, often."""
    return func is torch.ops.aten.cudnn_batch_norm.default and not source.is_contiguous()


def multiply(one: Any, other: Any, between: torch.dtype, like: View) -> torch.Tensor | None:
    """The product, rounded to one type and then to that of `like`, which says how it lies. None: not for these."""
    factors = as_factors(one, other)
    if factors is None or torch.promote_types(one.dtype, other.dtype) is not between:
        return None
    one, other = factors
    if one.shape != like.size or one.stride() != like.stride:
        return None
    if not multiplies_alike(one.device, one.dtype, other.dtype, like.dtype):
        return None
    made = torch.empty_like(one, dtype=like.dtype)
    return made if _multiply(one, other, made, between) else None


def as_factors(one: Any, other: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """A tensor whose rows lie one after the other, and one like it, one row, or a column. None: they are not."""
    for first, second in ((one, other), (other, one)):
        if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor) and _kind_of(first, second):
            return first, second
    return None


def _kind_of(one: torch.Tensor, other: torch.Tensor) -> str:
    if not (one.is_contiguous() and other.is_contiguous() and one.numel() and one.dim() and other.dim()):
        return ""
    if other.device != one.device:
        return ""
    if other.shape == one.shape:
        return "whole"
    if other.numel() == other.shape[-1] == one.shape[-1] and other.dim() <= one.dim():
        return "row"
    return "column" if other.shape == (*one.shape[:-1], 1) else ""


def _multiply(one: torch.Tensor, other: torch.Tensor, made: torch.Tensor, between: torch.dtype) -> bool:
    num_columns = one.shape[-1]
    num_rows = one.numel() // num_columns
    how = {"OTHER": _kind_of(one, other), "BETWEEN": str(between).removeprefix("torch.")}
    return _launch_tiles("multiply", num_rows, num_columns, (one, other, made, num_rows, num_columns), **how)


def _launch_tiles(name: str, num_rows: int, num_columns: int, given: Sequence[Any], **constants: Any) -> bool:
    columns = min(_TILE, 1 << (num_columns - 1).bit_length())
    grid = (-(-num_rows * columns // _TILE), -(-num_columns // columns))
    if grid[1] > _MOST_TILES or num_rows > _MOST_ROWS:
        return False
    return _launch(name, grid, given, **constants, ROWS=_TILE // columns, COLUMNS=columns)


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
    grid, signed = (-(-one.numel() // _TILE),), _keeps_minus_zero(one.device, one.dtype)
    return _launch("add_and_rectify", grid, (one, other, made, one.numel()), TILE=_TILE, SIGNED=signed)


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
    one, other = (numbers.to(device, dtype) for numbers in _sample())
    wanted, made = one.clone().add_(other).relu_(), torch.empty_like(one)
    return _add(one, other, made) and _is_same(made, wanted)


def multiplies_alike(device: torch.device, one: torch.dtype, other: torch.dtype, made: torch.dtype) -> bool:
    """Do kernels multiply numbers of two types, and cast the product to a third, like PyTorch's own?"""
    return _multiplies_alike(device, (*sorted((one, other), key=str), made))


@cache
def _multiplies_alike(device: torch.device, types: tuple[torch.dtype, ...]) -> bool:
    if not all(is_ready(device, dtype) for dtype in types):
        return False
    one, other = (numbers.to(device, dtype) for numbers, dtype in zip(_sample(), types))
    product, made = one * other, torch.empty_like(one, dtype=types[2])
    return _multiply(one, other, made, product.dtype) and _is_same(made, product.to(types[2]))


@cache
def adds_to_norms_alike(device: torch.device, dtype: torch.dtype, folded: bool) -> bool:
    """Does a kernel that adds something to a norm and rectifies it do what one after the other does? Asked once."""
    if not is_ready(device, dtype):
        return False
    orders = (torch.channels_last,) if folded else (torch.contiguous_format, torch.channels_last)
    for order in orders:
        numbers = torch.linspace(-3, 3, 4 * 6 * 10 * 10, device=device).reshape(4, 6, 10, 10)
        source, plus = (one.to(dtype).contiguous(memory_format=order) for one in (numbers, numbers.cos()))
        row = torch.arange(1, 7, device=device, dtype=torch.float32)
        given = row.sin(), row.cos(), row.sin().square(), row.cos().abs() + 0.5
        alone = normalise(source, given, folded=folded, rectified=False)
        made = normalise(source, given, folded=folded, plus=plus, rectified=True)
        if alone is None or made is None or not _is_same(made, alone.add_(plus).relu_()):
            return False
    return True


def _sample() -> tuple[torch.Tensor, torch.Tensor]:
    """Ordinary numbers, zeros of both signs, tiny and huge ones, and what is no number, each with each."""
    tiny, huge = [1e-45, -1e-45, 1e-39, 1e-38, 1e-20, 6e-8, -3e-4], [3e38, -3e38, 1e20, 6e4, torch.inf, -torch.inf]
    odd = torch.tensor([0.0, -0.0, 1.0, -1.0, torch.nan, *tiny, *huge])
    steps = torch.linspace(-3, 3, 1999)
    one, other = torch.cartesian_prod(odd, odd).T
    return torch.cat((one, steps)), torch.cat((other, steps.cos()))


def _is_same(made: torch.Tensor, wanted: torch.Tensor) -> bool:
    """What is no number may be any."""
    numbers = ~wanted.isnan()
    return torch.equal(made.isnan(), ~numbers) and not bool(differ(made[numbers], wanted[numbers]))


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
        from outcore.eager import kernels

        with torch.cuda.device_of(given[0]):
            getattr(kernels, name)[grid](*given, **constants)
    except Exception:  # Triton is missing, has no compiler, or knows no device like this one
        return False
    return True
