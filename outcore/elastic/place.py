"""Environment of the launcher -> Place: who this worker is, and the store through which all of them meet.

The store is the control plane only (births, generations, heartbeats; 75 us an operation); weights never pass through
it. Keys are prefixed by run, restart count, the training's name and its number: under torchrun the agent's store
outlives the workers, and a restarted gloo group that reads the dead ranks' addresses never connects (seen on torch
2.13, 0 of 10 restarts recovered). Two trainings of one launch share no key.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta

from outcore.elastic.sharded import Shard
from outcore.elastic.transport import (
    PrefixStore,
    Store,
    TCPStore,
    is_loopback,
    limit_silence,
    listen,
    local_address,
    resolve,
)
from outcore.errors import ElasticError

POLL_S = 0.01
_num_joined: Counter[str] = Counter()  # how often this process has joined a training of that name
_hosted: dict[tuple[str, int], Store] = {}  # without a launcher rank 0 hosts the store, for all trainings it joins


class PortTaken(ElasticError):
    """The store's port cannot be listened on."""


@dataclass(frozen=True)
class Place:
    """One worker's seat. `uid` tells a restarted rank from its dead predecessor; `local` is this host's address towards
    the store. Where FSDP2 shards the model, `rank` and `num_ranks` count replicas."""

    rank: int
    num_ranks: int
    uid: str
    store: Store
    address: tuple[str, int]
    prefix: str
    local: str
    shard: Shard | None = None

    def sub_store(self, prefix: str) -> Store:
        return PrefixStore(prefix, self.store)


FindShard = Callable[[int, int], Shard | None]


def find_place(limit_s: float, name: str = "default", find_shard: FindShard = lambda rank, num_ranks: None) -> Place:
    """The seat the launcher (torchrun, `outcore launch`, or anything that sets RANK) gave to this process.

    A process that joins a training of the same name again, after it left the first, joins the next one: all workers run
    the same script, so their numbers agree.
    """
    try:
        rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        raise ElasticError(
            f"elastic workers need RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT ({error} is missing or no number); "
            "start the script with `outcore launch --groups 4 script.py` or torchrun"
        ) from None
    # A launcher's own store outlives every worker; without one rank 0 hosts it. torch 2.13 turns every rank into a
    # client for a tcp:// rendezvous under torchrun, so the host is chosen here and not by init_process_group.
    hosted_by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    run, restart = os.environ.get("TORCHELASTIC_RUN_ID", "run"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix = f"outcore/{run}/{restart}/{name}/{_num_joined[name]}"
    shard = find_shard(rank, num_ranks)
    _num_joined[name] += 1
    host = rank == 0 and not hosted_by_launcher
    if shard is None:
        return open_place(rank, num_ranks, address, prefix, limit_s=limit_s, host=host)
    prefix = f"{prefix}/shard {shard.index} of {shard.count}"
    place = open_place(shard.replica, shard.num_replicas, address, prefix, limit_s=limit_s, host=host)
    return replace(place, shard=shard)


def open_place(
    rank: int, num_ranks: int, address: tuple[str, int], prefix: str, *, limit_s: float, host: bool = False
) -> Place:
    if host and address not in _hosted:
        with suppress(PortTaken):  # by torch's own store, where the script has called init_process_group: it serves
            _hosted[address] = host_store(address, limit_s)
    return take_seat(connect_store(address, limit_s), rank, num_ranks, address, prefix)


def take_seat(client: Store, rank: int, num_ranks: int, address: tuple[str, int], prefix: str) -> Place:
    """A seat at `address` over a connection that is there already."""
    store = PrefixStore(prefix, client)
    birth = store.add(f"born/{rank}", 1)
    return Place(rank, num_ranks, f"{rank}.{birth}", store, address, prefix, local_address(address[0]))


def connect_store(address: tuple[str, int], limit_s: float, silent_s: float | None = None) -> Store:
    """A client of its own: a TCPStore client serves one waiting call at a time, so busy threads must not share one.

    It waits `limit_s` for the store to be there, and fails when the store's host has been silent for `silent_s` (the
    same unless given).
    """
    host, port = address
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=limit_s))
        limit_silence(port, max(limit_s if silent_s is None else silent_s, 1.0))
        return store
    except Exception as error:
        raise ElasticError(
            f"no store at {host}:{port} within {limit_s:g} s; does the launcher (or rank 0) run? ({error})"
        ) from None


def host_store(address: tuple[str, int], limit_s: float) -> TCPStore:
    """The store itself, in this process (port 0: any that is free). It listens on that address only, be it loopback or
    a real one; a name that resolves to loopback on its own host is a real host's, which listens on every interface."""
    host, port = address
    try:
        server = listen(host if is_local_only(host) or not is_loopback(resolve(host)) else "", port)
    except OSError as error:
        raise PortTaken(f"cannot host the store at {host}:{port} ({error}); choose another port") from None
    port = int(server.getsockname()[1])
    try:
        return TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=limit_s),
            master_listen_fd=server.detach(),
        )
    except Exception as error:
        raise ElasticError(f"cannot host the store at {host}:{port} ({error}); choose another port") from None


def is_local_only(host: str) -> bool:
    """Whether `host` says loopback in so many words; a name that happens to resolve to it is a real host's."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def read_count(store: Store, key: str) -> int:
    """The value of a counter, 0 where nobody has counted yet."""
    return int(store.add(key, 0))


def raise_count(store: Store, key: str, value: int) -> None:
    """Brings a counter up to `value` (it never goes back)."""
    store.add(key, max(0, value - read_count(store, key)))


def read_json(store: Store, key: str, limit_s: float) -> object:
    """The value of `key`, waiting for it at most `limit_s`; None when it does not come."""
    try:
        store.wait([key], timedelta(seconds=limit_s))
        return json.loads(store.get(key).decode())
    except RuntimeError:  # torch's store errors derive from it
        return None


def write_json(store: Store, key: str, value: object) -> None:
    store.set(key, json.dumps(value))


def poll(reached: Callable[[], bool], limit_s: float) -> bool:
    """Whether `reached()` came true within `limit_s`."""
    end = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
