"""A worker's connection to the centre process: exchanges messages, and finds the centre again if it is lost.

While the centre is away a worker trains on alone: every exchange returns None until a background thread has found the
centre, or has won the election to restart it. Elections use the store: the first worker that claims the next epoch
starts the process, and an older centre that still runs sees the epoch and exits. A worker that finds no centre within
the join limit raises an error, and so does one whose centre serves fewer workers than `min_members`, so that no worker
trains alone unnoticed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from outcore.elastic.center import BYE, EXCHANGE, HELLO, READ, REFUSED, TAKES, TURN, CenterConfig, as_json
from outcore.elastic.frozen import Frozen
from outcore.elastic.methods import find_method
from outcore.elastic.muster import Muster
from outcore.elastic.place import connect_store, poll, raise_count, read_count, read_json, write_json
from outcore.elastic.transport import PrefixStore, listening_address
from outcore.elastic.wire import CENTER_RANK, Group, PeerLost, Traffic, cut
from outcore.errors import ElasticError

StartCenter = Callable[[CenterConfig], None]
_START_S = 60.0  # guessed: importing torch on a busy machine takes a while
_ASK_EVERY_S = 0.5  # guessed: how often a worker asks who else is attached


class _Refused(ElasticError):
    """The centre belongs to another training; trying again is of no use."""


def start_center_process(config: CenterConfig) -> None:
    """Starts the centre in a session of its own, so that it outlives the worker that started it."""
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

    def __init__(self, muster: Muster, config: CenterConfig, frozen: Frozen, start: StartCenter | None = None) -> None:
        self._muster, self._place, self._config, self._frozen = muster, muster.place, config, frozen
        self._start = start or start_center_process
        self._store = self._place.store
        self._store.add("center/joined", 1)
        dtype: torch.dtype = getattr(torch, config.dtype)
        self._header = _header(HELLO)
        self._out = torch.zeros(config.num_elements, dtype=dtype)
        self._answer = torch.zeros(config.num_elements + 1, dtype=dtype)  # C and the number of its exchanges
        self._kept, self._kept_count = self._out, -1  # the newest complete copy of C; -1: own weights
        self.global_step = 0
        self._works: list[Any] = []
        self._answered = False
        self._is_held_back = config.staleness is not None or find_method(config.method).order == "turns"
        self._group: Group | None = None
        self._epoch = 0
        self._found: Group | None = None
        self._finder: threading.Thread | None = None
        self._failure: ElasticError | None = None  # why the last search for a centre failed
        self._lost_s, self._asked_s = 0.0, 0.0
        self._closed = threading.Event()
        self.num_losses = 0
        self.traffic = Traffic()
        self.busy_s = 0.0

    def connect(self, weights: Tensor, global_step: int = 0) -> Tensor:
        """Returns the centre's weights; `weights` become the centre if there is none yet."""
        self._out.copy_(weights)
        self.global_step = global_step
        threading.Thread(target=self._beat, daemon=True).start()
        limit_s = self._muster.join_limit_s
        end_s = time.monotonic() + limit_s
        if not self._muster.leads:  # the first rank's weights become the centre, not the fastest one's
            poll(lambda: self._store.check(["center/first_step"]), min(limit_s, _START_S))
        while True:
            try:
                self._group = self._find()
                self._begin_with_the_others()
                return self._answer[:-1]
            except _Refused:
                raise
            except (PeerLost, ElasticError) as error:
                if time.monotonic() > end_s:
                    raise ElasticError(f"rank {self._place.rank} reached no centre in {limit_s:g} s: {error}") from None

    def _begin_with_the_others(self) -> None:
        """Makes all workers that are present at the beginning start with the same step, however late they connect."""
        first = self._store.compare_set("center/first_step", "", str(self.global_step))
        if not self._muster.is_late:
            self.global_step = int(first)

    def keep(self, center: Tensor) -> None:
        """Sets the caller's copy of the last answer, from which a new centre starts if the old one is lost."""
        self._kept = center

    def begin(self, vector: Tensor, clock: int, alpha: float, global_step: int) -> None:
        """Posts one exchange; it runs in gloo's threads until `finish`."""
        self._adopt()
        self._answered = False
        self.global_step = global_step
        if self._group is None:
            return
        self._out.copy_(vector)
        self._header = _header(EXCHANGE, clock, alpha, global_step)  # kept alive until gloo has sent it
        sizes = self._config.part_sizes
        try:
            self._works = self._group.post_send(self._header, 0)
            for part in cut(self._out, sizes):
                self._works += self._group.post_send(part, 0)
            for part in cut(self._answer, None if sizes is None else [*sizes, 1]):
                self._works += self._group.post_receive(part, 0)
        except PeerLost:
            self._lose()

    def finish(self) -> Tensor | None:
        """Returns the centre's answer; None while it is unreachable. Raises ElasticError if that lasts too long."""
        self._settle()
        answered, self._answered = self._answered, False
        if not answered and self._lost_s and time.monotonic() - self._lost_s > self._muster.join_limit_s:
            raise ElasticError(
                f"rank {self._place.rank} has trained alone for {self._muster.join_limit_s:g} s, the join limit: the "
                f"centre is out of reach ({self._failure}); see whether the other hosts are reachable"
            )
        self._await_company()
        return self._answer[:-1] if answered else None

    def _settle(self) -> None:
        """Waits for the exchange in progress, if there is one."""
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
                self._kept_count = int(self._answer[-1])
                self._count()
        self.busy_s += time.perf_counter() - began_s

    def take_turn(self) -> None:
        """Waits for this worker's turn, which in the full Algorithm 1 includes its gradient."""
        self._adopt()
        if self._group is not None:
            try:
                self._group.send(_header(TURN), 0)
                self._await_leave()
            except PeerLost:
                self._lose()

    def read(self) -> Tensor:
        """Returns the centre's present weights, or the last known ones while it is unreachable."""
        self._settle()
        fresh = torch.empty_like(self._answer)
        return fresh[:-1] if self._ask(READ, fresh) else self._kept

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

    def members(self) -> list[int]:
        """Returns the ranks that the centre serves now; none while it is unreachable."""
        if self._group is None:
            return []
        told = cast("tuple[int, list[int]] | None", read_json(self._place.store, f"center/{self._epoch}/beat", 1.0))
        return [] if told is None else list(told[1])

    def _await_company(self) -> None:
        """Waits while fewer workers than `min_members` are attached to the centre."""
        now_s = time.monotonic()
        if self._group is None or now_s - self._asked_s < _ASK_EVERY_S:
            return
        limit_s, has_warned = self._muster.join_limit_s, False
        while True:
            present, not_finished = self.members(), self._muster.not_finished()
            if len(present) >= self._muster.num_required(not_finished):
                break
            waited_s = time.monotonic() - now_s
            if waited_s > limit_s:
                raise self._muster.too_few(present)
            if waited_s > self._config.limit_s / 3 and not has_warned:
                self._muster.warn_of_too_few(present, not_finished)
                has_warned = True
            if read_count(self._place.store, "center/epoch") != self._epoch:
                break  # the next exchange notices it
            time.sleep(0.05)
        self._asked_s = time.monotonic()

    def close(self, *, finished: bool) -> None:
        self._closed.set()
        if finished:
            self._muster.leave()
            with suppress(RuntimeError):  # informs a centre that is still starting
                self._place.store.add("center/left", 1)
        if self._group is not None:
            if finished:
                with suppress(PeerLost):
                    self._group.send(_header(BYE), 0)
            self._group.close()
            self._group = None

    def _await_leave(self) -> None:
        """Waits until the centre lets this worker continue; meanwhile the centre signals that it is alive."""
        assert self._group is not None
        while self._group.receive_status(0) == 0.0:
            pass

    def _count(self) -> None:
        if self._group is not None:
            self.traffic.num_messages += self._group.traffic.num_messages
            self.traffic.num_bytes += self._group.traffic.num_bytes
            self._group.traffic = Traffic()

    def _lose(self) -> None:
        """Drops the connection and searches for the centre in the background."""
        self.num_losses += 1
        self._works = []
        self._lost_s = self._lost_s or time.monotonic()
        if self._group is not None:
            self._group.close()
            self._group = None
        if self._finder is None and not self._closed.is_set():
            self._finder = threading.Thread(target=self._search, daemon=True)
            self._finder.start()

    def _search(self) -> None:
        while not self._closed.is_set():
            try:
                # The search waits for the store, so it uses a client of its own.
                self._store = PrefixStore(self._place.prefix, connect_store(self._place.address, self._config.limit_s))
                self._found = self._find()
                return
            except (ElasticError, RuntimeError) as error:
                self._failure = error if isinstance(error, ElasticError) else ElasticError(str(error))
                self._closed.wait(0.1)

    def _adopt(self) -> None:
        """Takes over the connection that the background thread has found."""
        if self._group is None and self._finder is not None and not self._finder.is_alive():
            self._group, self._found, self._finder = self._found, None, None
            self._lost_s = 0.0

    def _beat(self) -> None:
        """Sends heartbeats for this process, however long its steps are."""
        pause_s = min(1.0, self._config.limit_s / 4)
        with suppress(ElasticError, RuntimeError):  # the store ended; those who wait for it notice
            store = PrefixStore(self._place.prefix, connect_store(self._place.address, self._config.limit_s))
            while not self._closed.is_set():
                store.add(f"beat/{self._place.uid}", 1)
                self._closed.wait(pause_s)

    def _find(self) -> Group:
        epoch = self._living_epoch()
        key = f"center/{epoch}"
        ticket = self._store.add(f"{key}/tickets", 1)
        theirs = self._store.get(f"{key}/address").decode()
        mine = listening_address(self._place.local, [theirs])
        write_json(self._store, f"{key}/ticket/{ticket}", [self._place.rank, self._place.uid, mine])
        wire = PrefixStore(f"{key}/wire/{ticket}", self._store)
        wire.set_timeout(timedelta(seconds=self._config.limit_s + 2))
        group = Group(wire, 1, [CENTER_RANK, self._place.rank], self._config.limit_s, address=mine)
        self._greet(group)
        self._epoch = epoch
        return group

    def _greet(self, group: Group) -> None:
        reply, is_newcomer = torch.zeros(4, dtype=torch.float64), self._kept_count < 0
        group.send(_header(HELLO, self._kept_count, self._config.digest, self.global_step), 0)
        group.receive(reply, 0)
        if reply[0] == REFUSED:
            raise _Refused(
                f"rank {self._place.rank} reached the centre of another training at {self._place.address[0]}; give "
                "each training a name of its own: join(..., name=...)"
            )
        if reply[0] == TAKES:
            group.send(self._kept.cpu(), 0)
        if reply[1]:
            for part in self._frozen.read():
                group.send(part, 0)
        elif is_newcomer:
            for number, size in enumerate(self._config.frozen_bytes):
                part = torch.zeros(size, dtype=torch.uint8)
                group.receive(part, 0)
                self._frozen.write(number, part)
        group.receive(self._answer, 0)
        if is_newcomer:
            self.global_step = max(self.global_step, int(reply[2]))
        self._kept_count = max(self._kept_count, 0)

    def _living_epoch(self) -> int:
        """Returns the epoch of a centre with a heartbeat; starts a centre if there is none."""
        epoch = read_count(self._store, "center/epoch")
        if epoch > 0 and self._beats(epoch, min(max(self._config.limit_s / 2, 1.0), 10.0)):
            return epoch
        epoch += 1
        owner = self._store.compare_set(f"center/owner/{epoch}", "", self._place.uid).decode()
        if owner == self._place.uid:
            self._start(replace(self._config, epoch=epoch, checkpoint=self._config.checkpoint or self._private_file()))
        error_key = f"center/{epoch}/error"
        poll(lambda: read_count(self._store, "center/epoch") >= epoch or self._store.check([error_key]), _START_S)
        if read_count(self._store, "center/epoch") < epoch:
            why = read_json(self._store, error_key, 0.1)
            raise_count(self._store, "center/epoch", epoch)  # lets another worker try
            raise ElasticError(f"the centre started by worker {owner} did not come up{f': {why}' if why else ''}")
        return read_count(self._store, "center/epoch")

    def _private_file(self) -> str:
        """Returns a file in a private folder of this run: that of the last centre if it was on this host."""
        told = read_json(self._store, "center/folder", 0.01)
        folder = Path(str(told)) if told else None
        if folder is None or not _is_private(folder):
            folder = Path(tempfile.mkdtemp(prefix="outcore-center-"))
            write_json(self._store, "center/folder", str(folder))
        return str(folder / "center.npz")

    def _beats(self, epoch: int, within_s: float) -> bool:
        key = f"center/{epoch}/beat"
        first = self._store.get(key) if self._store.check([key]) else b""
        return poll(lambda: self._store.check([key]) and self._store.get(key) != first, within_s)


def _is_private(folder: Path) -> bool:
    try:
        stat = folder.stat()
    except OSError:
        return False
    return stat.st_uid == os.getuid() and stat.st_mode & 0o77 == 0 and not folder.is_symlink()


def _header(kind: int, clock: int = 0, number: float = 0.0, global_step: int = 0) -> Tensor:
    return torch.tensor([kind, clock, number, global_step], dtype=torch.float64)
