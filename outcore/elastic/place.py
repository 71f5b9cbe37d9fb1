"""Environment of the launcher -> Place: who this worker is, and the store through which all of them meet.

The store is the control plane only (births, generations, heartbeats; 75 us an operation); weights never pass through
it. Keys are prefixed by run and restart count: under torchrun the agent's store outlives the workers, and a restarted
gloo group that reads the dead ranks' addresses never connects (seen on torch 2.13, 0 of 10 restarts recovered).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from outcore.errors import ElasticError

POLL_S = 0.01


@dataclass(frozen=True)
class Place:
    """One worker's seat. `uid` tells a restarted rank from its dead predecessor."""

    rank: int
    num_ranks: int
    uid: str
    store: Store
    address: tuple[str, int]
    prefix: str

    def sub_store(self, prefix: str) -> Store:
        return PrefixStore(prefix, self.store)


def find_place(limit_s: float) -> Place:
    """The seat the launcher (torchrun, `outcore launch`, or anything that sets RANK) gave to this process."""
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
    run = os.environ.get("TORCHELASTIC_RUN_ID", "run")
    prefix = f"outcore/{run}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return open_place(rank, num_ranks, address, prefix, limit_s=limit_s, host=rank == 0 and not hosted_by_launcher)


def open_place(
    rank: int, num_ranks: int, address: tuple[str, int], prefix: str, *, limit_s: float, host: bool = False
) -> Place:
    return take_seat(connect_store(address, limit_s, host=host), rank, num_ranks, address, prefix)


def take_seat(client: Store, rank: int, num_ranks: int, address: tuple[str, int], prefix: str) -> Place:
    """A seat at `address` over a connection that is there already."""
    store = PrefixStore(prefix, client)
    birth = store.add(f"born/{rank}", 1)
    return Place(rank, num_ranks, f"{rank}.{birth}", store, address, prefix)


def connect_store(address: tuple[str, int], limit_s: float, *, host: bool = False) -> Store:
    """A client of its own: a TCPStore client serves one waiting call at a time, so busy threads must not share one."""
    try:
        return TCPStore(
            address[0], address[1], is_master=host, wait_for_workers=False, timeout=timedelta(seconds=limit_s)
        )
    except Exception as error:
        raise ElasticError(
            f"no store at {address[0]}:{address[1]} within {limit_s:g} s; does the launcher (or rank 0) run? ({error})"
        ) from None


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
