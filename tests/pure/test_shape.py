"""The size of things in the core, and what its rooms may know, read from the source. What grows past these bounds is to
be split by what it knows, not by its length."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import outcore

PACKAGE = Path(outcore.__file__).parent
ROOMS = ("values", "planning", "memory", "eager", "compiled", "state", "fitting")
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))] + [PACKAGE / "limit.py"]
MOST_LINES = {"class": 250, "function": 60, "file": 600, "limit.py": 200}
MOST_ATTRIBUTES = 15


def length(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return (node.end_lineno or first) - first + 1


def is_frozen_record(node: ast.ClassDef) -> bool:
    """A frozen dataclass is a row of a table (a trace's op, a file's fields, settings): it has no state to keep."""
    return any(
        isinstance(decorator, ast.Call)
        and any(word.arg == "frozen" and ast.literal_eval(word.value) for word in decorator.keywords)
        for decorator in node.decorator_list
    )


def attributes(node: ast.ClassDef) -> set[str]:
    """Names that instances carry: assigned to `self` anywhere in the class, or fields of a dataclass."""
    names = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute)
        and isinstance(inner.ctx, ast.Store)
        and isinstance(inner.value, ast.Name)
        and inner.value.id == "self"
    }
    if node.decorator_list:
        fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        names |= {target.id for target in fields if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_classes_functions_and_files_of_the_core_are_small(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= MOST_LINES.get(path.name, MOST_LINES["file"])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            names = attributes(node)
            assert length(node) <= MOST_LINES["class"], f"{node.name} has {length(node)} lines"
            assert is_frozen_record(node) or len(names) <= MOST_ATTRIBUTES, f"{node.name} has {sorted(names)}"
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert length(node) <= MOST_LINES["function"], f"{node.name} has {length(node)} lines"


def test_what_is_measured_can_fail() -> None:
    source = "class Large:\n" + "".join(f"    def f{n}(self): self.a{n} = {n}\n" for n in range(260))
    (node,) = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]
    assert length(node) > MOST_LINES["class"]
    assert len(attributes(node)) > MOST_ATTRIBUTES
    assert not is_frozen_record(node)


def asks_for_cuda(tree: ast.AST) -> list[int]:
    """Lines that ask which kind of device something is on: `x.device.type == "cuda"`, `x.is_cuda`."""
    lines = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "is_cuda" and isinstance(node.ctx, ast.Load):
            lines.append(node.lineno)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            of_type = any(isinstance(side, ast.Attribute) and side.attr == "type" for side in sides)
            named = any(isinstance(part, ast.Constant) and part.value == "cuda" for part in ast.walk(node))
            lines += [node.lineno] if of_type and named else []
    return lines


@pytest.mark.parametrize(
    "path",
    [path for path in FILES if path.relative_to(PACKAGE).parts[0] != "memory"],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_only_the_room_of_memory_asks_whether_a_device_is_a_gpu(path: Path) -> None:
    """Others ask for what they need: `DeviceMemory`, and `DeviceKind` where a device's ability matters."""
    assert not asks_for_cuda(ast.parse(path.read_text()))


def test_asking_for_cuda_is_found_however_it_is_written() -> None:
    asked = (
        'if x.device.type == "cuda": ...',
        'y = "cuda" != where.type',
        'z = d.type in ("cpu", "cuda")',
        "x.is_cuda",
    )
    assert all(asks_for_cuda(ast.parse(source)) for source in asked)
    assert not asks_for_cuda(ast.parse('names = ("cuda", "cpu"); kind_of(device).home_tier == "host"'))


# Numbers that are no tunables: identities, halves, unit conversions, and digits below which floats are rounded.
PLAIN_NUMBERS = {0, 1, 2, 0.5, 1000, 1024, 1e6}
ROUNDING = 1e-6
FACTS: dict[str, tuple[set[float], str]] = {  # file -> numbers that are facts of somebody else's, or any would do: why
    "values/machine.py": ({10e-6}, "a machine file of an older release tells no fixed cost of a copy"),
    "planning/families/sizes.py": ({3}, "terms of an op's seconds: constant, linear, squared"),
    "planning/program/simulate.py": ({3, 4}, "positions in a tuple"),
    "planning/planners/hybrid.py": ({3}, "a flip changes one, two or three values; the odds are a setting"),
    "planning/trace_index.py": ({4}, "the members of an enumeration"),
    "memory/pinning.py": ({88}, "CUDA numbers what it tells of a device"),
    "memory/op_rates.py": ({3}, "a product of square matrices takes the third power of their side"),
    "compiled/program.py": ({3}, "a position of an argument"),
    "planning/planners/pricing.py": ({1e12}, "later than any step ends, and finite"),
    "memory/cuda_allocator.py": ({8}, "cuBLAS takes its workspace for matrices of any size"),
    "eager/fused_replay.py": (
        {3, 4, 5, 16, 31, 6, 7, 10, 1e-38, 1e-39, 1e-45, 1e-20, 6e-8, 3e-4, 3e38, 1e20, 6e4},
        "dimensions of a layout, CUDA's limits, and numbers that kernels are compared with",
    ),
    "eager/launches.py": ({62}, "more launches than anybody counts"),
    "eager/fake_recorder.py": ({5, 7, 8, 9}, "positions of arguments of a recurrent op"),
    "eager/signatures.py": ({3, 4, 5}, "positions of arguments of batch norm"),
    "state/optimizers.py": ({3}, "two parts of unequal length"),
    "state/state.py": ({4}, "frames between a warning and the user's line"),
    "state/unit.py": ({3}, "references to an object that nobody else holds"),
    "state/watched.py": ({3}, "references to an object that nobody else holds"),
    "state/loading.py": ({8}, "the alignment that safetensors files have"),
}


def numbers_in(tree: ast.AST) -> list[tuple[int, float]]:
    """Lines and values of the numbers in code, without indices and slices."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.Subscript) for part in ast.walk(node.slice)}
    return [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, int | float)
        and not isinstance(node.value, bool)
        and id(node) not in inside
    ]


@pytest.mark.parametrize(
    "path", [path for path in FILES if path.name != "settings.py"], ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_tunable_numbers_of_the_core_are_in_settings(path: Path) -> None:
    """A number that somebody may want to change has a name, a unit and an origin, and stands in its room's settings."""
    facts, _ = FACTS.get(str(path.relative_to(PACKAGE)), (set(), ""))
    found = [
        (line, number)
        for line, number in numbers_in(ast.parse(path.read_text()))
        if number not in PLAIN_NUMBERS | facts and abs(number) > ROUNDING
    ]
    assert not found, f"{path.name}: move to settings.py (line, number): {found}"


def test_a_number_in_code_is_found() -> None:
    assert numbers_in(ast.parse("SHARE = 0.92\ndef f(x=30): return x[5] * 7")) == [(1, 0.92), (2, 30), (2, 7)]


def test_settings_say_where_their_numbers_come_from() -> None:
    for path in (path for path in (PACKAGE / room / "settings.py" for room in ROOMS) if path.exists()):
        lines = path.read_text().splitlines()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.AnnAssign):
                about = " ".join(lines[node.lineno - 2 : (node.end_lineno or node.lineno) + 1])
                assert "#" in about, f"{path}:{node.lineno} says nothing of its number"
