"""Reads from a generated kernel's source which of its arguments it reads and writes, and whether it may run again.

A pointer that the kernel may write (`out_ptr`, `in_out_ptr`, and the names in `mutated_arg_names`) is *only written* if
the first line that mentions it stores into it: Inductor works in place only where each element is loaded before it is
stored. Every other pointer counts as read. This holds for PyTorch 2.11 and 2.13, with Triton and C++.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Role = Literal["", "r", "w", "rw"]  # "": not a tensor

_TRITON = re.compile(r"^(\w+) = async_compile\.triton\('(\w+)', '''(.*?)'''", re.S | re.M)
_CPP = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\(\[(.*?)\], r?'''(.*?)'''", re.S | re.M)
_ALIAS = re.compile(r"^\s*auto (\w+) = (\w+);", re.M)
_ATOMIC = re.compile(r"tl\.atomic_|atomic_add|atomic_\w+\(")
_WORKSPACES = ("ws_ptr", "semaphores_ptr")


@dataclass(frozen=True)
class Signature:
    """How a generated kernel uses its arguments, according to its source."""

    roles: tuple[Role, ...]
    is_pure: bool


def kernels_of(source: str) -> dict[str, Signature]:
    """Returns the kernels that a graph's source defines, by name."""
    found = {}
    for match in _TRITON.finditer(source):
        if (kernel := _triton(match[2], match[3])) is not None:
            found[match[1]] = kernel
    for match in _CPP.finditer(source):
        if (kernel := _cpp(match[2], match[3])) is not None:
            found[match[1]] = kernel
    return found


def _triton(name: str, text: str) -> Signature | None:
    header = re.search(rf"def {re.escape(name)}\(([^)]*)\):", text)
    changed = re.search(r"'mutated_arg_names': \[([^\]]*)\]", text)
    if header is not None and "@triton_heuristics.template" in text:
        return _template(header, text)
    if header is None or changed is None:
        return None
    mutated, body = set(re.findall(r"'(\w+)'", changed[1])), text[header.end() :]
    users_own = "user_autotune" in text or "'custom_kernel': True" in text

    def role(argument: str) -> Role:
        if argument.startswith(_WORKSPACES):
            return "rw"
        if users_own:
            return "rw" if argument in mutated else "r" if f"'{argument}': '*" in text else ""
        writes = argument in mutated or argument.startswith(("out_ptr", "in_out_ptr"))
        if not writes:
            return "r" if f"'{argument}': '*" in text else ""
        return "w" if _stores_first([argument], body) else "rw"

    arguments = [part.strip() for part in header[1].split(",") if "constexpr" not in part]
    return Signature(tuple(map(role, arguments)), not users_own and not _ATOMIC.search(body))


def _template(header: re.Match[str], text: str) -> Signature | None:
    """Reads a matrix product or an attention from one of Inductor's templates. Its source does not list what it writes:
    these are all pointers from which the address of a store is computed. Returns None if other functions than the main
    one store, or if it stores in another way."""
    main, *after = re.split(r"^@triton\.jit", text[header.end() :], flags=re.M)
    others = "".join((text[: header.start()], *after))
    if re.search(r"\b(?:store|atomic_\w+)\(", others) or re.search(r"descriptor_store|(?<!\btl)\.store\(", main):
        return None
    arguments = [part.strip() for part in header[1].split(",") if "constexpr" not in part]
    pointers = [argument for argument in arguments if f"'{argument}': '*" in text]
    comes_from = {pointer: {pointer} for pointer in pointers}
    assignments = re.findall(r"^\s*(\w+) = (.+)$", main, re.M)
    for name, value in assignments:
        if "tl.load" not in value:
            found = set[str]().union(*(comes_from.get(part, set()) for part in re.findall(r"\w+", value)))
            comes_from[name] = comes_from.get(name, set()) | found
    stores = re.findall(r"(?:tl\.store|tl\.atomic_\w+)\(\s*([^,]+)", main)
    written = set[str]().union(*(comes_from.get(part, set()) for at in stores for part in re.findall(r"\w+", at)))
    if not stores or not written:
        return None

    def role(argument: str) -> Role:
        if argument.startswith(_WORKSPACES) or argument in written:
            return "rw"
        return "r" if argument in pointers else ""

    return Signature(tuple(map(role, arguments)), not _ATOMIC.search(main))


def _cpp(types: str, text: str) -> Signature | None:
    header = re.search(r"void\s+kernel\((.*?)\)\s*\{", text, re.S)
    if header is None:
        return None
    body = text[header.end() :]
    aliases: dict[str, list[str]] = {}
    for alias, of in _ALIAS.findall(body):
        aliases.setdefault(of, [of]).append(alias)
    kinds = re.findall(r"'([^']*)'", types)
    names = [part.split()[-1].lstrip("*&") for part in header[1].split(",")]
    if len(kinds) != len(names):
        return None
    body = _ALIAS.sub("", body)

    def role(kind: str, name: str) -> Role:
        if "*" not in kind:
            return ""
        if kind.startswith("const"):
            return "r"
        return "w" if _stores_first(aliases.get(name, [name]), body) else "rw"

    return Signature(tuple(map(role, kinds, names)), not _ATOMIC.search(body))


def _stores_first(names: Sequence[str], body: str) -> bool:
    """Whether the first line that mentions one of these pointers only stores into it."""
    pointer = rf"\b(?:{'|'.join(map(re.escape, names))})\b"
    for line in body.splitlines():
        if re.search(pointer, line):
            into = rf"^\s*(?:tl\.store\({pointer}|[\w.]+\.store\({pointer}|{pointer}\[[^=]*\] = )"
            return re.search(into, line) is not None and len(re.findall(pointer, line)) == 1
    return False
