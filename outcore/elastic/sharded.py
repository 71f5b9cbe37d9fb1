"""Models that FSDP2 shards over the ranks of a replica: this rank's shard, and its place among the replicas.

A replica is a group of ranks that share one copy of the model (`fully_shard(model, mesh=mesh["shard"])`). Rank k of
every replica has the same elements, so these ranks average among themselves: every shard index is a separate training,
with as many workers as there are replicas. The parameters stay in FSDP2's memory, which its all-gathers read; they are
copied into the flat vector for an exchange, and back afterwards.

The ranks of one replica have the same number of exchanges, since each step of FSDP2 needs all of them. If a replica is
lost, the remaining ranks of each shard index regroup independently. FSDP2 itself does not survive the loss of a rank,
so a replica returns as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from outcore.elastic.methods import Method
from outcore.errors import ElasticError


def is_sharded(tensor: Tensor) -> bool:
    """Whether a tensor is a DTensor, without importing that class, which takes half a second."""
    return hasattr(tensor, "to_local") and hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """Returns this rank's elements of a tensor, as a view of its memory."""
    if not is_sharded(tensor):
        return tensor.detach()
    sharded: Any = tensor
    with torch.no_grad():
        part: Tensor = sharded.detach().to_local()
    return part


def with_local(like: Tensor, part: Tensor) -> Tensor:
    """Returns a tensor sharded like `like`, with `part` on this rank."""
    from torch.distributed.tensor import DTensor

    sharded: Any = like
    made: Tensor = DTensor.from_local(
        part, sharded.device_mesh, sharded.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


@dataclass(frozen=True)
class Shard:
    """Shard `index` of `count` of a replica, and the number of the replica."""

    index: int
    count: int
    replica: int
    num_replicas: int


def find_shard(model: nn.Module, method: Method, rank: int, num_ranks: int) -> Shard | None:
    """Returns this rank's shard according to FSDP2's mesh; None if the model is not sharded."""
    meshes = {p.device_mesh for p in model.parameters() if is_sharded(p)}  # type: ignore[attr-defined]
    if not meshes:
        return None
    if method.sends == "gradients" or method.momentum in ("worker", "look_ahead"):
        raise ElasticError(
            f"{method.name} moves weights or gradients in every step, which FSDP2 has sharded: choose sync-easgd, "
            "diloco or streaming-diloco, or FSDP2's own 2-D mesh for a gradient sum over replicas"
        )
    mesh: Any = meshes.pop()
    ranks = mesh.mesh.flatten().tolist()
    count = len(ranks)
    if meshes or mesh.ndim != 1 or num_ranks % count:
        raise ElasticError(
            f"the model is sharded over {1 + len(meshes)} mesh(es), the first over ranks {ranks} of {num_ranks} in "
            f"{mesh.ndim} dimension(s); shard each replica with one mesh of one dimension, and all alike"
        )
    num_replicas = num_ranks // count
    if ranks == list(range(ranks[0], ranks[0] + count)):
        replica = ranks[0] // count
    elif ranks == list(range(ranks[0], num_ranks, num_replicas)):
        replica = ranks[0]
    else:
        raise ElasticError(f"ranks {ranks} of a replica must follow each other, or be {num_replicas} apart")
    return Shard(ranks.index(rank), count, replica, num_replicas)
