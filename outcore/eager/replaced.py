"""Tensors that get another storage (`x.data = y`, `swap_tensors`) -> bytes that the step holds besides its plan.

A plan counts a parameter once. After such an exchange there are two storages, for as long as autograd holds the one
that it saved. An exchange after which the old storage dies at once takes nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch


class Replaced:
    """The storages that tensors of one step had before they got other ones, and that somebody still held then."""

    def __init__(self) -> None:
        self._olds: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self._given: list[weakref.ref[torch.UntypedStorage]] = []  # the storages that tensors got instead

    def begin(self, tensor: torch.Tensor) -> Callable[[], None]:
        """`tensor` is about to get another storage. What is returned is called when it has that."""
        storage = tensor.untyped_storage()
        old, num_bytes = weakref.ref(storage), storage.nbytes()

        def end() -> None:
            self._given.append(weakref.ref(tensor.untyped_storage()))
            if old() is not None:
                self._olds.append((old, num_bytes))

        return end

    @property
    def held_bytes(self) -> int:
        """Their bytes. One that another tensor got instead has only changed its owner: PyTorch swaps no tensor that
        autograd has saved."""
        return sum(num_bytes for old, num_bytes in self._olds if not any(old is given for given in self._given))
