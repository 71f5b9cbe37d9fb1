"""Batches of any size from the user's data, on the model's device, without changing the user's random generators.

Two kinds of batches are needed. To time a step any samples suffice: a few are read once, evenly spaced in the data set,
and repeated up to the requested size. To train (for noise, learning rate, time to a target) the data set is shuffled by
a separate generator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import IterableDataset, Subset, TensorDataset, default_collate

from outcore.errors import TuningError
from outcore.tuning.data.batches import each_tensor, tensors_of
from outcore.tuning.settings import SETTINGS

DATA = SETTINGS.data
Collate = Callable[[list[Any]], Any]


class Samples:
    """A map-style data set, or a function that makes a batch of a given size."""

    def __init__(self, data: Any, device: torch.device, collate: Collate | None = None) -> None:
        self.data, self.device, self.collate = data, device, collate or default_collate
        self.load_s = 0.0  # seconds in which one process reads and collates one sample; 0 if it need not
        self._read: list[Any] = []
        self._kept: dict[tuple[int, ...], Any] = {}
        self._kept_bytes = 0
        sized = hasattr(data, "__len__") and hasattr(data, "__getitem__")
        if isinstance(data, IterableDataset) or not (sized or callable(data)):
            raise TuningError(
                f"a {type(data).__name__} cannot be asked for a batch of a given size; pass a map-style data set "
                "(with __len__ and __getitem__) or a function batch_size -> (inputs, targets)"
            )
        self.num: int | None = len(data) if sized else None
        if self.num == 0:
            raise TuningError("the data set is empty; pass one with at least as many samples as a batch")

    def any_batch(self, size: int) -> Any:
        """Returns a batch of `size` samples for timing: the same ones every time."""
        if self.num is None:
            return self._on_device(self.data(size))
        if len(self._read) < min(size, DATA.num_read, self.num):
            self._read_some(min(max(size, 2), DATA.num_read, self.num))
        return self._on_device(self.collate([self._read[at % len(self._read)] for at in range(size)]))

    def _read_some(self, num: int) -> None:
        assert self.num is not None
        began_s = time.perf_counter()
        self._read = [self.data[at * self.num // num] for at in range(num)]
        self.collate(self._read)
        self.load_s = 0.0 if self._is_on_device() else (time.perf_counter() - began_s) / num

    def _is_on_device(self) -> bool:
        """Whether the samples are already on the device, so that a loader has nothing to read."""
        data = self.data
        while isinstance(data, Subset):
            data = data.dataset
        if isinstance(data, TensorDataset):
            return all(tensor.device == self.device for tensor in data.tensors)
        return self.device.type != "cpu" and all(tensor.device == self.device for tensor in tensors_of(self._read))

    def shuffled(self, size: int, *, seed: int = 0, only: Sequence[int] | None = None) -> Iterator[Any]:
        """Yields batches of `size` different samples, epoch after epoch, shuffled with `seed`."""
        if self.num is None:
            while True:
                yield self._on_device(self.data(size))
        indices = torch.arange(self.num) if only is None else torch.tensor(list(only))
        if len(indices) < size:
            raise TuningError(
                f"the data set has {len(indices)} samples to train on, fewer than one batch of {size}; lower the batch "
                "or give more data"
            )
        order = torch.Generator().manual_seed(seed)
        while True:
            picked = indices[torch.randperm(len(indices), generator=order)].tolist()
            for start in range(0, len(picked) - size + 1, size):
                yield self.batch_of(picked[start : start + size])

    def drawn(self, size: int, *, seed: int = 0) -> Iterator[Any]:
        """Yields batches of samples drawn with replacement: the data set is the distribution whose gradient noise is
        measured, however small it is."""
        if self.num is None:
            yield from self.shuffled(size)
            return
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.batch_of(torch.randint(self.num, (size,), generator=generator).tolist())

    def batch_of(self, indices: Sequence[int]) -> Any:
        return self._on_device(self._collated(indices))

    def kept_batch_of(self, indices: Sequence[int]) -> Any:
        """Returns a batch of samples that are requested repeatedly; up to `kept_bytes` of them are kept on the host."""
        key = tuple(indices)
        batch = self._kept[key] if key in self._kept else self._collated(indices)
        num_bytes = sum(int(getattr(leaf, "nbytes", 0)) for leaf in tree_leaves(batch))  # arrays count too
        on_host = all(tensor.device.type == "cpu" for tensor in tensors_of(batch))  # device memory is limited
        if key not in self._kept and on_host and self._kept_bytes + num_bytes <= DATA.kept_bytes:
            self._kept[key], self._kept_bytes = batch, self._kept_bytes + num_bytes
        if key not in self._kept:
            return self._on_device(batch)
        return each_tensor(batch, lambda tensor: tensor.to(self.device, copy=True))  # a forward may write into it

    def _collated(self, indices: Sequence[int]) -> Any:
        many = getattr(self.data, "__getitems__", None)  # as in torch's loaders
        return self.collate(many(list(indices)) if many else [self.data[at] for at in indices])

    def _on_device(self, batch: Any) -> Any:
        return each_tensor(batch, lambda tensor: tensor.to(self.device))
