"""Reads a compiled graph's source as a program. Only this file and `kernel_text` know Inductor.

Inductor lets a buffer reuse the memory of another one. Here a buffer that is only written gets memory of its own: the
caching allocator returns the same block, and each buffer has its own lifetime. A statement of any other form than those
below raises `UnknownStatement`, and the graph then runs as it was compiled. Tested with PyTorch 2.11 and 2.13.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._inductor.output_code import CompiledFxGraph
from torch._inductor.utils import clone_preserve_strides
from torch.utils.flop_counter import flop_registry

from outcore.compiled.kernel_text import Role, Signature, kernels_of
from outcore.compiled.program import Buffer, Launch, Program, UnknownStatement, View
from outcore.compiled.settings import COMPILED

_CHECKS = ("assert_size_stride", "assert_alignment", "args.clear")
_EXTERN = "extern_kernels."
_EXTERN_OF = {"bias_addmm": "addmm"}  # Inductor's functions that call an operator of another name
_OPERATORS = ("torch.ops.", "aten.", "inductor_ops.", "_quantized.", "prims.")
_IN_PLACE = {"zero_": "aten.zero_.default", "fill_": "aten.fill_.Scalar", "copy_": "aten.copy_.default"}
_ALLOCATES = re.compile(r"empty_strided(_\w+)?$")


# --- operators --------------------------------------------------------------------------------------------------------


def operator_of(path: str) -> Any:
    """Returns the overload of `aten.mm.default` or `torch.ops.mine.twice.default`; None if there is none."""
    found: Any = torch.ops
    for part in path.removeprefix("torch.ops.").split("."):
        found = getattr(found, part, None)
        if found is None:
            return None
    return found if hasattr(found, "_schema") else getattr(found, "default", None)


def _role_of_argument(operator: Any, place: int | str) -> Role:
    """Returns how an operator uses an argument. Collectives write into their inputs although their schema is silent."""
    schema = operator._schema
    if schema.name.startswith(("c10d::", "_c10d_functional::")):
        return "rw"
    named = [argument for at, argument in enumerate(schema.arguments) if place in (at, argument.name)]
    if not named:
        return "r" if isinstance(place, str) else "rw"
    info = named[0].alias_info
    if info is None or not info.is_write:
        return "r"
    return "w" if named[0].is_out else "rw"


# --- the source
# ---------------------------------------------------------------------------------------------------------


def read(source: str, is_tensor: Sequence[bool]) -> Program:
    """Returns the program in a graph's source. `is_tensor` tells which of the graph's inputs are tensors."""
    try:
        tree = ast.parse(source)
    except SyntaxError:  # a C++ wrapper
        raise UnknownStatement("the graph is not Python") from None
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        raise UnknownStatement(f"the graph has {len(functions)} functions `call`")
    return _Reader(kernels_of(source), is_tensor).read(functions[0].body)


@dataclass(frozen=True)
class _Bound:
    """The view that a name is bound to. With `is_reuse`, its buffer had another name that is deleted."""

    view: View
    is_reuse: bool = False


class _Reader:
    def __init__(self, kernels: dict[str, Signature], is_tensor: Sequence[bool]) -> None:
        self.kernels, self.is_tensor = kernels, is_tensor
        self.bound: dict[str, _Bound] = {}
        self.tuples: dict[str, Launch] = {}  # names of tuples that launches returned
        self.scalars: set[str] = set()
        self.program = Program([], [], [], [], {})

    def read(self, body: Sequence[ast.stmt]) -> Program:
        statements = list(self._flat(body))
        for statement, after in zip(statements, (*statements[1:], None)):
            deleted = after.targets if isinstance(after, ast.Delete) else []
            dying = {target.id for target in deleted if isinstance(target, ast.Name)}
            if isinstance(statement, ast.Assign):
                self._assign(statement, dying)
            elif isinstance(statement, ast.Expr):
                self._expression(statement)
            elif isinstance(statement, ast.Delete):
                for target in statement.targets:
                    self.bound.pop(_name(target), None)
                    self.tuples.pop(_name(target), None)
            elif isinstance(statement, ast.Return):
                self._return(statement)
            elif not isinstance(statement, ast.Pass):
                raise _unknown(statement)
        return self.program

    def _flat(self, body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
        for statement in body:
            if isinstance(statement, ast.With):
                guard = ast.unparse(statement.items[0].context_expr)
                if self.program.guard or "DeviceGuard" not in guard or len(statement.items) > 1:
                    raise _unknown(statement)
                self.program.guard = guard
                yield from self._flat(statement.body)
            else:
                yield statement

    # --- names

    def _view(self, node: ast.expr) -> View:
        """Returns the view of a buffer that an expression denotes."""
        if isinstance(node, ast.Name) and node.id in self.bound:
            return self.bound[node.id].view
        if isinstance(node, ast.Call) and _dotted(node.func) == "reinterpret_tensor" and not node.keywords:
            base = self._view(node.args[0])
            return replace(base, steps=(*base.steps, tuple(node.args[1:])))
        raise _unknown(node)

    def _has_tensor(self, node: ast.AST) -> bool:
        names = (inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name))
        return any(name in self.bound or name in self.tuples for name in names)

    def _add(self, buffer: Buffer) -> int:
        self.program.buffers.append(buffer)
        return len(self.program.buffers) - 1

    def _assign(self, statement: ast.Assign, dying: set[str]) -> None:
        target, value = statement.targets[0], statement.value
        if isinstance(target, ast.Tuple | ast.List) and _dotted(value) == "args":
            self._inputs([_name(element) for element in target.elts])
            return
        name = _name(target) if len(statement.targets) == 1 else ""
        if not name:
            raise _unknown(statement)
        if not self._has_tensor(value):
            self._assign_without_tensors(name, statement)
        elif isinstance(value, ast.Name) and value.id in self.tuples:
            self.tuples[name] = self.tuples[value.id]
        elif isinstance(value, ast.Name) or _dotted(getattr(value, "func", value)) == "reinterpret_tensor":
            base = value.args[0] if isinstance(value, ast.Call) else value
            self.bound[name] = _Bound(self._view(value), is_reuse=getattr(base, "id", "") in dying)
        elif isinstance(value, ast.Subscript) and getattr(value.value, "id", "") in self.tuples:
            self._take(name, self.tuples[_name(value.value)], value.slice)
        elif isinstance(value, ast.Call) and _dotted(value.func) == "copy_if_misaligned":
            if _name(value.args[0]) != name:
                raise _unknown(statement)
            self.program.aligned.append(name)
        elif isinstance(value, ast.Call):
            self._launch(value, name)
        else:
            raise _unknown(statement)

    def _assign_without_tensors(self, name: str, statement: ast.Assign) -> None:
        value = statement.value
        function = _dotted(value.func) if isinstance(value, ast.Call) else ""
        if function == "get_raw_stream":
            self.program.streams[name] = value
        elif _ALLOCATES.fullmatch(function):
            self.bound[name] = _Bound(View(self._add(Buffer("allocated", name, allocation=value))))
        elif isinstance(value, ast.Call) and function.startswith((*_OPERATORS, _EXTERN)):
            self._launch(value, name)  # for example a random operator, which reads nothing
        elif isinstance(value, ast.Call) and function not in ("max", "min", "int"):
            raise _unknown(statement)
        else:
            self.scalars.add(name)
            self.program.numbers.setdefault(len(self.program.launches), []).append(statement)

    def _inputs(self, names: Sequence[str]) -> None:
        if len(names) != len(self.is_tensor):
            raise UnknownStatement(f"the text has {len(names)} inputs, the call has {len(self.is_tensor)}")
        self.program.inputs = list(names)
        for name, is_tensor in zip(names, self.is_tensor):
            if is_tensor:
                number = self._add(Buffer("input", name, holds=True))
                self.program.input_buffers[name] = number
                self.bound[name] = _Bound(View(number))
            else:
                self.scalars.add(name)

    def _take(self, name: str, launch: Launch, place: ast.expr) -> None:
        """Binds a name to one of several results."""
        if not isinstance(place, ast.Constant) or not isinstance(place.value, int) or place.value in launch.results:
            raise _unknown(place)
        self.bound[name] = _Bound(View(self._result(name, launch, place.value)))

    def _result(self, name: str, launch: Launch, place: int | None) -> int:
        at = launch.number
        number = self._add(Buffer("result", name, first=at, last=at, written_by=at, holds=True))
        launch.results[place] = number
        launch.fresh.append(number)
        return number

    def _return(self, statement: ast.Return) -> None:
        value = statement.value
        elements = value.elts if isinstance(value, ast.Tuple) else [value] if value is not None else []
        self.program.outputs = [self._view(node) if self._has_tensor(node) else node for node in elements]

    # --- launches

    def _expression(self, statement: ast.Expr) -> None:
        call = statement.value
        if isinstance(call, ast.Constant):
            return
        if not isinstance(call, ast.Call):
            raise _unknown(statement)
        function = _dotted(call.func)
        if function in _CHECKS:
            return
        if function.endswith(("cuda.set_device", "_cuda_setDevice")):
            self.program.setup.append(statement)
            return
        self._launch(call, "")

    def _launch(self, call: ast.Call, target: str) -> None:
        function = _dotted(call.func)
        launch = Launch(len(self.program.launches), function.removesuffix(".run"), call)
        if launch.name in self.kernels:
            used = self._kernel_roles(launch, call)
        else:
            used = self._operator_roles(launch, call, function, target)
        self._give_own_memory(used)
        views = {name: self.bound[name].view for name in _names(call) if name in self.bound}
        launch.views = views
        roles: dict[int, set[str]] = {}
        for node, role in used:
            roles.setdefault(self._view(node).buffer, set()).update(role)
        for number, found in roles.items():
            self._use(launch, number, found)
        launch.scalars = tuple(sorted(_names_in(launch, self.program.buffers) & self.scalars))
        self.program.launches.append(launch)
        if target:
            if _is_tuple(launch):
                self.tuples[target] = launch
            else:
                self.bound[target] = _Bound(View(self._result(target, launch, None)))

    def _kernel_roles(self, launch: Launch, call: ast.Call) -> list[tuple[ast.expr, Role]]:
        kernel = self.kernels[launch.name]
        launch.is_kernel, launch.is_pure = True, kernel.is_pure
        launch.is_product = launch.name.startswith(("triton_tem", "cpp_CppMicroGemm"))
        if len(call.args) < len(kernel.roles) or any(self._has_tensor(word.value) for word in call.keywords):
            raise _unknown(call)
        no_tensors: list[Role] = [""] * (len(call.args) - len(kernel.roles))
        roles = [*kernel.roles, *no_tensors]
        for argument, role in zip(call.args, roles):
            if self._has_tensor(argument) != bool(role):
                raise _unknown(call)
        return [(argument, role) for argument, role in zip(call.args, roles) if role]

    def _operator_roles(
        self, launch: Launch, call: ast.Call, function: str, target: str
    ) -> list[tuple[ast.expr, Role]]:
        owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
        method = function.rpartition(".")[2]
        used: list[tuple[ast.expr, Role]] = []
        has_schema = function.startswith(_OPERATORS)
        if function.startswith(_EXTERN):
            name = function.removeprefix(_EXTERN)
            launch.operator = f"aten.{_EXTERN_OF.get(name, name)}.default"
        elif has_schema:
            launch.operator = function.removeprefix("torch.ops.").replace("inductor_ops.", "inductor.", 1)
        elif method in _IN_PLACE and self._has_tensor(owner) and not target:  # clears a workspace
            launch.operator = launch.name = _IN_PLACE[method]
            used = [(owner, "w" if isinstance(owner, ast.Name) else "rw")]
        elif method == "sum" and self._has_tensor(owner) and target:  # adds up partial results in a workspace
            launch.operator = launch.name = "aten.sum.dim_IntList"
            return [(ast.Name(name, ast.Load()), "r") for name in _names(owner) if name in self.bound]
        else:
            raise _unknown(call)
        operator = operator_of(launch.operator)
        if operator is None and (has_schema or "out" not in [word.arg for word in call.keywords]):
            raise _unknown(call)
        if operator is not None and target and any(part.alias_info is not None for part in operator._schema.returns):
            raise _unknown(call)  # a view of an unknown buffer
        launch.is_product = operator is not None and operator._overloadpacket in flop_registry
        launch.is_random = operator is not None and torch.Tag.nondeterministic_seeded in operator.tags
        for place, argument in enumerate(call.args):
            used += self._parts(argument, _role_of_argument(operator, place) if has_schema else "r")
        for word in call.keywords:
            role: Role = "w" if word.arg == "out" else "r"
            used += self._parts(word.value, _role_of_argument(operator, word.arg or "") if has_schema else role)
        return used

    def _parts(self, node: ast.expr, role: Role) -> list[tuple[ast.expr, Role]]:
        if isinstance(node, ast.List | ast.Tuple):
            return [part for element in node.elts for part in self._parts(element, role)]
        return [(node, role)] if self._has_tensor(node) else []

    def _give_own_memory(self, used: Sequence[tuple[ast.expr, Role]]) -> None:
        """Makes names that are only written, and that reuse another buffer's memory, buffers of their own."""
        roles: dict[str, set[str]] = {}
        for node, role in used:
            for name in _names(node):
                roles.setdefault(name, set()).update(role)
        for name, found in roles.items():
            bound = self.bound.get(name)
            if bound is None or not bound.is_reuse or found != {"w"} or self._has_other_name(name):
                continue
            new = _of_its_own(name, self.program.buffers[bound.view.buffer], bound.view)
            self.bound[name] = _Bound(View(self._add(new)))

    def _has_other_name(self, name: str) -> bool:
        buffer = self.bound[name].view.buffer
        return any(other != name and bound.view.buffer == buffer for other, bound in self.bound.items())

    def _use(self, launch: Launch, number: int, role: set[str]) -> None:
        buffer = self.program.buffers[number]
        is_input, held = buffer.origin == "input", buffer.holds
        buffer.first = launch.number if buffer.first < 0 else buffer.first
        buffer.last = launch.number
        if held and not (is_input and "w" in role):
            launch.reads.append(number)  # also if it is only partly written, as the rest stays
        if "w" in role:
            buffer.written_by, buffer.holds = launch.number, True
            (launch.changes if is_input else launch.overwrites if held else launch.fresh).append(number)


