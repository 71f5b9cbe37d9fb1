"""Recorded steps and their plans <-> files in the user's cache folder.

A training that is started again does the same steps on the same machine. What the first run recorded and planned is
found here by a key of everything that it depends on: the network's modules and parameters, the sizes of its inputs, the
device with its driver, the versions of outcore, PyTorch and CUDA, the process-wide settings, the planner and the
budget. An entry is one compressed file, written under another name and then renamed, so that a reader never sees half
of it. Whatever cannot be read counts as absent, with one line in the log: a cache must never stop a training.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import os
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from outcore.errors import BadFile
from outcore.values import Plan, Trace
from outcore.values.codec import Saved

log = logging.getLogger("outcore")


@dataclass(frozen=True)
class CacheSettings:
    """How much the cache may hold."""

    num_entries: int = 256  # guessed: a few trainings with a few dozen sizes each
    total_bytes: int = 256 * 2**20  # guessed; a trace of 3,000 ops takes about 100 KB compressed


@dataclass(frozen=True)
class Remembered(Saved):
    """What an earlier run knew about a kind of step when it settled."""

    KIND: ClassVar[str] = "remembered step"

    trace: Trace
    plan: Plan
    step_s: float  # measured with this plan


class StepCache:
    """One file per kind of step in a folder. Without a folder nothing is remembered."""

    def __init__(self, folder: Path | None, settings: CacheSettings | None = None) -> None:
        self.folder = folder
        self._settings = settings or CacheSettings()

    def load(self, key: str) -> Remembered | None:
        """The entry of an earlier run, or None; a broken one is removed."""
        if self.folder is None:
            return None
        path = self._path(key)
        try:
            found = Remembered.from_json(gzip.decompress(path.read_bytes()).decode())
        except FileNotFoundError:
            return None
        except (OSError, EOFError, zlib.error, UnicodeDecodeError, BadFile) as error:
            log.info("a remembered plan is not used: %s (%s); the step is recorded anew", path.name, error)
            with suppress(OSError):
                path.unlink()
            return None
        with suppress(OSError):
            os.utime(path)  # the entries that were not used for longest go first
        return found

    def save(self, key: str, remembered: Remembered) -> None:
        """Writes an entry, and removes the oldest ones beyond the limits."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".writing-", delete=False) as file:
                file.write(gzip.compress(remembered.to_json().encode(), compresslevel=6, mtime=0))
            Path(file.name).replace(self._path(key))
            self._trim()
        except OSError as error:
            log.info("a plan could not be remembered in %s (%s)", self.folder, error)

    def remove(self, key: str) -> None:
        """Of an entry that turned out wrong."""
        if self.folder is not None:
            with suppress(OSError):
                self._path(key).unlink()

    def _path(self, key: str) -> Path:
        assert self.folder is not None
        return self.folder / f"{key}.json.gz"

    def _trim(self) -> None:
        assert self.folder is not None
        entries = sorted(
            ((path, path.stat()) for path in self.folder.glob("*.json.gz")), key=lambda item: -item[1].st_mtime
        )
        total_bytes = 0
        for number, (path, about) in enumerate(entries):
            total_bytes += about.st_size
            if number >= self._settings.num_entries or total_bytes > self._settings.total_bytes:
                path.unlink(missing_ok=True)


def default_folder() -> Path | None:
    """`$OUTCORE_CACHE`, else `outcore` in the user's cache folder (`$XDG_CACHE_HOME` or `~/.cache`). None where
    `OUTCORE_CACHE=off`: nothing is remembered."""
    if chosen := os.environ.get("OUTCORE_CACHE"):
        return None if chosen == "off" else Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outcore" / "steps"


def key_of(facts: Mapping[str, Any]) -> str:
    """The same for equal facts, whatever their order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
