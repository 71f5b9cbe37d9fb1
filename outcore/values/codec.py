"""Frozen dataclass <-> JSON text.

Every file opens with what it is and which version wrote it, so that a broken file, a file of another kind and a file
from the future are each refused in one sentence. A tuple of dataclasses is written as a table (columns, rows): a trace
of 5,000 ops stays readable and small.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar, cast

from outcore.errors import BadFile

T = TypeVar("T")
RENAMED = {  # fields of version 1 -> their names since version 2
    "twin": "norm_replay",
    "twin_s": "norm_replay_s",
    "is_echo": "is_merged",
    "echoes": "merges_ops",
}


class Saved:
    """Gives a frozen dataclass `to_json`, `from_json`, `save` and `load`."""

    KIND: ClassVar[str]
    VERSION: ClassVar[int] = 2

    def to_json(self) -> str:
        body = {field.name: _encode(getattr(self, field.name)) for field in _fields(type(self))}
        return json.dumps({"outcore": self.KIND, "version": self.VERSION, **body}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Self:
        body = _read_object(text, cls.KIND, cls.VERSION)
        try:
            return _decode_object(cls, body)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadFile(f"this {cls.KIND} file is damaged ({error}); make it anew") from None

    def save(self, path: str | Path) -> None:
        Path(path).write_text(self.to_json())

    @classmethod
    def load(cls, path: str | Path) -> Self:
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadFile(f"cannot read {path} ({getattr(error, 'strerror', None) or error}); check the path") from None
        try:
            return cls.from_json(text)
        except BadFile as error:
            raise BadFile(f"{path}: {error}") from None


def _read_object(text: str, kind: str, version: int) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise BadFile(f"this is no JSON ({error}); a {kind} file is expected") from None
    if not isinstance(body, dict) or "outcore" not in body:
        raise BadFile(f"this JSON was not written by outcore; a {kind} file is expected")
    if body["outcore"] != kind:
        raise BadFile(f"this is a {body['outcore']} file; a {kind} file is expected")
    if not isinstance(body.get("version"), int) or body["version"] > version:
        raise BadFile(
            f"this {kind} file has version {body.get('version')}, this outcore reads up to {version}; upgrade outcore"
        )
    return {name: part for name, part in body.items() if name not in ("outcore", "version")}


def _fields(cls: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(cls)


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _encode(item: Any) -> Any:
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {field.name: _encode(getattr(item, field.name)) for field in dataclasses.fields(item)}
    if isinstance(item, tuple) and item and dataclasses.is_dataclass(item[0]):
        columns = [field.name for field in dataclasses.fields(item[0])]
        return {"columns": columns, "rows": [[_encode(getattr(row, name)) for name in columns] for row in item]}
    if isinstance(item, tuple | list):
        return [_encode(part) for part in item]
    if isinstance(item, dict):
        return {str(key): _encode(part) for key, part in item.items()}
    return item


def _decode_object(cls: type[T], body: dict[str, Any]) -> T:
    hints = _hints(cast(Any, cls))
    named = {RENAMED.get(name, name): part for name, part in body.items()}
    return cls(**{name: _decode(hints[name], part) for name, part in named.items() if name in hints})


def _decode(hint: Any, part: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if part is None:
            return None
        (inner,) = [arm for arm in typing.get_args(hint) if arm is not type(None)]
        return _decode(inner, part)
    if origin is tuple:
        return _decode_tuple(typing.get_args(hint), part)
    if origin is dict:
        key_hint, part_hint = typing.get_args(hint)
        return {key_hint(key): _decode(part_hint, value) for key, value in part.items()}
    if origin is typing.Literal:
        if part not in typing.get_args(hint):
            raise ValueError(f"{part!r} is none of {typing.get_args(hint)}")
        return part
    if dataclasses.is_dataclass(hint):
        return _decode_object(cast(type[Any], hint), part)
    if hint is float and isinstance(part, int) and not isinstance(part, bool):
        return float(part)
    if isinstance(hint, type) and not (isinstance(part, hint) and not (hint is int and isinstance(part, bool))):
        raise TypeError(f"{part!r} is no {hint.__name__}")
    return part


def _decode_tuple(arms: tuple[Any, ...], part: Any) -> tuple[Any, ...]:
    if len(arms) == 2 and arms[1] is Ellipsis:
        if isinstance(part, dict):  # a table
            return tuple(_decode_object(arms[0], dict(zip(part["columns"], row, strict=True))) for row in part["rows"])
        return tuple(_decode(arms[0], item) for item in part)
    return tuple(_decode(arm, item) for arm, item in zip(arms, part, strict=True))
