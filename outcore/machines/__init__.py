"""Machine files that come with the package, by name. Their numbers are from the vendors' data sheets and not measured;
each file marks them as `given`. Does not need torch."""

from __future__ import annotations

from pathlib import Path

from outcore.errors import BadFile
from outcore.values import Machine

_FOLDER = Path(__file__).parent
_SUFFIX = ".machine.json"


def machine_names() -> list[str]:
    """Returns the names of the machine files: `["a100", "h100", ...]`."""
    return sorted(path.name.removesuffix(_SUFFIX) for path in _FOLDER.glob(f"*{_SUFFIX}"))


def machine_from(name: str | Path) -> Machine:
    """Returns the machine `machine_from("a100")`, or that of a file that `outcore machine -o` wrote."""
    if str(name).lower() in machine_names():
        return Machine.load(_FOLDER / f"{str(name).lower()}{_SUFFIX}")
    if not Path(name).is_file():
        raise BadFile(f"there is no machine file {name}; name a file or one of {', '.join(machine_names())}")
    return Machine.load(name)
