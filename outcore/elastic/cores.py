"""Splits the host's cores into equal groups, each inside one NUMA node if possible.

1708.02983 (section 6.2) splits one many-core chip into groups with a copy of the weights and of the data each. Here a
group is a set of physical cores (one hardware thread of each). Once a process is pinned, its memory is allocated near
its cores by first touch.
"""

from __future__ import annotations

import os
from pathlib import Path

from outcore.errors import ElasticError

_SYSTEM = Path("/sys/devices/system")


def read_cores(system: Path = _SYSTEM, allowed: set[int] | None = None) -> list[list[int]]:
    """Returns the physical cores this process may use, per NUMA node, by the lowest hardware thread of each."""
    allowed = set(os.sched_getaffinity(0)) if allowed is None else allowed
    nodes = [parse_list(path.read_text()) for path in sorted(system.glob("node/node*/cpulist"))]
    nodes = [[cpu for cpu in node if cpu in allowed] for node in nodes] or [sorted(allowed)]
    seen: set[tuple[int, int]] = set()
    by_node = []
    for node in nodes:
        mine = []
        for cpu in node:
            core = _core_of(system, cpu)
            if core not in seen:
                seen.add(core)
                mine.append(cpu)
        by_node.append(mine)
    return [node for node in by_node if node] or [sorted(allowed)]


def all_cores() -> set[int]:
    """Returns the cores of all groups, from the launcher's environment; empty without a launcher."""
    return set(parse_list(os.environ.get("OUTCORE_ALL_CORES", "")))


def spare_cores() -> set[int]:
    """Returns the cores that the launcher gave to no group; empty without a launcher."""
    return set(parse_list(os.environ.get("OUTCORE_SPARE_CORES", "")))


def cores_for_messages() -> set[int]:
    """Returns the cores for communicating threads: spare cores if there are any, otherwise all cores."""
    return spare_cores() or all_cores()


def _core_of(system: Path, cpu: int) -> tuple[int, int]:
    folder = system / f"cpu/cpu{cpu}/topology"
    try:
        return int((folder / "physical_package_id").read_text()), int((folder / "core_id").read_text())
    except (OSError, ValueError):
        return -1, cpu  # containers may hide the topology; then every hardware thread counts as a core


def parse_list(text: str) -> list[int]:
    """`"0-3,8"` -> [0, 1, 2, 3, 8]."""
    cpus: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus += range(int(first), int(last or first) + 1)
    return cpus


def split_cores(by_node: list[list[int]], num_groups: int, num_spare: int = 0) -> list[list[int]]:
    """Returns `num_groups` groups of equal size, inside NUMA nodes unless there are fewer groups than nodes."""
    num_cores = sum(len(node) for node in by_node) - num_spare
    if num_groups < 1 or num_spare < 0 or num_cores < 1:
        raise ElasticError(f"{num_groups} groups and {num_spare} spare cores do not fit {num_cores + num_spare} cores")
    if num_groups > num_cores:
        pool = [core for node in by_node for core in node]
        return [[pool[group % len(pool)]] for group in range(num_groups)]  # shared cores; the launcher says so
    if num_groups < len(by_node):
        pool = [core for node in by_node for core in node]
        size = num_cores // num_groups
        return [pool[group * size : (group + 1) * size] for group in range(num_groups)]
    size = num_cores // num_groups
    while size > 1 and sum(len(node) // size for node in by_node) < num_groups:
        size -= 1  # unequal nodes: smaller groups rather than one that straddles
    turns = _in_turn([len(node) // size for node in by_node])[:num_groups]
    shares = [turns.count(node) for node in range(len(by_node))]
    left = [_spread_out(node, share, size) for node, share in zip(by_node, shares)]
    return [left[node].pop(0) for node in turns]


def _in_turn(rooms: list[int]) -> list[int]:
    """Returns nodes in turn, each as often as it has room, so that few groups also use every node's memory."""
    return [node for turn in range(max(rooms)) for node, room in enumerate(rooms) if turn < room]


def _spread_out(node: list[int], num_groups: int, size: int) -> list[list[int]]:
    """Returns groups with spare cores between them. If two virtual cores are one physical core, a group then shares it
    with messages and not with another group."""
    starts = [len(node) * group // num_groups for group in range(num_groups)]
    return [node[at : at + size] for at in starts]
