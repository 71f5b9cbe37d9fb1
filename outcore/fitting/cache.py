"""Recorded steps and their plans <-> files in the user's cache folder.

A training that is started again does the same steps on the same machine, and finds here what the first run recorded and
planned. `outcore.fitting.remembering` says what the key of an entry holds. An entry is one compressed file. It is
written under a temporary name and then renamed, so that a reader never sees half of it. A file that cannot be read
counts as absent and is logged, because a cache must never stop a training.
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

from outcore.errors import BadFile, warn
from outcore.fitting.settings import CACHE, CacheSettings
from outcore.values import Plan, Trace
from outcore.values.codec import Saved

log = logging.getLogger("outcore")


@dataclass(frozen=True)
class Remembered(Saved):
    """A kind of step of an earlier run: its recording and the plan on which it settled."""

    KIND: ClassVar[str] = "remembered step"

    trace: Trace
    plan: Plan
    step_s: float  # a measured step of this plan


class StepCache:
    """A folder with one file per kind of step. Without a folder nothing is saved."""

    def __init__(self, folder: Path | None, settings: CacheSettings = CACHE) -> None:
        self.folder = folder
        self._settings = settings

    def load(self, key: str) -> Remembered | None:
        """Returns the entry of an earlier run, or None. A broken entry is removed."""
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
            os.utime(path)  # entries that were not used for longest are removed first
        return found

    def save(self, key: str, remembered: Remembered) -> None:
        """Writes an entry, and removes the oldest ones beyond the limits."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".writing-", delete=False) as file:
                content = remembered.to_json().encode()
                file.write(gzip.compress(content, compresslevel=self._settings.compression, mtime=0))
            Path(file.name).replace(self._path(key))
            self._trim()
        except OSError as error:
            log.info("a plan could not be remembered in %s (%s)", self.folder, error)

    def remove(self, key: str) -> None:
        """Removes an entry."""
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


def folder_of(cache: bool | str | Path) -> Path | None:
    """Returns the folder that `limit(cache=...)` names, or None if nothing is saved. One that cannot be written to
    causes a warning."""
    if cache is True or not cache:
        return default_folder() if cache else None
    folder, because = Path(cache), "permission denied"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    except OSError as error:
        because = error.strerror or type(error).__name__
    warn(
        f"no plan can be saved in {folder} ({because}), so every run records and plans its steps anew; name a "
        "writable folder with cache=..., or pass cache=False"
    )
    return None


def default_folder() -> Path | None:
    """Returns `$OUTCORE_CACHE`, by default `outcore/steps` in the user's cache folder (`$XDG_CACHE_HOME` or
    `~/.cache`). With `OUTCORE_CACHE=off` it returns None, and nothing is saved."""
    if chosen := os.environ.get("OUTCORE_CACHE"):
        return None if chosen == "off" else Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outcore" / "steps"


def key_of(facts: Mapping[str, Any]) -> str:
    """Returns the same key for equal facts, in any order."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:32]
