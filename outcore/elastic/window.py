"""Members on one host -> memory they all see, through which the blocks of a sum pass.

Over loopback every byte is copied into the kernel and out again, by one thread per connection. Here member m writes its
block into its own part of a common memory, and the others read it there; gloo carries only the word "written". Every
member adds up one share of the block, for all, in the order of the tree (see wire.py), and the others copy the sum:
two rounds whatever the number of members. 1708.02983 has this inside a chip only (section 6.2), with one process.

The memory is a file without a name, found through its owner's open files: nothing is left behind by whoever dies.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Array = np.ndarray[Any, Any]

ROOM_BYTES = 1 << 23  # a block, one at a time: of 1, 2, 4, 8 MiB the fastest with 2 and 4 workers on 14 cores
_HEAD_BYTES = mmap.PAGESIZE


class Window:
    """A room for every member's part of a block, one for its share of the sum, and a random word that proves whose.

    Parts and sums lie apart: a sum may still be read when the next block's parts are written.
    """

    def __init__(self, file: int, num_members: int, room_bytes: int) -> None:
        size_bytes = _size_bytes(num_members, room_bytes)
        if os.fstat(file).st_size != size_bytes:
            raise OSError("another file has this number by now")
        whole: Array = np.frombuffer(mmap.mmap(file, size_bytes), dtype=np.uint8)
        self.word = whole[:8].view(np.int64)
        self._rooms: Array = whole[_HEAD_BYTES:].reshape(num_members, -1)
        self.room_bytes = room_bytes
        self._spare: Array = np.empty(room_bytes, dtype=np.uint8)

    def parts(self, like: Array) -> list[Array]:
        """Where every member writes its part of a block, as long as `like` and of its kind."""
        return [room[: like.nbytes].view(like.dtype) for room in self._rooms]

    def sums(self, shares: Sequence[Array]) -> list[Array]:
        """Where every member writes the sum of its share."""
        after = self._rooms[:, self.room_bytes :]
        return [room[: share.nbytes].view(share.dtype) for room, share in zip(after, shares)]

    def add_up(self, parts: Sequence[Array], out: Array) -> None:
        """out = the sum of all members' `parts` in the order of the tree: those past a power of two are added first."""
        folded = 1 << (len(parts).bit_length() - 1)
        with np.errstate(all="ignore"):  # a diverging run overflows; torch would not comment on it either
            self._add_tree([list(parts[first::folded]) for first in range(folded)], out, 0)

    def _add_tree(self, leaves: list[list[Array]], out: Array, used_bytes: int) -> None:
        if len(leaves) == 1:
            if len(leaves[0]) == 2:
                np.add(leaves[0][0], leaves[0][1], out=out)
            else:
                np.copyto(out, leaves[0][0])
            return
        if len(leaves) == 2 and len(leaves[0]) == len(leaves[1]) == 1:
            np.add(leaves[0][0], leaves[1][0], out=out)
            return
        middle, end_bytes = len(leaves) // 2, used_bytes + out.nbytes
        # A share is 1 / P of a block and the tree log2 P deep: a block of spare room is enough.
        right = self._spare[used_bytes:end_bytes].view(out.dtype)
        self._add_tree(leaves[:middle], out, end_bytes)
        self._add_tree(leaves[middle:], right, end_bytes)
        np.add(out, right, out=out)


def _size_bytes(num_members: int, room_bytes: int) -> int:
    share_bytes = -(-room_bytes // num_members // 64) * 64 + 64
    return _HEAD_BYTES + num_members * (room_bytes + share_bytes)


def offer(num_members: int, room_bytes: int) -> tuple[Window | None, Tensor]:
    """A window of this process's own, and what the others need to find it; None where the system has no such thing."""
    try:
        file = os.memfd_create("outcore-elastic")
        os.ftruncate(file, _size_bytes(num_members, room_bytes))
        window = Window(file, num_members, room_bytes)
    except (AttributeError, OSError):
        return None, torch.tensor([-1.0, -1.0, 0.0], dtype=torch.float64)
    window.word[0] = secrets.randbits(52)  # exact in a float64
    return window, torch.tensor([os.getpid(), file, int(window.word[0])], dtype=torch.float64)


def find(told: Tensor, num_members: int, room_bytes: int) -> Window | None:
    """The window another process offers; None where it is on another host, or may not be seen."""
    owner, number, word = (int(value) for value in told)
    try:
        file = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        window = Window(file, num_members, room_bytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    return window if window.word[0] == word else None


def withdraw(told: Tensor) -> None:
    """Closes the offered file once everybody has found it: what is mapped stays."""
    if told[1] >= 0:
        os.close(int(told[1]))
