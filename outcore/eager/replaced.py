"""Counts the bytes of storages that tensors had before they got other ones (`x.data = y`, `swap_tensors`).

A plan counts a parameter once. After such an exchange there are two storages, as long as autograd holds the one that it
saved. An exchange after which the old storage dies at once takes no memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class Replaced:
    """The previous storages of tensors of one step that were still in use after an exchange."""

    def __init__(self) -> None:
        self._olds: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._given: list[weakref.ref[torch.UntypedStorage]] = []  # the tensors' new storages

    def begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Called before `tensor` gets another storage. The returned function must be called afterwards."""
        storage = tensor.untyped_storage()
        old, num_bytes = weakref.ref(storage), storage.nbytes()

        def end() -> None:
            self._given.append(weakref.ref(tensor.untyped_storage()))
            if old() is not None:
                self._olds.append((old, num_bytes))

        return end

    @property
    def held_bytes(self) -> int:
        """The bytes of these storages. A storage that another tensor got has only changed its owner, and does not
        count: PyTorch does not swap tensors that autograd has saved."""
        return sum(num_bytes for old, num_bytes in self._olds if not any(old is given for given in self._given))
