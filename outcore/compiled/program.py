"""What a compiled graph does, as plain data: Program.

Inductor writes one straight line of Python per graph: allocate, launch, delete, return. Here that line is a list of
*launches* on *buffers*. A launch is one call of a kernel, of a library or of an operator; a buffer is one storage that
the graph is given, allocates, or gets as the result of a launch. Names in the text are views of buffers.
"""

from __future__ import annotations

import ast
import copy
from dataclasses import dataclass, field
from typing import Literal

import torch


class UnknownStatement(Exception):
    """The text has something that its reader does not know: the graph runs as it was compiled."""


@dataclass(frozen=True)
class View:
    """A name in the text: a buffer, seen through a chain of `reinterpret_tensor` calls."""

    buffer: int
    steps: tuple[tuple[ast.expr, ...], ...] = ()  # per call its arguments after the tensor

    def on(self, base: str) -> ast.expr:
        """The expression for this view where the whole buffer has the name `base`."""
        found: ast.expr = ast.Name(base, ast.Load())
        for arguments in self.steps:
            function = ast.Name("reinterpret_tensor", ast.Load())
            found = ast.Call(function, [found, *(copy.deepcopy(argument) for argument in arguments)], [])
        return found


@dataclass
class Buffer:
    """One storage of the graph."""

    origin: Literal["input", "allocated", "result"]
    name: str  # in the text, for messages
    allocation: ast.expr | None = None  # the call that allocates it
    like: int = -1  # the buffer whose type, or type and shape, it takes, where only the run knows them
    first: int = -1  # the first launch that uses it; -1: none yet
    last: int = -1
    written_by: int = -1  # the last launch that writes it
    holds: bool = False  # something was written into it, or it is an input or a result

    @property
    def num_bytes(self) -> int | None:
        """Where the text says it in numbers."""
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
    """One call. A rerun of it needs `reads`, and makes `fresh` and the next versions of `overwrites`."""

    number: int
    name: str  # of the kernel or operator
    call: ast.expr
    views: dict[str, View] = field(default_factory=dict)  # names of tensors in the call, as they are bound there
    reads: list[int] = field(default_factory=list)  # buffers, those it overwrites included
    fresh: list[int] = field(default_factory=list)  # buffers that it writes first
    overwrites: list[int] = field(default_factory=list)  # buffers whose content it changes, inputs not included
    changes: list[int] = field(default_factory=list)  # inputs of the graph that it writes into
    results: dict[int | None, int] = field(
        default_factory=dict
    )  # place in the tuple it returns (None: no tuple) -> buffer
    is_kernel: bool = False  # generated code: no switch of the process changes what it computes
    is_pure: bool = False  # generated code or a library call that gives the same bits from the same bytes
    is_random: bool = False  # it draws from a generator
    operator: str = ""  # the path of the PyTorch operator that is called, `aten.max_pool2d_with_indices.default`
    is_product: bool = False  # a matrix product or convolution
    scalars: tuple[str, ...] = ()  # names of numbers in the call and in what it allocates


@dataclass
class Program:
    """A graph's text, read."""

    inputs: list[str]
    buffers: list[Buffer]
    launches: list[Launch]
    outputs: list[ast.expr | View]
    input_buffers: dict[str, int]  # inputs that are tensors
    guard: str = ""  # the context manager around the launches, `torch.cuda._DeviceGuard(0)`
    setup: list[ast.stmt] = field(default_factory=list)  # statements with which the guarded part begins
    streams: dict[str, ast.expr] = field(default_factory=dict)  # name -> the call that finds the stream
    numbers: dict[int, list[ast.stmt]] = field(default_factory=dict)  # launch before which numbers are computed -> how
    aligned: list[str] = field(default_factory=list)  # inputs that the text itself copies where they lie askew

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(launch.name for launch in self.launches)
