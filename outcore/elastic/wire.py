"""Tensors <-> peers: the one module that knows torch's process-group classes.

A `Group` is built on the semi-private ProcessGroupGloo (or NCCL) class with a prefixed store, because only that allows
a group per generation of members, or one per worker, next to whatever group the user has. What gloo does was tried
first: a directed receive notices a dead peer at once; a wait that runs out of time closes the pair for good, so a
timeout always means "this peer is gone"; dropping a group closes its sockets and thereby wakes the other members.

Sums go along a butterfly, log2 P rounds of the whole buffer: the tree of 1708.02983 (section 5.1), where gloo's ring
adds the elements of a buffer in an order that depends on their position. Along the tree the order depends on the ranks
only, so a packed and a per-layer sum agree bit for bit, every member holds the same bits, and reruns repeat them.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store

from outcore.errors import ElasticError

CENTER_RANK = -1
SEGMENT_BYTES = 1 << 20
STATUS_TAG = 1 << 20  # above the tag of any segment


class PeerLost(ElasticError):
    """A peer closed its connection or did not answer within the limit. `rank` is its rank, where known."""

    def __init__(self, rank: int | None, what: str) -> None:
        self.rank = rank
        super().__init__(f"{_name(rank)} {what}")


@dataclass
class Traffic:
    """What this worker put on the wire."""

    num_messages: int = 0
    num_bytes: int = 0


class Group:
    """Members of one generation (or a worker and the centre) joined by gloo; `ranks[i]` names member i in errors."""

    def __init__(self, store: Store, index: int, ranks: list[int], limit_s: float) -> None:
        self.index, self.ranks, self.limit_s = index, ranks, limit_s
        self.traffic = Traffic()
        self._staging: dict[tuple[int, torch.dtype], Tensor] = {}
        try:
            self._gloo: Any = ProcessGroupGloo(store, index, len(ranks), timedelta(seconds=limit_s))
        except Exception as error:
            raise PeerLost(None, f"among {ranks} did not connect within {limit_s:g} s ({error})") from None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def close(self) -> None:
        """Closes the sockets: whoever waits for this member hears of it at once."""
        self._gloo = None

    def _start_send(self, tensor: Tensor, to: int, tag: int = 0) -> Any:
        self.traffic.num_messages += tag == 0  # further segments are the same message
        self.traffic.num_bytes += tensor.nbytes
        return self._posted("send", tensor, to, tag)

    def _start_receive(self, tensor: Tensor, source: int, tag: int = 0) -> Any:
        return self._posted("recv", tensor, source, tag)

    def _posted(self, verb: str, tensor: Tensor, peer: int, tag: int) -> Any:
        gloo = self._gloo
        if gloo is None:
            raise PeerLost(self.ranks[peer], "is out of reach: this group was closed")
        try:
            return getattr(gloo, verb)([tensor], peer, tag)
        except RuntimeError as error:
            raise PeerLost(self.ranks[peer], f"is gone ({_first_line(error)})") from None

    def wait(self, work: Any, peer: int, limit_s: float | None = None) -> None:
        limit_s = self.limit_s if limit_s is None else limit_s
        began_s = time.monotonic()
        try:
            work.wait(timedelta(seconds=limit_s))
        except RuntimeError as error:
            waited_s = time.monotonic() - began_s
            what = f"did not answer within {limit_s:g} s" if waited_s >= 0.9 * limit_s else "closed its connection"
            raise PeerLost(self.ranks[peer], f"{what} ({_first_line(error)})") from None

    def post_status(self, status: float) -> Any:
        """Posts a word to member 1 on a channel of its own and does not wait: the word must outlive the call."""
        word = torch.tensor([status], dtype=torch.float64)
        return word, self._start_send(word, 1, STATUS_TAG)

    def receive_status(self, source: int) -> float:
        word = torch.zeros(1, dtype=torch.float64)
        self.wait(self._start_receive(word, source, STATUS_TAG), source)
        return float(word)

    def post_send(self, tensor: Tensor, to: int) -> list[Any]:
        """Starts sending; the tensor must not change until every returned piece of work was waited for."""
        return [self._start_send(part, to, tag) for tag, part in enumerate(_segments(tensor))]

    def post_receive(self, tensor: Tensor, source: int) -> list[Any]:
        return [self._start_receive(part, source, tag) for tag, part in enumerate(_segments(tensor))]

    def send(self, tensor: Tensor, to: int) -> None:
        for work in self.post_send(tensor, to):
            self.wait(work, to)

    def receive(self, tensor: Tensor, source: int, limit_s: float | None = None) -> None:
        for work in self.post_receive(tensor, source):
            self.wait(work, source, limit_s)

    def _spare(self, like: Tensor, dtype: torch.dtype, slot: int) -> Tensor:
        """A resident buffer: fresh pages for every message would cost more than the message."""
        key = (like.numel() * 2 + slot, dtype)
        if key not in self._staging:
            self._staging[key] = torch.empty(like.numel(), dtype=dtype)
        return self._staging[key]

    def tree_sum(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> None:
        """Every member's flat CPU `tensor` becomes the sum over members; sent as `dtype` where one is given."""
        folded = _power_of_two_below(self.size)
        if self.index >= folded:
            self._send_rounded(tensor, self.index - folded, dtype)
            self._receive_rounded(tensor, self.index - folded, dtype)
            return
        if self.index + folded < self.size:
            self._receive_and_add(tensor, self.index + folded, dtype)
        if folded > 1:
            self._butterfly(tensor, folded, dtype)
        if self.index + folded < self.size:
            self._send_rounded(tensor, self.index + folded, dtype)
        if dtype is not None and folded < self.size:  # a folded member holds the rounded sum; hold the same
            tensor.copy_(tensor.to(dtype))

    def _butterfly(self, tensor: Tensor, folded: int, dtype: torch.dtype | None) -> None:
        """log2 P swaps with ever farther partners. Segments pass the rounds on their own, so that one travels while
        another is added."""
        ours = _segments(tensor)
        theirs = _segments(self._spare(tensor, dtype or tensor.dtype, 1))
        rounded = ours if dtype is None else _segments(self._spare(tensor, dtype, 0))

        def post(tag: int, peer: int) -> tuple[Any, Any]:
            if dtype is not None:
                rounded[tag].copy_(ours[tag])
            return self._start_receive(theirs[tag], peer, tag), self._start_send(rounded[tag], peer, tag)

        peers = [self.index ^ (1 << bit) for bit in range(folded.bit_length() - 1)]
        posted = [post(tag, peers[0]) for tag in range(len(ours))]
        for peer, following in zip(peers, [*peers[1:], None]):
            for tag in range(len(ours)):
                for work in posted[tag]:
                    self.wait(work, peer)
                if dtype is not None:
                    ours[tag].copy_(rounded[tag])  # both sides add the two rounded halves, so both hold the same bits
                add_into(ours[tag], theirs[tag])
                if following is not None:
                    posted[tag] = post(tag, following)

    def _receive_and_add(self, tensor: Tensor, peer: int, dtype: torch.dtype | None) -> None:
        theirs = self._spare(tensor, dtype or tensor.dtype, 1)
        posted = self.post_receive(theirs, peer)
        for work, mine, part in zip(posted, _segments(tensor), _segments(theirs)):
            self.wait(work, peer)
            add_into(mine, part)

    def _send_rounded(self, tensor: Tensor, peer: int, dtype: torch.dtype | None) -> None:
        self.send(tensor if dtype is None else self._spare(tensor, dtype, 0).copy_(tensor), peer)

    def _receive_rounded(self, tensor: Tensor, peer: int, dtype: torch.dtype | None) -> None:
        if dtype is None:
            self.receive(tensor, peer)
        else:
            rounded = self._spare(tensor, dtype, 1)
            self.receive(rounded, peer)
            tensor.copy_(rounded)

    def tree_reduce(self, tensor: Tensor) -> None:
        """Member 0's `tensor` becomes the sum, added in the order of `tree_sum`; the others' is used up."""
        folded = _power_of_two_below(self.size)
        if self.index >= folded:
            self.send(tensor, self.index - folded)
            return
        if self.index + folded < self.size:
            self._receive_and_add(tensor, self.index + folded, None)
        bit = 1
        while bit < folded:
            if self.index & bit:
                self.send(tensor, self.index ^ bit)
                return
            self._receive_and_add(tensor, self.index ^ bit, None)
            bit *= 2

    def tree_broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Everyone's `tensor` becomes member `root`'s."""
        place = (self.index - root) % self.size
        bit = 1
        while bit < self.size:
            if place < bit and place + bit < self.size:
                self.send(tensor, (place + bit + root) % self.size)
            elif bit <= place < 2 * bit:
                self.receive(tensor, (place - bit + root) % self.size)
            bit *= 2

    def ring_sum(self, tensor: Tensor) -> None:
        """gloo's own all-reduce: less traffic than the tree for large buffers and many members, position-dependent
        rounding, and a stopped member is noticed by the limit only."""
        self.traffic.num_messages += 2 * (self.size - 1)
        self.traffic.num_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        gloo = self._gloo
        if gloo is None:
            raise PeerLost(None, f"among {self.ranks} closed the group")
        try:
            gloo.allreduce([tensor]).wait()
        except RuntimeError as error:
            raise PeerLost(None, f"among {self.ranks} left the all-reduce ({_first_line(error)})") from None


class NcclGroup(Group):
    """The same members over NCCL: sums stay on the device. A lost member is noticed by the limit."""

    def __init__(self, store: Store, index: int, ranks: list[int], limit_s: float) -> None:
        super().__init__(PrefixStore("gloo", store), index, ranks, limit_s)
        nccl: Any = dist  # a CPU build of torch has no such class
        # NCCL's own watchdog ends the process; ten limits leave the verdict to the wait in tree_sum.
        self._nccl = nccl.ProcessGroupNCCL(
            PrefixStore("nccl", store), index, len(ranks), timedelta(seconds=10 * limit_s)
        )

    def tree_sum(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> None:
        if not tensor.is_cuda:
            super().tree_sum(tensor, dtype=dtype)
            return
        reached: Any = torch.cuda.Event()
        # A stream of its own: the compute stream must not queue behind the sum.
        side = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(side):
            sent = tensor if dtype is None else tensor.to(dtype)
            self._nccl.allreduce([sent]).wait()  # queues `side` behind the sum; does not block the host
            if dtype is not None:
                tensor.copy_(sent)
            reached.record(side)
        end_s = time.monotonic() + self.limit_s
        while not reached.query():  # NCCL's own wait would only queue; a dead peer must end in an error, not a hang
            if time.monotonic() > end_s:
                self._nccl.abort()
                raise PeerLost(None, f"among {self.ranks} did not finish the all-reduce within {self.limit_s:g} s")
            time.sleep(2e-5)

    def close(self) -> None:
        super().close()
        self._nccl = None


def cut(vector: Tensor, part_sizes: list[int] | None) -> list[Tensor]:
    """The messages `vector` travels in: one, or one per part for the per-layer baseline."""
    return [vector] if part_sizes is None else list(torch.split(vector, part_sizes))


def add_into(total: Tensor, other: Tensor) -> None:
    """total += other on this thread alone: torch would start a second OpenMP team beside the one that computes."""
    if total.dtype == other.dtype and total.dtype in (torch.float32, torch.float64):
        mine: np.ndarray[Any, Any] = total.numpy()
        with np.errstate(all="ignore"):  # a diverging run overflows; torch would not comment on it either
            np.add(mine, other.numpy(), out=mine)
    else:
        total.add_(other)


def _segments(tensor: Tensor) -> list[Tensor]:
    """Parts of about a MiB: a larger write leaves the cache before its partner reads it (2.4 x slower at 100 MiB)."""
    return list(torch.split(tensor, max(1, SEGMENT_BYTES // tensor.element_size())))


def _name(rank: int | None) -> str:
    return "a worker" if rank is None else "the centre" if rank == CENTER_RANK else f"rank {rank}"


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rpartition("] ")[2][:120] if str(error).strip() else type(error).__name__
