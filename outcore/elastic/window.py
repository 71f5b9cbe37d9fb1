"""Shared memory for the messages of members on one host.

Over loopback every byte is copied into the kernel and out again, by one thread per connection. Here the messages of all
members are in shared memory. Once all are written, each member adds up one share of them, in the order of the tree (see
wire.py), and writes the sum into all messages; no other member accesses that share. So members synchronize twice for
any size, and nothing is copied in or out. 1708.02983 has this inside a chip only (section 6.2), with one process.

Members also synchronize in the window: each counts its arrivals and reads the others' counts, while gloo would send two
messages for every pair. A member that leaves sets a flag; a dead one is detected by the system, a silent one by the
limit.

The memory is a file without a name, found through its owner's open files, so that nothing is left behind by a member
that dies. A window belongs to one generation of members. A dropped member that continues late writes into its own
window, which is no longer read.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

BLOCK_BYTES = 1 << 19  # of a share, added up at a time; with the tree's temporaries it stays in a core's cache
NUM_LOOKS = 20  # reads of the counts before the first pause
PAUSE_SHARE = (
    0.05  # of the wait so far; every read takes the interpreter from the step that runs in parallel at level 3
)
PAUSES_S = 5e-5, 1e-3  # the shortest and the longest pause
CHECK_EVERY_S = 0.02  # between checks whether the missing members are alive
_PAGE_BYTES = mmap.PAGESIZE
_LINE_BYTES = 64  # of a cache line; members write to separate lines
_ARRIVALS, _HAS_LEFT, _PROCESS = range(3)  # the numbers in a member's line
# On other processors a count may become visible before the data that was written before it.
_SEES_IN_ORDER = platform.machine().lower() in ("x86_64", "amd64")


class Window:
    """The messages of all members, a line of counts for each, and a random word that identifies the window."""

    def __init__(self, file: int, num_members: int, message_bytes: int) -> None:
        size_bytes = _size_bytes(num_members, message_bytes)
        if os.fstat(file).st_size != size_bytes:
            raise OSError("another file has this number by now")
        whole: Array = np.frombuffer(mmap.mmap(file, size_bytes), dtype=np.uint8)
        head_bytes = _head_bytes(num_members)
        self.word = whole[:8].view(np.int64)
        self._lines: Array = whole[:head_bytes].view(np.int64).reshape(-1, _LINE_BYTES // 8)[1 : 1 + num_members]
        self._messages: Array = whole[head_bytes:].reshape(num_members, -1)[:, :message_bytes]
        self._spare: Array = np.empty(0, dtype=np.uint8)

    def message(self, member: int) -> Array:
        """Returns the bytes of a member's message."""
        mine: Array = self._messages[member]
        return mine

    def enter(self, member: int) -> None:
        """Stores the process of this member."""
        self._lines[member, _PROCESS] = os.getpid()

    def leave(self, member: int) -> None:
        """Informs members that wait for this one immediately."""
        self._lines[member, _HAS_LEFT] = 1

    def meet(self, member: int, limit_s: float) -> int | None:
        """Waits until all members have arrived as often as this one; returns one that left or is late (`is_gone`)."""
        arrivals, has_left = self._lines[:, _ARRIVALS], self._lines[:, _HAS_LEFT]
        arrivals[member] += 1
        wanted, began_s = int(arrivals[member]), time.monotonic()
        for _ in range(NUM_LOOKS):
            if arrivals.min() >= wanted:
                return None
            time.sleep(0)
        looked_s = began_s
        while arrivals.min() < wanted:
            now_s = time.monotonic()
            if now_s - looked_s > CHECK_EVERY_S:
                looked_s = now_s
                self._mark_dead([int(other) for other in np.flatnonzero(arrivals < wanted)])
            if has_left.any() or now_s - began_s > limit_s:
                missing = [int(other) for other in np.flatnonzero(arrivals < wanted)]
                if missing:  # a missing member that left will never arrive
                    return next(filter(self.is_gone, missing), missing[0])
                break  # a member that left after arriving does not matter
            time.sleep(min(max(PAUSE_SHARE * (now_s - began_s), PAUSES_S[0]), PAUSES_S[1]))
        return None

    def is_gone(self, member: int) -> bool:
        """Whether the member has left, or was found dead."""
        return bool(self._lines[member, _HAS_LEFT])

    def _mark_dead(self, members: list[int]) -> None:
        for member in members:
            if _has_ended(int(self._lines[member, _PROCESS])):
                self.leave(member)

    def add_up(self, first_byte: int, last_byte: int, kind: np.dtype[Any]) -> None:
        """Replaces these bytes of every message by their sum, in the order of the tree."""
        with np.errstate(all="ignore"):  # a diverging run overflows; torch would not comment on it either
            for first in range(first_byte, last_byte, BLOCK_BYTES):
                last = min(first + BLOCK_BYTES, last_byte)
                self._add_block([message[first:last].view(kind) for message in self._messages])

    def _add_block(self, parts: Sequence[Array]) -> None:
        """Adds members beyond a power of two first, then neighbours, then pairs of neighbours."""
        folded = 1 << (len(parts).bit_length() - 1)
        total, *others = parts
        self._add_tree([list(parts[first::folded]) for first in range(folded)], total, 0)
        for other in others:
            np.copyto(other, total)

    def _add_tree(self, leaves: list[list[Array]], out: Array, depth: int) -> None:
        """Adds leaves into `out`, which is the first leaf and is read before it is written."""
        if len(leaves) == 1:
            if len(leaves[0]) == 2:
                np.add(leaves[0][0], leaves[0][1], out=out)
            elif out is not leaves[0][0]:
                np.copyto(out, leaves[0][0])
            return
        if len(leaves) == 2 and len(leaves[0]) == len(leaves[1]) == 1:
            np.add(leaves[0][0], leaves[1][0], out=out)
            return
        middle, right = len(leaves) // 2, self._room(out, depth)
        self._add_tree(leaves[:middle], out, depth + 1)
        self._add_tree(leaves[middle:], right, depth + 1)
        np.add(out, right, out=out)

    def _room(self, like: Array, depth: int) -> Array:
        """Returns reused memory for the right half of a tree, one per depth."""
        if len(self._spare) < (depth + 1) * BLOCK_BYTES:
            self._spare = np.empty(len(self._messages).bit_length() * BLOCK_BYTES, dtype=np.uint8)
        return self._spare[depth * BLOCK_BYTES :][: like.nbytes].view(like.dtype)


