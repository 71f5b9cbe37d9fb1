"""The direction of imports, read from every file; and planning on a machine that has no torch."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import outcore
from outcore.values import Machine
from tests.pure.test_reporting import small_trace

PACKAGE = Path(outcore.__file__).parent
LEVELS = [
    {"formats"},
    {"errors"},
    {"units", "script"},
    {"values"},
    {"planning", "machines"},
    {"memory", "reporting"},
    {"eager", "compiled", "state", "tiling", "elastic"},
    {"fitting"},
    {"limit", "estimating"},
    {"integrations", "tuning"},  # tuning tries out whole training steps
    {"demo"},
    {"cli"},
    {"__init__", "__main__"},
]
LEVEL = {room: level for level, rooms in enumerate(LEVELS) for room in rooms}
CORE = ("values", "planning", "memory", "eager", "compiled", "state", "fitting")
NO_TORCH = {
    *("formats", "errors", "units", "values", "planning", "reporting", "machines"),
    *("cli", "__init__", "__main__"),
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imports_of(path: Path, *, with_types: bool = False) -> set[str]:
    """Every module a file imports, also inside functions; names under TYPE_CHECKING are no imports when it runs."""
    tree = ast.parse(path.read_text())
    skipped = (
        set()
        if with_types
        else {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
    )
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} imports relatively"
            found.add(node.module or "")
            if node.module == "outcore":
                found |= {f"outcore.{name.name}" for name in node.names}
    return found


FILES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    room = room_of(path)
    assert room in LEVEL, f"{room} has no level yet: give it one here"
    for name in imports_of(path):
        parts = name.split(".")
        if parts[0] == "outcore" and len(parts) > 1:
            is_above = parts[1] == room or LEVEL[parts[1]] < LEVEL[room]
            assert is_above, f"{room} must not import {name}"


def test_no_file_of_the_core_needs_itself_not_even_for_types() -> None:
    """A file that two others name in a circle cannot be read, or moved, without them."""
    files = {".".join(("outcore", *path.relative_to(PACKAGE).with_suffix("").parts)): path for path in FILES}
    core = {name: path for name, path in files.items() if name.split(".")[1] in CORE and path.name != "__init__.py"}
    needed = {name: imports_of(path, with_types=True) & core.keys() - {name} for name, path in core.items()}
    while free := [name for name, others in needed.items() if not others & needed.keys()]:
        for name in free:
            del needed[name]
    assert not needed, f"these need each other: {sorted(needed)}"


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) in NO_TORCH], ids=lambda path: path.name)
def test_what_plans_and_reports_has_no_torch(path: Path) -> None:
    deferred = room_of(path) == "cli"  # its verbs import when they run
    tree = ast.parse(path.read_text())
    nodes = tree.body if deferred else list(ast.walk(tree))
    for node in nodes:
        names = [name.name for name in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.split(".")[0] == "torch" for name in names)


WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from outcore.cli import main; main(prog_name='outcore')"


def run_without_torch(*args: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=PACKAGE.parent, check=False)


def test_plan_and_explain_work_where_torch_is_not(tmp_path: Path) -> None:
    trace, machine, plan = tmp_path / "t.json", tmp_path / "m.json", tmp_path / "p.json"
    recorded = small_trace()
    recorded.save(trace)
    Machine("elsewhere", 10**9, 10**9, 0, 1e6, 1e6, 1.0, 1.0).save(machine)
    planned = run_without_torch("plan", trace, "--machine", machine, "--memory", "5000KiB", "-o", plan, "--json")
    assert planned.returncode == 0, planned.stderr
    facts = json.loads(planned.stdout)
    assert facts["predicted_peak_bytes"] <= 5000 * 1024 < facts["in_core_peak_bytes"]
    refused = run_without_torch("plan", trace, "--machine", machine, "--memory", "1KiB")
    assert "no plan fits 1.00 KiB on elsewhere" in refused.stderr
    page = tmp_path / "page.html"
    explained = run_without_torch("explain", plan, "--trace", trace, "--machine", machine, "--html", page)
    assert explained.returncode == 0, explained.stderr
    assert "convolution" in page.read_text()
    assert "convolution" in explained.stdout
    refused = run_without_torch("machine")
    assert refused.returncode == 1  # the block works: measuring does need torch
    assert refused.stderr.splitlines()[-1].startswith("Error: this command needs torch")


def test_importing_outcore_does_not_import_torch() -> None:
    code = "import sys, outcore, outcore.cli, outcore.planning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PACKAGE.parent, timeout=60, check=False).returncode == 0


def test_what_a_user_draws_next_does_not_depend_on_us() -> None:
    """Rich draws a number when it is imported, and `outcore.tune` imports it when it is first asked for."""
    asked = "import random; random.seed(0); before = random.getstate(); import outcore; outcore.tune; outcore.limit"
    subprocess.run([sys.executable, "-c", f"{asked}; assert random.getstate() == before"], check=True)