def _names_in(launch: Launch, buffers: Sequence[Buffer]) -> set[str]:
    """Returns all names that a launch's call, its views and its allocations depend on."""
    nodes: list[ast.AST] = [launch.call]
    nodes += [step for view in launch.views.values() for arguments in view.steps for step in arguments]
    nodes += [node for number in launch.fresh if (node := buffers[number].allocation) is not None]
    return {name for node in nodes for name in _names(node)}


def _of_its_own(name: str, old: Buffer, view: View) -> Buffer:
    """Returns a buffer like an old one (or a view of it) with memory of its own."""
    sizes = list(view.steps[-1][:2]) if view.steps else []
    new = Buffer("allocated", name)
    if isinstance(old.allocation, ast.Call) and old.like < 0:
        arguments = [*sizes, *old.allocation.args[len(sizes) :]]
        new.allocation = ast.Call(old.allocation.func, arguments, old.allocation.keywords)
    else:
        new.like = view.buffer if old.like < 0 else old.like
        own = old.allocation.elts if isinstance(old.allocation, ast.Tuple) else []
        new.allocation = ast.Tuple(sizes or list(own), ast.Load())
    return new


def _is_tuple(launch: Launch) -> bool:
    operator = operator_of(launch.operator) if launch.operator else None
    if operator is None or launch.name.startswith(_EXTERN):
        return False
    returns = operator._schema.returns
    return len(returns) > 1 or (len(returns) == 1 and "[]" in str(returns[0].type))


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _names(node: ast.AST) -> list[str]:
    return list(dict.fromkeys(inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name)))


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def _unknown(node: ast.AST) -> UnknownStatement:
    return UnknownStatement(ast.unparse(node)[: COMPILED.most_text])


