"""Writes the Python functions that run a program launch by launch and report to the step.

The statements are Inductor's own; only the names differ (`_b3` is the whole buffer 3). Between them the functions call

- `_run.pack(buffer)` when a value that the backward needs is complete, and `_run.token(...)` for the tensor that
autograd
  saves in its place;
- `_run.hold(buffer)` when a small value is complete that reruns of large ones start from and that autograd does not
save:
  seeds of random numbers, statistics;
- `_run.open(input)` before the first launch that uses an input which may be such a token, `_run.own(input)` before a
  launch that overwrites one;
- `_run.before(...)` and `_run.after(...)` around the launches whose numbers are in `_busy`.

A buffer is allocated before the first launch that uses it and deleted after the last. For each launch there is also a
function that runs it again from the values it read.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outcore.compiled.program import Launch, Program, View
from outcore.compiled.settings import COMPILED

SMALL_BYTES, SMALL_PART = COMPILED.small_bytes, COMPILED.small_part
Rerun = Callable[
    [Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[Any]], tuple[tuple[Any, ...], tuple[Any, ...]]
]


@dataclass(frozen=True)
class Functions:
    """The compiled functions of a program."""

    call: Callable[[list[Any], Any, Collection[int]], tuple[Any, ...]]
    reruns: tuple[Rerun, ...]
    text: str


def write(
    program: Program,
    namespace: Mapping[str, Any],
    *,
    saved: Collection[int] = (),
    stays: Collection[int] = (),
    opens: bool = False,
    reruns: bool = False,
) -> Functions:
    """Returns the functions of a program, whose names are looked up in `namespace`.

    `saved` are the outputs that autograd saves; an input among them that is also in `stays` is returned unchanged. With
    `opens`, inputs may be tokens. With `reruns`, every launch can be run again.
    """
    writer = _Writer(program, saved, stays, opens=opens)
    found: list[ast.stmt] = [writer.call()]
    if reruns:
        found += [writer.rerun(launch) for launch in program.launches]
    module = ast.fix_missing_locations(ast.Module(found, []))
    text = ast.unparse(module)
    names = {**namespace, "_like": _like}
    exec(compile(text, "<outcore: a compiled graph>", "exec"), names)
    again = tuple(names[f"rerun_{launch.number}"] for launch in program.launches) if reruns else ()
    return Functions(names["call"], again, text)


def _like(kind: tuple[Any, ...], *sizes: Any) -> torch.Tensor:
    """Allocates a buffer that Inductor would place in the memory of an input or a result."""
    size, stride, dtype, device = kind
    size, stride = sizes or (size, stride)
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


class _Names(ast.NodeTransformer):
    """Replaces the source's names by views of buffers."""

    def __init__(self, views: Mapping[str, View]) -> None:
        self.views = views

    def visit_Name(self, node: ast.Name) -> ast.expr:
        view = self.views.get(node.id)
        return node if view is None else view.on(f"_b{view.buffer}")