def _has_ended(process: int) -> bool:
    """Whether a process has ended, including zombies."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:  # for example too many open files, which does not mean that the process is dead
        return False
    return stat.rpartition(")")[2].split()[0] in ("Z", "X")


def _head_bytes(num_members: int) -> int:
    return -(-_LINE_BYTES * (1 + num_members) // _PAGE_BYTES) * _PAGE_BYTES


def _size_bytes(num_members: int, message_bytes: int) -> int:
    """Returns the size of a window. Messages begin on separate pages, which are near the member that writes first."""
    return _head_bytes(num_members) + num_members * -(-message_bytes // _PAGE_BYTES) * _PAGE_BYTES


def offer(num_members: int, message_bytes: int) -> tuple[Window | None, Tensor]:
    """Returns a new window, and the numbers with which others find it; None if the system does not support it."""
    file = -1
    try:
        if not _SEES_IN_ORDER:
            raise OSError("this processor may show a count before the data that it counts")
        file = os.memfd_create("outcore-elastic")
        os.ftruncate(file, _size_bytes(num_members, message_bytes))
        window = Window(file, num_members, message_bytes)
    except (AttributeError, OSError):
        if file >= 0:
            os.close(file)
        return None, torch.tensor([-1.0, -1.0, 0.0], dtype=torch.float64)
    window.word[0] = secrets.randbits(52)  # exact in a float64
    return window, torch.tensor([os.getpid(), file, int(window.word[0])], dtype=torch.float64)


def find(told: Tensor, num_members: int, message_bytes: int) -> Window | None:
    """Returns the window of another process; None if it is on another host, or not accessible."""
    owner, number, word = (int(value) for value in told)
    try:
        file = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        window = Window(file, num_members, message_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return window if window.word[0] == word else None


def withdraw(told: Tensor) -> None:
    """Closes the offered file after all members have opened it; mappings stay."""
    if told[1] >= 0:
        os.close(int(told[1]))