# --- graphs -----------------------------------------------------------------------------------------------------------


def watch(on_call: Callable[[CompiledFxGraph, Sequence[Any]], None]) -> None:
    """Makes every call of a compiled graph call `on_call(graph, inputs)` first."""
    original = CompiledFxGraph.__call__

    @functools.wraps(original)
    def call(self: CompiledFxGraph, inputs: Sequence[Any]) -> Any:
        on_call(self, inputs)
        return original(self, inputs)

    setattr(CompiledFxGraph, "__call__", call)  # noqa: B010


@dataclass(frozen=True)
class Facts:
    """Properties of a graph that are not in its source."""

    source: str
    namespace: dict[str, Any]
    is_backward: bool
    is_inference: bool
    uses_cuda_graphs: bool
    lasting: frozenset[int]  # inputs that exist between steps: parameters and buffers
    checked: tuple[int, ...]  # inputs that must be aligned
    mutated: frozenset[int]  # inputs that are written into


def facts_of(graph: CompiledFxGraph) -> Facts:
    asked = graph.fx_kwargs
    return Facts(
        source=graph.source_code,
        namespace=namespace_of(graph),
        is_backward=bool(asked.get("is_backward")),
        is_inference=bool(asked.get("is_inference")),
        uses_cuda_graphs="cuda" in graph.device_types and bool(asked.get("cudagraphs")),
        lasting=frozenset(asked.get("static_input_idxs") or ()),
        checked=tuple(graph.inputs_to_check),
        mutated=frozenset(graph.mutated_input_idxs),
    )


