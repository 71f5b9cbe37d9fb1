"""Launchers of several hosts: how they number their ranks, take over a dead one's, and what they say about the rest."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from outcore.elastic import nodes
from outcore.elastic.cli import launch_command
from outcore.elastic.nodes import Nodes, Seat
from outcore.errors import ElasticError

from .hosts import run_lab, why_not

REASON = why_not()
pytestmark = pytest.mark.timeout(120)


def meet(*launchers: tuple[Nodes, int | None]) -> list[Seat]:
    """All launchers take their seats at once."""
    seats: list[Any] = [None] * len(launchers)

    def act(number: int) -> None:
        launcher, wanted = launchers[number]
        seats[number] = launcher.take_seat(wanted)

    threads = [threading.Thread(target=act, args=(number,)) for number in range(len(launchers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    return seats


def test_ranks_are_numbered_node_by_node_and_a_silent_launchers_are_taken_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "SILENT_S", 0.4)
    monkeypatch.setattr(nodes, "BEAT_S", 0.05)
    first = Nodes(("127.0.0.1", 0), 2, num_groups=2, join_limit_s=5)
    second = Nodes(first.address, 2, num_groups=3, join_limit_s=5)
    seats = meet((first, 0), (second, 1))
    assert [(seat.node, seat.first_rank, seat.num_ranks, seat.num_before) for seat in seats] == [
        (0, 0, 5, 0),
        (1, 2, 5, 0),
    ]
    assert seats[0].run == seats[1].run
    with pytest.raises(ElasticError, match=r"all 2 nodes at .* have a launcher that lives or is done"):
        Nodes(first.address, 2, num_groups=3, join_limit_s=0.2).take_seat(None)
    second.close()  # it beats no more
    third = Nodes(first.address, 2, num_groups=3, join_limit_s=5)
    again = third.take_seat(None)
    assert (again.node, again.first_rank, again.run) == (1, 2, seats[0].run)
    assert again.num_before > 0
    assert first.finish(well=True, limit_s=0.3) == [1]  # still there, and not done
    third.finish(well=True, limit_s=1)
    assert first.finish(well=True, limit_s=1) == []
    third.close()
    first.close()


def test_a_node_that_does_not_come_is_named() -> None:
    lone = Nodes(("127.0.0.1", 0), 3, num_groups=2, join_limit_s=0.3)
    with pytest.raises(ElasticError, match=r"node\(s\) \[1, 2\] of 3 did not come to 127.0.0.1:\d+ within 0.3 s"):
        lone.take_seat(0)
    lone.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--nnodes", "2"], "2 nodes need an address to meet at"), (["--rdzv", "host"], "is not HOST:PORT")],
)
def test_the_command_says_what_several_hosts_need(options: list[str], words: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    done = CliRunner().invoke(launch_command, ["--groups", "1", *options, str(script)])
    assert done.exit_code != 0
    assert words in done.output


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.timeout(900)
def test_two_hosts_with_a_launcher_each_survive_deaths() -> None:
    """`outcore launch --nnodes 2` in two namespaces; OUTCORE_EXPLORE lets more die, the second host among them."""
    explores = bool(os.environ.get("OUTCORE_EXPLORE"))
    found = run_lab(
        "tests.cpu.elastic.soak_hosts:soak",
        850,
        method="sync-easgd",
        kills=10 if explores else 2,
        kinds=None if explores else ["replica"],
        seed=int.from_bytes(os.urandom(2), "big") if explores else 1,
    )
    assert found["problems"] == [], found
    assert len(found["deaths"]) == (10 if explores else 2)
