"""Frozen parameters and integer buffers, which no step changes and all workers start with.

They are not exchanged. They are sent once, at the beginning of a training and to every late worker, from the worker or
centre whose weights the others take over. Afterwards a worker's integer buffers (for example BatchNorm's batch counter)
are its own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outcore.elastic.sharded import is_sharded, local
from outcore.elastic.wire import Group


class Frozen:
    """The tensors of a model that are not in FlatModel, as bytes."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors: list[Tensor] = [local(p) for p in model.parameters() if not p.requires_grad]
        self.tensors += [b for b in model.buffers() if not b.is_floating_point()]
        self.sizes_bytes = [tensor.nbytes for tensor in self.tensors]

    def read(self) -> list[Tensor]:
        """Returns the bytes of every tensor in host memory."""
        return [as_bytes(tensor.detach().cpu().contiguous()) for tensor in self.tensors]

    def write(self, number: int, source: Tensor) -> None:
        """Overwrites tensor `number` with the bytes in `source`."""
        tensor = self.tensors[number]
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        as_bytes(host).copy_(source)
        once(tensor).copy_(once(host, like=tensor))

    def share(self, group: Group, root: int, *, is_newcomer: bool) -> None:
        """Sends the bytes from member `root` to all; newcomers take them over. One tensor at a time, because a frozen
        network may be far larger than the trained part."""
        for number, tensor in enumerate(self.tensors):
            if group.index == root:
                travelling = as_bytes(tensor.detach().cpu().contiguous())
            else:
                travelling = torch.empty(self.sizes_bytes[number], dtype=torch.uint8)
            group.tree_broadcast(travelling, root=root)
            if is_newcomer and group.index != root:
                self.write(number, travelling)


def once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Returns a view without the elements that `like` (by default the tensor) repeats by `expand`."""
    for dim, stride in enumerate((tensor if like is None else like).stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns a view of a contiguous tensor's memory as bytes."""
    flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
    return flat.view(torch.uint8)


def describe(model: nn.Module) -> list[str]:
    """Returns one line per tensor of the model, which all workers must have in common."""
    lines = []
    for name, parameter in model.named_parameters():
        lines.append(_line("parameter" if parameter.requires_grad else "frozen parameter", name, parameter))
    return lines + [_line("buffer", name, buffer) for name, buffer in model.named_buffers()]


def _line(kind: str, name: str, tensor: Tensor) -> str:
    part = f" of which {list(local(tensor).shape)}" if is_sharded(tensor) else ""
    return f"{kind} {name} {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}{part}"