class _Writer:
    def __init__(self, program: Program, saved: Collection[int], stays: Collection[int], *, opens: bool) -> None:
        self.program, self.opens = program, opens
        buffers = program.buffers
        self.tokens = {
            place: view
            for place, view in enumerate(program.outputs)
            if isinstance(view, View) and place in saved and view.buffer not in stays
        }
        self.returned = {
            view.buffer
            for place, view in enumerate(program.outputs)
            if isinstance(view, View) and place not in self.tokens
        }
        self.packs: dict[int, list[int]] = {}  # launch -> the saved buffers that are complete after it
        for number in dict.fromkeys(view.buffer for view in self.tokens.values()):
            self.packs.setdefault(buffers[number].written_by, []).append(number)
        self.holds: dict[int, list[int]] = {}
        for number in self._small_sources() if saved else ():
            self.holds.setdefault(buffers[number].written_by, []).append(number)
        self.kinds = {buffer.like for buffer in buffers if buffer.like >= 0}  # buffers whose dtypes are needed later
        self.born: dict[int, list[int]] = {}
        self.dying: dict[int, list[int]] = {}
        for number, buffer in enumerate(buffers):
            if buffer.origin == "allocated" and buffer.first >= 0:
                self.born.setdefault(buffer.first, []).append(number)
            if number not in self.returned and (buffer.last >= 0 or buffer.origin == "input"):
                self.dying.setdefault(buffer.last, []).append(number)
        self.first_uses: dict[int, list[int]] = {}
        for number in program.input_buffers.values():
            first = buffers[number].first
            self.first_uses.setdefault(first if first >= 0 else len(program.launches), []).append(number)

    def _small_sources(self) -> list[int]:
        """Returns small buffers that a rerun of a large one reads: random seeds, and small results."""
        buffers, launches = self.program.buffers, self.program.launches
        saved = {view.buffer for view in self.tokens.values()}
        found: dict[int, None] = {}
        for launch in launches:
            written = [buffers[number].num_bytes for number in (*launch.fresh, *launch.overwrites)]
            largest_bytes = max((SMALL_BYTES * SMALL_PART if size is None else size for size in written), default=0)
            for number in launch.reads:
                buffer = buffers[number]
                size, made_before = buffer.num_bytes, 0 <= buffer.written_by < launch.number
                if size is None or size > SMALL_BYTES or not made_before or number in saved:
                    continue
                if launches[buffer.written_by].is_random or SMALL_PART * size <= largest_bytes:
                    found[number] = None
        return list(found)

    # --- the whole graph

    def call(self) -> ast.FunctionDef:
        program = self.program
        own = [f"_b{program.input_buffers[name]}" if name in program.input_buffers else name for name in program.inputs]
        head = _parse(f"{', '.join(own)}, = args" if own else "") + _parse("args.clear()")
        body = [*copy.deepcopy(program.setup), *self._streams(list(program.streams))]
        if not self.opens:
            body += self._align(program.input_buffers.values())
            body += self._kinds(program.input_buffers.values())
        body += [*self._pack(-1), *self._delete(-1)]
        for launch in program.launches:
            body += self._launch(launch)
        body += copy.deepcopy(program.numbers.get(len(program.launches), []))
        if self.opens:
            body += self._open(len(program.launches))
        elements = [self._output(place, output) for place, output in enumerate(program.outputs)]
        body.append(ast.Return(ast.Tuple(elements, ast.Load())))
        if program.guard:
            guard = ast.parse(program.guard, mode="eval").body
            body = [ast.With([ast.withitem(guard)], body)]
        return _function("call", ["args", "_run", "_busy"], [*head, *body])

    def _launch(self, launch: Launch) -> list[ast.stmt]:
        body = copy.deepcopy(self.program.numbers.get(launch.number, []))
        if self.opens:
            body += self._open(launch.number)
        given = f"{_tuple(launch.reads)}, {_tuple(launch.changes)}, {_named(self._scalars(launch))}"
        number = launch.number
        body += _parse(f"_m = _run.before({number}, {given}) if {number} in _busy else None")
        for number in launch.changes if self.opens else ():
            body += _parse(f"_b{number} = _run.own(_b{number}, {number})")
        for number in self.born.get(launch.number, ()):
            body += self._allocate(number)
        body += self._call(launch)
        made = ", ".join(map(_tuple, (launch.fresh, launch.overwrites, launch.changes)))
        body += _parse(f"if _m is not None: _run.after(_m, {made})")
        return [*body, *self._kinds(launch.fresh), *self._pack(launch.number), *self._delete(launch.number)]

    def _call(self, launch: Launch) -> list[ast.stmt]:
        call: ast.expr = _Names(launch.views).visit(copy.deepcopy(launch.call))
        if not launch.results:
            return [ast.Expr(call)]
        if None in launch.results:
            return [ast.Assign([ast.Name(f"_b{launch.results[None]}", ast.Store())], call)]
        body: list[ast.stmt] = [ast.Assign([ast.Name("_t", ast.Store())], call)]
        for place, number in launch.results.items():
            body += _parse(f"_b{number} = _t[{place}]")
        return body + _parse("del _t")

    def _allocate(self, number: int) -> list[ast.stmt]:
        buffer = self.program.buffers[number]
        assert buffer.allocation is not None
        value = copy.deepcopy(buffer.allocation)
        if buffer.like >= 0:
            assert isinstance(value, ast.Tuple)
            kind = ast.Name(f"_kind{buffer.like}", ast.Load())
            value = ast.Call(ast.Name("_like", ast.Load()), [kind, *value.elts], [])
        return [ast.Assign([ast.Name(f"_b{number}", ast.Store())], value)]

    def _kinds(self, numbers: Collection[int]) -> list[ast.stmt]:
        """Returns statements that store the shape and dtype of buffers for later buffers in their memory."""
        body = []
        for number in numbers:
            if number in self.kinds:
                body += _parse(
                    f"_kind{number} = (_b{number}.size(), _b{number}.stride(), _b{number}.dtype, _b{number}.device)"
                )
        return body

    def _pack(self, launch: int) -> list[ast.stmt]:
        body = []
        for number in self.packs.get(launch, ()):
            body += _parse(f"_h = _run.pack(_b{number})")
            for place, view in self.tokens.items():
                if view.buffer == number:
                    token = f"_run.token(_h, {ast.unparse(view.on(f'_b{number}'))})"
                    body += _parse(f"_token{place} = {token}")
            body += _parse("del _h")
        for number in self.holds.get(launch, ()):
            body += _parse(f"_run.hold(_b{number})")
        return body

    def _open(self, launch: int) -> list[ast.stmt]:
        body = []
        for number in self.first_uses.get(launch, ()):
            if launch < len(self.program.launches) or number in self.returned:
                body += _parse(f"_b{number} = _run.open(_b{number}, {number})")
                body += [*self._align([number]), *self._kinds([number])]
        return body

    def _align(self, numbers: Collection[int]) -> list[ast.stmt]:
        """Returns statements that copy misaligned inputs, where the source does so after receiving them."""
        asked = {self.program.input_buffers[name] for name in self.program.aligned}
        return [line for n in numbers if n in asked for line in _parse(f"_b{n} = copy_if_misaligned(_b{n})")]

    def _delete(self, launch: int) -> list[ast.stmt]:
        dying = self.dying.get(launch, [])
        return _parse("del " + ", ".join(f"_b{number}" for number in dying)) if dying else []

    def _streams(self, names: Sequence[str]) -> list[ast.stmt]:
        streams = self.program.streams
        return [ast.Assign([ast.Name(name, ast.Store())], copy.deepcopy(streams[name])) for name in names]

    def _output(self, place: int, output: ast.expr | View) -> ast.expr:
        if place in self.tokens:
            return ast.Name(f"_token{place}", ast.Load())
        return output.on(f"_b{output.buffer}") if isinstance(output, View) else output

    # --- reruns of a launch

    def _scalars(self, launch: Launch) -> list[str]:
        """Returns the names that a rerun needs besides tensors: sizes, and shapes and dtypes of earlier buffers."""
        buffers = self.program.buffers
        kinds = [buffers[number].like for number in launch.fresh if buffers[number].like >= 0]
        return [*launch.scalars, *(f"_kind{number}" for number in dict.fromkeys(kinds))]

    def rerun(self, launch: Launch) -> ast.FunctionDef:
        body: list[ast.stmt] = []
        for names, argument in (
            ([f"_b{number}" for number in launch.reads], "_reads"),
            ([f"_b{number}" for number in launch.changes], "_changes"),
            (self._scalars(launch), "_scalars"),
        ):
            if names:
                body += _parse(f"{', '.join(names)}, = {argument}")
        used = {node.id for node in ast.walk(launch.call) if isinstance(node, ast.Name)}
        body += self._streams([name for name in self.program.streams if name in used])
        for number in launch.fresh:
            if self.program.buffers[number].origin == "allocated":
                body += self._allocate(number)
        body += self._call(launch)
        body += _parse(f"return {_tuple(launch.fresh)}, {_tuple(launch.overwrites)}")
        return _function(f"rerun_{launch.number}", ["_reads", "_changes", "_scalars"], body)


def _parse(text: str) -> list[ast.stmt]:
    return ast.parse(text).body


def _named(names: Sequence[str]) -> str:
    return f"({', '.join(names)},)" if names else "()"


def _tuple(numbers: Sequence[int]) -> str:
    return _named([f"_b{number}" for number in numbers])


def _function(name: str, arguments: Sequence[str], body: list[ast.stmt]) -> ast.FunctionDef:
    found = ast.parse(f"def {name}({', '.join(arguments)}): pass").body[0]
    assert isinstance(found, ast.FunctionDef)
    found.body = body
    return found
