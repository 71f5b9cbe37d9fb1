"""The only parser and the only formatter of quantities: bytes, seconds and rates.

Sizes are binary: KiB, MiB, GiB, TiB. Decimal units (KB, MB, GB, TB) are read as decimal.
"""

from __future__ import annotations

import re

from outcore.errors import BadSize
from outcore.formats import format_bytes as format_bytes
from outcore.formats import format_rate as format_rate
from outcore.formats import format_seconds as format_seconds
from outcore.formats import two_digits as two_digits

KIB = 1024
MIB = 1024**2
GIB = 1024**3
TB = 1000**4  # disks are sold, and their wear is told, in decimal units
ENDLESS_BYTES = 1 << 60  # more than any memory holds

_FACTORS = {"": 1, "B": 1, "KIB": KIB, "MIB": MIB, "GIB": GIB, "TIB": 1024**4}
_FACTORS |= {"KB": 1000, "MB": 1000**2, "GB": 1000**3, "TB": 1000**4}
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*)\s*$")
_HINT = 'write a size such as "16GiB", "900MiB" or "80%", or a number of bytes'


def parse_bytes(size: int | str, *, of_bytes: int | None = None) -> int:
    """Returns the bytes (above zero) of `"16GiB"`, `"16 GB"`, `17179869184` or, if `of_bytes` is the whole, `"80%"`."""
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise BadSize(f"{size!r} is not a size: {_HINT}")
    if isinstance(size, int):
        num_bytes = size
    elif size.strip().endswith("%"):
        num_bytes = _parse_share(size, of_bytes)
    else:
        found = _SIZE.match(size)
        if found is None or found[2].upper() not in _FACTORS:
            raise BadSize(f"{size!r} is not a size: {_HINT}")
        num_bytes = int(float(found[1]) * _FACTORS[found[2].upper()])
    if num_bytes <= 0:
        raise BadSize(f"{size!r} is not above zero: {_HINT}")
    return num_bytes


def _parse_share(size: str, of_bytes: int | None) -> int:
    try:
        percent = float(size.strip()[:-1])
    except ValueError:
        raise BadSize(f"{size!r} is not a size: {_HINT}") from None
    if of_bytes is None:
        raise BadSize(f"{size!r} is a share of something unknown here; write a size such as '16GiB'")
    if not 0 < percent <= 100:
        raise BadSize(f"{size!r} is not between 0 % and 100 %: {_HINT}")
    return int(of_bytes * percent / 100)
