"""torch's private interface, and addresses: what a new release of torch may change, and what gloo gets wrong."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import outcore.elastic
from outcore.elastic import transport
from outcore.elastic.place import connect_store, host_store

PACKAGE = Path(outcore.elastic.__file__).parent
pytestmark = pytest.mark.timeout(60)


def test_one_file_uses_what_is_private_in_torch() -> None:
    private = ("torch._C", "_distributed_c10d", "ProcessGroupGloo", "_Options", "torch._")
    users = {path.name for path in PACKAGE.glob("*.py") for word in private if word in path.read_text()}
    assert users == {"transport.py"}


def test_the_options_that_are_set_exist() -> None:
    """Attributes of a C++ class that does not know them would be refused; a renamed one must be noticed here."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    assert {"_timeout", "_devices", "_threads"} <= set(dir(options))
    assert gloo.create_device(hostname="127.0.0.1") is not None
    assert issubclass(dist.DistNetworkError, dist.DistError)
    assert issubclass(dist.DistError, RuntimeError)


def test_a_group_sums_over_several_lanes() -> None:
    store = host_store(("127.0.0.1", 0), 10)
    found: list[float] = [0.0, 0.0]

    def act(index: int) -> None:
        mine = transport.PrefixStore("group", connect_store(("127.0.0.1", store.port), 10))
        group = transport.open_gloo(mine, index, 2, 10.0, num_lanes=3, address="127.0.0.1")
        vector = torch.full((5,), float(1 + index))
        group.allreduce([vector]).wait()
        found[index] = float(vector.sum())

    threads = [threading.Thread(target=act, args=(index,)) for index in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [15.0, 15.0]


def test_addresses() -> None:
    assert transport.local_address("127.0.0.1") == "127.0.0.1"
    assert transport.local_address("no such host.invalid") == "127.0.0.1"
    assert transport.is_loopback("127.0.1.1")
    assert transport.is_loopback("::1")
    assert not transport.is_loopback("10.0.0.1")
    assert not transport.is_loopback("fe80::1%eth0")
    assert transport.listening_address("10.0.0.1", ["10.0.0.2", "127.0.0.1"]) == "10.0.0.1"
    assert transport.listening_address("127.0.0.1", ["127.0.0.1"]) == "127.0.0.1"


def test_a_member_that_reaches_the_store_over_loopback_listens_where_the_others_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "local_address", lambda towards: f"the way to {towards}")
    assert transport.listening_address("127.0.0.1", ["127.0.0.1", "10.0.0.2"]) == "the way to 10.0.0.2"


def test_a_stores_connection_does_not_wait_for_a_silent_host_for_ever() -> None:
    store = host_store(("127.0.0.1", 0), 10)
    client = connect_store(("127.0.0.1", store.port), 7)
    limits_s = []
    for name in Path("/proc/self/fd").iterdir():
        try:
            mine = socket.socket(fileno=int(name.name))
        except OSError:
            continue
        try:
            if mine.getpeername()[1] == store.port:
                limits_s.append(mine.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000)
        except OSError:
            pass
        finally:
            mine.detach()
    assert 7.0 in limits_s
    client.set("still", "works")
    assert store.get("still") == b"works"
