"""Numbers the ranks of several hosts' launchers, and tracks which launchers are alive.

Each host runs its own launcher, which starts, watches and restarts its own replicas: a replica that dies is started
again alone, whatever the other hosts do. The launchers meet in a store at the rendezvous address, hosted by the one
whose host has that address. They agree on nothing but the numbering: node k's ranks follow those of the nodes before
it. A launcher that died, or whose host was restarted, is started again with the same command and takes over the seat
whose heart has stopped; its replicas come back as late comers. Only the launcher that hosts the store is indispensable.
"""

from __future__ import annotations

import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outcore.elastic.place import (
    PortTaken,
    connect_store,
    host_store,
    poll,
    read_count,
    read_json,
    write_json,
)
from outcore.elastic.transport import PrefixStore, Store, TCPStore
from outcore.errors import ElasticError

BEAT_S = 0.5  # guessed: between two heartbeats of a launcher
SILENT_S = 5.0  # guessed: without one for so long, a launcher counts as dead
_STORE_LIMIT_S = 30.0  # guessed: how long a launcher waits for an answer of the store


@dataclass(frozen=True)
class Seat:
    """The ranks of a launcher's replicas: from `first_rank` on, of `num_ranks`. `num_before` launchers had it
    before."""

    node: int
    first_rank: int
    num_ranks: int
    run: str
    num_before: int = 0


class Nodes:
    """This launcher's view of the others."""

    def __init__(self, address: tuple[str, int], num_nodes: int, num_groups: int, join_limit_s: float) -> None:
        self.address, self.num_nodes, self._num_groups = address, num_nodes, num_groups
        self.join_limit_s = join_limit_s
        self._server: TCPStore | None = None
        with suppress(PortTaken):  # the address is another host's, or the store is there already
            server = host_store(address, _STORE_LIMIT_S)
            self._server, self.address = server, (address[0], server.port)
        self._store = self._client()
        self._node = -1
        self._ended = threading.Event()
        self.lost_store = threading.Event()

    def take_seat(self, node_rank: int | None) -> Seat:
        """Returns the numbering when all launchers are present; raises ElasticError if they are late."""
        self._node, num_before = self._claim(node_rank)
        write_json(self._store, f"{self._node}/host", [socket.gethostname(), self._num_groups])
        threading.Thread(target=self._beat, daemon=True).start()
        keys = [f"{node}/host" for node in range(self.num_nodes)]
        if not poll(lambda: self._store.check(keys), self.join_limit_s):
            missing = [node for node, key in enumerate(keys) if not self._store.check([key])]
            raise ElasticError(
                f"node(s) {missing} of {self.num_nodes} did not come to {self.address[0]}:{self.address[1]} within "
                f"{self.join_limit_s:g} s; start `outcore launch` with the same --nnodes and --rdzv on every host"
            )
        sizes = [self._told(node)[1] for node in range(self.num_nodes)]
        run = self._store.compare_set("run", "", secrets.token_hex(8)).decode()
        return Seat(self._node, sum(sizes[: self._node]), sum(sizes), run, num_before)

    def finish(self, *, well: bool, limit_s: float) -> list[int]:
        """Marks this node as done; the host of the store waits for the others. Returns the lost nodes."""
        with suppress(RuntimeError, ElasticError):
            write_json(self._store, f"{self._node}/done", well)
            if self._server is not None:
                poll(lambda: not self._unfinished() or self._all_silent(self._unfinished()), limit_s)
                return self._unfinished()
        return []

    def close(self) -> None:
        self._ended.set()
        self._server = None

    def name(self, node: int) -> str:
        return f"node {node} ({self._told(node)[0]})"

    def _client(self) -> Store:
        return PrefixStore("nodes", connect_store(self.address, self.join_limit_s, silent_s=_STORE_LIMIT_S))

    def _told(self, node: int) -> tuple[str, int]:
        told: Any = read_json(self._store, f"{node}/host", _STORE_LIMIT_S)
        return str(told[0]), int(told[1])

    def _claim(self, wanted: int | None) -> tuple[int, int]:
        """Returns a node that is free or whose launcher is silent, and how many launchers had it before."""
        end_s = time.monotonic() + self.join_limit_s
        while True:
            for node in range(self.num_nodes) if wanted is None else [wanted]:
                num_before = read_count(self._store, f"{node}/claims")
                if num_before > 0 and (self._is_done(node) or not self._is_silent(node)):
                    continue
                if self._store.add(f"{node}/claims", 1) == num_before + 1:
                    return node, num_before
            if time.monotonic() > end_s or (wanted is not None and self._is_done(wanted)):
                what = f"all {self.num_nodes} nodes" if wanted is None else f"node {wanted}"
                raise ElasticError(
                    f"{what} at {self.address[0]}:{self.address[1]} have a launcher that lives or is done; raise "
                    "--nnodes, or choose another port for another run"
                )
            time.sleep(BEAT_S)

    def _is_done(self, node: int) -> bool:
        return self._store.check([f"{node}/done"])

    def _is_silent(self, node: int) -> bool:
        before = read_count(self._store, f"{node}/beat")
        return not poll(lambda: read_count(self._store, f"{node}/beat") != before, SILENT_S)

    def _all_silent(self, nodes: list[int]) -> bool:
        return all(self._is_silent(node) for node in nodes)

    def _unfinished(self) -> list[int]:
        return [node for node in range(self.num_nodes) if not self._is_done(node)]

    def _beat(self) -> None:
        """Sends heartbeats until this launcher ends. If the store no longer answers, all replicas are ended."""
        try:
            store = self._client()
            while not self._ended.is_set():
                store.add(f"{self._node}/beat", 1)
                self._ended.wait(BEAT_S)
        except (RuntimeError, ElasticError):
            self.lost_store.set()
