"""The wheel carries every file of the package that is no Python."""

from __future__ import annotations

import tomllib
from pathlib import Path

import outcore

PACKAGE = Path(outcore.__file__).parent


def test_every_data_file_is_in_the_wheel() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["outcore"]
    shipped = {path for pattern in patterns for path in PACKAGE.glob(pattern)}
    files = {path for path in PACKAGE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert files - shipped == {path for path in files if path.suffix == ".py"}


def test_the_version_is_told_once() -> None:
    project = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())
    assert project["project"]["version"] == outcore.__version__
