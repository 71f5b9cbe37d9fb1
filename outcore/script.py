"""Loads a user's file, for commands that run a function of it."""

from __future__ import annotations

import inspect
import runpy
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outcore.errors import BadFile, OutcoreError


def names_in(path: Path, arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Runs a script with `arguments` and returns the names that it defines. Code under `if __name__ == "__main__"` is
    not run."""
    if not path.is_file():
        raise BadFile(f"cannot read {path} (no such file); check the path")
    before = sys.argv
    sys.path.insert(0, str(path.resolve().parent))
    sys.argv = [str(path), *arguments]
    try:
        return runpy.run_path(str(path), run_name=path.stem)
    except SyntaxError as error:
        raise BadFile(f"{path} is no Python ({error}); correct it") from None
    except SystemExit as error:  # for example an argument parser without its arguments
        raise OutcoreError(
            f"{path} ended itself (exit code {error.code}) before it defined a step; give its arguments after --, "
            "as in outcore record train.py:step -- --lr 0.1"
        ) from None
    except OutcoreError:
        raise
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        words = " ".join(str(error).split()) or "no message"
        where = f", line {lines[-1]}" if lines else ""
        raise BadFile(
            f"{path}{where}: {type(error).__name__}: {words}; correct it, so that it runs by itself"
        ) from error
    finally:
        sys.path.pop(0)
        sys.argv = before


def file_and_function(step: str) -> tuple[Path, str]:
    """Splits `"train.py:step"` into the file and the name of the function."""
    path, colon, name = step.rpartition(":")
    if not colon or not path or not name.isidentifier():
        raise OutcoreError(f"{step!r} names no function; write FILE.py:FUNCTION, for example train.py:step")
    return Path(path), name


def step_in(names: dict[str, Any], path: Path, function_name: str) -> Callable[[], Any]:
    """Returns the function of that name, which must be callable without arguments."""
    step = names.get(function_name)
    if not callable(step):
        raise OutcoreError(f"{path} defines no function {function_name!r}; define it or name another after the colon")
    wanted = [
        parameter.name
        for parameter in inspect.signature(step).parameters.values()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if wanted:
        raise OutcoreError(
            f"{function_name}({', '.join(wanted)}) in {path} needs arguments, and a step is called without any; let it "
            "use names of the file, or give its parameters defaults"
        )
    found: Callable[[], Any] = step
    return found
