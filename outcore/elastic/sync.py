"""The synchronous exchange: sums the vectors of all members; every member holds the centre.

The three levels of Sync EASGD (1708.02983, section 5.1) give the same numbers and differ in where the time goes:
1  the centre is at member 0: a tree reduction of the differences to it, and a tree broadcast of the new C;
2  every member holds C beside its weights and applies eq. 2 itself: one tree sum, no broadcast;
3  as 2, but a separate thread computes the sum and the new C while the forward and backward pass compute the gradient
   at the same weights. Eqs. 1 and 2 use the old pair (W_i, C), so overlapping is exact. The loop's own thread only
   makes two passes: the difference, and the pull.

Two numbers are appended to the vector: how many members took part, and whether a newcomer waits. Since every member
reads the same sums, all of them regroup after the same exchange. An exchange may cover a part of the vector only
(streaming DiLoCo), and may be sent as 8-bit codes (compression.py).
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
    """What the members of a new generation agree on: the progress of the furthest one (member `best`), whether this
    member is behind it, and whether there are newcomers."""

    num_exchanges: int
    best: int
    global_step: int
    is_behind: bool
    has_newcomers: bool


class SyncExchange:
    """Sums vectors over the members that are present, and regroups when they change."""

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
        """`device` is where the vectors come from; with NCCL the message is there, too. `largest_part` is the largest
        number of elements of an exchange, by default all."""
        self.roster, self.level, self.dtype = roster, level, dtype
        self._reduction, self._wire_dtype, self._part_sizes = reduction, wire_dtype, part_sizes
        self._num_elements, self._device, self._nccl = largest_part or num_elements, device, nccl
        self._error = torch.zeros(num_elements if wire_dtype in LARGEST else 0, dtype=dtype)  # rounding errors
        self._room = torch.zeros(0, dtype=dtype)  # memory for messages, made by `agree` for each generation
        self.message = self._room  # of the last exchange, including the two numbers
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
        """The number of members in the last sum, without those that abstained."""
        return round(float(self.message[-2]))

    def begin(
        self, write: Act, *, may_abstain: bool = False, then: Act | None = None, part: slice | None = None
    ) -> None:
        """Starts an exchange: `write` fills the vector that is summed, and `then` receives the sum. `part` selects the
        elements of the whole vector, by default all.

        At level 3 both run in parallel with the caller, who must not change what they use until `finish`. At level 1
        `then` runs at member 0 only, and its result in the vector is sent to all.
        """
        num = self._num_elements if part is None else part.stop - part.start
        self.message = self._room[: num + NUM_WORDS]
        group, message = self.group, self.message  # the thread uses this generation, however late it ends
        fill: Callable[[], None] | None = partial(self.fill, group, message, write, may_abstain)
        if self._device.type != "cpu":  # both run on the caller's stream, which the thread does not know
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
        """Returns the memory in which `part` will be summed, for callers that write it before `begin`."""
        return self._room[: part.stop - part.start]

    def fill(self, group: Group, message: Tensor, write: Act, may_abstain: bool) -> None:
        """Writes the message: the vector (zeros if it is not finite and may abstain) and the two numbers."""
        vector = message[:-NUM_WORDS]
        write(vector)
        self.abstained = may_abstain and not is_finite(vector)
        if self.abstained:
            vector.zero_()
        message[-2] = float(not self.abstained)
        message[-1] = float(group.index == 0 and self._someone_waits())

    def _someone_waits(self) -> bool:
        """Asks the store from time to time, because a request takes as long as a small exchange."""
        now_s = time.monotonic()
        if now_s - self._asked_s < ASK_EVERY_S:
            return False
        self._asked_s = now_s
        return self.roster.someone_waits()

    def is_over(self) -> bool:
        """Whether `finish` would not wait. Every wait of the exchange has a limit, so an exchange that lost a member
        ends too, and `finish` raises its error."""
        return self._running is None or self._running.done()

    def finish(self) -> Tensor:
        """Returns the sum, or at level 1 the new centre, valid until the next `begin`. Raises PeerLost."""
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
        """Meets the others in the next generation."""
        self.drop()
        self.group = self.roster.regroup()

    def agree(self, states: list[Tensor], num_exchanges: int, global_step: int, *, is_newcomer: bool) -> Agreement:
        """Copies `states` from the member with the most exchanges (-1: no state yet) to all members."""
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
        """Makes new memory for this generation, because a member that was dropped may still write into the old one."""
        num_elements, rounded = self._num_elements + NUM_WORDS, self._wire_dtype is not None
        if self._nccl:
            return torch.zeros(num_elements, dtype=self.dtype, device=self._device)
        if self.level == 1 or self._reduction == "ring" or rounded:  # these are sent over sockets
            return torch.zeros(num_elements, dtype=self.dtype, pin_memory=self._device.type == "cuda")
        return self.group.make_message(num_elements, self.dtype)

    def drop(self) -> None:
        self._running = self._then = None
        self.group.close()

    def close(self, *, finished: bool) -> None:
        """Leaves the group. With `finished` the worker is done; otherwise the others count it as missing."""

        if finished:
            self.roster.leave()
        self.drop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _count(self, group: Group) -> None:
        self.traffic.num_messages += group.traffic.num_messages
        self.traffic.num_bytes += group.traffic.num_bytes
        group.traffic = Traffic()
