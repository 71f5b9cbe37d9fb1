"""Generated kernels without a C++ compiler: what a stub writes is a pseudorandom function of the bytes it reads.

A g++ run takes seconds per kernel. What the tests here ask is whether a step under a plan gives every launch the bytes
that it has in-core, and for that a function that any wrong bit changes is better than the real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._functorch.config
import torch._inductor.config
from torch import Tensor
from torch._inductor.async_compile import AsyncCompile

from outcore.compiled.kernel_text import _cpp


@contextmanager
def stub_kernels() -> Iterator[None]:
    """What is compiled inside gets stubs; nothing of it is remembered."""

    def kernel(self: AsyncCompile, types: Sequence[str], source: str) -> Callable[..., None]:
        signature = _cpp(", ".join(f"'{kind}'" for kind in types), source)
        assert signature is not None
        return lambda *args: pretend(source, signature.roles, args)

    torch._dynamo.reset()
    with (
        mock.patch.object(AsyncCompile, "cpp_pybinding", kernel),
        mock.patch("torch._inductor.cpu_vec_isa.valid_vec_isa_list", return_value=[]),  # it asks g++
        torch._inductor.config.patch(fx_graph_cache=False, compile_threads=1),
        torch._functorch.config.patch(enable_autograd_cache=False),
    ):
        yield
    torch._dynamo.reset()


def pretend(name: str, roles: Sequence[str], args: Sequence[Any]) -> None:
    """Fills what a kernel writes with numbers that depend on its name and on all that it reads."""
    digest = hashlib.blake2b(name.encode(), digest_size=7)
    for role, arg in zip(roles, args):
        if isinstance(arg, Tensor) and "r" in role:
            digest.update(arg.detach().contiguous().clone().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif not isinstance(arg, Tensor):
            digest.update(repr(arg).encode())
    generator = torch.Generator().manual_seed(int.from_bytes(digest.digest()))
    for role, arg in zip(roles, args):
        if isinstance(arg, Tensor) and "w" in role:
            drawn = torch.rand(arg.shape, generator=generator)
            arg.copy_(drawn - 0.5 if arg.is_floating_point() else drawn > 0.5)
