"""The process that holds the centre C for the asynchronous methods.

It has one thread and one group of two members per worker, so that a slow or dead worker does not delay the others (a
group shared by all would never report the death). The order depends on the method: `locked` serves workers first come
first served under a lock, `free` lets the threads write C at the same time (Hogwild; torch releases the interpreter
lock inside its kernels), `turns` is the strict round robin of Algorithm 1 in 1708.02983. `staleness` limits how many
exchanges a worker may be ahead of the slowest living one.

The process may fail: it saves C regularly, exits when its workers are gone or a successor has taken over, and any
worker can start it again (link.py). A file that it was not told to keep is in a private folder, contains the run's
nonce, and is loaded by a successor in the same run only. The store lists the attached, living workers beside the
centre's heartbeat; workers use that list to decide whether they are enough (muster.py).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from outcore.elastic import rules
from outcore.elastic.checkpoint import CenterState, load_center, save_center
from outcore.elastic.cores import spare_cores
from outcore.elastic.methods import Method, find_method
from outcore.elastic.place import connect_store, raise_count, read_count, read_json, write_json
from outcore.elastic.transport import PrefixStore, listening_address, local_address
from outcore.elastic.turns import Turns
from outcore.elastic.wire import CENTER_RANK, Group, PeerLost, cut
from outcore.errors import OutcoreError

HELLO, EXCHANGE, TURN, READ, BYE = range(5)
REFUSED, TAKES = -1.0, 1.0  # answers to a greeting
BEAT_S = 0.2
_DAY_S = 86400.0


@dataclass(frozen=True)
class CenterConfig:
    """The configuration of a centre process."""

    epoch: int
    host: str
    port: int
    prefix: str
    method: str
    mu: float
    num_ranks: int
    num_elements: int
    num_params: int
    dtype: str
    frozen_bytes: list[int]
    limit_s: float
    staleness: int | None
    checkpoint: str  # a file, in a folder of its own if it is not to be kept
    keep_checkpoint: bool
    checkpoint_every_s: float
    part_sizes: list[int] | None
    nonce: str
    model_digest: str
    digest: float  # the number that workers of this training send when they connect


def send_parts(group: Group, vector: Tensor, to: int, part_sizes: list[int] | None) -> None:
    for part in cut(vector, part_sizes):
        group.send(part, to)


def receive_parts(group: Group, vector: Tensor, source: int, part_sizes: list[int] | None) -> None:
    for part in cut(vector, part_sizes):
        group.receive(part, source)


class Center:
    """C, its velocity, and the threads that serve workers."""

    def __init__(self, config: CenterConfig) -> None:
        self.config = config
        self.method: Method = find_method(config.method)
        # Two clients, because waiting for a worker's address must not delay the heartbeat.
        self._store, self._meeting_store = (
            PrefixStore(config.prefix, connect_store((config.host, config.port), config.limit_s)) for _ in range(2)
        )
        self._path, self._address = Path(config.checkpoint), local_address(config.host)
        self.dtype: torch.dtype = getattr(torch, config.dtype)
        has_momentum = self.method.momentum == "center"
        self.center = torch.zeros(config.num_elements, dtype=self.dtype)
        self.velocity = torch.zeros(config.num_params if has_momentum else 0, dtype=self.dtype)
        self.num_exchanges, self.global_step = -1, 0  # -1: no worker brought weights yet
        self._load()
        self._frozen: list[Tensor] | None = None if config.frozen_bytes else []
        self._lock, self._frozen_lock = threading.Lock(), threading.Lock()
        self._turns = Turns(config.num_ranks, config.limit_s, config.staleness)
        self._num_attached = 0
        self._beats: dict[str, tuple[int, float]] = {}  # by uid: a worker's last heartbeat and its time
        self._parted = False  # whether the last worker that left had finished
        self._last_word_s = time.monotonic()
        self._saved_exchanges = self.num_exchanges

    def _load(self) -> None:
        config = self.config
        nonce = None if config.keep_checkpoint else config.nonce
        saved = load_center(self._path, config.num_elements, self.dtype, nonce=nonce, model=config.model_digest)
        if saved is not None:
            self.center, self.num_exchanges, self.global_step = saved.center, saved.num_exchanges, saved.global_step
            if saved.velocity.numel() >= self.velocity.numel():
                self.velocity.copy_(saved.velocity[: self.velocity.numel()])

    def run(self) -> None:
        """Accepts workers until all are gone, a successor takes over, or the store (the launcher) ends."""
        config, num_tickets, beat, saved_s = self.config, 0, 0, time.monotonic()
        self._store.set(f"center/{config.epoch}/address", self._address)
        raise_count(self._store, "center/epoch", config.epoch)
        try:
            while not self._is_over() and read_count(self._store, "center/epoch") == config.epoch:
                write_json(self._store, f"center/{config.epoch}/beat", [beat := beat + 1, self._living()])
                arrived = read_count(self._store, f"center/{config.epoch}/tickets")
                for ticket in range(num_tickets + 1, arrived + 1):
                    self._num_attached += 1
                    threading.Thread(target=self._serve, args=(ticket,), daemon=True).start()
                num_tickets = arrived
                if time.monotonic() - saved_s > config.checkpoint_every_s:
                    self._save()
                    saved_s = time.monotonic()
                time.sleep(BEAT_S if num_tickets >= config.num_ranks else 0.02)
            superseded = read_count(self._store, "center/epoch") != config.epoch
        except RuntimeError:  # the store ended with its launcher: nobody is left to serve, or to come back
            superseded, self._parted = False, True
        if not superseded:  # otherwise the file belongs to the successor
            self._end()

    def _end(self) -> None:
        if self.config.keep_checkpoint:
            self._save()
        elif self._parted:
            shutil.rmtree(self._path.parent, ignore_errors=True)

    def _living(self) -> list[int]:
        """Returns the ranks of attached workers with a heartbeat; a stopped worker keeps its connection open."""
        now_s = time.monotonic()
        for uid, (count, _) in list(self._beats.items()):
            latest = read_count(self._store, f"beat/{uid}")
            if latest != count and uid in self._beats:
                self._beats[uid] = latest, now_s
        heard = [uid for uid, (_, heard_s) in list(self._beats.items()) if now_s - heard_s <= self.config.limit_s]
        return sorted({int(uid.partition(".")[0]) for uid in heard})

    def _is_over(self) -> bool:
        silent_s = time.monotonic() - self._last_word_s
        if self._num_attached == 0:
            if self._everyone_left():
                self._parted = True
            return silent_s > (1.0 if self._parted else self.config.limit_s + 5)
        return silent_s > 10 * self.config.limit_s + 60  # all workers are stopped; they can start a new centre

    def _everyone_left(self) -> bool:
        return 0 < read_count(self._store, "center/joined") <= read_count(self._store, "center/left")

    def _save(self) -> None:
        if self.num_exchanges <= self._saved_exchanges:
            return
        with self._lock:
            state = CenterState(self.center.clone(), self.velocity.clone(), self.num_exchanges, self.global_step)
        save_center(self._path, state, nonce=self.config.nonce, model=self.config.model_digest)
        self._saved_exchanges = state.num_exchanges

    def _serve(self, ticket: int) -> None:
        rank, uid = -1, ""
        try:
            rank, uid, group = self._meet(ticket)
            self._turns.attach(rank, uid)
            self._beats[uid] = -1, time.monotonic()
            self._parted = False
            self._answer(group, rank, uid)
            self._parted = True
        except (PeerLost, RuntimeError, OSError):
            pass  # this worker is gone, and so is its elastic term
        finally:
            self._turns.detach(rank, uid)
            self._beats.pop(uid, None)
            self._num_attached -= 1
            self._last_word_s = time.monotonic()

    def _meet(self, ticket: int) -> tuple[int, str, Group]:
        config = self.config
        store = self._meeting_store
        who = cast("tuple[int, str, str]", read_json(store, f"center/{config.epoch}/ticket/{ticket}", config.limit_s))
        if who is None:
            raise PeerLost(None, "took a ticket and vanished")
        wire = PrefixStore(f"center/{config.epoch}/wire/{ticket}", store)
        wire.set_timeout(timedelta(seconds=config.limit_s))
        rank, uid, their_address = who
        address = listening_address(self._address, [their_address])
        return rank, uid, Group(wire, 0, [CENTER_RANK, rank], config.limit_s, address=address)

    def _answer(self, group: Group, rank: int, uid: str) -> None:
        header = torch.zeros(4, dtype=torch.float64)
        theirs, reply = torch.zeros_like(self.center), torch.zeros(self.center.numel() + 1, dtype=self.dtype)
        while True:
            group.receive(header, 1, limit_s=_DAY_S)  # steps may be long; a death closes the connection
            self._last_word_s = time.monotonic()
            kind, clock, alpha = int(header[0]), int(header[1]), float(header[2])
            if kind == EXCHANGE:
                self.global_step = max(self.global_step, int(header[3]))
                self._exchange(group, rank, uid, clock, alpha, theirs, reply)
            elif kind == HELLO:
                self._welcome(group, header, theirs, reply)
            elif kind == READ:
                with self._lock:
                    self._write_center(reply)
                group.send(reply, 1)
            elif kind == TURN:
                self._hold(group, partial(self._turns.take, rank))
            else:
                return

    def _write_center(self, reply: Tensor) -> None:
        """Writes C and the number of its exchanges, because a worker's copy may become the next centre."""
        reply[:-1].copy_(self.center)
        reply[-1] = self.num_exchanges

    def _welcome(self, group: Group, header: Tensor, theirs: Tensor, reply: Tensor) -> None:
        """Tells a worker the centre's progress, and takes over the worker's copy of C if it is newer.

        A worker of another training is refused before anything whose size depends on the model is sent.
        """
        their_count, digest, their_step = int(header[1]), float(header[2]), int(header[3])
        if digest != self.config.digest:
            group.send(torch.tensor([REFUSED, 0.0, 0.0, 0.0], dtype=torch.float64), 1)
            return
        ours = self.num_exchanges
        takes = their_count > ours or ours < 0
        with self._frozen_lock:  # held until the first worker's bytes are here, which the others must get
            asks = self._frozen is None
            verdict = TAKES if takes else 0.0
            answer = [verdict, float(asks), float(max(self.global_step, their_step)), 0.0]
            group.send(torch.tensor(answer, dtype=torch.float64), 1)
            if takes:
                group.receive(theirs, 1)
            if asks:
                received = [torch.zeros(size, dtype=torch.uint8) for size in self.config.frozen_bytes]
                for part in received:
                    group.receive(part, 1)
                self._frozen = received
        if not asks and their_count < 0 and self._frozen is not None:
            for part in self._frozen:
                group.send(part, 1)
        with self._lock:
            if takes and (their_count > self.num_exchanges or self.num_exchanges < 0):
                self.center.copy_(theirs)
                self.num_exchanges = max(their_count, 0)
            self.global_step = max(self.global_step, their_step)
            self._write_center(reply)
        group.send(reply, 1)

    def _exchange(
        self, group: Group, rank: int, uid: str, clock: int, alpha: float, theirs: Tensor, reply: Tensor
    ) -> None:
        if self.method.order == "turns":
            self._hold(group, partial(self._turns.take, rank))
        try:
            receive_parts(group, theirs, 1, self.config.part_sizes)
            if self.method.order == "free":
                self._update(theirs, reply, alpha)
            else:
                with self._lock:
                    self._update(theirs, reply, alpha)
            if self.config.staleness is not None:
                self._hold(group, partial(self._turns.keep_pace, uid, clock))
            sizes = self.config.part_sizes
            send_parts(group, reply, 1, None if sizes is None else [*sizes, 1])
        finally:
            if self.method.order == "turns":
                self._turns.pass_on(rank)

    def _hold(self, group: Group, attempt: Callable[[float], bool]) -> None:
        """Holds a worker back until `attempt` succeeds, and signals from time to time that the centre is alive."""
        posted = []  # kept alive until the worker continues, because gloo reads them late
        while not attempt(self.config.limit_s / 3):
            posted.append(group.post_status(0.0))
        leave = group.post_status(1.0)
        group.wait(leave[1], 1, _DAY_S)  # a worker in a long step receives late

    def _update(self, theirs: Tensor, reply: Tensor, alpha: float) -> None:
        """Applies one worker's message; `reply` is the old centre for elastic methods, the new one for the others."""
        num_params, mean_rate = self.config.num_params, 1.0 / self.config.num_ranks
        center, velocity = self.center[:num_params], self.velocity
        if self.method.sends == "weights":
            self._write_center(reply)
            theirs.sub_(reply[:-1])
            rules.center_elastic(center, theirs[:num_params], alpha, out=center)
        elif self.method.momentum == "center":
            rules.momentum(velocity, theirs[:num_params], self.config.mu, out=velocity)
            rules.center_step(center, velocity, out=center)
        else:
            rules.center_step(center, theirs[:num_params], out=center)
        self.center[num_params:].add_(theirs[num_params:], alpha=mean_rate)  # buffers: averaged, whatever the method
        self.num_exchanges += 1
        if self.method.sends != "weights":
            self._write_center(reply)


def main() -> None:
    """Runs the centre: `python -m outcore.elastic.center CONFIG_JSON`, started by link.py."""
    config = CenterConfig(**json.loads(sys.argv[1]))
    if hasattr(os, "sched_setaffinity"):
        # The starter may be pinned to its group of cores; the centre must not compete with that group alone.
        os.sched_setaffinity(0, spare_cores() or range(os.cpu_count() or 1))
    torch.set_num_threads(1)
    try:
        Center(config).run()
    except OutcoreError as error:
        store = PrefixStore(config.prefix, connect_store((config.host, config.port), config.limit_s))
        write_json(store, f"center/{config.epoch}/error", str(error))
    os._exit(0)  # threads that wait for a stopped worker cannot be interrupted


def as_json(config: CenterConfig) -> str:
    return json.dumps(asdict(config))


if __name__ == "__main__":
    main()
