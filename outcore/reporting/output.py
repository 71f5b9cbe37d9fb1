"""What a command found -> stdout, and files that were checked before the work began."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from outcore.errors import BadFile
from outcore.reporting.text import WIDTH


class OutFile(click.Path):
    """An option that names a file to write. Whether it can be written is checked before the work begins."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        path = Path(str(super().convert(value, param, ctx)))
        folder = path.parent
        if path.is_dir():
            raise BadFile(f"cannot write {path} (it is a folder); name a file in it")
        if not folder.is_dir():
            raise BadFile(f"cannot write {path} (there is no folder {folder}); make the folder or name another file")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise BadFile(f"cannot write {path} (permission denied); name another file")
        return path


def write_file(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise BadFile(f"cannot write {path} ({error.strerror or error}); name another file") from None


def show(*results: Table | dict[str, Any]) -> None:
    """Prints a table for people, or one JSON object for programs."""
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    for result in results:
        if isinstance(result, dict):
            click.echo(json.dumps(result, indent=1))
        else:
            console.print(result)
