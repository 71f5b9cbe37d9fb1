"""The alternatives to outcore, each as a context around the forward of a step, and outcore's planners."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.networks import Network

Around = Callable[[], AbstractContextManager[Any]]

_HEAVY = [
    torch.ops.aten.convolution.default,
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
]


def in_core(network: Network) -> Around:
    return nullcontext


def checkpoint_blocks(network: Network) -> Around:
    """torch.utils.checkpoint around every block."""
    _wrap(network, functools.partial(checkpoint, use_reentrant=False))
    return nullcontext


def selective(network: Network) -> Around:
    """Selective checkpointing that saves the outputs of convolutions and matrix products."""

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if op in _HEAVY else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    _wrap(network, functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))
    return nullcontext


def save_on_cpu(network: Network) -> Around:
    return functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=True)


def offload_activations(network: Network) -> Around:
    """TRL's OffloadActivations, where it is installed."""
    from trl.models.activation_offloading import OffloadActivations

    return OffloadActivations  # type: ignore[no-any-return]


def training_step(
    network: Network,
    around: Around,
    optimizer: torch.optim.Optimizer,
    *,
    ours: bool,
    wait: bool = True,
    num_parts: int = 1,
) -> Tensor:
    """One whole step, and waits for it; its loss. Peers wrap the forward alone, ours the backward too. Gradients of
    several parts are summed before the optimizer's step."""
    total: Tensor | float = 0.0
    for _ in range(num_parts):
        with around():
            loss = network.loss() / num_parts if num_parts > 1 else network.loss()
            if ours:
                loss.backward()
        if not ours:
            loss.backward()
        total = total + loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    if wait:
        torch.cuda.synchronize()
    assert isinstance(total, Tensor)
    return total


def _wrap(network: Network, around: Callable[..., Any]) -> None:
    for block in network.blocks:
        forward = block.forward
        block.forward = functools.partial(around, forward)


PEERS: dict[str, Callable[[Network], Around]] = {
    "in-core": in_core,
    "checkpoint": checkpoint_blocks,
    "selective": selective,
    "save_on_cpu": save_on_cpu,
    "trl-offload": offload_activations,
}