def namespace_of(graph: CompiledFxGraph) -> dict[str, Any]:
    """Returns the names of the module with a graph's source: kernels, streams, constants."""
    for item in _reachable((graph.compiled_fn_runner, graph.current_callable)):
        call = getattr(type(item), "call", item)
        found: dict[str, Any] = getattr(call, "__globals__", {})
        if "reinterpret_tensor" in found and "call" in found:
            return found
    return {}


def saved_outputs(graph: CompiledFxGraph, num_outputs: int) -> range:
    """Returns which outputs of a forward graph autograd saves for the backward. They come last, before numbers."""
    if graph.fx_kwargs.get("is_inference"):
        return range(0)
    for function in reversed(torch.autograd.Function.__subclasses__()):
        if function.__name__ != "CompiledFunction" or not _reaches(getattr(function, "compiled_fw", None), graph):
            continue
        metadata: Any = getattr(function, "metadata", None)
        if getattr(function, "maybe_subclass_metadata", None) is not None:
            raise UnknownStatement("the graph works on tensor subclasses")
        if metadata is None or metadata.tokens or metadata.is_rng_op_functionalized:
            raise UnknownStatement("the graph has outputs of its own for side effects or random states")
        saved: slice = metadata.tensors_saved_for_backwards_slice
        return range(num_outputs)[saved]
    raise UnknownStatement("the autograd function of the graph is not found")


def _reachable(starts: Sequence[Any]) -> Iterator[Any]:
    """Yields functions and objects, and those that they wrap."""
    todo, seen = [item for item in starts if item is not None], set[int]()
    while todo and len(seen) < COMPILED.most_wrappers:
        item = todo.pop(0)
        if id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        inner = [getattr(item, name, None) for name in ("__self__", "__wrapped__", "__func__", "func", "compiled_fn")]
        for cell in getattr(item, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # empty
                inner.append(cell.cell_contents)
        todo += [other for other in inner if callable(other)]


def _reaches(start: Any, goal: CompiledFxGraph) -> bool:
    return any(item is goal for item in _reachable([start]))


def align(facts: Facts, inputs: list[Any]) -> bool:
    """Copies misaligned inputs, as the graph itself would before its source runs. Returns False if one of them is
    written into, because only the graph itself can copy it back."""
    for place in facts.checked:
        item = inputs[place]
        if isinstance(item, torch.Tensor) and item.data_ptr() % COMPILED.alignment_bytes:
            if place in facts.mutated:
                return False
            inputs[place] = clone_preserve_strides(item)
    return True
