"""The fast path of planned steps in C++: `fast_path.cpp`, compiled on the user's machine and loaded when it is ready.

It depends on the exact PyTorch in use, so a wheel cannot contain it. With `OUTCORE_NATIVE=on` the first limit on a
machine compiles it during training (15 to 40 seconds of one core, once for each version of PyTorch and Python) and
stores it in the user's cache folder; `OUTCORE_NATIVE` may name another folder instead. Steps use it as soon as it is
ready, also in this process. Otherwise, and without a compiler, the kernels in Python do the same. An error here never
makes a step fail: it is logged in one line, and steps use Python.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch

from outcore.eager.settings import EAGER

log = logging.getLogger("outcore")

_SOURCE = Path(__file__).with_name("fast_path.cpp")
_NAME = "outcore_fast_path"


class Library:
    """The compiled library: absent, being compiled, or loaded."""

    def __init__(self, path: Path | None) -> None:
        """`path`: the file of the library; None if it is not used."""
        self._path = path
        self._module: Any = None
        self._compiling: subprocess.Popen[bytes] | None = None

    def find(self, *, wait: bool = False) -> Any:
        """Returns the loaded library, or None as long as there is none. Compiles it if necessary."""
        if self._module is None and self._path is not None:
            try:
                self._advance(self._path, wait=wait)
                while wait and self._module is None and self._path is not None:  # another process compiles it
                    time.sleep(EAGER.build_poll_s)
                    self._advance(self._path, wait=wait)
            except (OSError, ImportError, RuntimeError) as error:
                self._give_up(str(error))
        return self._module

    def _advance(self, path: Path, *, wait: bool) -> None:
        if not path.exists() and self._compiling is None:
            self._compiling = _start_compiler(path)
        if self._compiling is not None and (wait or self._compiling.poll() is not None):
            _, said = self._compiling.communicate()
            _mark_of(path).unlink(missing_ok=True)
            self._compiling = None
            if not path.exists():
                self._give_up(said.decode(errors="replace").strip()[-300:])
        if self._path is not None and path.exists():
            self._module = _load(path)

    def _give_up(self, because: str) -> None:
        self._path = None
        log.info("planned steps are followed in Python, not by the fast path in C++ (%s)", because)


def _start_compiler(path: Path) -> subprocess.Popen[bytes] | None:
    """Starts the compiler; returns None if another process compiles the library."""
    command, mark = _command(str(path) + f".{os.getpid()}"), _mark_of(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if mark.exists() and time.time() - mark.stat().st_mtime < EAGER.most_build_s:
        return None
    mark.touch()
    log.info("compiling the fast path of planned steps, once for this PyTorch; steps use Python until it is there")
    written = "nice " + shlex.join(command) + f" && mv {shlex.quote(command[-1])} {shlex.quote(str(path))}"
    return subprocess.Popen(["/bin/sh", "-c", written], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def _mark_of(path: Path) -> Path:
    """Returns a file that exists while the library is being compiled."""
    return path.with_suffix(".compiling")


def chosen_path(chosen: str) -> Path | None:
    """Returns the path of the library for this source, PyTorch and Python; None if it is disabled or impossible."""
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    if chosen in ("", "off") or sys.platform != "linux" or not has_gil or _compiler() is None:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "outcore" / "native" if chosen == "on" else Path(chosen)
    facts = (_SOURCE.read_text(), torch.__version__, sys.version, platform.machine(), _flags())
    return folder / f"{_NAME}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:24]}.so"


def _compiler() -> str | None:
    names = (os.environ.get("CXX", ""), "c++", "g++", "clang++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def _flags() -> list[str]:
    """Returns the compiler's flags. `OUTCORE_NATIVE_FLAGS` adds more, for example for a sanitizer."""

    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
    more = shlex.split(os.environ.get("OUTCORE_NATIVE_FLAGS", ""))
    return ["-O2", "-std=c++20", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={_NAME}", abi, *more]


def _command(written: str) -> list[str]:
    compiler, root = _compiler() or "c++", Path(torch.__file__).parent
    include = root / "include"
    folders = (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    libraries = ("torch", "torch_cpu", "torch_python", "c10")
    return [
        *(compiler, *_flags(), *(f"-I{folder}" for folder in folders), str(_SOURCE)),
        *(f"-L{root / 'lib'}", *(f"-l{library}" for library in libraries), "-o", written),
    ]


def _load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


chosen_library: Library | None = None  # once somebody asked for it


def library(*, wait: bool = False) -> Any:
    """The loaded library; None where there is none, or none yet. `wait`: until it is compiled."""
    if chosen_library is None:
        use(os.environ.get("OUTCORE_NATIVE", ""))
    return chosen_library.find(wait=wait) if chosen_library is not None else None


def use(chosen: str) -> None:
    """Steps from the next one on use the library in this folder; `on`: in the user's cache folder; `off`: none."""
    global chosen_library
    try:
        chosen_library = Library(chosen_path(chosen))
    except OSError:
        chosen_library = Library(None)
