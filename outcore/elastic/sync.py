"""Vectors of all members -> their sum, and a centre every member holds: the synchronous exchange.

The three levels of Sync EASGD (1708.02983, section 5.1) give the same numbers and differ in where the time goes:
1  the centre's holder is member 0: a tree reduction of the differences to it, a tree broadcast of the new C;
2  every member holds C beside its weights and applies eq. 2 itself: one tree sum, no broadcast;
3  as 2, and the sum and the new C are made in a thread of its own while the forward and backward pass compute the
   gradient at the same weights; eqs. 1 and 2 use the old pair (W_i, C), so nothing is approximated by overlapping. The
   loop's own thread is left with two passes: the difference, and the pull.

Two words ride behind the vector: how many members took part, and whether someone waits to be let in. Since every member
reads the same sums, all of them regroup after the same exchange. An exchange may be of a part of the vector only
(streaming DiLoCo), and may travel as codes of 8 bits (compression.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from outcore.elastic.compression import LARGEST, compressed_sum
from outcore.elastic.roster import Roster
from outcore.elastic.settings import Reduction
from outcore.elastic.wire import Group, PeerLost, Traffic, cut, give_way, is_finite
from outcore.errors import ElasticError

Act = Callable[[Tensor], None]
NUM_WORDS = 2
ASK_EVERY_S = 0.05


@dataclass(frozen=True)
class Agreement:
    """What the members of a new generation have found out: how far the furthest of them (member `best`) is, whether
    this one is behind it, and whether some have only just come."""

    num_exchanges: int
    best: int
    global_step: int
    is_behind: bool
    has_newcomers: bool


class SyncExchange:
    """Sums vectors over whoever is present; regroups when that changes."""

    def __init__(
        self,
        roster: Roster,
        num_elements: int,
        dtype: torch.dtype,
        *,
        level: int,
        reduction: Reduction,
        wire_dtype: torch.dtype | None,
        part_sizes: list[int] | None,
        device: torch.device,
        nccl: bool = False,
        largest_part: int | None = None,
    ) -> None:
        """`device` is where the vectors come from; over NCCL the message lies there, too. `largest_part` is the most
        elements that one exchange is of [all]."""
        self.roster, self.level, self.dtype = roster, level, dtype
        self._reduction, self._wire_dtype, self._part_sizes = reduction, wire_dtype, part_sizes
        self._num_elements, self._device, self._nccl = largest_part or num_elements, device, nccl
        self._error = torch.zeros(num_elements if wire_dtype in LARGEST else 0, dtype=dtype)  # what rounding has lost
        self._room = torch.zeros(0, dtype=dtype)  # for messages; `agree` makes the one of a generation
        self.message = self._room  # of the exchange that was begun last, its two words behind it
        self.abstained = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic-exchange", initializer=give_way)
        self._running: Future[None] | None = None
        self._then: Act | None = None
        self._asked_s = 0.0
        self.traffic = Traffic()
        self.busy_s = 0.0
        self.group: Group = roster.regroup()

    @property
    def num_members(self) -> int:
        return self.group.size

    @property
    def num_present(self) -> int:
        """How many members the last sum is over: those that did not abstain."""
        return round(float(self.message[-2]))

    def begin(
        self, write: Act, *, may_abstain: bool = False, then: Act | None = None, part: slice | None = None
    ) -> None:
        """Starts an exchange: `write` fills the vector that is summed, `then` is given the sum. `part` says which
        elements of the whole vector these are [all].

        At level 3 both run beside whatever the caller does next, who leaves what they read and write be until `finish`.
        At level 1 `then` is for member 0 alone, and what it leaves in the vector is sent to all.
        """
        num = self._num_elements if part is None else part.stop - part.start
        self.message = self._room[: num + NUM_WORDS]
        group, message = self.group, self.message  # the thread keeps to this generation, however late it ends
        fill: Callable[[], None] | None = partial(self.fill, group, message, write, may_abstain)
        if self._device.type != "cpu":  # both on the caller's stream, which the exchange's thread does not know
            self.fill(group, message, write, may_abstain)
            torch.cuda.current_stream(self._device).synchronize()
            fill = None
            if self.level != 1:
                self._then, then = then, None
        job = partial(self.run_exchange, group, message, fill, then, self._error if part is None else self._error[part])
        if self.level == 3:
            self._running = self._thread.submit(job)
        else:
            job()

    def room(self, part: slice) -> Tensor:
        """Where the elements of `part` will be summed: a caller who writes them itself does so before `begin`."""
        return self._room[: part.stop - part.start]

    def fill(self, group: Group, message: Tensor, write: Act, may_abstain: bool) -> None:
        """The message: what is written (zeros where it is no longer finite and may abstain), and the two words."""
        vector = message[:-NUM_WORDS]
        write(vector)
        self.abstained = may_abstain and not is_finite(vector)
        if self.abstained:
            vector.zero_()
        message[-2] = float(not self.abstained)
        message[-1] = float(group.index == 0 and self._someone_waits())

    def _someone_waits(self) -> bool:
        """Asks the store now and then: a question takes as long as a small exchange."""
        now_s = time.monotonic()
        if now_s - self._asked_s < ASK_EVERY_S:
            return False
        self._asked_s = now_s
        return self.roster.someone_waits()

    def is_over(self) -> bool:
        """Whether `finish` would not wait. Each wait of the exchange has its limit, whether anybody stands here or not:
        an exchange that lost a member is over, too, and `finish` says so."""
        return self._running is None or self._running.done()

    def finish(self) -> Tensor:
        """The sum, or at level 1 the new centre (valid until the next `begin`); PeerLost when a member was lost."""
        if self._running is not None:
            rounds = max(1, self.group.size.bit_length() + 1)
            try:
                self._running.result(timeout=rounds * self.group.limit_s + 1)
            except FutureTimeout:
                raise PeerLost(None, f"among {self.group.ranks} holds up the exchange") from None
            finally:
                self._running = None
        total, then = self.message[:-NUM_WORDS], self._then
        self._then = None
        if then is not None:
            then(total)
        return total

    @property
    def newcomers_wait(self) -> bool:
        return bool(self.message[-1] > 0)

    def run_exchange(
        self, group: Group, message: Tensor, fill: Callable[[], None] | None, then: Act | None, error: Tensor
    ) -> None:
        began_s = time.perf_counter()
        if fill is not None:
            fill()
        sizes = self._part_sizes
        parts = cut(message, None if sizes is None else [*sizes, NUM_WORDS]) if group.size > 1 else []
        for part in parts:
            self._sum_one(group, part, error)
        if then is not None and (self.level != 1 or group.index == 0):
            then(message[:-NUM_WORDS])
        if self.level == 1:
            for part in parts:
                group.tree_broadcast(part)
        self.busy_s += time.perf_counter() - began_s
        self._count(group)

    def _sum_one(self, group: Group, part: Tensor, error: Tensor) -> None:
        if self.level == 1:
            group.tree_reduce(part)
        elif self._wire_dtype in LARGEST:
            compressed_sum(group, part[:-NUM_WORDS], error, self._wire_dtype)
            group.tree_sum(part[-NUM_WORDS:])
        elif self._reduction == "ring":
            group.ring_sum(part)
        else:
            group.tree_sum(part, dtype=self._wire_dtype)

    def regroup(self) -> None:
        """Meets the others under the next generation."""
        self.drop()
        self.group = self.roster.regroup()

    def agree(self, states: list[Tensor], num_exchanges: int, global_step: int, *, is_newcomer: bool) -> Agreement:
        """Everyone takes over `states` from the member with the most exchanges (-1: one that has no state yet)."""
        self._room = self.message = self._make_message()
        mine = [float(num_exchanges), float(global_step), float(is_newcomer), self.roster.muster.digest]
        told = torch.zeros((len(mine), self.group.size), dtype=torch.float64)
        told[:, self.group.index] = torch.tensor(mine, dtype=torch.float64)
        self.group.tree_sum(told.view(-1))
        counts, steps, newcomers, digests = told
        if not bool((digests == mine[-1]).all()):
            raise ElasticError(
                f"members {self.group.ranks} connected although they belong to different trainings; "
                "give each training a name of its own: join(..., name=...)"
            )
        best = int(counts.argmax())
        for state in states:
            host = state if not state.is_cuda else state.cpu()
            self.group.tree_broadcast(host, root=best)
            state.copy_(host)
        return Agreement(
            num_exchanges=int(counts[best]),
            best=best,
            global_step=int(steps[best]),
            is_behind=bool(counts[self.group.index] < counts[best]),
            has_newcomers=bool(newcomers.any()),
        )

    def _make_message(self) -> Tensor:
        """Of this generation's own: whoever was dropped and does not know it yet may still write into the last one."""
        num_elements, rounded = self._num_elements + NUM_WORDS, self._wire_dtype is not None
        if self._nccl:
            return torch.zeros(num_elements, dtype=self.dtype, device=self._device)
        if self.level == 1 or self._reduction == "ring" or rounded:  # these travel
            return torch.zeros(num_elements, dtype=self.dtype, pin_memory=self._device.type == "cuda")
        return self.group.make_message(num_elements, self.dtype)

    def drop(self) -> None:
        self._running = self._then = None
        self.group.close()

    def close(self, *, finished: bool) -> None:
        """`finished` says goodbye; without it the others will count this worker among the missing."""
        if finished:
            self.roster.leave()
        self.drop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _count(self, group: Group) -> None:
        self.traffic.num_messages += group.traffic.num_messages
        self.traffic.num_bytes += group.traffic.num_bytes
        group.traffic = Traffic()
