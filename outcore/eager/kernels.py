"""The Triton kernels of fused_replay.py. Without Triton this file cannot be imported."""
# mypy: ignore-errors

import triton
from triton import language as tl


@triton.jit
def rectified(number, SIGNED: tl.constexpr):
    """What is no number stays what it is; SIGNED: and so does a zero below zero."""
    if SIGNED:
        result = tl.where(number < 0, 0.0, number)
    else:
        result = tl.where((number > 0) | (number != number), number, 0.0)
    return result


@triton.jit(do_not_specialize=["num_rows", "num_channels"])
def normalise(
    source, other, made, weight, bias, mean, deviation, num_rows, num_columns, num_channels,
    LAST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    FOLDED: tl.constexpr, ADDED: tl.constexpr, RECTIFIED: tl.constexpr, SIGNED: tl.constexpr,
):  # fmt: skip
    """A tile of a matrix whose columns are channels (LAST), or whose rows are, over and over. FOLDED: weight and
    deviation are multiplied first. ADDED: the other one is, to what was rounded."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    if LAST:
        channel, known = column, column < num_columns
    else:
        channel, known = row % num_channels, row < num_rows
    place = row.to(tl.int64) * num_columns + column
    shifted = tl.load(source + place, mask=inside).to(tl.float32) - tl.load(mean + channel, mask=known)
    scale, shift = tl.load(weight + channel, mask=known), tl.load(bias + channel, mask=known)
    if FOLDED:
        number = tl.fma(shifted, scale * tl.load(deviation + channel, mask=known), shift)
    else:
        number = tl.fma(scale * shifted, tl.load(deviation + channel, mask=known), shift)
    if ADDED:
        number = number.to(made.dtype.element_ty).to(tl.float32) + tl.load(other + place, mask=inside).to(tl.float32)
    if RECTIFIED:
        number = rectified(number.to(made.dtype.element_ty).to(tl.float32), SIGNED)
    tl.store(made + place, number, mask=inside)


@triton.jit
def add_and_rectify(one, other, made, num, TILE: tl.constexpr, SIGNED: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = place < num
    number = tl.load(one + place, mask=inside).to(tl.float32) + tl.load(other + place, mask=inside).to(tl.float32)
    number = number.to(made.dtype.element_ty).to(tl.float32)
    tl.store(made + place, rectified(number, SIGNED), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def multiply(
    one, other, made, num_rows, num_columns,
    OTHER: tl.constexpr, BETWEEN: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of a matrix, with a whole other one, one row or one column. BETWEEN: the type of the product."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < num_rows) & (column < num_columns)
    place = row.to(tl.int64) * num_columns + column
    if OTHER == "whole":
        factor = tl.load(other + place, mask=inside)
    elif OTHER == "row":
        factor = tl.load(other + column, mask=column < num_columns)
    else:
        factor = tl.load(other + row, mask=row < num_rows)
    number = tl.load(one + place, mask=inside).to(tl.float32) * factor.to(tl.float32)
    if BETWEEN == "bfloat16":
        number = number.to(tl.bfloat16).to(tl.float32)
    elif BETWEEN == "float16":
        number = number.to(tl.float16).to(tl.float32)
    tl.store(made + place, number, mask=inside)
