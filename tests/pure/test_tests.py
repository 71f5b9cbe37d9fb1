"""What holds for the tests themselves, read from their source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]


def private_attributes_set(tree: ast.AST) -> list[str]:
    """Attributes with a leading underscore that are assigned to anything but `self` and `cls`."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    ]


def private_names_patched(tree: ast.AST) -> list[str]:
    """Names with a leading underscore that `setattr` of a monkeypatch replaces, but for those of PyTorch."""
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "setattr"
        and len(node.args) > 1
        and isinstance(node.args[1], ast.Constant)
        and str(node.args[1].value).startswith("_")
        and not str(node.args[1].value).startswith("__")
        and ast.unparse(node.args[0]) not in OF_PYTORCH
    ]


OF_PYTORCH = ("torch._C", "convert_frame")


@pytest.mark.parametrize("path", sorted(TESTS.rglob("*.py")), ids=lambda path: str(path.relative_to(TESTS)))
def test_tests_set_no_private_attribute_of_others(path: Path) -> None:
    """A test that reaches inside an object tests how it is written, and not what it does."""
    tree = ast.parse(path.read_text())
    assert not private_attributes_set(tree)
    assert not private_names_patched(tree)


def test_setting_a_private_attribute_is_found() -> None:
    assert private_names_patched(ast.parse("monkeypatch.setattr(Bench, '_run', late)"))
    assert not private_names_patched(ast.parse("monkeypatch.setattr(Bench, 'run', late)"))
    assert private_attributes_set(ast.parse("trial._held_out = [0]; self._own = 1")) == ["trial._held_out"]
