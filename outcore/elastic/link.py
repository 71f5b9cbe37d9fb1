"""A worker's messages -> the centre, and the centre's weights back; connects, loses and finds the centre again.

While the centre is away a worker trains on alone: every exchange answers None until a background thread has found the
centre, or won the election to start it anew from its checkpoint. Elections go through the store: the first worker to
claim the next epoch starts the process; an older centre that wakes up sees the epoch and ends.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore

from outcore.elastic.center import BYE, EXCHANGE, HELLO, READ, TURN, CenterConfig, as_json
from outcore.elastic.methods import find_method
from outcore.elastic.place import Place, connect_store, poll, raise_count, read_count, read_json, write_json
from outcore.elastic.wire import CENTER_RANK, Group, PeerLost, Traffic, cut
from outcore.errors import ElasticError

StartCenter = Callable[[CenterConfig], None]
_START_S = 60.0  # importing torch on a busy machine takes a while


def start_center_process(config: CenterConfig) -> None:
    """A process of its own session: it outlives the worker that happened to start it."""
    subprocess.Popen(
        [sys.executable, "-m", "outcore.elastic.center", as_json(config)],
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


class CenterLink:
    """One worker's connection to the centre."""

    def __init__(self, place: Place, config: CenterConfig, start: StartCenter | None = None) -> None:
        self._place, self._config = place, config
        self._start = start or start_center_process
        self._store = place.store
        self._store.add("center/joined", 1)
        self._header = _header(HELLO)
        self._out, self._seen = torch.zeros(config.num_elements), torch.zeros(config.num_elements)
        self._seen_count = -1
        self._works: list[Any] = []
        self._answered = False
        self._is_held_back = config.staleness is not None or find_method(config.method).order == "turns"
        self._group: Group | None = None
        self._found: Group | None = None
        self._finder: threading.Thread | None = None
        self._closed = False
        self.num_losses = 0
        self.traffic = Traffic()
        self.busy_s = 0.0

    def connect(self, weights: Tensor, limit_s: float) -> Tensor:
        """The centre's weights; `weights` become the centre where there is none yet."""
        self._out.copy_(weights)
        end_s = time.monotonic() + limit_s
        while True:
            try:
                self._group = self._find()
                return self._seen
            except (PeerLost, ElasticError) as error:
                if time.monotonic() > end_s:
                    raise ElasticError(f"rank {self._place.rank} reached no centre in {limit_s:g} s: {error}") from None

    def begin(self, vector: Tensor, clock: int, alpha: float) -> None:
        """Posts one exchange; it runs in gloo's threads until `finish`."""
        self._adopt()
        self._answered = False
        if self._group is None:
            return
        self._out.copy_(vector)
        self._header = _header(EXCHANGE, clock, alpha)  # gloo reads it until the centre has it
        try:
            self._works = self._group.post_send(self._header, 0)
            for part in self._cut(self._out):
                self._works += self._group.post_send(part, 0)
            for part in self._cut(self._seen):
                self._works += self._group.post_receive(part, 0)
        except PeerLost:
            self._lose()

    def finish(self) -> Tensor | None:
        """The centre's answer; None while the centre is out of reach."""
        self._settle()
        answered, self._answered = self._answered, False
        return self._seen if answered else None

    def _settle(self) -> None:
        """Waits for the exchange under way, if there is one."""
        began_s = time.perf_counter()
        works, self._works = self._works, []
        try:
            if works and self._is_held_back:
                self._await_leave()
            for work in works:
                assert self._group is not None
                self._group.wait(work, 0)
        except PeerLost:
            self._lose()
        else:
            if works:
                self._answered = True
                self._seen_count += 1
                self._count()
        self.busy_s += time.perf_counter() - began_s

    def take_turn(self) -> None:
        """Algorithm 1 in full: a worker's turn covers its gradient too. Waits until it is this worker's."""
        self._adopt()
        if self._group is not None:
            try:
                self._group.send(_header(TURN), 0)
                self._await_leave()
            except PeerLost:
                self._lose()

    def read(self) -> Tensor:
        """The centre's weights now, or as last seen while the centre is out of reach."""
        self._settle()
        fresh = torch.empty_like(self._seen)
        return fresh if self._ask(READ, fresh) else self._seen

    def _ask(self, kind: int, answer: Tensor) -> bool:
        self._adopt()
        if self._group is None:
            return False
        try:
            self._group.send(_header(kind), 0)
            self._group.receive(answer, 0)
        except PeerLost:
            self._lose()
            return False
        return True

    def close(self) -> None:
        self._closed = True
        with suppress(RuntimeError):  # a centre that is still starting must learn that nobody will come
            self._place.store.add("center/left", 1)
        if self._group is not None:
            with suppress(PeerLost):
                self._group.send(_header(BYE), 0)
            self._group.close()
            self._group = None

    def _await_leave(self) -> None:
        """Behind a turn or a staleness bound the centre says now and then that it is alive, then lets this one go."""
        assert self._group is not None
        while self._group.receive_status(0) == 0.0:
            pass

    def _cut(self, vector: Tensor) -> list[Tensor]:
        return cut(vector, self._config.part_sizes)

    def _count(self) -> None:
        if self._group is not None:
            self.traffic.num_messages += self._group.traffic.num_messages
            self.traffic.num_bytes += self._group.traffic.num_bytes
            self._group.traffic = Traffic()

    def _lose(self) -> None:
        """Forgets the connection and looks for the centre in the background."""
        self.num_losses += 1
        self._works = []
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._finder is None and not self._closed:
            self._finder = threading.Thread(target=self._search, daemon=True)
            self._finder.start()

    def _search(self) -> None:
        # The search waits on the store for long; a client of its own leaves the worker's free.
        self._store = PrefixStore(self._place.prefix, connect_store(self._place.address, self._config.limit_s))
        while not self._closed:
            try:
                self._found = self._find()
                return
            except (PeerLost, ElasticError, RuntimeError):
                time.sleep(0.1)

    def _adopt(self) -> None:
        """Takes over the connection the background thread has found."""
        if self._group is None and self._finder is not None and not self._finder.is_alive():
            self._group, self._found, self._finder = self._found, None, None

    def _find(self) -> Group:
        epoch = self._living_epoch()
        key = f"center/{epoch}"
        ticket = self._store.add(f"{key}/tickets", 1)
        write_json(self._store, f"{key}/ticket/{ticket}", [self._place.rank, self._place.uid])
        wire = PrefixStore(f"{key}/wire/{ticket}", self._store)
        wire.set_timeout(timedelta(seconds=self._config.limit_s + 2))
        ranks = [CENTER_RANK, self._place.rank]
        group = Group(wire, 1, ranks, self._config.limit_s, host=self._config.host)
        self._greet(group)
        return group

    def _greet(self, group: Group) -> None:
        reply = torch.zeros(2, dtype=torch.float64)
        group.send(_header(HELLO, self._seen_count), 0)
        group.receive(reply, 0)
        if reply[0] > 0:
            group.send(self._seen if self._seen_count >= 0 else self._out, 0)
        group.receive(self._seen, 0)
        self._seen_count = max(self._seen_count, int(reply[1]), 0)

    def _living_epoch(self) -> int:
        """The epoch of a centre whose heart beats; starts one where there is none."""
        epoch = read_count(self._store, "center/epoch")
        if epoch > 0 and self._beats(epoch, min(max(self._config.limit_s / 2, 1.0), 10.0)):
            return epoch
        epoch += 1
        owner = self._store.compare_set(f"center/owner/{epoch}", "", self._place.uid).decode()
        if owner == self._place.uid:
            self._start(replace(self._config, epoch=epoch))
        error_key = f"center/{epoch}/error"
        poll(lambda: read_count(self._store, "center/epoch") >= epoch or self._store.check([error_key]), _START_S)
        if read_count(self._store, "center/epoch") < epoch:
            why = read_json(self._store, error_key, 0.1)
            raise_count(self._store, "center/epoch", epoch)  # let another one try
            raise ElasticError(f"the centre started by worker {owner} did not come up{f': {why}' if why else ''}")
        return read_count(self._store, "center/epoch")

    def _beats(self, epoch: int, within_s: float) -> bool:
        key = f"center/{epoch}/beat"
        first = self._store.get(key) if self._store.check([key]) else b""
        return poll(lambda: self._store.check([key]) and self._store.get(key) != first, within_s)


def _header(kind: int, clock: int = 0, alpha: float = 0.0) -> Tensor:
    return torch.tensor([kind, clock, alpha, 0.0], dtype=torch.float64)
