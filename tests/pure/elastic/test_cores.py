"""Splitting the cores of hosts this one is not: NUMA nodes, hyperthreads, hidden topologies."""

from __future__ import annotations

from pathlib import Path

import pytest

from outcore.elastic.cores import parse_list, read_cores, split_cores
from outcore.errors import ElasticError


def make_host(folder: Path, nodes: list[str], threads_apart: int | None) -> Path:
    """A /sys tree; hardware thread i and i + threads_apart share a core."""
    for number, cpus in enumerate(nodes):
        (folder / f"node/node{number}").mkdir(parents=True)
        (folder / f"node/node{number}/cpulist").write_text(cpus + "\n")
        for cpu in parse_list(cpus):
            topology = folder / f"cpu/cpu{cpu}/topology"
            topology.mkdir(parents=True)
            (topology / "physical_package_id").write_text(f"{number}\n")
            (topology / "core_id").write_text(f"{cpu % threads_apart if threads_apart else cpu}\n")
    return folder


def test_a_core_counts_once(tmp_path: Path) -> None:
    host = make_host(tmp_path, ["0-3,8-11", "4-7,12-15"], threads_apart=8)
    assert read_cores(host, set(range(16))) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert read_cores(host, {2, 3, 10, 14}) == [
        [2, 3],
        [14],
    ]  # 10 is the other thread of 2; only 14 of core 6 is allowed


def test_a_hidden_topology_counts_every_thread(tmp_path: Path) -> None:
    assert read_cores(tmp_path, {0, 1, 5}) == [[0, 1, 5]]


@pytest.mark.parametrize("num_groups", [2, 4, 8])
def test_groups_are_equal_disjoint_and_inside_a_node(num_groups: int) -> None:
    nodes = [[0, 1, 2, 3], [4, 5, 6, 7]]
    groups = split_cores(nodes, num_groups)
    assert {len(group) for group in groups} == {8 // num_groups}
    assert sorted(core for group in groups for core in group) == list(range(8))
    assert all(any(set(group) <= set(node) for node in nodes) for group in groups)


def test_three_groups_on_two_nodes_do_not_straddle() -> None:
    groups = split_cores([[0, 1, 2, 3], [4, 5, 6, 7]], 3)
    assert groups == [[0, 1], [4, 5], [2, 3]]


def test_one_group_takes_the_whole_host_and_spare_cores_stay_free() -> None:
    assert split_cores([[0, 1], [2, 3]], 1) == [[0, 1, 2, 3]]
    groups = split_cores([[0, 1, 2, 3, 4]], 2, num_spare=1)
    assert groups == [[0, 1], [2, 3]]


def test_spare_cores_lie_between_the_groups() -> None:
    assert split_cores([list(range(16))], 4, num_spare=12) == [[0], [4], [8], [12]]
    assert split_cores([[0, 1, 2, 3], [4, 5, 6, 7]], 4, num_spare=4) == [[0], [4], [2], [6]]
    assert split_cores([list(range(9))], 4, num_spare=1) == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_more_groups_than_cores_share_and_nonsense_is_refused() -> None:
    assert split_cores([[0, 1]], 4) == [[0], [1], [0], [1]]
    with pytest.raises(ElasticError, match="do not fit"):
        split_cores([[0, 1]], 1, num_spare=2)


def test_lists() -> None:
    assert parse_list("0-2,7,9-10\n") == [0, 1, 2, 7, 9, 10]
    assert parse_list("\n") == []
