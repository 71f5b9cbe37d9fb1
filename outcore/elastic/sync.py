"""Vectors of all members -> their sum, and a centre every member holds: the synchronous exchange.

The three levels of Sync EASGD (1708.02983, section 5.1) give the same numbers and differ in where the time goes:
1  the centre's holder is member 0: a tree reduction of the differences to it, a tree broadcast of the new C;
2  every member holds C beside its weights and applies eq. 2 itself: one tree sum, no broadcast;
3  as 2, and the sum runs in a thread of its own while the forward and backward pass compute the gradient at the same
   weights; eqs. 1 and 2 use the old pair (W_i, C), so nothing is approximated by overlapping.

Two words ride behind the vector: how many members took part, and whether someone waits to be let in. Since every member
reads the same sums, all of them regroup after the same exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from outcore.elastic.roster import Roster
from outcore.elastic.wire import Group, PeerLost, Traffic, copy_into, cut, give_way, is_finite

Reduction = Literal["tree", "ring"]
NUM_WORDS = 2


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
        on_device: torch.device | None = None,
    ) -> None:
        self.roster, self.level = roster, level
        self._reduction, self._wire_dtype, self._part_sizes = reduction, wire_dtype, part_sizes
        pin = on_device is None and torch.cuda.is_available()
        self.message = torch.zeros(num_elements + NUM_WORDS, dtype=dtype, pin_memory=pin, device=on_device or "cpu")
        self.abstained = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="elastic-exchange", initializer=give_way)
        self._running: Future[None] | None = None
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
        self, vector: Tensor, *, may_abstain: bool = False, at_root: Callable[[Tensor], None] | None = None
    ) -> None:
        """Starts the sum of `vector`; at level 3 it runs beside whatever the caller does next, who leaves `vector` be.

        At level 1 member 0 alone gets the sum, turns it into the new centre by `at_root` (in place), and sends that.
        """
        if vector.is_cuda:  # on the caller's stream, which the exchange's thread does not know
            self._fill(vector, may_abstain)
            torch.cuda.current_stream().synchronize()
            fill = None
        else:
            fill = partial(self._fill, vector, may_abstain)
        if self.level == 3:
            self._running = self._thread.submit(self._sum, fill, at_root)
        else:
            self._sum(fill, at_root)

    def _fill(self, vector: Tensor, may_abstain: bool) -> None:
        """The message: `vector` (zeros where it is no longer finite and may abstain), and the two words."""
        self.abstained = may_abstain and not is_finite(vector)
        if self.abstained:
            self.message.zero_()
        else:
            copy_into(self.message[:-NUM_WORDS], vector)
        self.message[-2] = float(not self.abstained)
        self.message[-1] = float(self.group.index == 0 and self.roster.someone_waits())

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
        return self.message[:-NUM_WORDS]

    @property
    def newcomers_wait(self) -> bool:
        return bool(self.message[-1] > 0)

    def _sum(self, fill: Callable[[], None] | None, at_root: Callable[[Tensor], None] | None) -> None:
        began_s = time.perf_counter()
        if fill is not None:
            fill()
        parts = self._parts() if self.group.size > 1 else []
        for part in parts:
            self._sum_one(part)
        if self.level == 1 and at_root is not None:
            if self.group.index == 0:
                at_root(self.message[:-NUM_WORDS])
            for part in parts:
                self.group.tree_broadcast(part)
        self.busy_s += time.perf_counter() - began_s
        self._count(self.group)

    def _parts(self) -> list[Tensor]:
        sizes = self._part_sizes
        return cut(self.message, None if sizes is None else [*sizes, NUM_WORDS])

    def _sum_one(self, part: Tensor) -> None:
        if self.level == 1:
            self.group.tree_reduce(part)
        elif self._reduction == "ring":
            self.group.ring_sum(part)
        else:
            self.group.tree_sum(part, dtype=self._wire_dtype)

    def regroup(self) -> None:
        """Meets the others under the next generation."""
        self.drop()
        self.group = self.roster.regroup()

    def agree(self, states: list[Tensor], num_exchanges: int) -> tuple[int, int]:
        """Everyone takes over `states` from the member with the most exchanges; returns (its count, its index)."""
        counts = torch.full((self.group.size,), 0.0)
        counts[self.group.index] = float(num_exchanges + 1)  # a newcomer says 0 by num_exchanges = -1
        self.group.tree_sum(counts)
        best = int(counts.argmax())
        for state in states:
            host = state if not state.is_cuda else state.cpu()
            self.group.tree_broadcast(host, root=best)
            state.copy_(host)
        return int(counts[best]) - 1, best

    def drop(self) -> None:
        self._running = None
        self.group.close()

    def close(self) -> None:
        self.roster.leave()
        self.drop()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _count(self, group: Group) -> None:
        self.traffic.num_messages += group.traffic.num_messages
        self.traffic.num_bytes += group.traffic.num_bytes
        group.traffic = Traffic()
