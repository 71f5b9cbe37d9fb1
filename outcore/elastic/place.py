"""The place of a worker in its training, from the launcher's environment, and the store in which workers meet.

The store is for control only (restarts, generations, heartbeats; 75 us per operation); weights are never sent through
it. Keys have a prefix of run, restart count, the training's name and its number. Under torchrun the agent's store
outlives the workers, and a restarted gloo group that reads the addresses of dead ranks never connects (torch 2.13: 0 of
10 restarts recovered). Two trainings of one launch have no common key.
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
_num_joined: Counter[str] = Counter()  # how often this process joined a training of that name
_hosted: dict[tuple[str, int], Store] = {}  # without a launcher, rank 0 hosts the store for all its trainings


class PortTaken(ElasticError):
    """The port of the store is in use."""


@dataclass(frozen=True)
class Place:
    """The place of one worker. `uid` distinguishes a restarted rank from its dead predecessor; `local` is this host's
    address towards the store. If FSDP2 shards the model, `rank` and `num_ranks` count replicas."""

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
    """Returns the place that the launcher (torchrun, `outcore launch`, or anything that sets RANK) gave this process.

    A process that leaves a training and joins one of the same name again joins the next one. All workers run the same
    script, so their numbers agree.
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
        with suppress(PortTaken):  # torch's own store, after init_process_group, can be used
            _hosted[address] = host_store(address, limit_s)
    return take_seat(connect_store(address, limit_s), rank, num_ranks, address, prefix)


def take_seat(client: Store, rank: int, num_ranks: int, address: tuple[str, int], prefix: str) -> Place:
    """Returns a place at `address` over an existing connection."""
    store = PrefixStore(prefix, client)
    birth = store.add(f"born/{rank}", 1)
    return Place(rank, num_ranks, f"{rank}.{birth}", store, address, prefix, local_address(address[0]))


def connect_store(address: tuple[str, int], limit_s: float, silent_s: float | None = None) -> Store:
    """Returns a new client. A TCPStore client serves one waiting call at a time, so threads must not share one.

    It waits `limit_s` for the store, and fails if the store's host is silent for `silent_s` (by default the same).
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
    """Hosts the store in this process (port 0: any free port). It listens on the given address only. A name that
    resolves to loopback on its own host is that of a real host, and the store then listens on every interface."""
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
    """Whether `host` is explicitly a loopback address, and not a name that resolves to one."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def read_count(store: Store, key: str) -> int:
    """Returns the value of a counter, 0 if it does not exist."""
    return int(store.add(key, 0))


def raise_count(store: Store, key: str, value: int) -> None:
    """Raises a counter to `value`; it never decreases."""
    store.add(key, max(0, value - read_count(store, key)))


def read_json(store: Store, key: str, limit_s: float) -> object:
    """Returns the value of `key`, after waiting at most `limit_s` for it; None if it is not there."""
    try:
        store.wait([key], timedelta(seconds=limit_s))
        return json.loads(store.get(key).decode())
    except RuntimeError:  # torch's store errors derive from it
        return None


def write_json(store: Store, key: str, value: object) -> None:
    store.set(key, json.dumps(value))


def poll(reached: Callable[[], bool], limit_s: float) -> bool:
    """Whether `reached()` becomes true within `limit_s`."""
    end = time.monotonic() + limit_s
    while not reached():
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True
