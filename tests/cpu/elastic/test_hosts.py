"""Two hosts with two ranks each, in network namespaces: they train together, or say why not."""

from __future__ import annotations

import os
import re
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outcore.elastic.center import Center, CenterConfig
from outcore.elastic.place import poll, read_count
from outcore.elastic.worker import join

from . import reference
from .hosts import PORT, Host, gather, run_lab, serve_store, why_not
from .town import ETA, Net, center_of, weights_of

REASON = why_not()
pytestmark = [pytest.mark.timeout(120), pytest.mark.skipif(REASON is not None, reason=str(REASON))]
NUM_STEPS, PERIOD, NUM_RANKS = 6, 2, 4  # after an even number of steps no exchange is under way
FAMILIES: dict[str, dict[str, Any]] = {
    "sync-easgd": {"level": 3},
    "diloco": {},
    "sync-sgd": {"period": 1},
    "async-easgd": {},
    "async-sgd": {},
    "hogwild-easgd": {},
    "original-easgd": {},
    "eamsgd": {},
}


def enter(rank: int, run: str) -> None:
    """What a launcher tells a rank."""
    told = {"RANK": rank, "WORLD_SIZE": NUM_RANKS, "MASTER_ADDR": "10.77.0.1", "MASTER_PORT": PORT}
    told |= {"TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RUN_ID": run}
    os.environ |= {name: str(value) for name, value in told.items()}


def fork_center(config: CenterConfig) -> None:
    """A process as real as the one a worker starts, without the seconds that importing torch takes."""
    if os.fork() == 0:
        Center(config).run()
        os._exit(0)


def meet(store: Any, name: str) -> None:
    store.add(name, 1)
    assert poll(lambda: read_count(store, name) >= NUM_RANKS, 30)


def train(rank: int, method: str, chosen: dict[str, Any], run: str = "") -> dict[str, Any]:
    """One rank's training, as a user's script does it; at its end all read the centre at once."""
    enter(rank, run or method)
    if method != "async-easgd":  # this one starts the real process
        import outcore.elastic.link

        outcore.elastic.link.start_center_process = fork_center
    net, settings = Net(), {"period": PERIOD, "limit_s": 10, "join_limit_s": 30, **chosen}
    with join(net, torch.optim.SGD(net.parameters(), lr=ETA), method, **settings) as worker:
        meet(worker.place.store, "here")
        for step in range(NUM_STEPS):
            net.loss(rank, step).backward()
            worker.step()
        meet(worker.place.store, "trained")
        found = {"weights": weights_of(worker).tolist(), "center": center_of(worker).tolist()}
        poll(lambda: len(worker.members()) == NUM_RANKS, 10)  # a centre says five times a second whom it serves
        found |= {"members": worker.members(), "num_exchanges": worker.stats().num_exchanges}
        meet(worker.place.store, "read")
        return found


def train_until_cut(rank: int, method: str, folder: Path) -> str:
    """Trains until it fails; the error is the result."""
    enter(rank, f"cut {method}")
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=ETA)
    with join(net, optimizer, method, period=1, level=2, limit_s=1, join_limit_s=1.5) as worker:
        (folder / f"begun-{method}-{rank}").touch()
        for step in range(10_000):
            net.loss(rank, step % 10).backward()
            worker.step()
            time.sleep(0.005)
    return "trained on"


def in_all_ranks(hosts: list[Host], folder: Path, name: str, act: Any) -> None:
    for rank in range(NUM_RANKS):
        hosts[rank // 2].start(partial(act, rank), folder / f"{name} {rank}.json")


def try_everything(hosts: list[Host]) -> dict[str, Any]:
    """Every family and a wrong interface, side by side; then the cable is pulled."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        serve_store(hosts[0], folder)
        hosts[0].children.clear()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        chosen = {"limit_s": 1, "join_limit_s": 6}
        in_all_ranks(hosts, folder, "lo", partial(train, method="sync-easgd", chosen=chosen, run="lo"))
        del os.environ["GLOO_SOCKET_IFNAME"]
        for method, chosen in FAMILIES.items():
            in_all_ranks(hosts, folder, method, partial(train, method=method, chosen=chosen))
        found = gather(hosts, 40)
        for method in ("sync-easgd", "async-easgd"):
            in_all_ranks(hosts, folder, f"cut {method}", partial(train_until_cut, method=method, folder=folder))
        assert poll(lambda: len(list(folder.glob("begun-*"))) == 2 * NUM_RANKS, 20)
        time.sleep(0.3)
        hosts[1].ip("link set cable1 down")
        return found | gather(hosts, 25)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    told: dict[str, Any] = run_lab("tests.cpu.elastic.test_hosts:try_everything", 110)
    return told


@pytest.mark.parametrize("method", FAMILIES)
def test_two_hosts_train_together(found: dict[str, Any], method: str) -> None:
    told = [found[f"{method} {rank}"] for rank in range(NUM_RANKS)]
    assert [one.get("error") for one in told] == [None] * NUM_RANKS
    ranks = [one["value"] for one in told]
    assert [one["members"] for one in ranks] == [[0, 1, 2, 3]] * NUM_RANKS
    assert len({tuple(one["center"]) for one in ranks}) == 1
    assert all(one["num_exchanges"] >= NUM_STEPS // PERIOD for one in ranks)


def test_two_hosts_have_the_numbers_of_one(found: dict[str, Any]) -> None:
    """Sync EASGD at level 3 and the round robin against their references."""
    expected = {
        "sync-easgd": reference.elastic_sync(4, NUM_STEPS, PERIOD, 0.9 / 4),
        "diloco": reference.diloco(4, NUM_STEPS, PERIOD, 0.7, 0.9),
        "original-easgd": reference.elastic_one_by_one([0, 1, 2, 3] * (NUM_STEPS), 4, PERIOD, 0.9 / 4),
    }
    for method, (weights, center) in expected.items():
        for rank in range(NUM_RANKS):
            one = found[f"{method} {rank}"]["value"]
            np.testing.assert_allclose(one["weights"], weights[rank], rtol=2e-5, atol=2e-6)
            np.testing.assert_allclose(one["center"], center, rtol=2e-5, atol=2e-6)


def test_hosts_that_cannot_reach_each_other_say_so(found: dict[str, Any]) -> None:
    for rank in range(NUM_RANKS):
        error = found[f"lo {rank}"]["error"]
        assert f"rank {rank} on host-{'ab'[rank // 2]} waited 6 s for" in error, error
        assert f"rank {rank} did not connect with rank" in error
        assert "gloo uses lo here; where that is the reason, set GLOO_SOCKET_IFNAME on every host" in error


@pytest.mark.parametrize("method", ["sync-easgd", "async-easgd"])
def test_two_halves_do_not_train_on_apart(found: dict[str, Any], method: str) -> None:
    """The store is on host-a: there the missing are named. host-b has lost the store as well."""
    errors = [found[f"cut {method} {rank}"].get("error", "none") for rank in range(NUM_RANKS)]
    for error in errors[:2]:
        # The second of the two to say so may miss the first one already.
        assert re.search(r"for rank\(s\) \[([01], )?2, 3\] \(.*host-b\): only [12] of 4 workers are here", error), (
            errors
        )
        assert re.search("or set min_members=[12] to train without them", error)
    for error in errors[2:]:
        assert error.startswith("ElasticError: rank"), errors
