"""Sums, broadcasts and messages among the members of a group.

A `Group` is one generation of members, or a worker and the centre (transport.py connects them). It relies on tested
behaviour of gloo: a directed receive notices a dead peer immediately; a wait that times out closes the pair
permanently, so a timeout always means that the peer is gone; dropping a group closes its sockets, which wakes the other
members.

Sums follow the tree of 1708.02983 (section 5.1): neighbours first, then pairs of neighbours. The order of the additions
depends on the ranks only, while in gloo's ring it depends on an element's position in the buffer. So a packed and a
per-layer sum agree bit for bit, all members have the same bits, and reruns repeat them. Two algorithms give these bits.
Small vectors are swapped whole along a butterfly, in log2 P messages. Large ones use recursive halving and doubling:
twice the messages, but 2 (P - 1) / P of the bytes instead of log2 P. They are sent in blocks, several in progress at
once over several connections, so that one block is added while others are transferred. If all members are on one host,
a message made by `make_message` is in shared memory and each member adds up a share of it (window.py), with the same
bits again.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outcore.elastic import transport, window
from outcore.elastic.cores import cores_for_messages
from outcore.elastic.simulate import WHOLE_BYTES
from outcore.elastic.transport import PrefixStore, Store
from outcore.errors import ElasticError

CENTER_RANK = -1
SEGMENT_BYTES = 1 << 20
BLOCK_BYTES = 1 << 22
MIN_BLOCK_BYTES = 1 << 19
NUM_UNDER_WAY = 8  # blocks in progress at once
PIECE_ELEMENTS = 1 << 17  # small enough that consecutive rules find a piece in the cache
SERIAL_ELEMENTS = 511 * 64  # below torch's threshold for threads, 32,768
NUM_LANES = 4  # connections to each peer, each with a gloo thread, which moves about 4 GB/s
STATUS_TAG = 1 << 20  # above the tag of any segment
SHARED_BYTES: int | None = 1 << 17  # larger messages are in shared memory, if possible; None: never

_PLAIN = (torch.float32, torch.float64)  # dtypes that NumPy adds as torch does


class PeerLost(ElasticError):
    """A peer closed its connection or did not answer within the limit. `rank` is its rank, if known."""

    def __init__(self, rank: int | None, what: str) -> None:
        self.rank = rank
        super().__init__(f"{_name(rank)} {what}")


@dataclass
class Traffic:
    """The messages that this worker has sent."""

    num_messages: int = 0
    num_bytes: int = 0


class Group:
    """Members of one generation (or a worker and the centre) connected by gloo; errors call member i `ranks[i]`."""

    def __init__(
        self,
        store: Store,
        index: int,
        ranks: list[int],
        limit_s: float,
        *,
        num_lanes: int = 1,
        address: str = transport.LOOPBACK,
    ) -> None:
        """`address` is the one on which this member listens for the others."""
        self.index, self.ranks, self.limit_s = index, ranks, limit_s
        self.traffic = Traffic()
        self._staging: dict[tuple[str, torch.dtype], Tensor] = {}
        self._window: window.Window | None = None
        self._message: Tensor | None = None  # this member's, in the window
        try:
            with giving_way():
                self._gloo: Any = transport.open_gloo(
                    store, index, len(ranks), limit_s, num_lanes=num_lanes, address=address
                )
        except Exception as error:
            raise PeerLost(None, f"among {ranks} did not connect within {limit_s:g} s ({error})") from None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def close(self) -> None:
        """Closes the sockets, so that peers waiting for this member notice immediately."""
        self._gloo = None
        if self._window is not None:
            self._window.leave(self.index)
        self._window = self._message = None

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
        """Sends a status to member 1 on a separate channel without waiting; keep the result until it was received."""
        word = torch.tensor([status], dtype=torch.float64)
        return word, self._start_send(word, 1, STATUS_TAG)

    def receive_status(self, source: int) -> float:
        word = torch.zeros(1, dtype=torch.float64)
        self.wait(self._start_receive(word, source, STATUS_TAG), source)
        return float(word)

    def post_send(self, tensor: Tensor, to: int) -> list[Any]:
        """Starts sending; the tensor must not change until all returned works have been waited for."""
        return [self._start_send(part, to, tag) for tag, part in enumerate(_segments(tensor))]

    def post_receive(self, tensor: Tensor, source: int) -> list[Any]:
        return [self._start_receive(part, source, tag) for tag, part in enumerate(_segments(tensor))]

    def send(self, tensor: Tensor, to: int) -> None:
        for work in self.post_send(tensor, to):
            self.wait(work, to)

    def receive(self, tensor: Tensor, source: int, limit_s: float | None = None) -> None:
        for work in self.post_receive(tensor, source):
            self.wait(work, source, limit_s)

    def spare(self, num_elements: int, dtype: torch.dtype, name: str) -> Tensor:
        """Returns a buffer that is reused, because allocating pages for every message would cost more than sending."""
        kept = self._staging.get((name, dtype))
        if kept is None or kept.numel() < num_elements:
            kept = self._staging[name, dtype] = torch.empty(num_elements, dtype=dtype)
        return kept[:num_elements]

    def tree_sum(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> None:
        """Replaces every member's flat CPU `tensor` by the sum over members, sent as `dtype` if given."""
        place = self._place_in_window(tensor) if dtype is None else None
        if place is not None and self._window is not None:
            self._share(tensor, self._window, place)
            return
        folded = _power_of_two_below(self.size)
        if self.index >= folded:
            self._send_rounded(tensor, self.index - folded, dtype)
            self._receive_rounded(tensor, self.index - folded, dtype)
            return
        if self.index + folded < self.size:
            self._receive_and_add(tensor, self.index + folded, dtype)
        if folded > 1:
            swap = self._butterfly if tensor.nbytes <= WHOLE_BYTES else self._halve_and_double
            swap(tensor, [self.index ^ (1 << bit) for bit in range(folded.bit_length() - 1)], dtype)
        if self.index + folded < self.size:
            self._send_rounded(tensor, self.index + folded, dtype)
        if dtype is not None and self.size > 1:  # some members have the rounded sum; this one needs the same
            tensor.copy_(tensor.to(dtype))

    def _butterfly(self, tensor: Tensor, peers: list[int], dtype: torch.dtype | None) -> None:
        """Swaps the whole vector log2 P times, with partners at doubling distance."""
        theirs = self.spare(tensor.numel(), dtype or tensor.dtype, "theirs")
        sent = tensor if dtype is None else self.spare(tensor.numel(), dtype, "sent")
        for peer in peers:
            if dtype is not None:
                sent.copy_(tensor)
                tensor.copy_(sent)  # both sides add two rounded vectors, for the same bits
            self._finish(self._start_swap(sent, theirs, peer, 0), peer)
            add_into(tensor, theirs)

    def make_message(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Returns zeroed memory for the vectors that this group will sum. All members must call it at the same time.

        If all are on one host it is shared memory, and summing it, or parts of it, needs no copies.
        """
        num_bytes = num_elements * dtype.itemsize
        if SHARED_BYTES is not None and num_bytes > SHARED_BYTES and self.size > 1 and dtype in _PLAIN:
            self._window = self._open_window(num_bytes)
        if self._window is None:
            return torch.zeros(num_elements, dtype=dtype, pin_memory=torch.cuda.is_available())
        self._message = torch.from_numpy(self._window.message(self.index)).view(dtype)
        return self._message

    def _open_window(self, message_bytes: int) -> window.Window | None:
        """Returns shared memory, or None at all members if one of them cannot open it."""
        told, mine = torch.zeros(3, dtype=torch.float64), None
        if self.index == 0:
            mine, told = window.offer(self.size, message_bytes)
        try:
            self.tree_broadcast(told)
            if self.index != 0:
                mine = window.find(told, self.size, message_bytes)
            if mine is not None:
                mine.enter(self.index)
            num_found = torch.tensor([float(mine is not None)])
            self.tree_sum(num_found)
        finally:
            if self.index == 0:
                window.withdraw(told)
        return mine if int(num_found) == self.size else None

    def _place_in_window(self, tensor: Tensor) -> int | None:
        """Returns the offset of `tensor` in the shared message in bytes; None if it is elsewhere or small."""
        if self._message is None or SHARED_BYTES is None or tensor.nbytes <= SHARED_BYTES:
            return None
        place = tensor.data_ptr() - self._message.data_ptr()
        return place if 0 <= place < self._message.nbytes and tensor.is_contiguous() else None

    def _share(self, tensor: Tensor, shared: window.Window, first_byte: int) -> None:
        """Adds up this member's share for all, while the others write their shares into `tensor`."""
        self.traffic.num_messages += 2 * (self.size - 1)
        # Bytes read from the others and written to them.
        self.traffic.num_bytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        edges = [tensor.numel() * member // self.size * tensor.element_size() for member in range(self.size + 1)]
        self._meet(shared)
        first, last = edges[self.index : self.index + 2]
        shared.add_up(first_byte + first, first_byte + last, tensor.numpy().dtype)
        self._meet(shared)

    def _meet(self, shared: window.Window) -> None:
        """Waits until every member has come to the same point."""
        missing = shared.meet(self.index, self.limit_s)
        if missing is not None:
            what = "closed its connection" if shared.is_gone(missing) else f"did not answer within {self.limit_s:g} s"
            raise PeerLost(self.ranks[missing], what)

    def _halve_and_double(self, tensor: Tensor, peers: list[int], dtype: torch.dtype | None) -> None:
        """Advances blocks in turn, each by one swap. All members use the same order, so that none waits for a block
        that its partner has not begun."""
        under_way: deque[Iterator[None]] = deque()
        for tag, block in enumerate(_blocks(tensor)):
            while len(under_way) == NUM_UNDER_WAY:  # blocks end in the order they began, which frees a slot
                _advance(under_way)
            under_way.append(self._pass_block(block, peers, dtype, tag))
            next(under_way[-1])
        while under_way:
            _advance(under_way)

    def _pass_block(self, mine: Tensor, peers: list[int], dtype: torch.dtype | None, tag: int) -> Iterator[None]:
        """Halves one block with each peer and doubles it on the way back; yields while its swaps are in transfer."""
        slot = tag % NUM_UNDER_WAY
        theirs = self.spare(mine.numel(), dtype or mine.dtype, f"theirs {slot}")
        sent = mine if dtype is None else self.spare(mine.numel(), dtype, f"sent {slot}")
        kept, halvings = slice(0, mine.numel()), []
        for peer in peers:
            if dtype is not None:
                sent[kept].copy_(mine[kept])
                mine[kept].copy_(sent[kept])
            middle = (kept.start + kept.stop) // 2
            halves = slice(kept.start, middle), slice(middle, kept.stop)
            kept, given = halves if self.index < peer else halves[::-1]
            halvings.append((peer, kept, given))
            swap = self._start_swap(sent[given], theirs[kept], peer, tag)
            yield
            self._finish(swap, peer)
            add_into(mine[kept], theirs[kept])
        if dtype is not None:
            sent[kept].copy_(mine[kept])
        for peer, kept, given in reversed(halvings):
            swap = self._start_swap(sent[kept], sent[given], peer, tag)
            yield
            self._finish(swap, peer)
        if dtype is not None:
            mine.copy_(sent)

    def _start_swap(self, out: Tensor, into: Tensor, peer: int, tag: int) -> tuple[Any, Any]:
        return self._start_receive(into, peer, tag), self._start_send(out, peer, tag)

    def _finish(self, swap: tuple[Any, Any], peer: int) -> None:
        for work in swap:
            self.wait(work, peer)

    def _receive_and_add(self, tensor: Tensor, peer: int, dtype: torch.dtype | None) -> None:
        theirs = self.spare(tensor.numel(), dtype or tensor.dtype, "theirs")
        posted = self.post_receive(theirs, peer)
        segments = _segments(theirs)
        for work, mine, part in zip(posted, torch.split(tensor, segments[0].numel()), segments):
            self.wait(work, peer)
            add_into(mine, part)

    def _send_rounded(self, tensor: Tensor, peer: int, dtype: torch.dtype | None) -> None:
        self.send(tensor if dtype is None else self.spare(tensor.numel(), dtype, "sent").copy_(tensor), peer)

    def _receive_rounded(self, tensor: Tensor, peer: int, dtype: torch.dtype | None) -> None:
        if dtype is None:
            self.receive(tensor, peer)
        else:
            rounded = self.spare(tensor.numel(), dtype, "theirs")
            self.receive(rounded, peer)
            tensor.copy_(rounded)

    def tree_reduce(self, tensor: Tensor) -> None:
        """Sums into member 0's `tensor`, in the order of `tree_sum`; the others' tensors are overwritten."""
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
        """Copies member `root`'s `tensor` to all members."""
        place = (self.index - root) % self.size
        bit = 1
        while bit < self.size:
            if place < bit and place + bit < self.size:
                self.send(tensor, (place + bit + root) % self.size)
            elif bit <= place < 2 * bit:
                self.receive(tensor, (place - bit + root) % self.size)
            bit *= 2

    def ring_sum(self, tensor: Tensor) -> None:
        """Runs gloo's all-reduce: less traffic than the tree for large buffers and many members, but position-dependent
        rounding, and a stopped member is noticed only by the limit."""
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
    """A group over NCCL, whose sums stay on the device. A lost member is noticed by the limit."""

    def __init__(
        self,
        store: Store,
        index: int,
        ranks: list[int],
        limit_s: float,
        *,
        num_lanes: int = 1,
        address: str = transport.LOOPBACK,
    ) -> None:
        super().__init__(PrefixStore("gloo", store), index, ranks, limit_s, num_lanes=num_lanes, address=address)
        # NCCL's watchdog would end the process; with ten limits, the wait in tree_sum times out first.
        self._nccl = transport.open_nccl(PrefixStore("nccl", store), index, len(ranks), 10 * limit_s)

    def tree_sum(self, tensor: Tensor, *, dtype: torch.dtype | None = None) -> None:
        if not tensor.is_cuda:
            super().tree_sum(tensor, dtype=dtype)
            return
        reached: Any = torch.cuda.Event()
        # On a separate stream, so that the compute stream does not wait for the sum.
        side = torch.cuda.Stream(tensor.device)
        with torch.cuda.stream(side):
            sent = tensor if dtype is None else tensor.to(dtype)
            self._nccl.allreduce([sent]).wait()  # queues `side` behind the sum; does not block the host
            if dtype is not None:
                tensor.copy_(sent)
            reached.record(side)
        end_s = time.monotonic() + self.limit_s
        while not reached.query():  # NCCL's wait does not block the host; a dead peer must raise an error
            if time.monotonic() > end_s:
                self._nccl.abort()
                raise PeerLost(None, f"among {self.ranks} did not finish the all-reduce within {self.limit_s:g} s")
            time.sleep(2e-5)

    def close(self) -> None:
        super().close()
        self._nccl = None


def cut(vector: Tensor, part_sizes: list[int] | None) -> list[Tensor]:
    """Returns the messages of a vector: one, or one per part for the per-layer baseline."""
    return [vector] if part_sizes is None else list(torch.split(vector, part_sizes))


# The next three run in threads beside the computing one, where torch would start a second OpenMP team.


def pieces(*vectors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yields equal pieces of several vectors, small enough that torch does not use several threads for them.

    A rule applied piece by piece gives the same bits as for the whole, because a piece is a multiple of any vector
    register. Here, and wherever an exchange's thread makes tuples, they are made from lists: while `outcore.limit`
    iterates over all objects, Python cannot resize a tuple that another thread builds from a generator.
    """
    if any(vector.is_cuda for vector in vectors):
        yield vectors
        return
    size = PIECE_ELEMENTS if torch.get_num_threads() == 1 else SERIAL_ELEMENTS
    yield from zip(*[torch.split(vector, size) for vector in vectors], strict=True)


def add_into(total: Tensor, other: Tensor) -> None:
    """Computes total += other in this thread only."""
    if _is_plain(total) and total.dtype == other.dtype:
        mine: np.ndarray[Any, Any] = total.numpy()
        with np.errstate(all="ignore"):  # a diverging run overflows; torch would not comment on it either
            np.add(mine, other.numpy(), out=mine)
    else:
        total.add_(other)


def is_finite(vector: Tensor) -> bool:
    """Whether all elements are finite, in one pass of this thread; a sum that overflows counts as not finite."""
    if not _is_plain(vector):
        return bool(torch.isfinite(vector.sum(dtype=torch.float32)))
    with np.errstate(all="ignore"):
        return bool(np.isfinite(vector.numpy().sum()))


def _is_plain(vector: Tensor) -> bool:
    return vector.device.type == "cpu" and vector.dtype in _PLAIN


def _segments(tensor: Tensor) -> list[Tensor]:
    """Returns parts of about 1 MiB: a larger write leaves the cache before it is read (2.4 x slower at 100 MiB)."""
    return list(torch.split(tensor, max(1, SEGMENT_BYTES // tensor.element_size())))


def _blocks(tensor: Tensor) -> list[Tensor]:
    """Returns equal parts that fit the cache, at least one per lane if the vector is large enough."""
    for_lanes = min(NUM_LANES, tensor.nbytes // MIN_BLOCK_BYTES)
    return list(torch.tensor_split(tensor, max(1, for_lanes, -(-tensor.nbytes // BLOCK_BYTES))))


def _advance(under_way: deque[Iterator[None]]) -> None:
    """Advances the oldest block by one swap, and drops it if it is finished."""
    block = under_way.popleft()
    for _ in block:
        under_way.append(block)
        break


def give_way() -> None:
    """Lowers this thread's priority to SCHED_BATCH, and moves it to a spare core, or to any of the launcher's.

    gloo's thread polls while another thread is in a call on the same connection. If it preempts that thread on their
    common core, it polls for a whole time slice: 4 KiB in both directions took 2.7 ms instead of 0.09. Also, an
    exchange that shares its core with the computation cannot overlap with it.
    """
    if hasattr(os, "SCHED_BATCH"):
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        os.sched_setaffinity(0, cores_for_messages() or os.sched_getaffinity(0))


@contextmanager
def giving_way() -> Iterator[None]:
    """A context in which new threads give way, because they inherit policy and affinity."""
    if not hasattr(os, "SCHED_BATCH"):
        yield
        return
    policy, priority, mine = os.sched_getscheduler(0), os.sched_getparam(0), os.sched_getaffinity(0)
    try:
        give_way()
        yield
    finally:
        os.sched_setaffinity(0, mine)
        os.sched_setscheduler(0, policy, priority)


def _name(rank: int | None) -> str:
    return "a worker" if rank is None else "the centre" if rank == CENTER_RANK else f"rank {rank}"


def _power_of_two_below(number: int) -> int:
    return 1 << (number.bit_length() - 1)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0].rpartition("] ")[2][:120] if str(error).strip() else type(error).__name__
