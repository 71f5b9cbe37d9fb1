"""A user's file -> the names it defines, for the verbs that try out what is in it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

from outcore.errors import BadFile


def names_in(path: Path) -> dict[str, Any]:
    """The names a script defines. It runs as a module, so what is behind `__main__` does not."""
    if not path.is_file():
        raise BadFile(f"cannot read {path} (no such file); check the path")
    sys.path.insert(0, str(path.resolve().parent))
    try:
        return runpy.run_path(str(path), run_name=path.stem)
    except SyntaxError as error:
        raise BadFile(f"{path} is no Python ({error}); correct it") from None
    finally:
        sys.path.pop(0)
