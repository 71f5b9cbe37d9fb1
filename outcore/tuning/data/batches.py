"""The loss and the size of a batch, and batches regrouped to any size.

A batch is whatever a loader yields: a tensor, or tuples, lists and dictionaries of tensors with the samples along their
first axis. Nothing is copied if a batch already has the requested size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any

import torch

from outcore.errors import TuningError

LossFn = Callable[..., torch.Tensor]


def loss_of(model: torch.nn.Module, loss_fn: LossFn, batch: Any) -> torch.Tensor:
    """Returns `loss_fn(model(x), y)` for a pair, `loss_fn(model(**batch), batch)` for a dictionary, otherwise
    `loss_fn(model(x))`."""
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    batch = each_tensor(batch, lambda tensor: tensor.to(device, non_blocking=True))
    if isinstance(batch, Mapping):
        loss = loss_fn(model(**batch), batch)
    elif isinstance(batch, list | tuple):
        *inputs, target = batch
        loss = loss_fn(model(*inputs), target) if inputs else loss_fn(model(target))
    else:
        loss = loss_fn(model(batch))
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        given = f"a tensor of {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise TuningError(
            f"loss_fn returned {given}; return a tensor with one element, such as the mean over the batch"
        )
    return loss


def size_of(batch: Any) -> int:
    """Returns the number of samples, which is the length of the first tensor."""
    for tensor in tensors_of(batch):
        return len(tensor)
    raise TuningError(f"a batch of type {type(batch).__name__} holds no tensor; let the loader yield tensors")


def tensors_of(batch: Any) -> Iterator[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for part in batch.values():
            yield from tensors_of(part)
    elif isinstance(batch, list | tuple):
        for part in batch:
            yield from tensors_of(part)


def each_tensor(batch: Any, act: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Returns the same structure with `act` applied to its tensors."""
    return _zipped([batch], lambda tensors: act(tensors[0]))


def _zipped(batches: list[Any], act: Callable[[list[torch.Tensor]], torch.Tensor]) -> Any:
    """Returns one structure from several equal ones; `act` combines the tensors at the same position."""
    first = batches[0]
    if isinstance(first, torch.Tensor):
        return act(batches)
    if isinstance(first, Mapping):
        return {key: _zipped([batch[key] for batch in batches], act) for key in first}
    if isinstance(first, list | tuple):
        parts = [_zipped(list(column), act) for column in zip(*batches)]
        if isinstance(first, list):
            return parts
        return type(first)(*parts) if hasattr(first, "_fields") else tuple(parts)
    return first


class Regrouped:
    """A queue of samples: batches of any size go in, batches of the requested size come out, in order."""

    def __init__(self) -> None:
        self._pieces: deque[Any] = deque()
        self.num_samples = 0

    def add(self, batch: Any) -> None:
        self._pieces.append(batch)
        self.num_samples += size_of(batch)

    def take(self, num_samples: int) -> Any:
        """Returns the next `num_samples` samples; at least so many must be stored."""
        taken: list[Any] = []
        missing = num_samples
        while missing:
            piece = self._pieces.popleft()
            if (size := size_of(piece)) > missing:
                head, tail = self._cut(piece, missing)
                self._pieces.appendleft(tail)
                piece, size = head, missing
            taken.append(piece)
            missing -= size
        self.num_samples -= num_samples
        return taken[0] if len(taken) == 1 else _zipped(taken, torch.cat)

    @staticmethod
    def _cut(piece: Any, at: int) -> tuple[Any, Any]:
        return each_tensor(piece, lambda t: t[:at]), each_tensor(piece, lambda t: t[at:])


def again_and_again(batches: Iterable[Any]) -> Generator[Any, None, None]:
    """Yields batches without end; starts over at the end of an epoch."""
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise TuningError("the batches ran out; pass something that can be read again, such as a DataLoader")


def generators_of(loader: Any) -> list[torch.Generator]:
    """Returns the random generators of a DataLoader, which a trial must restore."""
    owners = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler", "dataset"))]
    attributes = [getattr(owner, "generator", None) for owner in owners]
    generators = [item for item in attributes if isinstance(item, torch.Generator)]
    return list({id(generator): generator for generator in generators}.values())
