"""A compiled graph's source as plain data.

Inductor writes straight-line Python for each graph: allocate, launch, delete, return. Here this is a list of *launches*
on *buffers*. A launch is one call of a kernel, of a library or of an operator; a buffer is one storage that the graph
receives, allocates, or gets as the result of a launch. Names in the source are views of buffers.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import Literal

import torch


class UnknownStatement(Exception):
    """The source has a statement that its reader does not know; the graph then runs as it was compiled."""


@dataclass(frozen=True)
class View:
    """A name in the source: a buffer seen through a chain of `reinterpret_tensor` calls."""

    buffer: int
    steps: tuple[tuple[ast.expr, ...], ...] = ()  # the arguments of each call after the tensor

    def on(self, base: str) -> ast.expr:
        """Returns the expression for this view if the whole buffer has the name `base`."""
        found: ast.expr = ast.Name(base, ast.Load())
        for arguments in self.steps:
            function = ast.Name("reinterpret_tensor", ast.Load())
            found = ast.Call(function, [found, *(copy.deepcopy(argument) for argument in arguments)], [])
        return found


@dataclass
class Buffer:
    """One storage of the graph."""

    origin: Literal["input", "allocated", "result"]
    name: str  # in the source, for messages
    allocation: ast.expr | None = None  # the call that allocates it
    like: int = -1  # the buffer whose dtype and perhaps shape it has, if they are known only when it runs
    first: int = -1  # the first launch that uses it; -1: none yet
    last: int = -1
    written_by: int = -1  # the last launch that writes it
    holds: bool = False  # it was written, or it is an input or a result

    @property
    def num_bytes(self) -> int | None:
        """The buffer's size if the source gives it in numbers; otherwise None."""
        if not isinstance(self.allocation, ast.Call) or len(self.allocation.args) < 3:
            return None
        try:
            sizes, strides = (ast.literal_eval(argument) for argument in self.allocation.args[:2])
        except ValueError:
            return None
        dtype = getattr(torch, getattr(self.allocation.args[2], "attr", ""), None)
        if not isinstance(dtype, torch.dtype):
            return None
        reach = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides))
        return 0 if 0 in sizes else int(reach * dtype.itemsize)


@dataclass
class Launch:
    """One call. A rerun of it reads `reads`, and makes `fresh` and the next versions of `overwrites`."""

    number: int
    name: str  # of the kernel or operator
    call: ast.expr
    views: dict[str, View] = field(default_factory=dict)  # tensors in the call by name
    reads: list[int] = field(default_factory=list)  # buffers, including those it overwrites
    fresh: list[int] = field(default_factory=list)  # buffers that it writes first
    overwrites: list[int] = field(default_factory=list)  # buffers whose content it changes, except inputs
    changes: list[int] = field(default_factory=list)  # inputs of the graph that it writes into
    results: dict[int | None, int] = field(
        default_factory=dict
    )  # place in the tuple it returns (None: no tuple) -> buffer
    is_kernel: bool = False  # generated code, whose result does not depend on switches of the process
    is_pure: bool = False  # generated code or a library call with bitwise reproducible results
    is_random: bool = False  # draws from a random generator
    operator: str = ""  # the path of the called PyTorch operator, `aten.max_pool2d_with_indices.default`
    is_product: bool = False  # a matrix product or convolution
    scalars: tuple[str, ...] = ()  # names of numbers in the call and in its allocations


@dataclass
class Program:
    """The launches and buffers in a graph's source."""

    inputs: list[str]
    buffers: list[Buffer]
    launches: list[Launch]
    outputs: list[ast.expr | View]
    input_buffers: dict[str, int]  # inputs that are tensors
    guard: str = ""  # the context manager around the launches, `torch.cuda._DeviceGuard(0)`
    setup: list[ast.stmt] = field(default_factory=list)  # statements at the beginning of the guarded part
    streams: dict[str, ast.expr] = field(default_factory=dict)  # name -> the call that returns the stream
    numbers: dict[int, list[ast.stmt]] = field(default_factory=dict)  # by launch: statements before it
    aligned: list[str] = field(default_factory=list)  # inputs that the source copies if they are misaligned

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(launch.name for launch in self.launches)
