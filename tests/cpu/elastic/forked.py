"""Processes as real as any, forked from a server that has imported what they need: they start in milliseconds."""

from __future__ import annotations

import multiprocessing
from multiprocessing.context import ForkServerContext

import torch
import torch.distributed.fsdp

# A first optimizer imports for two seconds; a server that has made one hands that on.
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()


def context() -> ForkServerContext:
    """The one fork server of a test session: all tests must ask for the same preload."""
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["tests.cpu.elastic.forked", "tests.cpu.elastic.faults"])
    return server
